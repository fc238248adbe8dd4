package dedup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/internal/admin"
	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// DeadLetter is a message that had no effect, and why.
type DeadLetter struct {
	ID       int64  `json:"id"`
	Scope    string `json:"scope"`
	Source   string `json:"source"`
	Lane     string `json:"lane"`
	Position int64  `json:"position"`
	// Class is no_id, bad_id, poison, conflict or duplicate: why it is a dead letter.
	Class string `json:"class"`
	// Attempts counts the tries to apply it: the one that made it a dead letter, and each
	// replay that failed. Reason and SQLState are those of the last one.
	Attempts int32   `json:"attempts"`
	Reason   string  `json:"reason"`
	SQLState *string `json:"sqlstate"`
	ClaimKey string  `json:"claim_key"`
	// MessageID, Topic, Key, Value and headers are the raw bytes; nil: none.
	MessageID    []byte     `json:"message_id"`
	Topic        []byte     `json:"topic"`
	Key          []byte     `json:"key"`
	Value        []byte     `json:"value"`
	HeaderKeys   [][]byte   `json:"header_keys"`
	HeaderValues [][]byte   `json:"header_values"`
	BrokerTime   *time.Time `json:"broker_time"`
	// The place where the id was claimed first, for a conflict or a duplicate.
	OriginalSource   *string `json:"original_source"`
	OriginalLane     *string `json:"original_lane"`
	OriginalPosition *int64  `json:"original_position"`
	// CreatedAt is when it became a dead letter, LastAt when it was last tried.
	CreatedAt time.Time `json:"created_at"`
	LastAt    time.Time `json:"last_at"`
	// LaneNumber is the number by which claims and books knew its lane then; the lane may
	// be gone.
	LaneNumber int32 `json:"-"`
	// StreamID is its lane's of then.
	StreamID string `json:"-"`
}

// Classes are the classes of dead letters.
func Classes() []string {
	return []string{classNoID, classBadID, classPoison, classConflict, classDuplicate, classSequence}
}

// Moment is a point in time: At, or Ago before the database's time. The zero
// Moment is none.
type Moment struct {
	At  time.Time
	Ago time.Duration
}

// DeadLetterFilter narrows dead letters down. Its zero value selects all of the scope's.
type DeadLetterFilter struct {
	IDs []int64
	// Classes are those to select; empty: any.
	Classes      []string
	Source, Lane string
	// SQLState is a code, or its beginning, such as the two characters of a class. Reason
	// is a part of the reason.
	SQLState, Reason string
	// Since and Until bound when they became dead letters; the latter is excluded.
	Since, Until Moment
	// Before is above the numbers of all; 0: no bound.
	Before int64
	// Limit is how many there are at most; 0: no limit.
	Limit int
}

func (s *Store) fromDeadLetters() string {
	return `
	FROM ` + s.name("dead_letters") + ` d
	LEFT JOIN ` + s.name("lanes") + ` l ON l.id = d.original_lane`
}

const selectDeadLetters = `SELECT d.id, d.scope, d.source, d.lane, d.position, d.class, d.attempts, d.reason, d.sqlstate, d.claim_key::text,
	d.message_id, d.topic, d.key, d.value, d.header_keys, d.header_values, d.broker_time, l.source, l.lane, d.original_position, d.created_at, d.last_at,
	d.lane_id, d.stream_id`

// whereDeadLetters is a filter in SQL. Every condition is always there, so that it is one
// statement.
func (s *Store) whereDeadLetters(f DeadLetterFilter) (sql string, args []any) {
	return `
	WHERE d.scope = $1
		AND ($2::bigint[] IS NULL OR d.id = ANY ($2))
		AND ($3::text[] IS NULL OR d.class = ANY ($3))
		AND ($4::text = '' OR d.source = $4) AND ($5::text = '' OR d.lane = $5)
		AND ($6::text = '' OR starts_with(d.sqlstate, $6)) AND ($7::text = '' OR strpos(d.reason, $7) > 0)
		AND ($8::timestamptz IS NULL OR d.created_at >= $8) AND ($9::float8 = 0 OR d.created_at >= ` + s.name("clock") + `() - make_interval(secs => $9))
		AND ($10::timestamptz IS NULL OR d.created_at < $10) AND ($11::float8 = 0 OR d.created_at < ` + s.name("clock") + `() - make_interval(secs => $11))
		AND ($12::bigint = 0 OR d.id < $12)`,
		[]any{s.scope, f.IDs, f.Classes, f.Source, f.Lane, f.SQLState, f.Reason, timestamp(f.Since.At), f.Since.Ago.Seconds(), timestamp(f.Until.At), f.Until.Ago.Seconds(), f.Before, f.Limit}
}

// DeadLetters lists the scope's dead letters that pass the filter, the newest
// first.
func (s *Store) DeadLetters(ctx context.Context, f DeadLetterFilter) ([]DeadLetter, error) {
	where, args := s.whereDeadLetters(f)
	rows, _ := s.pool.Query(ctx, selectDeadLetters+s.fromDeadLetters()+where+` ORDER BY d.id DESC LIMIT nullif($13::bigint, 0)`, args...)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[DeadLetter])
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	return all, nil
}

