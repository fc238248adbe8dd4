package table

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// copyFrom is the number of messages from which COPY is used where it can be. It
// takes a third less processor time a row for text and bytea, an eighth less for
// jsonb, whose parsing is the most of it; and two more round trips.
const copyFrom = 256

func (s *Sink) send(ctx context.Context, tx sinks.Tx, p *plan, msgs []message.Message) error {
	if !p.copies || len(msgs) < copyFrom || s.changed.Load() {
		return s.insert(ctx, tx, p, msgs)
	}
	if s.readsFirst() {
		values, err := p.set.Encode(msgs)
		if err != nil {
			s.refused()
			return s.blame(ctx, tx, p, err)
		}
		return s.copy(ctx, tx, p, values)
	}
	values, err := p.set.EncodeUnread(msgs)
	if err != nil {
		if _, bad := p.set.Encode(msgs); bad != nil {
			s.refused()
			err = bad
		}
		return s.blame(ctx, tx, p, err)
	}
	if err = s.copy(ctx, tx, p, values); !sqlstate.Means(sqlstate.Of(err), sqlstate.Unreadable) {
		return err
	}
	// One look names every message that is at fault. Where it finds none, the
	// server is stricter than we are, and what it says stands.
	if _, bad := p.set.Encode(msgs); bad != nil {
		s.refused()
		return bad
	}
	return err
}

// insert writes by the plan's statement, and makes sure that it was made for the
// columns as they are. The statement casts each value to its column's type, so one
// that was made before the type was changed would round, cut or refuse what the
// column takes now. So it looks itself, before it casts anything: it has the table's
// lock by then, which keeps the columns as they are, and a snapshot taken after that,
// for it runs under READ COMMITTED. (A constant's cast may be tried when it is planned, so
// there the columns are looked at before.) If they have changed, it writes no row. So where
// it wrote none, or can't tell, the columns are looked at once more: a keyed insert of
// nothing new doesn't write any either.
func (s *Sink) insert(ctx context.Context, tx sinks.Tx, p *plan, msgs []message.Message) error {
	values, err := p.set.Encode(msgs)
	if err != nil {
		return s.blame(ctx, tx, p, err)
	}
	written, before, shape := int64(0), p.shape, p.shape
	var b pgx.Batch
	if p.constant {
		s.queueShape(&b, p, &before)
	}
	b.Queue(p.sql, s.args(p, values)...).Exec(func(tag pgconn.CommandTag) error {
		written = tag.RowsAffected()
		return nil
	})
	p.targets.queue(&b)
	if !p.counts {
		s.queueShape(&b, p, &shape)
	}
	err = tx.SendBatch(ctx, &b).Close()
	switch {
	case before != p.shape && before != "": // empty: the table is gone, which err says
		s.distrust(p)
		return errChanged
	case err != nil:
		if sqlstate.Means(sqlstate.Of(err), sqlstate.Outdated) {
			s.current.CompareAndSwap(p, nil)
		}
		return err
	case !p.counts && shape != p.shape:
		s.distrust(p)
		return errChanged
	case p.counts && written == 0:
		return s.blame(ctx, tx, p, nil)
	}
	return nil
}

// blame gives what is wrong with messages that can't be put into the columns' types, or
// nil if they were not to be written, unless the columns have got other types since the plan was made.
func (s *Sink) blame(ctx context.Context, tx sinks.Tx, p *plan, bad error) error {
	shape := p.shape
	var b pgx.Batch
	s.queueShape(&b, p, &shape)
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	if shape != p.shape {
		s.distrust(p)
		return errChanged
	}
	return bad
}

// queueShape asks for the shape of the plan's columns in a batch.
func (s *Sink) queueShape(b *pgx.Batch, p *plan, shape *string) {
	b.Queue(shapeSQL, s.schema, s.table, p.names).QueryRow(func(row pgx.Row) error { return row.Scan(shape) })
}

// doubtHolds is for how long documents are read here once one was no JSON. One is
// seldom alone, and what the server refuses costs it a group's rows, and a line in
// its log. Else they go unread: that they are valid, it finds out in any case.
const doubtHolds = time.Minute

func (s *Sink) readsFirst() bool { return time.Now().UnixNano() < s.doubt.Load() }
func (s *Sink) refused()         { s.doubt.Store(time.Now().Add(doubtHolds).UnixNano()) }

func (s *Sink) copy(ctx context.Context, tx sinks.Tx, p *plan, values *columns.Values) error {
	_, err := tx.CopyFrom(ctx, pgx.Identifier{s.schema, s.table}, p.names, values.Source())
	if err == nil {
		return s.checkCopied(ctx, tx, p)
	}
	if sqlstate.Of(err) == "" && ctx.Err() == nil {
		// The driver itself couldn't put a value into the type it takes the
		// column for. (Or the connection is gone; then a look at the catalog
		// before the next try is no loss.)
		s.distrust(p)
	}
	return err
}

var errChanged = errors.New("the table's columns have changed meanwhile; nothing was written, and the next try will see them as they are")

// checkCopied makes sure that the rows were copied into the types they were made
// for: COPY takes any bytes for a value of the type it finds.
// Having copied, this transaction holds a lock that keeps the columns as they
// are, so afterwards is the time to look. (Where the bytes make no sense for the
// new type, COPY itself fails as if a message were bad. The batch is then
// divided until it is too small for COPY, and INSERT says what is the matter.)
func (s *Sink) checkCopied(ctx context.Context, tx sinks.Tx, p *plan) error {
	var shape string
	var b pgx.Batch
	s.queueShape(&b, p, &shape)
	p.targets.queue(&b)
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	if shape != p.shape {
		s.distrust(p)
		return errChanged
	}
	return nil
}

// distrust has the catalog read again before the next try, and ends the use of
// COPY for as long as this process runs: each connection of the driver remembers
// the types it once found for a COPY and would encode for those, and checkCopied
// can't see that.
func (s *Sink) distrust(p *plan) {
	s.changed.Store(true)
	s.current.CompareAndSwap(p, nil)
}
