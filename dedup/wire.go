package dedup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// A step is one statement of a pipelined round trip. Parameters and results are
// in Postgres' binary format, written by the append functions below: the claim
// statement's arrays are the hot path, and have no use for a general encoder.
type step struct {
	name string // of the prepared statement; empty: not worth keeping
	// generation, if not nil, is what the statement is about; it is deallocated
	// when the catalog doesn't have that generation any more.
	generation *generation
	sql        string
	oids       []uint32
	params     [][]byte
	// row is given each result row; the values are valid until it returns.
	row func(values [][]byte) error
	// tag must be the command tag, if not empty.
	tag string
	// ofSink tells that a failure comes of what the sink has done.
	ofSink bool
}

var binaryFormat = []int16{pgx.BinaryFormatCode}

// roundTrip sends all steps and waits for their answers once. When a step fails,
// the server skips the rest, also a COMMIT. The first error is returned.
//
// With prepared statements, steps that a connection doesn't know yet are prepared
// first. Without (behind a pooler) they are parsed each time, within the same
// round trip.
func roundTrip(ctx context.Context, conn *pgx.Conn, prepare bool, steps []step) (err error) {
	if prepare {
		for i := range steps {
			if s := &steps[i]; s.name != "" {
				if _, err := conn.Prepare(ctx, s.name, s.sql); err != nil {
					return err
				}
				if s.generation != nil {
					preparedOn(conn).names[s.name] = s.generation.identity
				}
			}
		}
	}
	p := conn.PgConn().StartPipeline(ctx)
	defer func() {
		if closeErr := p.Close(); err == nil {
			err = closeErr
		}
	}()
	for i := range steps {
		s := &steps[i]
		if prepare && s.name != "" {
			p.SendQueryPrepared(s.name, s.params, binaryFormat, binaryFormat)
		} else {
			p.SendQueryParams(s.sql, s.params, s.oids, binaryFormat, binaryFormat)
		}
	}
	if err := p.Sync(); err != nil {
		return err
	}
	for i := range steps {
		if err := readStep(p, &steps[i]); err != nil {
			return &stepError{steps[i].ofSink, err}
		}
	}
	return nil
}

// stepError is the failure of a statement, and whether it is the sink's.
type stepError struct {
	ofSink bool
	error
}

func (e *stepError) Unwrap() error { return e.error }

// prepared are the statements about generations that a connection knows.
type prepared struct {
	catalog Key // the one for which the names were last looked through
	names   map[string]Key
}

func preparedOn(conn *pgx.Conn) *prepared {
	const key = "dedupd"
	data := conn.PgConn().CustomData()
	p, ok := data[key].(*prepared)
	if !ok {
		p = &prepared{names: make(map[string]Key)}
		data[key] = p
	}
	return p
}

// deallocate drops the connection's statements about generations that the
// catalog doesn't have: a connection may live through many.
func deallocate(ctx context.Context, conn *pgx.Conn, c *catalog) error {
	p := preparedOn(conn)
	if p.catalog == c.identity {
		return nil
	}
	for name, identity := range p.names {
		if !c.has(identity) {
			if err := conn.Deallocate(ctx, name); err != nil {
				return err
			}
			delete(p.names, name)
		}
	}
	p.catalog = c.identity
	return nil
}

func readStep(p *pgconn.Pipeline, s *step) error {
	result, err := p.GetResults()
	if err != nil {
		return err
	}
	reader, ok := result.(*pgconn.ResultReader)
	if !ok {
		return fmt.Errorf("unexpected answer %T to %q", result, s.sql)
	}
	var rowErr error
	for reader.NextRow() {
		if s.row != nil && rowErr == nil {
			rowErr = s.row(reader.Values())
		}
	}
	tag, err := reader.Close()
	if err != nil {
		return err
	}
	if rowErr != nil {
		return rowErr
	}
	if s.tag != "" && tag.String() != s.tag {
		return fmt.Errorf("the server answered %q to %s", tag, s.sql)
	}
	return nil
}

// The binary forms of parameters.

func int4(v int32) []byte  { return binary.BigEndian.AppendUint32(nil, uint32(v)) }
func int8b(v int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(v)) }

// optional is NULL for a negative number.
func optional(v int64) []byte {
	if v < 0 {
		return nil
	}
	return int8b(v)
}

// postgresEpoch is where timestamptz counts its microseconds from.
var postgresEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// timestamptz is NULL for the zero time.
func timestamptz(t time.Time) []byte {
	if t.IsZero() {
		return nil
	}
	return int8b(t.Sub(postgresEpoch).Microseconds())
}

// appendArrayHeader begins a one-dimensional array without NULLs or with them.
func appendArrayHeader(buf []byte, elemOID uint32, n int, nulls bool) []byte {
	dims, flag := uint32(1), uint32(0)
	if n == 0 {
		dims = 0
	}
	if nulls {
		flag = 1
	}
	buf = binary.BigEndian.AppendUint32(buf, dims)
	buf = binary.BigEndian.AppendUint32(buf, flag)
	buf = binary.BigEndian.AppendUint32(buf, elemOID)
	if n > 0 {
		buf = binary.BigEndian.AppendUint32(buf, uint32(n))
		buf = binary.BigEndian.AppendUint32(buf, 1) // lower bound
	}
	return buf
}

func appendKeys(buf []byte, n int, key func(i int) *Key) []byte {
	buf = appendArrayHeader(buf, pgtype.UUIDOID, n, false)
	for i := range n {
		buf = binary.BigEndian.AppendUint32(buf, 16)
		buf = append(buf, key(i)[:]...)
	}
	return buf
}

func appendInt8s(buf []byte, n int, value func(i int) int64) []byte {
	buf = appendArrayHeader(buf, pgtype.Int8OID, n, false)
	for i := range n {
		buf = binary.BigEndian.AppendUint32(buf, 8)
		buf = binary.BigEndian.AppendUint64(buf, uint64(value(i)))
	}
	return buf
}

func appendInt4s(buf []byte, n int, value func(i int) int32) []byte {
	buf = appendArrayHeader(buf, pgtype.Int4OID, n, false)
	for i := range n {
		buf = binary.BigEndian.AppendUint32(buf, 4)
		buf = binary.BigEndian.AppendUint32(buf, uint32(value(i)))
	}
	return buf
}

// array is one of values in their binary form; nil is NULL.
func array(elemOID uint32, values [][]byte) []byte {
	nulls, size := false, 20
	for _, v := range values {
		nulls = nulls || v == nil
		size += 4 + len(v)
	}
	buf := appendArrayHeader(make([]byte, 0, size), elemOID, len(values), nulls)
	for _, v := range values {
		if v == nil {
			buf = binary.BigEndian.AppendUint32(buf, 0xFFFFFFFF)
			continue
		}
		buf = binary.BigEndian.AppendUint32(buf, uint32(len(v)))
		buf = append(buf, v...)
	}
	return buf
}

// The binary forms of results.

var errShort = errors.New("a result of the wrong size: the schema is not dedupd's own")

func readKey(v []byte) (Key, error) {
	if len(v) != 16 {
		return Key{}, errShort
	}
	return Key(v), nil
}

func readInt8(v []byte) (int64, error) {
	if len(v) != 8 {
		return 0, errShort
	}
	return int64(binary.BigEndian.Uint64(v)), nil
}
