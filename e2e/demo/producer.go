package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// The two ways by which orders come: two streams, which are two sources of the
// worker. An order that comes by both is still one order.
const (
	shopStream, shopSubject = "SHOP", "orders.shop"
	edgeStream, edgeSubject = "EDGE", "orders.edge"
)

// idHeader carries an order's id. It isn't Nats-Msg-Id, on purpose: with that
// one JetStream itself drops what comes again within its two-minute window, and
// the demo would show nothing.
const idHeader = "message-id"

// order is what the n-th id stands for: all its copies are the same bytes.
type order int

func (o order) id() string { return fmt.Sprintf("order-%07d", int(o)) }

func (o order) cents() int64 { return 100 + int64(o)*7919%100_000 }

func (o order) body() []byte {
	return fmt.Appendf(nil, `{"customer":"customer-%d","cents":%d}`, int(o)*31%997, o.cents())
}

// home is the subject that an order is first sent to: one in eight comes from
// the edge.
func (o order) home() string {
	if o%8 == 0 {
		return edgeSubject
	}
	return shopSubject
}

func (o order) away() string {
	if o.home() == edgeSubject {
		return shopSubject
	}
	return edgeSubject
}

// dice decide what is sent next: a new order, or one that was sent before.
type dice struct {
	*rand.Rand
	messages, resends int // that are still to come
	orders            int // so far
}

func newDice(messages int, share float64, seed uint64) *dice {
	return &dice{
		Rand:     rand.New(rand.NewPCG(seed, 0)), // #nosec: it must be repeatable
		messages: messages,
		resends:  min(int(float64(messages)*share), messages-1),
	}
}

// next is the next order and the subject it goes to.
func (d *dice) next() (o order, subject string, resend bool) {
	d.messages--
	// Drawing without replacement: the share comes out exactly.
	if d.orders == 0 || d.IntN(d.messages+1) >= d.resends {
		o = order(d.orders)
		d.orders++
		return o, o.home(), false
	}
	d.resends--
	switch d.IntN(5) {
	case 0, 1: // a retry at once: both copies stand in one batch of the worker
		o = order(d.orders - 1 - d.IntN(min(d.orders, 10)))
		return o, o.home(), true
	case 2, 3: // a late one, from any time before
		o = order(d.IntN(d.orders))
		return o, o.home(), true
	default: // the same order by the other way
		o = order(d.orders - 1 - d.IntN(min(d.orders, 1000)))
		return o, o.away(), true
	}
}

// producer sends orders to the two streams. Its numbers may be read while it
// works; they count what JetStream has confirmed.
type producer struct {
	js   jetstream.JetStream
	dice *dice
	rate int // messages a second; 0: as fast as it goes

	sent, orders, resent, otherWay atomic.Int64
	cents                          atomic.Int64 // of all orders, each once
}

// burst is how many messages are under way at most. What is said to be sent has
// been confirmed, so a burst is also the step in which the numbers move.
const burst = 500

// run sends n messages. The error is that of ctx, or of JetStream.
func (p *producer) run(ctx context.Context, n int) error {
	began := time.Now()
	for done := 0; done < n; {
		step := min(burst, n-done)
		if p.rate > 0 {
			step = min(step, max(1, p.rate/50))
			due := began.Add(time.Duration(done) * time.Second / time.Duration(p.rate))
			if !sleep(ctx, time.Until(due)) {
				return ctx.Err()
			}
		}
		if err := p.send(ctx, step); err != nil {
			return err
		}
		done += step
	}
	return nil
}

func (p *producer) send(ctx context.Context, n int) error {
	acks := make([]jetstream.PubAckFuture, 0, n)
	var orders, resent, otherWay, cents int64
	for range n {
		o, subject, resend := p.dice.next()
		ack, err := p.js.PublishMsgAsync(&natsgo.Msg{
			Subject: subject,
			Header:  natsgo.Header{idHeader: {o.id()}},
			Data:    o.body(),
		})
		if err != nil {
			return fmt.Errorf("send order %s: %w", o.id(), err)
		}
		acks = append(acks, ack)
		switch {
		case !resend:
			orders++
			cents += o.cents()
		case subject == o.home():
			resent++
		default:
			otherWay++
		}
	}
	for _, ack := range acks {
		select {
		case <-ack.Ok():
		case err := <-ack.Err():
			return fmt.Errorf("send orders: %w", err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	p.sent.Add(int64(n))
	p.orders.Add(orders)
	p.resent.Add(resent)
	p.otherWay.Add(otherWay)
	p.cents.Add(cents)
	return nil
}

// sleep returns false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
