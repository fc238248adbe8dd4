package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/e2e/bench/measure"
)

// floor is how fast this Postgres takes batches that are made beforehand, bytes
// and all, without a broker: what no consumer can beat that writes the same.
type floor struct {
	name        string
	connections int
	batch       int
	claims      string // "unnest", "copy" or "": none
}

var floors = []floor{
	{"claims by unnest, rows by COPY", 3, 4000, "unnest"},
	{"claims by unnest, rows by COPY, batches of 1,000", 3, 1000, "unnest"},
	{"claims by unnest, rows by COPY, 2 connections", 2, 4000, "unnest"},
	{"claims and rows by COPY", 3, 4000, "copy"},
	{"rows by COPY alone", 3, 4000, ""},
}

// made is a batch in the forms that the server takes.
type made struct {
	params [][]byte // of the claims' statement
	claims []byte   // for COPY
	rows   []byte   // for COPY
}

var copyHeader = append([]byte("PGCOPY\n\xff\r\n\x00"), make([]byte, 8)...)

func makeBatch(n int) made {
	keys := make([][16]byte, n)
	for i := range keys {
		binary.BigEndian.PutUint64(keys[i][:], rand.Uint64())
		binary.BigEndian.PutUint64(keys[i][8:], rand.Uint64())
	}
	slices.SortFunc(keys, func(a, b [16]byte) int { return bytes.Compare(a[:], b[:]) })
	be := binary.BigEndian
	array := func(oid, size uint32) []byte {
		head := make([]byte, 0, 20+n*int(4+size))
		for _, v := range []uint32{1, 0, oid, uint32(n), 1} {
			head = be.AppendUint32(head, v)
		}
		return head
	}
	uuids, fingerprints, positions, lanes := array(pgtype.UUIDOID, 16), array(pgtype.Int8OID, 8), array(pgtype.Int8OID, 8), array(pgtype.Int4OID, 4)
	m := made{rows: slices.Clone(copyHeader), claims: slices.Clone(copyHeader)}
	for i := range keys {
		uuids = append(be.AppendUint32(uuids, 16), keys[i][:]...)
		fingerprints = be.AppendUint64(be.AppendUint32(fingerprints, 8), rand.Uint64())
		positions = be.AppendUint64(be.AppendUint32(positions, 8), uint64(i))
		lanes = be.AppendUint32(be.AppendUint32(lanes, 4), 1)

		payload := order(measure.RandomID())
		m.rows = be.AppendUint16(m.rows, 2)
		m.rows = append(be.AppendUint32(m.rows, 16), keys[i][:]...)
		m.rows = append(be.AppendUint32(m.rows, uint32(len(payload)+1)), 1)
		m.rows = append(m.rows, payload...)

		m.claims = be.AppendUint16(m.claims, 4)
		m.claims = append(be.AppendUint32(m.claims, 16), keys[i][:]...)
		m.claims = be.AppendUint64(be.AppendUint32(m.claims, 8), rand.Uint64())
		m.claims = be.AppendUint64(be.AppendUint32(m.claims, 8), uint64(i))
		m.claims = be.AppendUint32(be.AppendUint32(m.claims, 4), 1)
	}
	m.rows, m.claims = be.AppendUint16(m.rows, 0xFFFF), be.AppendUint16(m.claims, 0xFFFF)
	m.params = [][]byte{uuids, fingerprints, positions, lanes}
	return m
}

// run measures the floor over the rows of a topic.
func (f floor) run(ctx context.Context, b *bench, t topic) (res result, err error) {
	b.runCount++
	name := fmt.Sprint("bench_", b.runCount)
	if err := b.exec(ctx, "postgres", "CREATE DATABASE "+name); err != nil {
		return res, err
	}
	defer func() {
		err = errors.Join(err, b.exec(context.WithoutCancel(ctx), "postgres", "DROP DATABASE "+name+" WITH (FORCE)"))
	}()
	if err := b.exec(ctx, name, "CREATE TABLE rows ("+plainColumns+")",
		"CREATE TABLE claims (key uuid PRIMARY KEY, fingerprint bigint, position bigint, lane integer, claimed_at timestamptz NOT NULL DEFAULT now())"); err != nil {
		return res, err
	}
	each := t.distinct() / f.batch / f.connections
	batches := make([][]made, f.connections)
	conns := make([]*pgx.Conn, f.connections)
	for i := range batches {
		for range each {
			batches[i] = append(batches[i], makeBatch(f.batch))
		}
		if conns[i], err = pgx.Connect(ctx, b.server.URL(name)); err != nil {
			return res, err
		}
		defer func() { _ = conns[i].Close(context.WithoutCancel(ctx)) }()
	}
	before, err := b.used(ctx, conns[0], nil)
	if err != nil {
		return res, err
	}
	var group sync.WaitGroup
	errs := make([]error, f.connections)
	start := time.Now()
	for i, conn := range conns {
		group.Go(func() {
			for _, m := range batches[i] {
				if errs[i] = f.write(ctx, conn.PgConn(), m); errs[i] != nil {
					return
				}
			}
		})
	}
	group.Wait()
	took := time.Since(start)
	if err := errors.Join(errs...); err != nil {
		return res, err
	}
	after, err := b.used(ctx, conns[0], nil)
	if err != nil {
		return res, err
	}
	res = result{messages: each * f.connections * f.batch, usage: after.since(before)}
	res.rate = float64(res.messages) / took.Seconds() * float64(t.messages) / float64(t.distinct())
	return res, nil
}

const claimsSQL = `INSERT INTO claims (key, fingerprint, position, lane) SELECT unnest($1::uuid[]), unnest($2::bigint[]), unnest($3::bigint[]), unnest($4::integer[]) ON CONFLICT (key) DO NOTHING RETURNING key`

// write is one transaction: BEGIN and the claims in one round trip, the rows in
// another, COMMIT in the last.
func (f floor) write(ctx context.Context, conn *pgconn.PgConn, m made) error {
	if f.claims == "unnest" {
		batch := new(pgconn.Batch)
		batch.ExecParams("BEGIN", nil, nil, nil, nil)
		binaryFormat := []int16{1}
		batch.ExecParams(claimsSQL, m.params, []uint32{pgtype.UUIDArrayOID, pgtype.Int8ArrayOID, pgtype.Int8ArrayOID, pgtype.Int4ArrayOID}, binaryFormat, binaryFormat)
		if _, err := conn.ExecBatch(ctx, batch).ReadAll(); err != nil {
			return err
		}
	} else if _, err := conn.Exec(ctx, "BEGIN").ReadAll(); err != nil {
		return err
	}
	if f.claims == "copy" {
		if _, err := conn.CopyFrom(ctx, bytes.NewReader(m.claims), "COPY claims (key, fingerprint, position, lane) FROM STDIN BINARY"); err != nil {
			return err
		}
	}
	if _, err := conn.CopyFrom(ctx, bytes.NewReader(m.rows), "COPY rows FROM STDIN BINARY"); err != nil {
		return err
	}
	_, err := conn.Exec(ctx, "COMMIT").ReadAll()
	return err
}
