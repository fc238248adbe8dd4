package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/internal/admin"
	"github.com/dedupd/dedupd/dedup/internal/pipeline"
)

// Mark is how far a producer has come, with strategy sequence.
type Mark struct {
	// Producer is its name, as dedup.sequence.producer found it.
	Producer []byte
	Key      string
	// Source and Lane are where its messages come by; nil: that lane was forgotten, and the
	// next one takes over. LaneNumber is left of it.
	Source, Lane  *string
	LaneNumber    int32
	Epoch, Number int64
	// Position is that of the message with the number.
	Position   int64
	SeenAt     time.Time
	AgeSeconds float64
}

// MarkFilter selects marks; the zero value selects all of the scope.
type MarkFilter struct {
	Source, Lane string
	Limit        int // 0: no limit
}

// selectMark reads what a Mark has from m, a row of sequences.
func (s *Store) selectMark(from string) string {
	return `SELECT m.name, m.producer::text, l.source, l.lane, m.lane, m.epoch, m.number, m.position, m.seen_at,
		greatest(0, extract(epoch FROM ` + s.name("clock") + `() - m.seen_at))::float8
		FROM ` + from + ` m LEFT JOIN ` + s.name("lanes") + ` l ON l.id = m.lane`
}

// ofScope selects a scope's marks.
func (s *Store) ofScope() string {
	return ` WHERE m.scope_id = (SELECT id FROM ` + s.name("scopes") + ` WHERE scope = $1)`
}

// Marks lists producers' marks, those seen last first.
func (s *Store) Marks(ctx context.Context, f MarkFilter) ([]Mark, error) {
	rows, _ := s.pool.Query(ctx, s.selectMark(s.name("sequences"))+s.ofScope()+`
		AND ($2 = '' OR l.source = $2) AND ($3 = '' OR l.lane = $3)
		ORDER BY m.seen_at DESC, m.producer LIMIT nullif($4, 0)`, s.scope, f.Source, f.Lane, f.Limit)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Mark])
	if err != nil {
		return nil, fmt.Errorf("list producers' marks: %w", err)
	}
	return all, nil
}

// MarkAnswer is what there is to say about a producer.
type MarkAnswer struct {
	Key  string
	Mark *Mark // nil: it has none
	// DeadLetters are those of its messages.
	DeadLetters []DeadLetterRef
}

// FindMark looks for a producer's mark, and for dead letters of its messages.
func (s *Store) FindMark(ctx context.Context, producer string) (a MarkAnswer, err error) {
	a.Key = claimkey.Of(producer).String()
	if a.Mark, err = oneMark(ctx, s.pool, s.selectMark(s.name("sequences"))+s.ofScope()+` AND m.producer = $2::uuid`, s.scope, a.Key); err == nil {
		rows, _ := s.pool.Query(ctx, `SELECT id, class FROM `+s.name("dead_letters")+` WHERE scope = $1 AND claim_key = $2::uuid ORDER BY id`, s.scope, a.Key)
		a.DeadLetters, err = pgx.CollectRows(rows, pgx.RowToStructByPos[DeadLetterRef])
	}
	if err != nil {
		return a, fmt.Errorf("look for the mark of producer %q: %w", producer, err)
	}
	return a, nil
}

// ForgetMark deletes a producer's mark: its next message is applied whatever its number, and
// its lane becomes the producer's. It returns what the mark was; nil: there was none. It
// waits for a worker's transaction that has locked the mark.
func (s *Store) ForgetMark(ctx context.Context, actor, producer string) (forgotten *Mark, err error) {
	key := claimkey.Of(producer).String()
	err = s.retry(ctx, func() error {
		return admin.Tx(ctx, s.schema, func(ctx context.Context, tx pgx.Tx) (err error) {
			forgotten, err = oneMark(ctx, tx, `WITH gone AS (DELETE FROM `+s.name("sequences")+` m`+s.ofScope()+` AND m.producer = $2::uuid RETURNING *) `+
				s.selectMark("gone"), s.scope, key)
			if err != nil || forgotten == nil {
				return err
			}
			return admin.Audit(ctx, tx, s.schema, actor, "marks forget", string(pipeline.CleanText(producer)), struct {
				Key      string    `json:"key"`
				Source   *string   `json:"source"`
				Lane     *string   `json:"lane"`
				Number   int64     `json:"number,string"`
				Epoch    int64     `json:"epoch,string"`
				Position int64     `json:"position"`
				SeenAt   time.Time `json:"seen_at"`
			}{forgotten.Key, forgotten.Source, forgotten.Lane, forgotten.Number, forgotten.Epoch, forgotten.Position, forgotten.SeenAt})
		})
	})
	if err != nil {
		return nil, fmt.Errorf("forget the mark of producer %q: %w", producer, err)
	}
	return forgotten, nil
}

// oneMark reads a mark; nil: there is none.
func oneMark(ctx context.Context, db interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}, sql string, args ...any,
) (*Mark, error) {
	rows, _ := db.Query(ctx, sql, args...)
	m, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByPos[Mark])
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return m, err
}
