package dedup

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// A message may end the process: the sink takes all the memory there is, crashes beyond
// recovery, or hangs until the worker gives up. No error reports that, and the next
// worker reads the same message again. So where workers have crashed again and again,
// attempts are recorded in the database before the sink is given the messages, in a
// transaction of their own. The record is cleared when the attempt has an answer,
// whatever it is. A surviving record marks an attempt that crashed its worker.
//
// That costs time, so it is done only in quarantine: for an ordered lane that was
// acquired repeatedly without moving, or that has a record; for a queue's message that
// was delivered repeatedly. Quarantine without a cause harms nobody.

const (
	// quarantineAcquisitions is how often a lane may be acquired without moving, and
	// without being released, before it is quarantined. Once or twice is chance: a deploy
	// that is killed, a machine that is lost.
	quarantineAcquisitions = 2
	// quarantineDeliveries is how often a queue's message may be delivered before it is
	// quarantined: its delivery, and two of chance.
	quarantineDeliveries = 3
	// maxCrashes is how many workers may crash at one message before it is a dead letter.
	// Together with those that crashed before the quarantine it takes five in a row, at
	// the same place and without an answer in between. That isn't chance, and no setting:
	// a higher one costs one more outage for each such message, a lower one would give up
	// good messages.
	maxCrashes = 3
	// quarantineRun is how many messages are recorded and tried at a time, as long as
	// none of them has a record. If that crashes the worker, each is tried alone.
	quarantineRun = 64
	// answerLimit is how long after its context's end an attempt may still have an
	// answer. Later the worker counts as hung, and is about to be ended for it.
	answerLimit = 5 * time.Second
	// allSinkSlots is all of Processor.sinkSlots.
	allSinkSlots = math.MaxInt32
)

// quarantine has the lanes whose messages are applied one by one, and how many of these
// have been.
type quarantine struct {
	mu    sync.RWMutex
	lanes map[message.Lane]int
}

// set puts a lane into quarantine, or takes it out.
func (s *quarantine) set(lane message.Lane, quarantined bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !quarantined {
		delete(s.lanes, lane)
		return
	}
	if s.lanes == nil {
		s.lanes = make(map[message.Lane]int)
	}
	s.lanes[lane] = 0
}

func (s *quarantine) has(lane message.Lane) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	_, ok := s.lanes[lane]
	return ok
}

// passed counts messages of a quarantined lane. The quarantine ends after as many as a
// batch can have: what crashed the workers was in their first.
func (s *quarantine) passed(lane message.Lane, n, most int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if passed, ok := s.lanes[lane]; ok && passed+n < most {
		s.lanes[lane] = passed + n
		return
	}
	delete(s.lanes, lane)
}

// divide separates what may be applied together from what is applied one by one. Neither
// shares the caller's slice.
func (p *Processor) divide(batches []lane.Batch) (plain, quarantined []lane.Batch) {
	plain = make([]lane.Batch, 0, len(batches))
	for _, b := range batches {
		switch {
		case b.Ordered && p.Store.quarantine.has(b.Lane):
			quarantined = append(quarantined, b)
		case !b.Ordered && deliveredRepeatedly(b.Messages):
			rest, one := b, b
			rest.Messages, one.Messages = nil, nil
			for i := range b.Messages {
				if deliveredRepeatedly(b.Messages[i : i+1]) {
					one.Messages = append(one.Messages, b.Messages[i])
				} else {
					rest.Messages = append(rest.Messages, b.Messages[i])
				}
			}
			quarantined = append(quarantined, one)
			if len(rest.Messages) > 0 {
				plain = append(plain, rest)
			}
		default:
			plain = append(plain, b)
		}
	}
	return plain, quarantined
}

// deliveredRepeatedly reports whether a queue's messages contain one that was delivered too
// often to be chance.
func deliveredRepeatedly(messages []message.Message) bool {
	for i := range messages {
		if messages[i].Deliveries > quarantineDeliveries {
			return true
		}
	}
	return false
}

// applyOneByOne applies a batch in small runs that are recorded before. A message with a
// record goes alone, or to the dead letters.
func (p *Processor) applyOneByOne(ctx context.Context, b lane.Batch, clocks clocks) error {
	b, there, err := p.unlanded(ctx, b)
	if err != nil || !there {
		return err
	}
	recorded, err := p.Store.attempts(ctx, b)
	if err != nil {
		return holdUnlessPassing(err)
	}
	for {
		run, rest := cut(b, recorded)
		if err := p.attempt(ctx, run, clocks, recorded); err != nil {
			return err
		}
		p.Store.quarantine.passed(b.Lane, len(run.Messages), p.MaxMessages)
		if len(rest.Messages) == 0 {
			return nil
		}
		b = rest
	}
}