// DeadLetterIDs lists the numbers of the dead letters that pass the filter, the
// oldest first: those of one lane are then in its order.
func (s *Store) DeadLetterIDs(ctx context.Context, f DeadLetterFilter) ([]int64, error) {
	where, args := s.whereDeadLetters(f)
	rows, _ := s.pool.Query(ctx, `SELECT d.id FROM `+s.name("dead_letters")+` d`+where+` ORDER BY d.id LIMIT nullif($13::bigint, 0)`, args...)
	all, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, fmt.Errorf("select dead letters: %w", err)
	}
	return all, nil
}

// ErrNoDeadLetter says that the scope has no dead letter of that number.
var ErrNoDeadLetter = errors.New("no such dead letter")

// DeadLetter is one of the scope's, by its number.
func (s *Store) DeadLetter(ctx context.Context, id int64) (DeadLetter, error) {
	return s.readDeadLetter(ctx, s.pool, id, "")
}

// readDeadLetter reads a dead letter. lock is the statement's locking clause, if any.
func (s *Store) readDeadLetter(ctx context.Context, q interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}, id int64, lock string,
) (d DeadLetter, err error) {
	rows, _ := q.Query(ctx, selectDeadLetters+s.fromDeadLetters()+` WHERE d.scope = $1 AND d.id = $2 `+lock, s.scope, id)
	d, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[DeadLetter])
	if errors.Is(err, pgx.ErrNoRows) {
		return d, fmt.Errorf("%w: %d in scope %s", ErrNoDeadLetter, id, s.scope)
	}
	if err != nil {
		return d, fmt.Errorf("read dead letter %d: %w", id, err)
	}
	return d, nil
}

// batch is the message as its source handed it over, in a batch that moves
// nothing.
func (d *DeadLetter) batch() lane.Batch {
	l := message.Lane{Source: d.Source, Name: d.Lane}
	m := message.Message{Topic: string(d.Topic), Key: d.Key, Value: d.Value, Position: message.Position{Lane: l, Offset: d.Position}}
	if d.BrokerTime != nil {
		m.Time = *d.BrokerTime
	}
	for i, key := range d.HeaderKeys {
		m.Headers = append(m.Headers, message.Header{Key: string(key), Value: d.HeaderValues[i]})
	}
	return lane.Batch{Lane: l, StreamID: d.StreamID, Messages: []message.Message{m}}
}

// auditedDeadLetter is what the audit keeps of a dead letter: no payload.
type auditedDeadLetter struct {
	Class     string `json:"class"`
	Source    string `json:"source"`
	Lane      string `json:"lane"`
	Position  int64  `json:"position"`
	MessageID string `json:"message_id,omitempty"`
	ClaimKey  string `json:"claim_key"`
	// Outcome and Reason are those of a replay.
	Outcome string `json:"outcome,omitempty"`
	Reason  string `json:"reason,omitempty"`
}

func (d *DeadLetter) audited() auditedDeadLetter {
	return auditedDeadLetter{
		Class: d.Class, Source: d.Source, Lane: d.Lane, Position: d.Position, MessageID: string(pipeline.CleanText(string(d.MessageID))), ClaimKey: d.ClaimKey,
	}
}

// discardBatch is how many dead letters a transaction discards.
const discardBatch = 500

// DiscardDeadLetters deletes dead letters, and returns which of the ids there were. Their
// claims stay: a copy of such a message is a duplicate. The audit records what they were,
// without the payload. told, if not nil, is called with the number of ids that are dealt
// with. If it ends early, what is discarded stays so.
func (s *Store) DiscardDeadLetters(ctx context.Context, actor string, ids []int64, told func(done int)) (discarded []int64, err error) {
	done := 0
	for chunk := range slices.Chunk(ids, discardBatch) {
		var some []int64
		err := s.retry(ctx, func() error {
			return admin.Tx(ctx, s.schema, func(ctx context.Context, tx pgx.Tx) error {
				some, err = s.discard(ctx, tx, actor, chunk)
				return err
			})
		})
		if err != nil {
			return discarded, fmt.Errorf("discard dead letters: %w", err)
		}
		discarded = append(discarded, some...)
		if done += len(chunk); told != nil {
			told(done)
		}
	}
	return discarded, nil
}

func (s *Store) discard(ctx context.Context, tx pgx.Tx, actor string, ids []int64) (discarded []int64, err error) {
	rows, _ := tx.Query(ctx, `DELETE FROM `+s.name("dead_letters")+` WHERE scope = $1 AND id = ANY ($2)
		RETURNING id, class, source, lane, position, message_id, claim_key::text`, s.scope, ids)
	var d DeadLetter
	var details []string
	_, err = pgx.ForEachRow(rows, []any{&d.ID, &d.Class, &d.Source, &d.Lane, &d.Position, &d.MessageID, &d.ClaimKey}, func() error {
		detail, err := json.Marshal(d.audited())
		discarded, details = append(discarded, d.ID), append(details, string(detail))
		return err
	})
	if err != nil {
		return nil, err
	}
	_, err = tx.Exec(ctx, `SELECT `+s.name("note_dead_letter")+`($1, $2, 'discard', u.id, u.detail) FROM unnest($3::bigint[], $4::text[]) AS u (id, detail)`,
		s.scope, actor, discarded, details)
	return discarded, err
}
