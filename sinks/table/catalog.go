package table

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/nearest"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// target is the table as the catalog has it.
type target struct {
	kind       string // pg_class.relkind
	plain      bool   // no rules, no row security: COPY does what INSERT does
	fills      bool   // a trigger runs before an insert, of the table or of a partition, and may fill in columns
	mayUse     bool   // USAGE on the schema
	mayRead    bool   // SELECT on the table, which its system columns need
	attributes []attribute
	unique     []uniqueIndex
	shape      string // what a plan takes from the columns that the sink fills: see shapeSQL
}

// attribute is a column of the target.
type attribute struct {
	name      string
	notNull   bool
	hasValue  bool // without one from the insert: a default, an identity
	generated bool
	always    bool // an identity that takes no value from outside
	mayInsert bool
	mayUpdate bool
	maySelect bool
	domain    bool
	// collation is the one to compare by, as SQL, if it isn't the type's own: see adoptKey.
	collation string
	// equals and isAbove are the type's own operators, as SQL; empty: it has none.
	equals, isAbove string
	equalsOID       uint32
	nullsEqual      bool // in the key's unique index
	typ             columns.Type
}

// uniqueIndex is one that ON CONFLICT can go by.
type uniqueIndex struct {
	name    string
	columns []string // sorted
	ordered []string // in the index's order
	// Of each column: the collation, as SQL, if it isn't both the type's own and the column's; whether that takes
	// different texts for equal; the operator class, and its = operator.
	collations       []string
	folds            []bool
	classes          []string
	equals           []uint32
	nullsNotDistinct bool
}

func (t *target) attribute(name string) *attribute {
	i := slices.IndexFunc(t.attributes, func(a attribute) bool { return a.name == name })
	if i < 0 {
		return nil
	}
	return &t.attributes[i]
}

// uniqueOn is a unique index on just these columns, in this order; nil: there is none.
func (t *target) uniqueOn(columns ...string) *uniqueIndex {
	i := slices.IndexFunc(t.unique, func(u uniqueIndex) bool { return slices.Equal(u.ordered, columns) })
	if i < 0 {
		return nil
	}
	return &t.unique[i]
}

func (t *target) names() []string {
	names := make([]string, len(t.attributes))
	for i, a := range t.attributes {
		names[i] = a.name
	}
	return names
}

// attributesSQL returns a row for each column of the table.
var attributesSQL = `
WITH RECURSIVE ` + columns.Domains + `
SELECT c.relkind::pg_catalog.text, NOT c.relhasrules AND NOT c.relrowsecurity,
       pg_catalog.has_schema_privilege(n.oid, 'USAGE'), pg_catalog.has_table_privilege(c.oid, 'SELECT'),
       a.attname::pg_catalog.text, a.attnotnull,
       a.atthasdef OR a.attidentity <> '' OR t.typdefault IS NOT NULL,
       a.attgenerated <> '', a.attidentity = 'a',
       pg_catalog.has_column_privilege(c.oid, a.attnum, 'INSERT'),
       pg_catalog.has_column_privilege(c.oid, a.attnum, 'UPDATE'),
       pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT'),
       t.typtype = 'd',
       coalesce((SELECT ` + collationName + `
                   FROM pg_catalog.pg_collation l JOIN pg_catalog.pg_namespace ln ON ln.oid = l.collnamespace
                  WHERE l.oid = a.attcollation AND a.attcollation <> b.typcollation), ''),
       coalesce(` + operatorSQL(operatorName, 3) + `, ''), coalesce(` + operatorSQL(operatorName, 5) + `, ''),
       coalesce(` + operatorSQL("o.oid", 3) + `, 0),
       ` + columns.CastName("coalesce(d.typmod, a.atttypmod)") + `,
       pg_catalog.format_type(a.atttypid, a.atttypmod), b.oid, b.typcategory::pg_catalog.text,
       CASE WHEN b.typcategory = 'A' THEN coalesce(e.oid, b.typelem) ELSE 0 END
  FROM pg_catalog.pg_namespace n
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid
  JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
  LEFT JOIN bases d ON d.of = a.atttypid
  JOIN pg_catalog.pg_type b ON b.oid = coalesce(d.oid, a.atttypid)
  JOIN pg_catalog.pg_namespace bn ON bn.oid = b.typnamespace
  LEFT JOIN bases e ON e.of = b.typelem
  LEFT JOIN LATERAL (` + classSQL + `) AS k ON true
 WHERE n.nspname = $1 AND c.relname = $2
 ORDER BY a.attnum`