// cut takes the next run off a batch: a message with a record alone, else some without.
func cut(b lane.Batch, recorded map[int64]attempt) (run, rest lane.Batch) {
	n := 0
	for n < min(len(b.Messages), quarantineRun) {
		if _, ok := recorded[b.Messages[n].Position.Offset]; ok {
			n = max(n, 1)
			break
		}
		n++
	}
	return cutAt(b, n)
}

// attempt applies one run, with nothing else of this process at the sink.
func (p *Processor) attempt(ctx context.Context, run lane.Batch, clocks clocks, recorded map[int64]attempt) error {
	if err := p.sinkSlots.Acquire(ctx, allSinkSlots); err != nil {
		return err
	}
	defer p.sinkSlots.Release(allSinkSlots)
	h := &handOver{clocks: clocks, recorded: true}
	if len(run.Messages) == 1 {
		if a := recorded[run.Messages[0].Position.Offset]; a.tries >= maxCrashes {
			// It isn't tried: the record stays until it is a dead letter.
			h.reject(&run.Messages[0], &rejection{class: classPoison, reason: a.reason(), attempts: int32(a.tries)})
			return p.handOver(ctx, []lane.Batch{run}, h)
		}
	}
	at, err := p.Store.recordAttempt(ctx, run)
	if err != nil {
		p.Store.clearAttempt(ctx, run, at) // it may have been written all the same
		return holdUnlessPassing(err)
	}
	err = p.handOver(ctx, []lane.Batch{run}, h)
	if deadline, ok := ctx.Deadline(); err != nil && !(ok && time.Since(deadline) > answerLimit) {
		p.Store.clearAttempt(ctx, run, at)
	}
	return err
}

// attempt is the record of a message whose attempts have crashed workers.
type attempt struct {
	tries       int
	first, last time.Time
}

func (a attempt) reason() string {
	const format = "2006-01-02 15:04:05Z"
	return fmt.Sprintf("the worker ended %d times while it applied this message, between %s and %s: it takes the process down, or the sink hangs on it",
		a.tries, a.first.UTC().Format(format), a.last.UTC().Format(format))
}

// openAttempts reports whether there are records of a lane's messages that are still to
// come. It takes no locks: its transaction holds the lane's row, and everybody else locks
// records before lanes.
func (s *Store) openAttempts(ctx context.Context, tx pgx.Tx, lane int32, next int64) (open bool, err error) {
	err = tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+s.name("attempts")+` WHERE lane = $1 AND position >= $2 AND last_at >= now() - interval '30 days')`,
		lane, next).Scan(&open)
	return open, err
}

// forgetAttempts deletes the records that nobody will ask for: a lane was moved past
// them, or a queue's message was deleted at the broker. What it fails to delete, the next
// acquisition deletes.
func (s *Store) forgetAttempts(ctx context.Context, lane message.Lane, ordered bool, next int64) {
	id, err := s.laneID(lane)
	if err == nil {
		_, err = s.pool.Exec(ctx, `DELETE FROM `+s.name("attempts")+` WHERE lane = $1 AND ($2 AND position < $3 OR last_at < now() - interval '30 days')`, id, ordered, next)
	}
	if err != nil {
		s.log.Debug("forget old attempts", "source", lane.Source, "lane", lane.Name, "error", err)
	}
}

