package dedup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// The policies, as configuration writes them.
const (
	MissingDeadLetter = "dead_letter"
	MissingPosition   = "position"
	MissingStop       = "stop"

	DuplicateDrop       = "drop"
	DuplicateDeadLetter = "dead_letter"

	ConflictDeadLetter = "dead_letter"
	ConflictDrop       = "drop"
	ConflictStop       = "stop"
)

// Processor makes groups of batches durable, each message id once. The fields
// are set before the first Handle and not changed after. It may be used by many
// goroutines.
type Processor struct {
	Store       *Store
	Sink        sinks.Sink
	Identity    *message.Identity
	Fingerprint Fingerprint
	// Missing is what happens to a message without an id, OnDuplicate to a copy,
	// OnConflict to a copy with another payload: one of the constants.
	Missing, OnDuplicate, OnConflict string
	// MaxDeadShare of the last DeadWindow messages of a lane may be dead letters;
	// above it the fault isn't the messages', and the lane is held.
	MaxDeadShare float64
	DeadWindow   int
	Metrics      *Metrics

	poison    poisonGuard
	sinkStale atomic.Bool // the sink's view of the database may be out of date

	mu sync.Mutex
	// unknown keeps what would have happened, for commits whose answer was lost.
	unknown map[message.Lane]unknownCommit
}

type unknownCommit struct {
	epoch, next int64
	tally       tally
}

// Start prepares the sink and the guards. It must be called once, before Handle.
func (p *Processor) Start(ctx context.Context) error {
	p.unknown = make(map[message.Lane]unknownCommit)
	p.poison.init(p.MaxDeadShare, p.DeadWindow)
	return p.prepareSink(ctx)
}

func (p *Processor) prepareSink(ctx context.Context) error {
	preparer, ok := p.Sink.(sinks.Preparer)
	if !ok {
		return nil
	}
	tx, err := p.Store.pool.Begin(ctx)
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // it only looked
	if err := preparer.Prepare(ctx, tx); err != nil {
		return fmt.Errorf("prepare the sink: %w", err)
	}
	return nil
}

// Handle makes the batches durable in one transaction, or in several where a
// message that the sink can't take has to be found among them. It is
// consumer.Handler's method; the errors are described there.
func (p *Processor) Handle(ctx context.Context, batches []message.Batch) error {
	if p.sinkStale.Load() {
		if err := p.prepareSink(ctx); err != nil {
			if react(err) == retry {
				return err
			}
			return &message.HoldError{Err: err}
		}
		p.sinkStale.Store(false)
	}
	// Sorted and trimmed below; the caller's slice stays as it is.
	return p.apply(ctx, slices.Clone(batches), nil)
}

// rejections are messages known to be poison, by their address, which all parts
// of a divided group share.
type rejections map[*message.Message]*rejection

// apply tries a group until it is durable or the worker has to decide.
func (p *Processor) apply(ctx context.Context, batches []message.Batch, known rejections) error {
	g, err := p.prepare(batches)
	if err != nil {
		return err
	}
	g.reject(known)
	for {
		all, err := p.transact(ctx, g)
		if err == nil {
			p.landed(g, all)
			return nil
		}
		var own *ownError
		var sink *sinkError
		var lost *commitError
		isOwn, isSink, isLost := errors.As(err, &own), errors.As(err, &sink), errors.As(err, &lost)
		if isLost {
			// Send the same batch again: if the commit landed, its lane has moved,
			// and the fence says so. The server may even be at it still; then this
			// one waits for its locks. It is exact since an epoch has one owner,
			// and an ordered lane one transaction at a time.
			p.remember(g, all)
			err = fmt.Errorf("%w: %w", errConnection, err)
		}
		switch react(err) {
		case fence:
			rest, err := p.fenced(ctx, g.batches)
			if err != nil || len(rest) == 0 {
				return err
			}
			return p.apply(ctx, rest, known)
		case reload:
			if isSink {
				p.sinkStale.Store(true)
				return &message.HoldError{Err: err}
			}
			p.Metrics.retries.WithLabelValues(retryReason(err)).Inc()
			old := *p.Store.catalog.Load()
			if err := p.Store.refresh(ctx); err != nil {
				return err
			}
			if *p.Store.catalog.Load() == old {
				return &message.HoldError{Err: fmt.Errorf("the catalog of generations doesn't fit the tables: %w", err)}
			}
		case isolate:
			if isOwn {
				return &message.HoldError{Err: err}
			}
			return p.isolate(ctx, g, err, known)
		case retry:
			p.Metrics.retries.WithLabelValues(retryReason(err)).Inc()
			if !isLost {
				return err
			}
			if !pause(ctx, 50*time.Millisecond) {
				return err
			}
		case hold:
			var held *message.HoldError
			if errors.As(err, &held) {
				return held
			}
			if isSink {
				p.sinkStale.Store(true)
			}
			return &message.HoldError{Err: err}
		}
	}
}