// uniqueSQL returns the unique indexes that ON CONFLICT (columns) can infer: not partial, on
// plain columns, not deferrable. indnullsnotdistinct came with Postgres 15, so it is read in a
// way that works without it.
var uniqueSQL = `
WITH RECURSIVE ` + columns.Domains + `
SELECT x.relname::pg_catalog.text, u.columns, u.ordered, u.collations, u.folds, u.classes, u.equals,
       coalesce((pg_catalog.to_jsonb(i) ->> 'indnullsnotdistinct')::pg_catalog.bool, false)
  FROM pg_catalog.pg_namespace n
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid
  JOIN pg_catalog.pg_index i ON i.indrelid = c.oid
  JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
 CROSS JOIN LATERAL (
       SELECT pg_catalog.array_agg(a.attname::pg_catalog.text ORDER BY a.attname::pg_catalog.text COLLATE pg_catalog."C") AS columns,
              pg_catalog.array_agg(a.attname::pg_catalog.text ORDER BY p.nth) AS ordered,
              pg_catalog.array_agg(CASE WHEN l.oid <> b.typcollation OR l.oid <> a.attcollation THEN ` + collationName + ` ELSE '' END ORDER BY a.attname::pg_catalog.text COLLATE pg_catalog."C") AS collations,
              pg_catalog.array_agg(NOT coalesce(l.collisdeterministic, true) ORDER BY a.attname::pg_catalog.text COLLATE pg_catalog."C") AS folds,
              pg_catalog.array_agg(k.opcname::pg_catalog.text ORDER BY a.attname::pg_catalog.text COLLATE pg_catalog."C") AS classes,
              pg_catalog.array_agg(coalesce(` + operatorSQL("o.oid", 3) + `, 0) ORDER BY a.attname::pg_catalog.text COLLATE pg_catalog."C") AS equals
         FROM ROWS FROM (pg_catalog.unnest(i.indkey::pg_catalog.int2[]), pg_catalog.unnest(i.indcollation::pg_catalog.oid[]),
                         pg_catalog.unnest(i.indclass::pg_catalog.oid[])) WITH ORDINALITY AS p (attnum, coll, class, nth)
         JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = p.attnum
         JOIN pg_catalog.pg_opclass k ON k.oid = p.class
         LEFT JOIN bases d ON d.of = a.atttypid
         JOIN pg_catalog.pg_type b ON b.oid = coalesce(d.oid, a.atttypid)
         LEFT JOIN pg_catalog.pg_collation l ON l.oid = p.coll
         LEFT JOIN pg_catalog.pg_namespace ln ON ln.oid = l.collnamespace
        WHERE p.nth <= i.indnkeyatts) AS u
 WHERE n.nspname = $1 AND c.relname = $2 AND i.indisunique AND i.indisvalid AND i.indimmediate
   AND i.indpred IS NULL AND i.indexprs IS NULL
 ORDER BY i.indexrelid`

// shapeSQL returns a text that changes when a column does, or the table, in a way that a plan
// goes by: another type; another collation or modifier that is part of a plan
// (columns.CastName); NOT NULL, a default or an identity that comes or goes; rules or row
// security. Triggers are found by storageSQL.
var shapeSQL = shapeFrom(1)

// shapeFrom is shapeSQL with its parameters (schema, table, columns) numbered from param.
func shapeFrom(param int) string {
	return fmt.Sprintf(`SELECT coalesce(pg_catalog.string_agg(pg_catalog.concat_ws(' ', a.attname, a.atttypid, a.attcollation,
                  CASE WHEN a.atttypid IN (1083, 1114, 1184, 1186, 1266, 1700) THEN a.atttypmod END,
                  a.attnotnull, a.atthasdef, a.attidentity, c.relhasrules, c.relrowsecurity), ',' ORDER BY a.attnum), '')
  FROM pg_catalog.pg_namespace n
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid
  JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE n.nspname = $%d AND c.relname = $%d AND a.attname = ANY ($%d::pg_catalog.text[])`, param, param+1, param+2)
}

// namesSQL lists the tables that a wrong name may have meant.
const namesSQL = `
SELECT n.nspname::pg_catalog.text, c.relname::pg_catalog.text
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p', 'v', 'f') AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
 ORDER BY 1, 2 LIMIT 5000`

// readCatalog reads the target in one round trip. A target without columns doesn't exist.
func (s *Sink) readCatalog(ctx context.Context, tx sinks.Tx) (*target, error) {
	t := &target{}
	var b pgx.Batch
	b.Queue(attributesSQL, s.schema, s.table).Query(func(rows pgx.Rows) (err error) {
		t.attributes, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (a attribute, err error) {
			var category string
			err = row.Scan(&t.kind, &t.plain, &t.mayUse, &t.mayRead, &a.name, &a.notNull, &a.hasValue, &a.generated, &a.always,
				&a.mayInsert, &a.mayUpdate, &a.maySelect, &a.domain, &a.collation, &a.equals, &a.isAbove, &a.equalsOID,
				&a.typ.Cast, &a.typ.Name, &a.typ.OID, &category, &a.typ.Element)
			if category != "" {
				a.typ.Category = category[0]
			}
			return a, err
		})
		return err
	})
	b.Queue(uniqueSQL, s.schema, s.table).Query(func(rows pgx.Rows) (err error) {
		t.unique, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (u uniqueIndex, err error) {
			err = row.Scan(&u.name, &u.columns, &u.ordered, &u.collations, &u.folds, &u.classes, &u.equals, &u.nullsNotDistinct)
			return u, err
		})
		return err
	})
	var names []string
	for _, c := range slices.Concat(s.cols, s.expected) {
		names = append(names, c.Name)
	}
	b.Queue(shapeSQL, s.schema, s.table, names).QueryRow(func(row pgx.Row) error { return row.Scan(&t.shape) })
	b.Queue(storageSQL, []string{s.schema}, []string{s.table}).QueryRow(func(row pgx.Row) error { return row.Scan(&t.fills, nil, nil, nil, nil) })
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return nil, fmt.Errorf("read the catalog: %w", err)
	}
	s.adoptKey(t)
	return t, nil
}

// similarTable finds the table that the configured name may have meant.
func (s *Sink) similarTable(ctx context.Context, tx sinks.Tx) string {
	rows, err := tx.Query(ctx, namesSQL)
	if err != nil {
		return ""
	}
	names, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
		var schema, table string
		err := row.Scan(&schema, &table)
		return schema + "." + table, err
	})
	if err != nil {
		return ""
	}
	return nearest.Name(s.schema+"."+s.table, names)
}
