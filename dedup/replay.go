package dedup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/dedup/internal/admin"
	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// What becomes of a dead letter that is replayed.
const (
	// ReplayApplied: the sink has taken it, and the dead letter is gone.
	ReplayApplied = "applied"
	// ReplayDuplicate: another message has claimed the id, with the same payload.
	// The dead letter is gone.
	ReplayDuplicate = "duplicate"
	// ReplayConflict: another message has claimed the id, with another payload.
	// The dead letter stays.
	ReplayConflict = "conflict"
	// ReplayDead: it has no usable id, or the sink refuses it. The dead letter
	// stays.
	ReplayDead = "dead"
	// ReplayFiltered: no sink wants it any more. The dead letter stays.
	ReplayFiltered = "filtered"
	// ReplayGone: there is no such dead letter, or not any more. Somebody else has
	// replayed or discarded it, or it has expired.
	ReplayGone = "gone"
)

// Replayed is what became of a dead letter.
type Replayed struct {
	ID      int64
	Outcome string
	// SinkOutcome is what the sink said if it was applied: written, already_present, stale
	// or rejected.
	SinkOutcome string
	// MessageID is nil where the message has no usable id.
	MessageID []byte
	// Reason says why the dead letter stays, SQLState what Postgres said.
	Reason, SQLState string
}

// Replay tries a dead letter again: its message goes through a claim transaction of its
// own, like one that was just read, except that the lane doesn't move. This Processor
// decides where the id is, what is compared and what the sink does: any of it may have been
// fixed since.
//
// A dead letter holds the claim of its id, or of its place; that claim counts as new.
// Without it (it has expired or was forgotten, or the id is now found elsewhere) the
// message competes for its id like any other. Once applied, the dead letter is deleted in
// the same transaction: whoever replays it at the same time has to wait, and finds it
// gone. The audit records everything but that, under the actor's name.
//
// What passes is waited for and retried, for about ten seconds. Any other error is a
// person's to fix first; the dead letter is then unchanged.
func (p *Processor) Replay(ctx context.Context, actor string, id int64) (r Replayed, err error) {
	var unknown *lostReplay
	l := 50 * time.Millisecond
	for n := 1; ; n++ {
		r, err = p.tryReplay(ctx, actor, id)
		if err == nil {
			return r, nil
		}
		var lost *lostReplay
		switch {
		case errors.As(err, &lost):
			// Look again: if the server is still at the commit, the dead letter is
			// locked; if the commit has landed, it is gone.
			unknown = lost
		case errors.Is(err, ErrNoDeadLetter) && unknown == nil:
			return Replayed{ID: id, Outcome: ReplayGone}, nil
		case errors.Is(err, ErrNoDeadLetter):
			return p.Store.confirmReplay(ctx, unknown)
		}
		if refused := refusalOf(err); refused != nil {
			r = Replayed{ID: id, Outcome: refused.outcome, MessageID: r.MessageID, Reason: string(pipeline.CleanText(refused.reason)), SQLState: refused.sqlstate}
			return p.Store.refuse(ctx, actor, r)
		}
		reaction := react(err)
		if _, checks := p.Sink.(sinks.Preparer); checks && reaction == doubt {
			// Is it the table? Then a person has to fix it before any dead letter is
			// replayed. If not, the dead letter stays, as after any refusal. If the sink
			// can't say which, a person has to find out.
			if table := p.prepareSink(ctx); table != nil {
				return r, fmt.Errorf("replay dead letter %d: %w", id, table)
			}
			r = Replayed{ID: id, Outcome: ReplayDead, MessageID: r.MessageID, Reason: string(pipeline.CleanText(err.Error())), SQLState: sqlstate.Of(err)}
			return p.Store.refuse(ctx, actor, r)
		}
		if reaction == reload && n < tries {
			_, failed := p.Store.generations.Refresh(ctx)
			if failed == nil {
				continue
			}
			err, reaction = failed, react(failed)
		}
		if reaction != retry && reaction != internal || n == tries || !wait.For(ctx, l) {
			return r, fmt.Errorf("replay dead letter %d: %w", id, err)
		}
		l = min(2*l, 2*time.Second)
	}
}

