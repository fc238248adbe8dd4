package dedup

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/internal/admin"
	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/internal/sqlstate"
)

// importBatch is how many ids an import claims in a transaction. A copy that a worker has
// in hand waits for all of it.
const importBatch = 20_000

// Import claims ids that had their effect before dedupd knew of them. Like those of
// Store.Claim, the claims have no lane and no fingerprint.
type Import struct {
	// Actor and Input tell the audit who imported what.
	Actor, Input string
	// Unit is what an error calls a place of the input: line, row.
	Unit string
	// MaxBytes is the longest id.
	MaxBytes int
	// IDs are the ids, or the error that ends them.
	IDs iter.Seq2[string, error]
	// Told is called with the progress after each transaction.
	Told func(Imported)
}

// Imported counts what became of the ids: read = new + known + repeated.
type Imported struct {
	Read  int64 `json:"read"`
	New   int64 `json:"new"`
	Known int64 `json:"known"` // claimed before the import, or meanwhile by a lane
	// Repeated were claimed by the import itself: they are in the input twice. (Or by
	// another import, or a service's Store.Claim, at the same time.)
	Repeated int64 `json:"repeated"`
}

func (n *Imported) add(o Imported) {
	n.Read += o.Read
	n.New += o.New
	n.Known += o.Known
	n.Repeated += o.Repeated
}

// Import claims ids, a batch in a transaction. What is claimed stays if it ends early;
// started again, it finds those ids known, and goes on.
func (s *Store) Import(ctx context.Context, im Import) (n Imported, err error) {
	begun, err := s.beginImport(ctx, im)
	if err != nil {
		return n, fmt.Errorf("import: %w", err)
	}
	keys := make([]claimkey.Key, 0, importBatch)
	var looked time.Time
	flush := func() error {
		// Without a filter, each key is looked up in each sealed generation. A generation
		// may be sealed while this runs, and its filter come later.
		if looked.IsZero() || s.generations.FiltersBehind() && time.Since(looked) > 10*time.Second {
			if err := s.generations.LoadFilters(ctx); err != nil {
				return err
			}
			looked = time.Now()
		}
		some, err := s.importKeys(ctx, keys, begun)
		if err != nil {
			return err
		}
		n.add(some)
		keys = keys[:0]
		if im.Told != nil {
			im.Told(n)
		}
		return nil
	}
	for id, err := range im.IDs {
		if err == nil {
			err = im.check(id, n.Read+int64(len(keys))+1)
		}
		if err != nil {
			return n, failedImport(n, err)
		}
		keys = append(keys, claimkey.Of(id))
		if len(keys) == importBatch {
			if err := flush(); err != nil {
				return n, failedImport(n, err)
			}
		}
	}
	if len(keys) > 0 {
		if err := flush(); err != nil {
			return n, failedImport(n, err)
		}
	}
	return n, nil
}

func (im *Import) check(id string, number int64) error {
	switch {
	case id == "":
		return fmt.Errorf("%s %d is empty: each must hold an id", im.Unit, number)
	case len(id) > im.MaxBytes:
		return fmt.Errorf("%s %d is longer than an id may be, id.max_bytes: %d", im.Unit, number, im.MaxBytes)
	}
	return nil
}

// failedImport says what to do with the rest.
func failedImport(n Imported, err error) error {
	if n.Read == 0 {
		return fmt.Errorf("import: %w; nothing was claimed", err)
	}
	return fmt.Errorf("import: %w; the first %d are claimed and stay so: import all of it again to go on from there", err, n.Read)
}

// beginImport records the import in the audit, which only the owner may, before any work
// is done. It returns the time by the database's clock.
func (s *Store) beginImport(ctx context.Context, im Import) (begun time.Time, err error) {
	err = admin.Tx(ctx, s.schema, func(ctx context.Context, tx pgx.Tx) error {
		if err := admin.Audit(ctx, tx, s.schema, im.Actor, "claims import", im.Input, json.RawMessage(`{}`)); err != nil {
			return err
		}
		return tx.QueryRow(ctx, `SELECT `+s.name("clock")+`()`).Scan(&begun)
	})
	return begun, err
}

// importKeys claims keys in a transaction of its own.
func (s *Store) importKeys(ctx context.Context, keys []claimkey.Key, begun time.Time) (n Imported, err error) {
	g := &group{items: make([]item, len(keys))}
	for i, key := range keys {
		g.items[i] = item{key: key, duplicateOf: -1}
	}
	g.fold()
	err = s.retry(ctx, func() error {
		return s.begin(ctx, g, func(t *txn) error {
			t.reset()
			var running float64
			if err := t.claim(ctx, beginStep, s.sinceStep(begun, &running), t.enterStep()); err != nil {
				return fmt.Errorf("claim: %w", err)
			}
			if err := t.commit(ctx); err != nil {
				return err
			}
			n = t.imported(running)
			return nil
		})
	})
	return n, err
}

