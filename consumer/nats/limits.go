package nats

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/internal/logonce"
)

// What the server answers to a consumer that wants more than the server, the
// account or the stream allows.
const (
	codeMaxAckPending   jetstream.ErrorCode = 10121
	codeMaxRequestBatch jetstream.ErrorCode = 10125
)

// withinLimits creates or changes a consumer by apply, with as much as is allowed of
// what c wants. The server names the limit only in a text, and asking for the account's
// takes a right of its own; so it is found by asking for less.
func (d *durable) withinLimits(ctx context.Context, c jetstream.ConsumerConfig, apply func(context.Context, jetstream.ConsumerConfig) (jetstream.Consumer, error)) (jetstream.Consumer, error) {
	wanted := c.MaxAckPending
	for {
		made, err := apply(ctx, c)
		var refused *jetstream.APIError
		switch {
		case errors.As(err, &refused) && refused.ErrorCode == codeMaxAckPending && c.MaxAckPending > 1:
			c.MaxAckPending /= 2
		case errors.As(err, &refused) && refused.ErrorCode == codeMaxRequestBatch && c.MaxRequestBatch > 0:
			c.MaxRequestBatch = 0 // the server then puts in its own limit
		case err != nil:
			return nil, err
		default:
			if c.MaxAckPending < wanted && c.MaxAckPending != d.allowed {
				d.allowed = c.MaxAckPending
				d.log.Warn("the server or the account allows the durable fewer pending acks than wanted, which may slow reading down",
					"durable", d.config.Durable, "wanted", wanted, "allowed", d.allowed)
			}
			return made, nil
		}
	}
}

// within keeps a pull within limits; 0: none.
func (p pull) within(limits pull) pull {
	if limits.messages > 0 {
		p.messages = min(p.messages, limits.messages)
	}
	if limits.bytes > 0 {
		p.bytes = min(p.bytes, limits.bytes)
	}
	if limits.wait > 0 {
		p.wait = min(p.wait, limits.wait)
	}
	return p
}

// learnLimits takes the durable's limits of a single pull from its state. An operator
// may set them at any time, or the server when the durable is created or changed.
func (x *session) learnLimits(c *jetstream.ConsumerConfig) {
	now := pull{messages: c.MaxRequestBatch, bytes: int64(c.MaxRequestMaxBytes), wait: c.MaxRequestExpires}
	if was := x.limits.Swap(&now); was != nil && *was == now || was == nil && now == (pull{}) {
		return
	}
	if now == (pull{}) {
		x.log.Info("the durable no longer limits a pull", "durable", x.source.config.Durable)
		return
	}
	x.log.Warn("the durable limits what a pull may ask for, which may slow reading down",
		"durable", x.source.config.Durable, "max_batch", now.messages, "max_bytes", now.bytes, "max_expires", now.wait)
}

// refusedAfter is for how long the server must have refused every pull before the source
// isn't ready. A new leader, or a limit that has to be learned, takes less.
const refusedAfter = 5 * time.Second

// refusals counts the pulls that failed in a row. Only the goroutine that fetches uses
// it.
type refusals struct {
	since   time.Time
	n       int
	problem logonce.Problem
}

// refused counts a pull that failed, and returns how long to wait.
func (x *session) refused(err error) time.Duration {
	r := &x.refusals
	if r.n++; r.n == 1 {
		r.since = time.Now()
	}
	if time.Since(r.since) >= refusedAfter {
		err := &refusedError{x.source.config.Durable, err}
		x.pullFailure.Store(err)
		if r.problem.IsNew(err) {
			x.log.Warn("nothing is read; trying again", "error", err)
		}
	} else {
		x.log.Debug("fetch", "error", err)
	}
	x.tellReady()
	return min(fetchPause<<min(r.n-1, 5), 2*time.Second)
}

// granted records a pull that the server answered.
func (x *session) granted() {
	x.refusals.n = 0
	if x.pullFailure.Swap(nil) != nil { // also where the connection was lost meanwhile
		x.refusals.problem.End()
		x.log.Info("the server answers pulls again")
		x.tellReady()
	}
}

// tellReady reports whether the durable can be read.
func (x *session) tellReady() {
	if err := x.pullFailure.Load(); err != nil {
		x.in.NotReady(err)
		return
	}
	if err := x.paused.Load(); err != nil && x.conn.IsConnected() {
		x.in.NotReady(err)
		return
	}
	x.in.Ready(x.conn.IsConnected())
}

// learnPause takes from the durable's state whether somebody has paused it. The server
// answers pulls of a paused one as if there were nothing to read.
func (x *session) learnPause(info *jetstream.ConsumerInfo) {
	now := pauseOf(info)
	switch was := x.paused.Swap(now); {
	case was == nil && now != nil:
		x.log.Warn("nothing is read", "error", now)
	case was != nil && now == nil:
		x.log.Info("the durable is no longer paused", "durable", x.source.config.Durable)
	}
}

// pauseOf is nil for a durable that delivers.
func pauseOf(info *jetstream.ConsumerInfo) *pausedError {
	if !info.Paused {
		return nil
	}
	p := &pausedError{stream: info.Stream, durable: info.Name}
	if info.Config.PauseUntil != nil {
		p.until = *info.Config.PauseUntil
	}
	return p
}

// pausedError says that somebody has paused the durable.
type pausedError struct {
	stream, durable string
	until           time.Time
}

func (e *pausedError) Error() string {
	return fmt.Sprintf("somebody has paused durable %s until %s: \"nats consumer resume %s %[1]s\" has it deliver again", e.durable, e.until.Format(time.RFC3339), e.stream)
}

// refusedError says that the server has been refusing all pulls.
type refusedError struct {
	durable string
	err     error
}

func (e *refusedError) Error() string {
	return fmt.Sprintf("the server refuses every pull of durable %s (%v): see its limits by \"nats consumer info\", and the server's log", e.durable, e.err)
}

func (e *refusedError) Unwrap() error { return e.err }

// errNoAnswer ends a pull that the server didn't answer, not even that there is nothing
// to read.
var errNoAnswer = errors.New("no answer; the right to publish to $JS.API.CONSUMER.MSG.NEXT may be missing")
