package table

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
)

// A row is as durable as its table. Postgres empties an UNLOGGED table after a crash, drops a
// temporary one with its session, and lets another server commit what a foreign one holds.
// Rows there may be lost after the broker was told that their messages are safe.

// storageSQL finds such a table among those named, and among all that rows may be routed to
// from there: partitions, and children that a trigger or a rule fills. It also tells whether
// a trigger runs before an insert into one of them, but for those children. It runs in the transaction that has
// written: a partition that was written to was attached before, and can't be altered until the
// transaction ends.
const storageSQL = `
WITH RECURSIVE tree (oid, routes, own) AS (
  SELECT c.oid, c.relkind = 'p' OR c.relhastriggers OR c.relhasrules, true
    FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[])) AS u (schema, name)
    JOIN pg_catalog.pg_namespace n ON n.nspname = u.schema::pg_catalog.name
    JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = u.name::pg_catalog.name
  UNION
  SELECT c.oid, c.relkind = 'p' OR c.relhastriggers OR c.relhasrules, c.relispartition
    FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
   WHERE t.routes)
SELECT EXISTS (SELECT FROM tree t JOIN pg_catalog.pg_trigger g ON g.tgrelid = t.oid
                WHERE t.routes AND t.own AND NOT g.tgisinternal AND g.tgtype & 7 = 7), -- row, before, insert
       l.*
  FROM (VALUES (0)) AS one LEFT JOIN (
       SELECT n.nspname::pg_catalog.text, c.relname::pg_catalog.text, c.relkind = 'f', c.relpersistence = 't'
         FROM tree t JOIN pg_catalog.pg_class c ON c.oid = t.oid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE c.relkind = 'f' OR c.relkind = 'r' AND c.relpersistence <> 'p'
        ORDER BY 1, 2 LIMIT 1) AS l ON true`

// tables are those that a statement writes to, by schema and name.
type tables struct{ schemas, names []string }

func (t *tables) add(schema, name string) {
	for i := range t.names {
		if t.schemas[i] == schema && t.names[i] == name {
			return
		}
	}
	t.schemas, t.names = append(t.schemas, schema), append(t.names, name)
}

// queueTargets adds storageSQL to a batch. A table that isn't durable is an error, and so is a
// trigger that has come or gone since the plan was made.
func (s *Sink) queueTargets(b *pgx.Batch, p *plan) {
	b.Queue(storageSQL, p.targets.schemas, p.targets.names).QueryRow(func(row pgx.Row) error {
		var fills bool
		var schema, name *string
		var foreign, temporary *bool
		switch err := row.Scan(&fills, &schema, &name, &foreign, &temporary); {
		case err != nil:
			return err
		case name != nil:
			return notDurable(pgx.Identifier{*schema, *name}.Sanitize(), *foreign, *temporary)
		case p.ordinary && fills != p.fills:
			s.current.CompareAndSwap(p, nil)
			return errChanged
		}
		return nil
	})
}

func notDurable(table string, foreign, temporary bool) error {
	switch {
	case foreign:
		return fmt.Errorf("%s is a foreign table: another server commits what is written to it, so a message could be applied twice or not at all; "+
			"write to a table of this database", table)
	case temporary:
		return fmt.Errorf("%s is a temporary table: it is gone with its session; write to a permanent one", table)
	}
	return fmt.Errorf("%s is UNLOGGED: a crash of the server empties it, after the broker was told that its messages are safe; "+
		"run: ALTER TABLE %[1]s SET LOGGED", table)
}

// writesTo reads from EXPLAIN's JSON what the statement writes to, such as the table behind
// a view, or those that a rule names.
func writesTo(explained []byte) (tables, error) {
	type node struct {
		Type   string `json:"Node Type"`
		Schema string `json:"Schema"`
		Table  string `json:"Relation Name"`
		Plans  []node
	}
	var plans []struct{ Plan node }
	var t tables
	if err := json.Unmarshal(explained, &plans); err != nil {
		return t, fmt.Errorf("read the server's plan: %w", err)
	}
	var walk func(node)
	walk = func(n node) {
		if n.Type == "ModifyTable" {
			t.add(n.Schema, n.Table)
		}
		for _, below := range n.Plans {
			walk(below)
		}
	}
	for _, p := range plans {
		walk(p.Plan)
	}
	if i := slices.Index(t.schemas, "pg_temp"); i >= 0 { // as the plan calls the session's own
		return t, notDurable(pgx.Identifier{"pg_temp", t.names[i]}.Sanitize(), false, true)
	}
	return t, nil
}