// sinceStep reads how many seconds have passed since a time of the database.
func (s *Store) sinceStep(begun time.Time, seconds *float64) pipeline.Step {
	return pipeline.Step{
		SQL:  `SELECT extract(epoch FROM ` + s.name("clock") + `() - $1::timestamptz)::float8`,
		OIDs: []uint32{pgtype.TimestamptzOID}, Params: [][]byte{pipeline.Timestamptz(begun)},
		Row: func(v [][]byte) error {
			*seconds = math.Float64frombits(binary.BigEndian.Uint64(v[0]))
			return nil
		},
	}
}

// imported counts what became of the group. A claim without a lane that was made since
// the import began is the import's own.
func (t *txn) imported(running float64) Imported {
	n := Imported{Read: int64(len(t.items))}
	for i := range t.items {
		it := &t.items[i]
		row := t.found[it.key]
		switch {
		case it.isNew:
			n.New++
		case it.duplicateOf >= 0, row != nil && row.lane == nil && row.age <= running:
			n.Repeated++
		default:
			n.Known++
		}
	}
	return n
}

// QueryError says that somebody's query can't be used: the server refuses it, or its
// first column isn't an id.
type QueryError struct{ Err error }

func (e *QueryError) Error() string { return e.Err.Error() }

// Unwrap is the objection of the server, or of QueryIDs.
func (e *QueryError) Unwrap() error { return e.Err }

// ofQuery makes a *QueryError of an error of the query itself, which another try
// would meet again.
func ofQuery(err error) error {
	if code := sqlstate.Of(err); code == "" || sqlstate.Means(code, sqlstate.Outside) {
		return err
	}
	return &QueryError{err}
}

// QueryIDs runs a query and yields the first column of its rows, as text, while the
// server still works on it, on a connection of its own. The query can't write. estimate
// is called first, with how many rows the planner expects. A *QueryError says that the
// query is at fault.
func (s *Store) QueryIDs(ctx context.Context, query string, estimate func(rows int64)) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		wanted := true
		err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			rows, err := startQuery(ctx, tx, query, estimate)
			if err != nil {
				return err
			}
			defer rows.Close()
			for n := 1; rows.Next(); n++ {
				id, err := firstColumn(rows, n)
				if err != nil {
					cancel() // or Close reads what is left, however much it is
					return err
				}
				if wanted = yield(id, nil); !wanted {
					cancel()
					return nil
				}
			}
			return ofQuery(rows.Err())
		})
		if err != nil && wanted {
			yield("", fmt.Errorf("the query: %w", err))
		}
	}
}

func startQuery(ctx context.Context, tx pgx.Tx, query string, estimate func(rows int64)) (pgx.Rows, error) {
	// It takes as long as the import of what it finds.
	if _, err := tx.Exec(ctx, `SELECT set_config('statement_timeout', '0', true)`); err != nil {
		return nil, err
	}
	var plan string
	if err := tx.QueryRow(ctx, `EXPLAIN (FORMAT JSON) `+query).Scan(&plan); err != nil {
		return nil, ofQuery(err)
	}
	estimate(plannedRows(plan))
	rows, err := tx.Query(ctx, query, pgx.QueryResultFormats{pgx.TextFormatCode})
	return rows, ofQuery(err)
}

// firstColumn is the text of a row's first column, where the text is the id.
func firstColumn(rows pgx.Rows, number int) (string, error) {
	fields := rows.FieldDescriptions()
	if len(fields) == 0 {
		return "", &QueryError{errors.New("it returns no column")}
	}
	switch fields[0].DataTypeOID {
	case pgtype.ByteaOID: // \x6f6e65
		return "", &QueryError{errors.New("its first column is bytea, whose text isn't the id: convert it, as in convert_from(id, 'UTF8')")}
	case pgtype.BPCharOID: // filled up with blanks
		return "", &QueryError{errors.New("its first column is of type character(n), whose blanks aren't the id's: cast it, as in id::text")}
	}
	v := rows.RawValues()[0]
	if v == nil {
		return "", fmt.Errorf("the first column of row %d is NULL: leave such rows out, as in WHERE id IS NOT NULL", number)
	}
	return string(v), nil
}

// plannedRows is how many rows the planner expects; 0 where it doesn't say.
func plannedRows(plan string) int64 {
	var all []struct {
		Plan struct {
			Rows float64 `json:"Plan Rows"`
		} `json:"Plan"`
	}
	if json.Unmarshal([]byte(plan), &all) != nil || len(all) == 0 {
		return 0
	}
	return int64(all[0].Plan.Rows)
}
