package dedup

import (
	"context"
	"errors"
	"fmt"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// write gives the new messages to the sink, in lane order.
func (t *txn) write(ctx context.Context, sink sinks.Sink) (err error) {
	messages := t.newMessages()
	if len(messages) == 0 {
		return nil
	}
	defer func() {
		if r := recover(); r != nil {
			err = sinks.Recovered(r)
		}
	}()
	batch := sinks.NewBatch(messages)
	if err := sink.Write(ctx, sinkTx{t.conn}, batch); err != nil {
		return err
	}
	switch status := t.conn.PgConn().TxStatus(); {
	case t.conn.PgConn().IsBusy():
		return errors.New("the sink left a query open: it must close its rows and batch results")
	case status == 'E':
		return errors.New("the sink hid an error of the database: the transaction has failed, yet Write returned nil")
	case status != 'T':
		return errors.New("the sink ended the transaction it was given: its effect may be committed without its claims; it must neither commit nor roll back")
	}
	return t.report(batch)
}

// sinkFailed is the sink's error, or the hold of a lane that it asks for.
func (g *group) sinkFailed(err error) error {
	index, why, ok := sinks.AsHold(err)
	if !ok {
		return &sinkError{err}
	}
	it := g.newItem(index)
	if it == nil {
		return &sinkError{err}
	}
	return g.heldAt(it, fmt.Errorf("id %.100q: %w", g.message(it).ID, why), "the sink holds the lane at this message; the log says why")
}

// report gives the messages that the sink was given the outcomes and results that it says.
func (g *group) report(batch *sinks.Batch) error {
	next := 0
	for i := range g.items {
		if !g.items[i].outcome.applied() {
			continue
		}
		o := written + outcome(batch.OutcomeOf(next))
		if !o.applied() {
			return fmt.Errorf("the sink says outcome %d of a message, which isn't one of the package sinks", batch.OutcomeOf(next))
		}
		g.items[i].outcome = o
		if r, ok := batch.ResultOf(next); ok {
			g.results = append(g.results, result{int32(i), r})
		}
		next++
	}
	return nil
}

// newMessages are the messages for the sink.
func (g *group) newMessages() []message.Message {
	n := 0
	for i := range g.items {
		if g.items[i].outcome.applied() {
			n++
		}
	}
	if len(g.batches) == 1 && n == len(g.items) {
		return g.batches[0].Messages
	}
	messages := make([]message.Message, 0, n)
	for i := range g.items {
		if it := &g.items[i]; it.outcome.applied() {
			messages = append(messages, *g.message(it))
		}
	}
	return messages
}

// newItem is the item behind newMessages()[index].
func (g *group) newItem(index int) *item {
	for i := range g.items {
		if g.items[i].outcome.applied() {
			if index == 0 {
				return &g.items[i]
			}
			index--
		}
	}
	return nil
}

// sinkTx is all that a sink gets of the connection.
type sinkTx struct{ sinks.Tx }
