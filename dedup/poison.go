package dedup

import (
	"context"
	"slices"

	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/sinks"
)

// isolate finds the messages that the sink can't apply. Those that the sink named are
// dead-lettered when the group is retried. Otherwise the group is divided and each part
// made durable by itself, in order, down to one message: about 2·log2(n) transactions for
// each such message among n. If the cause leaves open whether a message is at fault at
// all, the message found becomes a suspect.
func (p *Processor) isolate(ctx context.Context, g *group, cause error) error {
	candidates := len(g.newMessages())
	if candidates == 0 {
		// The database refuses data although the sink was given none.
		return &lane.HoldError{Err: cause}
	}
	bad := sinks.AllPermanent(cause)
	if candidates == 1 {
		if react(cause) != isolate {
			if !g.suspect(g.message(g.newItem(0)), cause) && !wait.For(ctx, doubtPause) {
				return ctx.Err()
			}
			return p.apply(ctx, g.batches, g.handOver)
		}
		bad = map[int]error{0: cause}
	}
	found := false
	for at, why := range bad {
		if at >= 0 && at < candidates {
			g.reject(g.message(g.newItem(at)), &rejection{class: classPoison, reason: why.Error(), sqlstate: sqlstate.Of(why)})
			found = true
		}
	}
	if found {
		return p.apply(ctx, g.batches, g.handOver)
	}
	p.Metrics.retries.WithLabelValues("poison").Inc()
	left, right := g.divide(candidates)
	if err := p.apply(ctx, left, g.handOver); err != nil {
		return err
	}
	return p.apply(ctx, right, g.handOver)
}

// divide cuts a group in two: between lanes, or within its only lane so that each part
// has half of what went to the sink. If the first part lands and the second doesn't, the
// lane's position is in between; the next try finds that out.
func (g *group) divide(candidates int) (left, right []lane.Batch) {
	if n := len(g.batches); n > 1 {
		return slices.Clone(g.batches[:n/2]), slices.Clone(g.batches[n/2:])
	}
	first, second := cutAt(g.batches[0], int(g.newItem(candidates/2).message))
	return []lane.Batch{first}, []lane.Batch{second}
}

// cutAt cuts a batch before one of its messages.
func cutAt(b lane.Batch, at int) (first, second lane.Batch) {
	first, second = b, b
	first.Messages, second.Messages = b.Messages[:at:at], b.Messages[at:]
	if len(second.Messages) == 0 {
		return first, second
	}
	first.Next = second.Messages[0].Position.Offset
	if b.Lag >= 0 {
		first.Lag += int64(len(second.Messages))
	}
	second.From = first.Next
	return first, second
}