// lostReplay is a replay whose COMMIT was sent, and the answer lost.
type lostReplay struct {
	error
	Replayed
	lane int32
}

func (e *lostReplay) Error() string { return e.error.Error() }
func (e *lostReplay) Unwrap() error { return e.error }

// confirmReplay finds out what deleted a dead letter after a COMMIT without an answer: a
// replay, ours or another's, has left its line in the audit. It also makes sure that what
// is visible is durable.
func (s *Store) confirmReplay(ctx context.Context, lost *lostReplay) (Replayed, error) {
	var landed bool
	err := s.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+s.name("audit")+` WHERE scope = $1 AND action = 'dlq replay' AND subject = $2 AND detail->>'outcome' = $3)`,
		s.scope, fmt.Sprintf("dead letter %d", lost.ID), lost.Outcome).Scan(&landed)
	if err == nil && !landed {
		return Replayed{ID: lost.ID, Outcome: ReplayGone}, nil
	}
	if err == nil {
		err = s.waitForStandby(ctx, lost.lane)
	}
	if err != nil {
		return lost.Replayed, fmt.Errorf("dead letter %d is gone, but whether it was replayed, and durably, is not known: %w", lost.ID, err)
	}
	return lost.Replayed, nil
}

// refusal ends a replay after which the dead letter stays.
type refusal struct {
	outcome string
	rejection
}

func (r *refusal) Error() string { return r.reason }

// refusalOf reports whether an error is the message's fault; nil: it isn't.
func refusalOf(err error) *refusal {
	var refused *refusal
	if errors.As(err, &refused) {
		return refused
	}
	if react(err) != isolate {
		return nil
	}
	if named, ok := sinks.AllPermanent(err)[0]; ok {
		err = named
	}
	return &refusal{ReplayDead, rejection{reason: err.Error(), sqlstate: sqlstate.Of(err)}}
}

// refuse records a try that failed.
func (s *Store) refuse(ctx context.Context, actor string, r Replayed) (Replayed, error) {
	err := s.retry(ctx, func() error {
		return admin.Tx(ctx, s.schema, func(ctx context.Context, tx pgx.Tx) error {
			d, err := s.readDeadLetter(ctx, tx, r.ID, "FOR UPDATE OF d")
			if errors.Is(err, ErrNoDeadLetter) {
				r = Replayed{ID: r.ID, Outcome: ReplayGone} // somebody else was faster
				return nil
			}
			if err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `UPDATE `+s.name("dead_letters")+` SET attempts = attempts + 1, last_at = `+s.name("clock")+`(), reason = $2, sqlstate = nullif($3, '')
				WHERE id = $1`, r.ID, r.Reason, r.SQLState); err != nil {
				return err
			}
			detail, err := d.auditedReplay(r)
			if err != nil {
				return err
			}
			_, err = tx.Exec(ctx, `SELECT `+s.name("note_dead_letter")+`($1, $2, 'replay', $3, $4)`, s.scope, actor, r.ID, string(detail))
			return err
		})
	})
	if err != nil {
		return r, fmt.Errorf("replay dead letter %d: it was refused (%s), and that could not be recorded: %w", r.ID, r.Reason, err)
	}
	return r, nil
}

func (d *DeadLetter) auditedReplay(r Replayed) ([]byte, error) {
	detail := d.audited()
	if r.MessageID != nil {
		detail.MessageID = string(pipeline.CleanText(string(r.MessageID)))
	}
	detail.Outcome, detail.Reason = r.Outcome, r.Reason
	return json.Marshal(detail)
}

// replayTime bounds one try, whose statements have time-outs of their own.
const replayTime = time.Minute

func (p *Processor) tryReplay(ctx context.Context, actor string, id int64) (r Replayed, err error) {
	ctx, cancel := context.WithTimeout(ctx, replayTime)
	defer cancel()
	err = p.Store.begin(ctx, &group{}, func(t *txn) error {
		r, err = p.replayOn(ctx, t, actor, id)
		return err
	})
	return r, err
}

