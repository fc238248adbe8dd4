package consumertest

import (
	"context"
	"slices"
	"time"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// FailBefore lets the next n hand-overs fail without any effect.
func (s *Store) FailBefore(n int, err error) { s.fail(n, fault{err: err}) }

// FailAfter lets the next n hand-overs become durable and yet be answered by err:
// a COMMIT whose answer was lost.
func (s *Store) FailAfter(n int, err error) { s.fail(n, fault{err: err, after: true}) }

func (s *Store) fail(n int, f fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range n {
		s.faults = append(s.faults, f)
	}
}

// Heal ends the faults that are still to come, and the delay.
func (s *Store) Heal() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults, s.delay = nil, 0
}

// Delay lets every hand-over take at least that long.
func (s *Store) Delay(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.delay = d
}

// Hold stops every hand-over that begins from now on before its effect, until
// release is called (or its context ends).
func (s *Store) Hold() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := make(chan struct{})
	s.hold = c
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.hold == c {
			s.hold = nil
			close(c)
		}
	}
}

// Steal raises a lane's epoch, as another worker that acquires it would: its owner is
// fenced.
func (s *Store) Steal(l message.Lane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.rows[l]; r != nil {
		r.Epoch++
	}
}

// Rewind moves a lane back to a position and forgets the effects from there on,
// as a failover to a replica that lacks the last commits would, and the last
// checkpoint. A queue doesn't move before its rewind is confirmed.
func (s *Store) Rewind(l message.Lane, to int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	r := s.rows[l]
	if r == nil || r.Next <= to {
		return
	}
	r.Next, r.Heartbeat = to, time.Time{}
	r.LeaderEpochs = lane.EpochsBelow(r.LeaderEpochs, to)
	r.BrokerPosition = min(r.BrokerPosition, to)
	r.Checkpoint--
	s.instance++
	s.forget(l, to)
}

// Lose deletes a lane's row and all its effects, as a failover to a replica from before
// it was acquired would.
func (s *Store) Lose(l message.Lane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	delete(s.rows, l)
	s.lost[l] = true
	s.instance++
	s.forget(l, 0)
}

// FailOver goes to a replica that lacks nothing, as a restart does.
func (s *Store) FailOver() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instance++
}

// Copy makes a copy of the rows and their effects. putBack puts it in the place of what
// is there then.
func (s *Store) Copy() (putBack func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	rows, log := make(map[message.Lane]row), slices.Clone(s.log)
	for l, r := range s.rows {
		rows[l] = *r
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		defer s.notify()
		for l := range s.rows {
			s.lost[l] = true
		}
		clear(s.rows)
		for l, r := range rows {
			s.rows[l] = &r
		}
		s.log = slices.Clone(log)
		s.forget(message.Lane{}, 0)
		s.instance++
	}
}

// forget forgets a lane's effects from a position on.
func (s *Store) forget(l message.Lane, from int64) {
	s.log = slices.DeleteFunc(s.log, func(e Effect) bool {
		return e.Message.Position.Lane == l && e.Message.Position.Offset >= from
	})
	clear(s.effects)
	for i, e := range s.log {
		s.effects[e.ID] = i
	}
}

// SetPosition moves a lane as an operator does.
func (s *Store) SetPosition(l message.Lane, to int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	if r := s.rows[l]; r != nil {
		r.Epoch++
		r.Next, r.BrokerPosition, r.moved, r.LeaderEpochs = to, -1, true, nil
	}
}

// Row returns a lane's row.
func (s *Store) Row(l message.Lane) (Row, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.rows[l]
	if !ok {
		return Row{}, false
	}
	return r.Row, true
}

// Lanes lists the lanes that were ever acquired, sorted.
func (s *Store) Lanes() []message.Lane {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []message.Lane
	for l := range s.rows {
		all = append(all, l)
	}
	slices.SortFunc(all, message.Lane.Compare)
	return all
}

// Effects lists the effects in the order in which they became durable.
func (s *Store) Effects() []Effect {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.log)
}

// Counts returns how many messages were handed over and made durable, how many
// of them were duplicates, and how often Handle was called.
func (s *Store) Counts() (handled, duplicates, calls int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.handled, s.duplicates, s.calls
}

// Violations lists what the source or the worker did against their contracts.
func (s *Store) Violations() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.violations)
}

// Wait returns once ok holds, which is asked after every change of the store,
// or the context's error. ok may call the store's methods.
func (s *Store) Wait(ctx context.Context, ok func() bool) error {
	for {
		s.mu.Lock()
		changed := s.changed
		s.mu.Unlock()
		if ok() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// WaitEffects waits until n ids have had their effect.
func (s *Store) WaitEffects(ctx context.Context, n int) error {
	return s.Wait(ctx, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.log) >= n
	})
}