func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

func (g *group) reject(known rejections) {
	if len(known) == 0 {
		return
	}
	for i := range g.items {
		if why := known[g.message(&g.items[i])]; why != nil {
			g.items[i].reject = why
		}
	}
}

// isolate finds the messages that the sink can't take. Those that it has named
// are dead-lettered when the group is tried again; else the group is divided and each
// part made durable by itself, in order, down to one message: about 2·log2(n)
// transactions for each such message among n.
func (p *Processor) isolate(ctx context.Context, g *group, cause error, known rejections) error {
	candidates := len(g.winners())
	bad := sinks.AllPermanent(cause)
	if candidates == 1 {
		bad = map[int]error{0: cause}
	}
	if known == nil {
		known = make(rejections)
	}
	found := false
	for at, why := range bad {
		if at >= 0 && at < candidates {
			known[g.message(g.candidate(at))] = &rejection{class: classPoison, reason: why.Error(), sqlstate: sqlstate(why)}
			found = true
		}
	}
	if found {
		return p.apply(ctx, g.batches, known)
	}
	if candidates == 0 {
		// The database objects to data although the sink was given none.
		return &message.HoldError{Err: cause}
	}
	p.Metrics.retries.WithLabelValues("poison").Inc()
	left, right := g.divide(candidates)
	if err := p.apply(ctx, left, known); err != nil {
		return err
	}
	return p.apply(ctx, right, known)
}

// divide cuts a group in two: between lanes, or within the one lane so that each
// part has half of what went to the sink. If the first part lands and the second
// doesn't, the lane stands in between, which the next try finds out.
func (g *group) divide(candidates int) (left, right []message.Batch) {
	if n := len(g.batches); n > 1 {
		return slices.Clone(g.batches[:n/2]), slices.Clone(g.batches[n/2:])
	}
	b := g.batches[0]
	at := g.candidate(candidates / 2).message
	first, second := b, b
	first.Messages, second.Messages = b.Messages[:at:at], b.Messages[at:]
	first.Next = b.Messages[at].Position.Offset
	if b.Lag >= 0 {
		first.Lag += int64(len(second.Messages))
	}
	second.From = first.Next
	return []message.Batch{first}, []message.Batch{second}
}

// fenced finds out why a lane didn't move: what of the batches has landed after
// all, under our own epoch, what is left to do, and which lanes aren't ours.
func (p *Processor) fenced(ctx context.Context, batches []message.Batch) (rest []message.Batch, err error) {
	rows, err := p.Store.standings(ctx, batches)
	if err != nil {
		return nil, err
	}
	lost := &message.FencedError{}
	for i, b := range batches {
		at := rows[i]
		switch {
		case at.epoch != b.Epoch, b.Ordered && (at.next < b.From || at.next > b.Next):
			lost.Lanes = append(lost.Lanes, b.Lane)
		case !b.Ordered, at.next == b.From:
			rest = append(rest, b)
		default:
			// Our own commit, whose answer was lost, or the first part of a
			// divided batch.
			p.confirm(b, at.next)
			if at.next < b.Next {
				rest = append(rest, trim(b, at.next))
			}
		}
	}
	if len(lost.Lanes) > 0 {
		p.Store.forgetLanes()
		return nil, lost
	}
	if len(rest) == len(batches) && !pause(ctx, 20*time.Millisecond) {
		return nil, ctx.Err()
	}
	return rest, nil
}

