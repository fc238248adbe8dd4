package main

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/e2e/shape"
)

//go:embed prepare.sql
var prepareSQL string

// prepare makes what a run is audited by, in a database with dedupd's schema.
func prepare(ctx context.Context, url, schema string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // nothing is left to be sent
	var exists bool
	if err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname = $1 AND tablename = 'lanes')`, schema).Scan(&exists); err != nil {
		return fmt.Errorf("look for dedupd's tables: %w", err)
	}
	if !exists {
		return fmt.Errorf("the database has no table lanes in the schema %s: run dedupd migrate up first", schema)
	}
	if _, err := conn.Exec(ctx, strings.ReplaceAll(prepareSQL, "{{schema}}", pgx.Identifier{schema}.Sanitize())); err != nil {
		return fmt.Errorf("make the tables of the audit: %w", err)
	}
	return nil
}

// postgresReader reads the database's part of a history, all of it as of one
// moment.
type postgresReader struct {
	*history
	tx     pgx.Tx
	schema string
	// byNumber are lanes by the number that claims know them by.
	byNumber map[int32]laneID
	byName   map[laneName]laneID
}

type laneName struct{ source, name string }

func (h *history) readPostgres(ctx context.Context, url, schema string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // nothing is left to be sent
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return fmt.Errorf("read the database: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // nothing was written
	r := &postgresReader{history: h, tx: tx, schema: schema, byNumber: map[int32]laneID{}, byName: map[laneName]laneID{}}
	for _, step := range []struct {
		what string
		read func(context.Context) error
	}{
		{"lanes", r.readLanes},
		{"moves", r.readMoves},
		{"effects", r.readEffects},
		{"claims", r.readClaims},
		{"dead letters", r.readLetters},
		{"shape's table", r.readTable},
		{"marks", r.readMarks},
	} {
		if err := step.read(ctx); err != nil {
			return fmt.Errorf("read the %s: %w", step.what, err)
		}
	}
	return nil
}

func (r *postgresReader) name(table string) string { return pgx.Identifier{r.schema, table}.Sanitize() }

// each calls row for every row, after its columns were scanned.
func (r *postgresReader) each(ctx context.Context, columns []any, row func() error, sql string, args ...any) error {
	rows, err := r.tx.Query(ctx, sql, args...)
	if err != nil {
		return err
	}
	_, err = pgx.ForEachRow(rows, columns, row)
	return err
}

// lane finds a lane by a row's columns, which are the driver's memory.
func (r *postgresReader) lane(source, name []byte) (laneID, error) {
	if id, ok := r.byName[laneName{string(source), string(name)}]; ok {
		return id, nil
	}
	id, err := r.history.lane(string(source), string(name))
	if err == nil {
		r.byName[laneName{string(source), string(name)}] = id
	}
	return id, err
}

func (r *postgresReader) readLanes(ctx context.Context) error {
	var number int32
	var source, name pgtype.DriverBytes
	var w row
	columns := []any{&number, &source, &name, &w.ordered, &w.streamID, &w.epoch, &w.owner, &w.next}
	for i := range w.books {
		columns = append(columns, &w.books[i])
	}
	err := r.each(ctx, columns, func() error {
		id, err := r.lane(source, name)
		if err != nil {
			return err
		}
		r.byNumber[number] = id
		r.lanes[id].row = new(w)
		return nil
	}, `SELECT id, source, lane, ordered, stream_id, epoch, owner, next_position, `+strings.Join(bookNames[:], ", ")+`
		FROM `+r.name("lanes")+` WHERE scope = $1 ORDER BY source, lane`, r.scope)
	if err == nil && len(r.lanes) == 0 {
		err = fmt.Errorf("the scope %s has none", r.scope)
	}
	return err
}

func (r *postgresReader) readMoves(ctx context.Context) error {
	var m move
	var number int32
	var source, name pgtype.DriverBytes
	var from, to pgtype.Int8
	columns := []any{&m.number, &m.at, &m.wal, &m.xid, &m.op, &source, &name, &number, &m.ordered, &from, &to, &m.epoch, &m.owner}
	for i := range m.delta {
		columns = append(columns, &m.delta[i])
	}
	return r.each(ctx, columns, func() (err error) {
		if m.lane, err = r.lane(source, name); err != nil {
			return err
		}
		r.byNumber[number] = m.lane
		m.from, m.to = from.Int64, to.Int64
		r.moves = append(r.moves, m)
		return nil
	}, `SELECT number, at, wal::text, xid, op, source, lane, lane_id, ordered, from_position, to_position, epoch, owner, `+strings.Join(bookNames[:], ", ")+`
		FROM public.moves WHERE scope = $1 ORDER BY number`, r.scope)
}

func (r *postgresReader) readEffects(ctx context.Context) error {
	var e effect
	var id, source, name, sum pgtype.DriverBytes
	err := r.each(ctx, []any{&e.number, &id, &source, &name, &e.position, &sum, &e.xid}, func() (err error) {
		if e.lane, err = r.lane(source, name); err != nil {
			return fmt.Errorf("row %d of public.effects: %w", e.number, err)
		}
		e.key, e.id, e.sum = keyOf(id), r.texts.add(id), textSum(sum)
		r.effects = append(r.effects, e)
		return nil
	}, `SELECT number, id, source, lane, position, sum, xid FROM public.effects`)
	// The table has them nearly in this order.
	slices.SortFunc(r.effects, func(a, b effect) int { return int(min(1, max(-1, a.number-b.number))) })
	return err
}

func (r *postgresReader) readClaims(ctx context.Context) error {
	type generation struct {
		number       int32
		table, state string
	}
	var generations []generation
	var g generation
	err := r.each(ctx, []any{&g.number, &g.table, &g.state}, func() error {
		generations = append(generations, g)
		return nil
	}, `SELECT generation, table_name, state FROM `+r.name("generations")+` WHERE scope = $1 ORDER BY generation`, r.scope)
	if err != nil {
		return err
	}
	if len(generations) == 0 {
		return fmt.Errorf("the scope %s has no generation", r.scope)
	}
	r.forgotten = generations[0].number > 1
	for _, g := range generations {
		if g.state == "dropping" {
			r.forgotten = true
			continue
		}
		c := claim{generation: g.number}
		var lane pgtype.Int4
		var position pgtype.Int8
		err := r.each(ctx, []any{(*[16]byte)(&c.key), &lane, &position, &c.xmin}, func() error {
			c.lane, c.position = noLane, position.Int64
			if lane.Valid {
				var ok bool
				if c.lane, ok = r.byNumber[lane.Int32]; !ok {
					c.lane = goneLane
				}
			}
			r.claims = append(r.claims, c)
			return nil
		}, `SELECT key, lane, position, xmin FROM `+r.name(g.table))
		if err != nil {
			return fmt.Errorf("generation %d: %w", g.number, err)
		}
	}
	return nil
}

// readTable reads the shape's table, if it has one.
func (r *postgresReader) readTable(ctx context.Context) error {
	if r.shape.Table == "" {
		return nil
	}
	var columns map[string]*string
	var xmin uint32
	return r.each(ctx, []any{&columns, &xmin}, func() error {
		w := tableRow{columns: shape.Row{}, xmin: xmin}
		for name, value := range columns {
			if value != nil {
				w.columns[name] = *value
			}
		}
		r.rows = append(r.rows, w)
		columns = nil // the next row's own
		return nil
	}, `SELECT (SELECT jsonb_object_agg(key, value) FROM jsonb_each_text(to_jsonb(t))), t.xmin FROM `+shape.Target+` AS t`)
}

// readMarks reads how far producers have come, with strategy sequence.
func (r *postgresReader) readMarks(ctx context.Context) error {
	if r.shape.By != shape.ByNumber {
		return nil
	}
	var producer, lane pgtype.DriverBytes
	var m shape.Mark
	return r.each(ctx, []any{&producer, &lane, &m.Epoch, &m.Number}, func() error {
		m.Producer, m.Lane = string(producer), string(lane)
		r.marks = append(r.marks, m)
		return nil
	}, `SELECT s.name, l.lane, s.epoch, s.number FROM `+r.name("sequences")+` s
		JOIN `+r.name("scopes")+` p ON p.id = s.scope_id LEFT JOIN `+r.name("lanes")+` l ON l.id = s.lane WHERE p.scope = $1`, r.scope)
}

func (r *postgresReader) readLetters(ctx context.Context) error {
	var d letter
	var source, name, id, topic, key, value, reason pgtype.DriverBytes
	var headerKeys, headerValues [][]byte
	return r.each(ctx, []any{&d.number, &source, &name, &d.position, &d.class, &reason, (*[16]byte)(&d.claimKey), &id, &topic, &key, &value, &headerKeys, &headerValues, &d.xmin}, func() (err error) {
		if d.lane, err = r.lane(source, name); err != nil {
			return err
		}
		d.id, d.key, d.reason = r.texts.add(id), [16]byte{}, r.texts.add(reason)
		if len(id) > 0 {
			d.key = keyOf(id)
		}
		headers := make([]header, len(headerKeys))
		for i := range headerKeys {
			headers[i] = header{headerKeys[i], headerValues[i]}
		}
		d.raw = rawSum(topic, key, value, headers)
		r.letters = append(r.letters, d)
		return nil
	}, `SELECT id, source, lane, position, class, reason, claim_key, message_id, topic, key, value, header_keys, header_values, xmin
		FROM `+r.name("dead_letters")+` WHERE scope = $1 ORDER BY id`, r.scope)
}
