// Package pipeline sends several statements in one round trip, with parameters and results
// in Postgres' binary format. It also holds the limits of dedupd's transactions.
//
// The claim statement's arrays are the hot path, which is why pgx's general encoder isn't
// used.
package pipeline

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/claimkey"
)

// Step is one statement of a round trip. The functions below write its parameters and read
// its results.
type Step struct {
	Name string // of the prepared statement; empty: not worth keeping
	// Generation, if not nil, is the generation that the statement is about. The statement
	// is deallocated once the catalog no longer has it.
	Generation *claimkey.Key
	SQL        string
	OIDs       []uint32
	Params     [][]byte
	// Row gets each result row; the values are valid until it returns.
	Row func(values [][]byte) error
	// Tag, if not empty, is what the command tag must be.
	Tag string
	// OfSink: a failure comes from what the sink did.
	OfSink bool
}

var binaryFormat = []int16{pgx.BinaryFormatCode}

// RoundTrip sends all steps, waits for their answers once, and returns the first error.
// When a step fails, the server skips the rest, even a COMMIT.
//
// With prepare, steps that the connection doesn't know yet are prepared first. Without it,
// behind a pooler, they are parsed each time, within the same round trip.
func RoundTrip(ctx context.Context, conn *pgx.Conn, prepare bool, steps []Step) (err error) {
	if prepare {
		for i := range steps {
			if s := &steps[i]; s.Name != "" {
				if _, err := conn.Prepare(ctx, s.Name, s.SQL); err != nil {
					return err
				}
				if s.Generation != nil {
					preparedOn(conn).names[s.Name] = *s.Generation
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
		if prepare && s.Name != "" {
			p.SendQueryPrepared(s.Name, s.Params, binaryFormat, binaryFormat)
		} else {
			p.SendQueryParams(s.SQL, s.Params, s.OIDs, binaryFormat, binaryFormat)
		}
	}
	if err := p.Sync(); err != nil {
		return err
	}
	for i := range steps {
		if err := readStep(p, &steps[i]); err != nil {
			return &StepError{steps[i].Name, steps[i].OfSink, err}
		}
	}
	return nil
}

// StepError is the failure of a step.
type StepError struct {
	Name   string
	OfSink bool
	error
}

func (e *StepError) Unwrap() error { return e.error }

// prepared has the statements about generations that a connection knows.
type prepared struct {
	catalog claimkey.Key // the one that Deallocate last saw
	names   map[string]claimkey.Key
}

func preparedOn(conn *pgx.Conn) *prepared {
	const key = "dedupd"
	data := conn.PgConn().CustomData()
	p, ok := data[key].(*prepared)
	if !ok {
		p = &prepared{names: make(map[string]claimkey.Key)}
		data[key] = p
	}
	return p
}

// Deallocate drops the connection's statements about generations that the catalog no
// longer has: a connection may outlive many.
func Deallocate(ctx context.Context, conn *pgx.Conn, catalog claimkey.Key, has func(generation claimkey.Key) bool) error {
	p := preparedOn(conn)
	if p.catalog == catalog {
		return nil
	}
	for name, identity := range p.names {
		if !has(identity) {
			if err := conn.Deallocate(ctx, name); err != nil {
				return err
			}
			delete(p.names, name)
		}
	}
	p.catalog = catalog
	return nil
}

func readStep(p *pgconn.Pipeline, s *Step) error {
	result, err := p.GetResults()
	if err != nil {
		return err
	}
	reader, ok := result.(*pgconn.ResultReader)
	if !ok {
		return fmt.Errorf("unexpected answer %T to %q", result, s.SQL)
	}
	var rowErr error
	for reader.NextRow() {
		if s.Row != nil && rowErr == nil {
			rowErr = s.Row(reader.Values())
		}
	}
	tag, err := reader.Close()
	if err != nil {
		return err
	}
	if rowErr != nil {
		return rowErr
	}
	if s.Tag != "" && tag.String() != s.Tag {
		return fmt.Errorf("the server answered %q to %s", tag, s.SQL)
	}
	return nil
}

// Int4 and the functions below write parameters in binary form.
func Int4(v int32) []byte { return binary.BigEndian.AppendUint32(nil, uint32(v)) }

// Int8 writes a bigint.
func Int8(v int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(v)) }

// OptionalInt8 writes a bigint; a negative number is NULL.
func OptionalInt8(v int64) []byte {
	if v < 0 {
		return nil
	}
	return Int8(v)
}

// postgresEpoch is where timestamptz counts its microseconds from.
var postgresEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// Timestamptz writes a timestamptz; the zero time is NULL.
func Timestamptz(t time.Time) []byte {
	if t.IsZero() {
		return nil
	}
	return Int8(t.Sub(postgresEpoch).Microseconds())
}

// appendArrayHeader begins a one-dimensional array of n elements.
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

// AppendKeys appends an array of n keys as uuid[].
func AppendKeys(buf []byte, n int, key func(i int) *claimkey.Key) []byte {
	buf = appendArrayHeader(buf, pgtype.UUIDOID, n, false)
	for i := range n {
		buf = binary.BigEndian.AppendUint32(buf, 16)
		buf = append(buf, key(i)[:]...)
	}
	return buf
}

// AppendInt8s appends an array of n numbers as bigint[].
func AppendInt8s(buf []byte, n int, value func(i int) int64) []byte {
	buf = appendArrayHeader(buf, pgtype.Int8OID, n, false)
	for i := range n {
		buf = binary.BigEndian.AppendUint32(buf, 8)
		buf = binary.BigEndian.AppendUint64(buf, uint64(value(i)))
	}
	return buf
}

// AppendInt4s appends an array of n numbers as integer[].
func AppendInt4s(buf []byte, n int, value func(i int) int32) []byte {
	buf = appendArrayHeader(buf, pgtype.Int4OID, n, false)
	for i := range n {
		buf = binary.BigEndian.AppendUint32(buf, 4)
		buf = binary.BigEndian.AppendUint32(buf, uint32(value(i)))
	}
	return buf
}

// Array writes an array of values that are in binary form; nil is NULL.
func Array(elemOID uint32, values [][]byte) []byte {
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

var errShort = errors.New("a result of the wrong size: the schema is not dedupd's own")

// ReadKey reads a uuid.
func ReadKey(v []byte) (claimkey.Key, error) {
	if len(v) != 16 {
		return claimkey.Key{}, errShort
	}
	return claimkey.Key(v), nil
}

// ReadInt8 reads a bigint.
func ReadInt8(v []byte) (int64, error) {
	if len(v) != 8 {
		return 0, errShort
	}
	return int64(binary.BigEndian.Uint64(v)), nil
}