// attempts reads the records of a batch's messages, by position. It leaves out this
// process's own: those attempts have had their answer, or it wouldn't ask.
func (s *Store) attempts(ctx context.Context, b lane.Batch) (map[int64]attempt, error) {
	lane, err := s.laneID(b.Lane)
	if err != nil {
		return nil, err
	}
	rows, _ := s.pool.Query(ctx, `SELECT position, tries, first_at, last_at FROM `+s.name("attempts")+`
		WHERE lane = $1 AND position = ANY ($2) AND worker <> $3::uuid`, lane, positions(b), s.process)
	recorded := make(map[int64]attempt)
	var position int64
	var a attempt
	if _, err := pgx.ForEachRow(rows, []any{&position, &a.tries, &a.first, &a.last}, func() error {
		recorded[position] = a
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the attempts of lane %s: %w", b.Lane, err)
	}
	return recorded, nil
}

// recordAttempt records that a run's messages are tried. The record is durable before the
// sink is given them. Nothing is recorded for a lane that another worker owns: advance()
// refuses what comes of that.
func (s *Store) recordAttempt(ctx context.Context, run lane.Batch) (at time.Time, err error) {
	lane, err := s.laneID(run.Lane)
	if err != nil {
		return at, err
	}
	err = s.pool.QueryRow(ctx, `
		WITH recorded AS (
			INSERT INTO `+s.name("attempts")+` AS a (lane, position, worker)
			SELECT l.id, u.position, $3::uuid FROM `+s.name("lanes")+` l, unnest($2::bigint[]) AS u (position) WHERE l.id = $1 AND l.epoch = $4
			ON CONFLICT (lane, position) DO UPDATE SET
				tries    = CASE WHEN a.worker = EXCLUDED.worker THEN 1 ELSE a.tries + 1 END,
				first_at = CASE WHEN a.worker = EXCLUDED.worker THEN EXCLUDED.first_at ELSE a.first_at END,
				last_at  = EXCLUDED.last_at,
				worker   = EXCLUDED.worker)
		SELECT now()`, lane, positions(run), s.process, run.Epoch).Scan(&at)
	if err != nil {
		return at, fmt.Errorf("record an attempt in lane %s: %w", run.Lane, err)
	}
	return at, nil
}

// unclearedAttempts are the records of attempts that had an answer, which the database
// was away to clear. The process lives, so they don't count as its crashes: they are
// cleared as soon as the database is back. Otherwise three outages at the wrong moment
// would make a dead letter of a good message.
type unclearedAttempts struct {
	mu  sync.Mutex
	all []unclearedAttempt
}

type unclearedAttempt struct {
	lane      int32
	positions []int64
	at        time.Time // by the database's clock; zero: not known
}

// clearAttempt clears the records of a run whose attempt had an answer: now, or once the
// database is back.
func (s *Store) clearAttempt(ctx context.Context, run lane.Batch, at time.Time) {
	lane, err := s.laneID(run.Lane)
	if err != nil {
		return // without the lane's number nothing was recorded
	}
	attempt := unclearedAttempt{lane, positions(run), at}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := s.deleteAttempt(ctx, attempt); err != nil {
		s.uncleared.mu.Lock()
		s.uncleared.all = append(s.uncleared.all, attempt)
		s.uncleared.mu.Unlock()
		s.log.Warn("an attempt that had an answer stays on record until the database is back", "source", run.Lane.Source, "lane", run.Lane.Name, "position", run.From, "error", err)
	}
}

// clearAttempts clears what the database was away for. The next hand-over retries what
// fails.
func (s *Store) clearAttempts(ctx context.Context) {
	s.uncleared.mu.Lock()
	defer s.uncleared.mu.Unlock()
	for len(s.uncleared.all) > 0 {
		if err := s.deleteAttempt(ctx, s.uncleared.all[0]); err != nil {
			s.log.Debug("clear the records of attempts that had an answer", "error", err)
			return
		}
		s.uncleared.all = s.uncleared.all[1:]
	}
}

// deleteAttempt deletes a record of this process. If another has recorded its own attempt
// on top of it since, that record stays, and counts one less.
func (s *Store) deleteAttempt(ctx context.Context, n unclearedAttempt) error {
	_, err := s.pool.Exec(ctx, `
		WITH mine AS (DELETE FROM `+s.name("attempts")+` WHERE lane = $1 AND position = ANY ($2) AND worker = $3::uuid AND last_at <= coalesce($4::timestamptz, now()))
		UPDATE `+s.name("attempts")+` SET tries = tries - 1
		WHERE lane = $1 AND position = ANY ($2) AND worker <> $3::uuid AND first_at <= $4 AND tries > 1`,
		n.lane, n.positions, s.process, timestamp(n.at))
	return err
}

// clearAttemptSteps clear the records of messages in the transaction that has their
// outcome.
func (s *Store) clearAttemptSteps(batches []lane.Batch) (steps []pipeline.Step, err error) {
	for i := range batches {
		lane, err := s.laneID(batches[i].Lane)
		if err != nil {
			return nil, err
		}
		at := positions(batches[i])
		steps = append(steps, pipeline.Step{
			Name:   "dedupd_clear_attempts",
			SQL:    `DELETE FROM ` + s.name("attempts") + ` WHERE lane = $1::integer AND position = ANY ($2::bigint[])`,
			OIDs:   []uint32{pgtype.Int4OID, pgtype.Int8ArrayOID},
			Params: [][]byte{pipeline.Int4(lane), pipeline.AppendInt8s(nil, len(at), func(i int) int64 { return at[i] })},
		})
	}
	return steps, nil
}

func positions(b lane.Batch) []int64 {
	at := make([]int64, len(b.Messages))
	for i := range b.Messages {
		at[i] = b.Messages[i].Position.Offset
	}
	return at
}