// replayOn replays a dead letter in a transaction.
//
// The dead letter is locked before anything else, so that a second replay waits without
// holding up rotations or claims. It can't deadlock with workers. They do without that
// lock: none reads dead letters, and to write one they wait only for a row of the same
// place that is being written or deleted. replayed() deletes the dead letter at the end,
// when only the lane's row is left to lock; and whoever holds that row locks nothing
// after it. All else is locked in the order of txn. Expiry skips locked rows.
func (p *Processor) replayOn(ctx context.Context, t *txn, actor string, id int64) (r Replayed, err error) {
	r.ID = id
	if err := t.send(ctx, beginStep, limitsStep); err != nil {
		return r, &ownError{err}
	}
	d, err := p.Store.readDeadLetter(ctx, t.conn, id, "FOR UPDATE OF d")
	if err != nil {
		return r, &ownError{err}
	}
	t.group = p.prepare([]lane.Batch{d.batch()})
	it := &t.items[0]
	if it.unwanted {
		return r, &refusal{ReplayFiltered, rejection{reason: "no sink wants the message: it passes no filter"}}
	}
	if it.hold != nil {
		return r, &refusal{ReplayDead, rejection{reason: it.hold.Error()}}
	}
	if it.reject != nil {
		return r, &refusal{ReplayDead, *it.reject}
	}
	r.MessageID = []byte(t.message(it).ID)

	if err := p.claimAgain(ctx, t, &d); err != nil {
		return r, err
	}
	if it.outcome.applied() {
		if err := p.mayOverwrite(&d, t.message(it)); err != nil {
			return r, err
		}
	}
	if err := t.write(ctx, p.Sink); err != nil {
		var held *lane.HoldError
		if err = t.sinkFailed(err); errors.As(err, &held) {
			return r, &refusal{ReplayDead, rejection{reason: held.Err.Error()}}
		}
		return r, err
	}
	r.Outcome = ReplayDuplicate
	if it.outcome.applied() {
		r.Outcome, r.SinkOutcome = ReplayApplied, outcomeNames[it.outcome]
	}
	steps, err := p.Store.replayedSteps(actor, &d, r, it.outcome)
	if err != nil {
		return r, err
	}
	err = t.commit(ctx, append(t.resultSteps(), steps...)...)
	var lost *commitError
	if errors.As(err, &lost) {
		return r, &lostReplay{err, r, d.LaneNumber}
	}
	return r, err
}

// mayOverwrite is an error if a message comes after newer ones that it may undo, and nobody has
// said that it may. One that was out of its producer's order may also be a copy: a replay
// looks at no mark.
func (p *Processor) mayOverwrite(d *DeadLetter, m *message.Message) error {
	if p.Overwrite {
		return nil
	}
	if d.Class == classSequence {
		return errors.New("its number was out of its producer's order, and a replay looks at no mark: it may be a copy, or older than what was applied since; " +
			"find out what the producer did, then replay it with --overwrite, or discard it")
	}
	s, ok := p.Sink.(sinks.ReplaySensitive)
	if !ok {
		return nil
	}
	if err := s.Overwrites(m); err != nil {
		return fmt.Errorf("%w, then replay it with --overwrite, or discard it", err)
	}
	return nil
}

