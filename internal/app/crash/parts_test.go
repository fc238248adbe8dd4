package crash_test

import (
	"context"
	"errors"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

var (
	errTransient = errors.New("a transient fault of the test")
	errRefused   = errors.New("the broker does not take this commit")
)

// handler is the processor, with the step "fetched" before it.
type handler struct{ w *worker }

func (h *handler) Handle(ctx context.Context, batches []lane.Batch) error {
	w := h.w
	if w.due(fetched) && w.strike(fetched, nil) == cut {
		return errTransient
	}
	if err := w.processor.Handle(ctx, batches); err != nil {
		return err
	}
	for i := range batches {
		b := &batches[i]
		w.told.Add(int64(len(b.Messages)))
		if b.Ordered {
			w.mustBeDurable(b.Lane, b.Next)
		}
	}
	return nil
}

// lanes is the store, of which a dead worker hears nothing any more.
type lanes struct{ w *worker }

func (l *lanes) Acquire(ctx context.Context, t lane.Acquire) (lane.Assignment, error) {
	taken, err := l.w.store.Acquire(ctx, t)
	switch {
	case err == nil:
		l.w.took <- taken
	case errors.Is(err, lane.ErrStale):
		l.w.stale.Add(1)
	}
	return taken, err
}

func (l *lanes) Heartbeat(ctx context.Context, all []lane.Heartbeat) ([]message.Lane, error) {
	return l.w.store.Heartbeat(ctx, all)
}

func (l *lanes) Confirm(ctx context.Context, c lane.Confirm) (lane.Confirmation, error) {
	return l.w.store.Confirm(ctx, c)
}

func (l *lanes) ConfirmRewind(ctx context.Context, lane message.Lane, taken lane.Assignment, from int64) (int64, error) {
	return l.w.store.ConfirmRewind(ctx, lane, taken, from)
}

func (l *lanes) ReportGap(ctx context.Context, lane message.Lane, found lane.Gap) (lane.Gap, error) {
	return l.w.store.ReportGap(ctx, lane, found)
}

func (l *lanes) AcceptGap(ctx context.Context, lane message.Lane, next int64) error {
	return l.w.store.AcceptGap(ctx, lane, next)
}

func (l *lanes) BrokerConfirmed(ctx context.Context, all []lane.BrokerPosition) error {
	return l.w.store.BrokerConfirmed(ctx, all)
}

func (l *lanes) Release(ctx context.Context, lane message.Lane, epoch int64) error {
	return l.w.store.Release(ctx, lane, epoch)
}

func (l *lanes) ReportLogCut(ctx context.Context, cut lane.LogCut) error {
	return l.w.store.ReportLogCut(ctx, cut)
}

// sink writes plain rows, with the steps "claimed" before and "written" after it.
type sink struct{ w *worker }

func (s *sink) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	msgs := batch.Messages()
	if err := s.step(ctx, tx, claimed); err != nil {
		return err
	}
	var ids, lanes, values []string
	var positions []int64
	for i := range msgs {
		ids, values = append(ids, msgs[i].ID), append(values, string(msgs[i].Value))
		lanes, positions = append(lanes, msgs[i].Position.Lane.Name), append(positions, msgs[i].Position.Offset)
	}
	_, err := tx.Exec(ctx, `INSERT INTO public.rows (id, lane, position, value) SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[])`,
		ids, lanes, positions, values)
	if err != nil {
		return err
	}
	return s.step(ctx, tx, written)
}

// step lets the database itself raise the transient errors: what it calls a
// deadlock has taken the transaction with it.
func (s *sink) step(ctx context.Context, tx sinks.Tx, at step) error {
	if !s.w.due(at) || s.w.strike(at, nil) != cut {
		return nil
	}
	_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'by the test' USING ERRCODE = '40P01'; END $$`)
	if err == nil {
		err = errTransient // not reached
	}
	return err
}

// ack stands between a member and the broker: nothing may be acknowledged that
// the database doesn't hold, and a process that is gone acknowledges nothing.
func (w *worker) ack(partition int, position int64, commit func() error) error {
	return w.acknowledge(func() { w.mustBeDurable(laneOf(partition), position) }, commit)
}

func (w *worker) acknowledge(check func(), commit func() error) error {
	if w.dead.Load() {
		return errDead
	}
	if w.deposed.Load() {
		return errRefused
	}
	check()
	due := w.due(acked)
	if due && w.trap.event == fail {
		w.strike(acked, nil)
		return errRefused
	}
	err := commit()
	if due {
		w.strike(acked, nil)
	}
	return err
}

// mustBeDurable is called where a worker takes a position for durable.
func (w *worker) mustBeDurable(l message.Lane, position int64) {
	if !w.cell.ask(`SELECT coalesce((SELECT next_position FROM dedupd.lanes WHERE source = $1 AND lane = $2), 0) >= $3`, l.Source, l.Name, position) {
		w.cell.Errorf("%s takes position %d of lane %s for durable, but the database does not hold it; %s", w.name, position, l, w.cell.standings())
	}
}
