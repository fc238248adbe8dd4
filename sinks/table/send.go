package table

import (
	"context"
	"errors"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// copyFrom is the number of messages from which on COPY is used, if it can be. A row takes a
// third less processor time for text and bytea, and an eighth less for jsonb, where parsing
// is most of it. COPY costs two more round trips.
const copyFrom = 256

func (s *Sink) send(ctx context.Context, tx sinks.Tx, p *plan, batch *sinks.Batch) error {
	msgs := batch.Messages()
	if !p.copies || len(msgs) < copyFrom || s.changed.Load() {
		return s.run(ctx, tx, p, batch)
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
	// Encode names every message at fault. If it finds none, the server is stricter than we
	// are, and its error stands.
	if _, bad := p.set.Encode(msgs); bad != nil {
		s.refused()
		return bad
	}
	return err
}

// run writes by the plan's statements, and makes sure that the columns are still those of
// the plan. The statement casts each value to its column's type; made before the type was
// changed, it would round, cut or refuse what the column takes now. So the statement itself
// compares the columns before it casts anything. By then it has the table's lock, which keeps
// the columns as they are, and a snapshot taken after that, since it runs under READ
// COMMITTED. (The server may cast a constant when it plans, so with one the columns are read
// first.) If they have changed, it writes no row. So if it wrote none, or can't tell, the
// columns are read once more: a keyed insert of nothing new writes none either.
func (s *Sink) run(ctx context.Context, tx sinks.Tx, p *plan, batch *sinks.Batch) error {
	values, err := p.set.Encode(batch.Messages())
	if err != nil {
		return s.blame(ctx, tx, p, err)
	}
	before, after := p.shape, p.shape
	var b pgx.Batch
	if p.constant {
		s.queueShape(&b, p, &before)
	}
	sent := p.queue(&b, values)
	s.queueTargets(&b, p)
	if !p.counts {
		s.queueShape(&b, p, &after)
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
	case !p.counts && after != p.shape:
		s.distrust(p)
		return errChanged
	case p.counts && sent.rows == 0:
		if err := s.blame(ctx, tx, p, nil); err != nil {
			return err
		}
	}
	if sent.settle == nil {
		return nil
	}
	return sent.settle(ctx, tx, batch)
}

// blame returns bad, which blames messages that don't fit the columns' types, or is nil. But
// if the columns have got other types since the plan was made, it returns errChanged; and if
// a table isn't durable any more, that error.
func (s *Sink) blame(ctx context.Context, tx sinks.Tx, p *plan, bad error) error {
	shape := p.shape
	var b pgx.Batch
	s.queueShape(&b, p, &shape)
	s.queueTargets(&b, p)
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	if shape != p.shape {
		s.distrust(p)
		return errChanged
	}
	return bad
}

// queueShape adds a query for the shape of the plan's columns to a batch.
func (s *Sink) queueShape(b *pgx.Batch, p *plan, shape *string) {
	b.Queue(shapeSQL, s.schema, s.table, p.names).QueryRow(func(row pgx.Row) error { return row.Scan(shape) })
}

// doubtHolds is how long documents are read here after one was no JSON. A bad one is seldom
// alone, and each that the server refuses costs it a group's rows and a line in its log.
// Otherwise documents are sent unread, since the server checks them anyway.
const doubtHolds = time.Minute

func (s *Sink) readsFirst() bool { return time.Now().UnixNano() < s.doubt.Load() }
func (s *Sink) refused()         { s.doubt.Store(time.Now().Add(doubtHolds).UnixNano()) }

func (s *Sink) copy(ctx context.Context, tx sinks.Tx, p *plan, values *columns.Values) error {
	_, err := tx.CopyFrom(ctx, pgx.Identifier{s.schema, s.table}, p.names, values.Source())
	if err == nil {
		// COPY takes any bytes for a value of the type that it finds. Its lock keeps the
		// columns as they are. (If the bytes make no sense for a new type, COPY fails as if a
		// message were bad. The batch is then divided until it is too small for COPY, and
		// INSERT says what is wrong.)
		return s.blame(ctx, tx, p, nil)
	}
	if sqlstate.Of(err) == "" && ctx.Err() == nil {
		// The driver itself couldn't encode a value for the type it takes the column for.
		// (Or the connection is gone; then reading the catalog again costs little.)
		s.distrust(p)
	}
	return err
}

// keptAway is an error after fewer rows were written than were due, though they were locked.
// The batch is divided until a single message is left, which is dead-lettered. But if the
// key's index is another one than when the plan was made, the statements went by what it was.
func (s *Sink) keptAway(ctx context.Context, tx sinks.Tx, p *plan) error {
	t, err := s.readCatalog(ctx, tx)
	if err != nil {
		return err
	}
	if !reflect.DeepEqual(s.keyIndex(t), p.index) {
		s.current.CompareAndSwap(p, nil)
		return meanwhile("the index of the key is another one now")
	}
	return sinks.Permanent(errors.New("the server doesn't write its row: a trigger, rule or policy of the table keeps it away or changes its key"))
}

// meanwhile is an error after which the transaction is tried again: somebody else has changed
// what it went by.
func meanwhile(what string) error {
	return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: sqlstate.SerializationFailure, Message: what}
}

var errChanged = errors.New("the table has changed meanwhile; nothing was written, and the next try will see them as they are")

// distrust makes the next try read the catalog again, and ends the use of COPY for the life
// of this process: each connection of the driver remembers the types that it once found for
// a COPY and would encode for those, which blame can't see.
func (s *Sink) distrust(p *plan) {
	s.changed.Store(true)
	s.current.CompareAndSwap(p, nil)
}