// trim drops what stands below a position.
func trim(b message.Batch, next int64) message.Batch {
	at, _ := slices.BinarySearchFunc(b.Messages, next, func(m message.Message, next int64) int {
		return int(min(1, max(-1, m.Position.Offset-next)))
	})
	b.From, b.Messages = next, b.Messages[at:]
	return b
}

func (p *Processor) remember(g *group, all []tally) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, b := range g.batches {
		if b.Ordered {
			p.unknown[b.Lane] = unknownCommit{b.Epoch, b.Next, all[i]}
		}
	}
}

// confirm counts a commit that turns out to have landed.
func (p *Processor) confirm(b message.Batch, next int64) {
	p.mu.Lock()
	u, ok := p.unknown[b.Lane]
	delete(p.unknown, b.Lane)
	p.mu.Unlock()
	if ok && u.epoch == b.Epoch && u.next == next {
		p.Metrics.count(b.Lane.Source, u.tally)
	}
}

// landed counts what has become durable.
func (p *Processor) landed(g *group, all []tally) {
	p.poison.note(g, all)
	p.Metrics.observe(p, g, all)
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.unknown) > 0 {
		for _, b := range g.batches {
			delete(p.unknown, b.Lane) // it had not landed
		}
	}
}

func (s *Store) forgetLanes() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.lanes)
	for lane, id := range s.laneIDs {
		s.lanes[id] = lane
	}
}

// Claim claims ids within a transaction of the caller's own, for services that
// deduplicate without dedupd's worker. won tells for each id whether it is new;
// an id that stands twice wins once. The claims stand or fall with tx, which must
// be READ COMMITTED. Another transaction that holds one of the ids is waited for.
// Ids must be 1 byte long at least.
//
// A refused catalog (SQLSTATE DD002) means that the scope's generations have
// changed: roll back and try again.
func (s *Store) Claim(ctx context.Context, tx pgx.Tx, ids []string) (won []bool, err error) {
	c, err := s.loaded(ctx)
	if err != nil {
		return nil, err
	}
	g := &group{items: make([]item, len(ids))}
	for i, id := range ids {
		if id == "" {
			return nil, fmt.Errorf("claim: id %d is empty", i)
		}
		g.items[i] = item{key: KeyOf(id), twin: -1}
	}
	g.fold()
	if _, err := tx.Exec(ctx, `SELECT `+s.name("enter")+`($1, $2, $3, $4, $5)`, c.scopeID, c.epoch, lockTimeout, statementTimeout, idleTimeout); err != nil {
		var pg *pgconn.PgError
		if errors.As(err, &pg) && pg.Code == stateCatalog {
			s.catalog.Store(nil) // read anew by the next call
		}
		return nil, fmt.Errorf("claim: %w", err)
	}
	keys := make([][16]byte, len(g.firsts))
	for i, at := range g.firsts {
		keys[i] = g.items[at].key
	}
	rows, err := tx.Query(ctx, `INSERT INTO `+c.table+` (key) SELECT * FROM unnest($1::uuid[]) ON CONFLICT (key) DO NOTHING RETURNING key`, keys)
	if err != nil {
		return nil, fmt.Errorf("claim: %w", err)
	}
	var key [16]byte
	next := 0
	if _, err := pgx.ForEachRow(rows, []any{&key}, func() error {
		next, err = g.won(key, next)
		return err
	}); err != nil {
		return nil, fmt.Errorf("claim: %w", err)
	}
	won = make([]bool, len(ids))
	for i := range g.items {
		won[i] = g.items[i].wins
	}
	return won, nil
}
