// Package multi makes one sink of several: each applies those messages that its filter lets
// pass, all in one transaction.
package multi

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// Part is one of several sinks.
type Part struct {
	// Name is what errors call it.
	Name string
	Sink sinks.Sink
	// Filter says which messages it wants; nil: all.
	Filter *message.Filter
}

// New makes one sink of the parts. They write in their order, so all workers of a scope
// must have the same. A message is wanted if it passes the filter of all (nil: each does)
// and that of a part.
func New(all *message.Filter, parts ...Part) sinks.Sink {
	if len(parts) == 1 && all == nil && parts[0].Filter == nil {
		return parts[0].Sink
	}
	s := &sink{all: all, parts: parts, readsJSON: all != nil && all.ReadsJSON()}
	prepares := false
	for _, p := range parts {
		s.takesAll = s.takesAll || p.Filter == nil
		s.readsJSON = s.readsJSON || p.Filter != nil && p.Filter.ReadsJSON()
		_, ok := p.Sink.(sinks.Preparer)
		prepares = prepares || ok
	}
	if prepares {
		return preparing{s}
	}
	return s
}

type sink struct {
	all       *message.Filter
	parts     []Part
	takesAll  bool // a part has no filter
	readsJSON bool // a filter does
}

// preparing is a sink of which a part is a sinks.Preparer.
type preparing struct{ *sink }

// Prepare prepares the parts that want it, all of them: a person then sees all that is
// wrong.
func (s preparing) Prepare(ctx context.Context, tx sinks.Tx) error {
	for i, p := range s.parts {
		if preparer, ok := p.Sink.(sinks.Preparer); ok {
			if err := preparer.Prepare(ctx, tx); err != nil {
				return s.of(i, err)
			}
		}
	}
	return nil
}

// Wants implements sinks.Selective.
func (s *sink) Wants(m *message.Message) (bool, error) {
	if s.readsJSON && m.Value != nil {
		if err := message.ValidJSON(m.Value); err != nil {
			return false, fmt.Errorf("a filter can't read the value: %w", err)
		}
	}
	if s.all != nil {
		if ok, err := s.all.Wants(m); !ok || err != nil {
			return false, err
		}
	}
	wanted := s.takesAll
	for i := range s.parts {
		if f := s.parts[i].Filter; f != nil {
			// All are asked: if one can't tell, the message isn't another's alone.
			ok, err := f.Wants(m)
			if err != nil {
				return false, s.of(i, err)
			}
			wanted = wanted || ok
		}
	}
	return wanted, nil
}

// Overwrites implements sinks.ReplaySensitive for the parts that want the message.
func (s *sink) Overwrites(m *message.Message) error {
	var errs []error
	for i, p := range s.parts {
		sensitive, ok := p.Sink.(sinks.ReplaySensitive)
		if !ok {
			continue
		}
		if p.Filter != nil {
			if wanted, err := p.Filter.Wants(m); err != nil || !wanted {
				continue // Write says why not
			}
		}
		if err := sensitive.Overwrites(m); err != nil {
			errs = append(errs, s.of(i, err))
		}
	}
	return errors.Join(errs...)
}

// of says which part an error is of.
func (s *sink) of(i int, err error) error {
	if len(s.parts) == 1 {
		return err
	}
	return fmt.Errorf("%s: %w", s.parts[i].Name, err)
}

// Write gives each part its messages. A message is written if a part wrote it; else its
// outcome is that of the first part that had it.
func (s *sink) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	if len(s.parts) == 1 {
		return s.parts[0].Sink.Write(ctx, tx, batch) // all that Wants let pass
	}
	shares := make([]share, len(s.parts))
	for i := range s.parts {
		var err error
		if shares[i], err = s.share(i, batch.Messages()); err != nil {
			return s.of(i, err)
		}
		if len(shares[i].Messages()) == 0 {
			continue
		}
		if err := shares[i].write(ctx, tx, s.parts[i].Sink); err != nil {
			return s.blame(i, &shares[i], err)
		}
	}
	report(batch, shares)
	return nil
}

// share is what a part is given of a batch.
type share struct {
	*sinks.Batch
	// from are the indexes in the whole batch; nil: it is all of it.
	from []int
}

func (s *sink) share(i int, messages []message.Message) (share, error) {
	f := s.parts[i].Filter
	if f == nil {
		return share{Batch: sinks.NewBatch(messages)}, nil
	}
	var some []message.Message
	var from []int
	for at := range messages {
		ok, err := f.Wants(&messages[at])
		if err != nil {
			return share{}, sinks.PermanentAt(at, err)
		}
		if ok {
			some, from = append(some, messages[at]), append(from, at)
		}
	}
	return share{sinks.NewBatch(some), from}, nil
}

// index is where the share's message at is in the whole batch; -1: nowhere.
func (p *share) index(at int) int {
	switch {
	case at < 0 || at >= len(p.Messages()):
		return -1
	case p.from == nil:
		return at
	}
	return p.from[at]
}

func (p *share) write(ctx context.Context, tx sinks.Tx, sink sinks.Sink) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = sinks.Recovered(r)
		}
	}()
	return sink.Write(ctx, tx, p.Batch)
}

// blame makes the error of a part's Write one of the whole batch's: it says which part, and
// the indexes of its messages are the batch's.
func (s *sink) blame(i int, p *share, err error) error {
	if at, why, ok := sinks.AsHold(err); ok {
		if why = s.of(i, why); p.index(at) < 0 {
			return why
		}
		return sinks.HoldAt(p.index(at), why)
	}
	named := sinks.AllPermanent(err)
	if len(named) == 0 {
		return s.of(i, err)
	}
	var all []error
	for _, at := range slices.Sorted(maps.Keys(named)) {
		all = append(all, sinks.PermanentAt(p.index(at), s.of(i, named[at])))
	}
	return errors.Join(all...)
}

// says reports whether the part has said anything but that it wrote its messages.
func (p *share) says() bool {
	for at := range p.Messages() {
		if p.OutcomeOf(at) != sinks.Written {
			return true
		}
	}
	return false
}

// report tells the batch what its parts have said. A message's result is that of the first
// part that gives one.
func report(batch *sinks.Batch, shares []share) {
	for i := len(shares) - 1; i >= 0; i-- {
		for at := range shares[i].Messages() {
			batch.CopyResult(shares[i].index(at), shares[i].Batch, at)
		}
	}
	if !slices.ContainsFunc(shares, func(p share) bool { return p.says() }) {
		return
	}
	outcomes := make(map[int]sinks.Outcome)
	for i := range shares {
		for at := range shares[i].Messages() {
			o, whole := shares[i].OutcomeOf(at), shares[i].index(at)
			if _, had := outcomes[whole]; !had || o == sinks.Written {
				outcomes[whole] = o
			}
		}
	}
	for at, o := range outcomes {
		if o != sinks.Written {
			batch.Outcome(at, o)
		}
	}
}
