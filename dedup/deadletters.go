package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// buryStep is the statement that writes one dead letter, in the transaction that
// moves its lane.
func (s *Store) buryStep(g *group, it *item, why *rejection) step {
	m := g.message(it)
	keys := make([][]byte, len(m.Headers))
	values := make([][]byte, len(m.Headers))
	for i, h := range m.Headers {
		keys[i], values[i] = []byte(h.Key), h.Value
	}
	var id, state []byte
	if m.ID != "" {
		id = []byte(m.ID)
	}
	if why.sqlstate != "" {
		state = []byte(why.sqlstate)
	}
	originalLane, originalPosition := []byte(nil), []byte(nil)
	if it.original != nil {
		originalLane, originalPosition = it.original.laneParam(), it.original.positionParam()
	}
	return step{
		name:     "dedupd_bury",
		affected: func(rows int64) { it.buried = rows > 0 },
		sql: `INSERT INTO ` + s.name("dead_letters") + ` (scope, source, lane, position, class, reason, sqlstate, claim_key, message_id, topic, key, value,
			header_keys, header_values, broker_time, original_lane, original_position)
			VALUES ($1::text, $2::text, $3::text, $4::bigint, $5::text, $6::text, $7::text, $8::uuid, $9::bytea, $10::bytea, $11::bytea, $12::bytea,
			$13::bytea[], $14::bytea[], $15::timestamptz, $16::integer, $17::bigint)
			ON CONFLICT DO NOTHING`,
		oids: []uint32{
			pgtype.TextOID, pgtype.TextOID, pgtype.TextOID, pgtype.Int8OID, pgtype.TextOID, pgtype.TextOID, pgtype.TextOID, pgtype.UUIDOID,
			pgtype.ByteaOID, pgtype.ByteaOID, pgtype.ByteaOID, pgtype.ByteaOID, pgtype.ByteaArrayOID, pgtype.ByteaArrayOID,
			pgtype.TimestamptzOID, pgtype.Int4OID, pgtype.Int8OID,
		},
		params: [][]byte{
			[]byte(s.scope), []byte(m.Position.Lane.Source), []byte(m.Position.Lane.Name), int8b(m.Position.Offset),
			[]byte(why.class), cleanText(why.reason), state, it.key[:], id, nonNil([]byte(m.Topic)), m.Key, m.Value,
			byteaArray(keys), byteaArray(values), timestamptz(m.Time), originalLane, originalPosition,
		},
	}
}

func nonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// cleanText makes a reason storable as text: it may quote a message's bytes.
func cleanText(s string) []byte {
	const longest = 2000
	if len(s) > longest {
		s = s[:longest] + "…"
	}
	clean := make([]byte, 0, len(s))
	for _, r := range s { // a range over a string replaces bad UTF-8
		if r == 0 {
			r = '␀'
		}
		clean = append(clean, string(r)...)
	}
	return clean
}

// DeadLetter is one message that had no effect, with why.
type DeadLetter struct {
	ID       int64  `json:"id"`
	Scope    string `json:"scope"`
	Source   string `json:"source"`
	Lane     string `json:"lane"`
	Position int64  `json:"position"`
	// Class is no_id, bad_id, poison, conflict or duplicate.
	Class    string  `json:"class"`
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
	OriginalSource   *string   `json:"original_source"`
	OriginalLane     *string   `json:"original_lane"`
	OriginalPosition *int64    `json:"original_position"`
	CreatedAt        time.Time `json:"created_at"`
}

const selectDeadLetters = `SELECT d.id, d.scope, d.source, d.lane, d.position, d.class, d.reason, d.sqlstate, d.claim_key::text,
	d.message_id, d.topic, d.key, d.value, d.header_keys, d.header_values, d.broker_time, l.source, l.lane, d.original_position, d.created_at`

// DeadLetters lists the scope's dead letters, newest first, at most limit, with
// ids below before (0: from the newest).
func (s *Store) DeadLetters(ctx context.Context, before int64, limit int) ([]DeadLetter, error) {
	rows, err := s.pool.Query(ctx, selectDeadLetters+`
		FROM `+s.name("dead_letters")+` d LEFT JOIN `+s.name("lanes")+` l ON l.id = d.original_lane
		WHERE d.scope = $1 AND ($2 = 0 OR d.id < $2) ORDER BY d.id DESC LIMIT $3`, s.scope, before, limit)
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[DeadLetter])
}

// ErrNoDeadLetter says that the scope has no dead letter of that number.
var ErrNoDeadLetter = errors.New("no such dead letter")

// DeadLetter is one of the scope's, by its number.
func (s *Store) DeadLetter(ctx context.Context, id int64) (DeadLetter, error) {
	rows, err := s.pool.Query(ctx, selectDeadLetters+`
		FROM `+s.name("dead_letters")+` d LEFT JOIN `+s.name("lanes")+` l ON l.id = d.original_lane
		WHERE d.scope = $1 AND d.id = $2`, s.scope, id)
	if err != nil {
		return DeadLetter{}, fmt.Errorf("read dead letter: %w", err)
	}
	d, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[DeadLetter])
	if errors.Is(err, pgx.ErrNoRows) {
		return d, fmt.Errorf("%w: %d in scope %s", ErrNoDeadLetter, id, s.scope)
	}
	return d, err
}

// CountDeadLetters is how many the scope has.
func (s *Store) CountDeadLetters(ctx context.Context) (n int64, err error) {
	err = s.pool.QueryRow(ctx, `SELECT count(*) FROM `+s.name("dead_letters")+` WHERE scope = $1`, s.scope).Scan(&n)
	if err != nil {
		err = fmt.Errorf("count dead letters: %w", err)
	}
	return n, err
}

// ExpireDeadLetters deletes dead letters older than age, by the database's clock,
// in small transactions, and tells how many. led is false, and nothing done,
// while another process is at it.
func (s *Store) ExpireDeadLetters(ctx context.Context, age time.Duration) (n int64, led bool, err error) {
	for {
		var some int64
		led, err = s.lead(ctx, func(ctx context.Context, tx pgx.Tx) error {
			tag, err := tx.Exec(ctx, `DELETE FROM `+s.name("dead_letters")+` WHERE id IN (
				SELECT id FROM `+s.name("dead_letters")+` WHERE scope = $1 AND created_at < `+s.name("clock")+`() - make_interval(secs => $2) ORDER BY created_at LIMIT 1000)`,
				s.scope, age.Seconds())
			some = tag.RowsAffected()
			return err
		})
		n += some
		if err != nil {
			return n, led, fmt.Errorf("expire dead letters: %w", err)
		}
		if some < 1000 {
			return n, led, nil
		}
	}
}