// claimAgain claims the id of a dead letter's message, or finds that the claim is the
// dead letter's own, and gives the message its outcome. Nobody can forget the claim,
// whoever's it is, before the transaction ends.
func (p *Processor) claimAgain(ctx context.Context, t *txn, d *DeadLetter) error {
	t.lanes = []int32{d.LaneNumber}
	if p.Strategy == policy.StrategyPosition || p.Strategy == policy.StrategySequence {
		// The dead letter's row, which is locked, alone keeps others from replaying it. A
		// mark has passed it already, and stays.
		if err := t.send(ctx, t.enterStep()); err != nil {
			return &ownError{err}
		}
		t.newByPosition(&t.items[0])
		if d.Class == classConflict {
			return &refusal{ReplayConflict, rejection{reason: "the id was claimed with another payload"}}
		}
		if d.Class == classDuplicate { // nothing that was mended makes it new
			t.items[0].outcome = resent
		}
		return nil
	}
	t.fingerprint = p.comparesPayloads()
	err := t.claim(ctx, t.enterStep())
	p.Metrics.probed(t.probed)
	if err != nil {
		return &ownError{fmt.Errorf("claim: %w", err)}
	}
	it := &t.items[0]
	if row := t.found[it.key]; row != nil {
		own, err := p.Store.holdClaim(ctx, t.conn, row.table, it.key, d)
		if err != nil {
			return &ownError{fmt.Errorf("claim: %w", err)}
		}
		if own {
			it.outcome = written
			t.claimedIn = row.table
		}
	}
	err = p.settle(ctx, t)
	if it.outcome == conflict { // whatever dedup.on_conflict says
		return &refusal{ReplayConflict, rejection{reason: "the id was claimed with another payload"}}
	}
	if err != nil {
		return &ownError{fmt.Errorf("claim: %w", err)}
	}
	return nil
}

// holdClaim keeps a claim from being forgotten before the transaction ends, and tells
// whether it was made when the dead letter was written.
func (s *Store) holdClaim(ctx context.Context, conn *pgx.Conn, g *generations.Table, key claimkey.Key, d *DeadLetter) (own bool, err error) {
	var position *int64
	var claimedAt time.Time
	err = conn.QueryRow(ctx, `SELECT r_position, r_claimed_at FROM `+s.name("hold_claim")+`($1::text::uuid, $2::text::uuid)`, g.Identity.String(), key.String()).
		Scan(&position, &claimedAt)
	if err != nil {
		return false, err
	}
	// A conflict or a duplicate has made no claim: whatever looks like it is somebody
	// else's.
	hasClaim := d.Class != classConflict && d.Class != classDuplicate
	return hasClaim && d.ClaimKey == key.String() && position != nil && *position == d.Position && claimedAt.Equal(d.CreatedAt), nil
}

// limitsStep sets the time-outs for what comes before enter().
var limitsStep = pipeline.Step{
	Name: "dedupd_limits", SQL: pipeline.SetLimits,
	OIDs:   []uint32{pgtype.TextOID, pgtype.TextOID, pgtype.TextOID},
	Params: [][]byte{[]byte(pipeline.LockTimeout), []byte(pipeline.StatementTimeout), []byte(pipeline.IdleTimeout)},
}

// replayedSteps delete a dead letter, book its outcome, and record that in the audit.
func (s *Store) replayedSteps(actor string, d *DeadLetter, r Replayed, o outcome) ([]pipeline.Step, error) {
	if !o.applied() && !o.duplicate() {
		return nil, fmt.Errorf("bug: the dead letter %d was left without an outcome", d.ID)
	}
	detail, err := d.auditedReplay(r)
	if err != nil {
		return nil, err
	}
	return []pipeline.Step{{
		Name:   "dedupd_replayed",
		SQL:    `SELECT ` + s.name("replayed") + `($1::bigint, $2::integer, $3::text)`,
		OIDs:   []uint32{pgtype.Int8OID, pgtype.Int4OID, pgtype.TextOID},
		Params: [][]byte{pipeline.Int8(d.ID), pipeline.Int4(d.LaneNumber), []byte(outcomeNames[o])},
	}, {
		Name:   "dedupd_note_dead_letter",
		SQL:    `SELECT ` + s.name("note_dead_letter") + `($1::text, $2::text, 'replay', $3::bigint, $4::text)`,
		OIDs:   []uint32{pgtype.TextOID, pgtype.TextOID, pgtype.Int8OID, pgtype.TextOID},
		Params: [][]byte{[]byte(s.scope), []byte(actor), pipeline.Int8(d.ID), detail},
	}}, nil
}
