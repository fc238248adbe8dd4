package dedup

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/internal/policy"
)

// commit keeps results, writes dead letters, clears attempts, moves the lanes and commits, in
// one round trip. If a lane doesn't move, the server skips COMMIT.
func (p *Processor) commit(ctx context.Context, t *txn, all []tally) error {
	steps := append(append(t.markSteps(), t.resultSteps()...), p.deadLetterSteps(t.group)...)
	if t.recorded {
		passed, err := p.Store.clearAttemptSteps(t.batches)
		if err != nil {
			return err
		}
		steps = append(steps, passed...)
	}
	moves, err := p.Store.advanceSteps(t.batches, t.clocks, all, p.guard.steps(p.Store, t.group, all))
	if err != nil {
		return err
	}
	return t.commit(ctx, append(steps, moves...)...)
}

// checkStep runs the sink's deferred constraints and triggers in a statement of its own.
// An error here is the sink's; an error after it is dedupd's, which has no deferred
// constraint. Names don't tell them apart: both may share a schema.
var checkStep = pipeline.Step{Name: "dedupd_check", SQL: "SET CONSTRAINTS ALL IMMEDIATE", OfSink: true}

// commit sends a transaction's last steps and COMMIT in one round trip. The error is a
// *commitError if the outcome is unknown. After any other error nothing was done.
//
// The outcome is also unknown when COMMIT succeeds with a warning: somebody cancelled its
// wait for a synchronous standby, so the commit stands on this server only.
func (t *txn) commit(ctx context.Context, steps ...pipeline.Step) error {
	steps = append(append([]pipeline.Step{checkStep}, steps...), pipeline.Step{Name: "dedupd_commit", SQL: "commit", Tag: "COMMIT", OfSink: true})

	ctx, cancel := context.WithTimeout(ctx, commitTimeout)
	defer cancel()
	_ = takeWarning(t.conn) // of an earlier statement
	err := t.send(ctx, steps...)
	if err == nil {
		if w := takeWarning(t.conn); w != nil {
			return &commitError{w}
		}
		return nil
	}
	if answer(err) != nil {
		var failed *pipeline.StepError
		if errors.As(err, &failed) && failed.OfSink {
			return fmt.Errorf("commit: %w", err)
		}
		return &ownError{fmt.Errorf("move the lanes: %w", err)}
	}
	if pgconn.SafeToRetry(err) {
		return fmt.Errorf("commit: %w", err)
	}
	return &commitError{err}
}

// answer returns an error that the server sent and survived: nothing was committed. It
// returns nil for any other error, which may hide a success. The server sends the
// severity in two forms, one of them in its own language.
func answer(err error) *pgconn.PgError {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.SeverityUnlocalized == "ERROR" {
		return pg
	}
	return nil
}

// rejection says why a message becomes a dead letter; nil: it doesn't.
func (p *Processor) rejection(it *item) *rejection {
	switch {
	case it.outcome == dead:
		return it.reject
	case it.outcome == conflict && p.OnConflict == policy.ConflictDeadLetter:
		return &rejection{class: classConflict, reason: "the id was claimed with another payload"}
	case (it.outcome == resent || it.outcome == crossSource) && p.OnDuplicate == policy.DuplicateDeadLetter:
		return &rejection{class: classDuplicate, reason: "the id was claimed before"}
	}
	return nil
}
