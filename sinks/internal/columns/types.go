package columns

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/sinks"
)

// Domains is a common table expression (for WITH RECURSIVE) with the base type of each domain
// and that type's modifier. Only the innermost domain of a chain can have a modifier.
const Domains = `domains(of, oid, typmod) AS (
  SELECT oid, typbasetype, typtypmod FROM pg_catalog.pg_type WHERE typtype = 'd'
   UNION ALL
  SELECT d.of, t.typbasetype, t.typtypmod
    FROM domains d JOIN pg_catalog.pg_type t ON t.oid = d.oid AND t.typtype = 'd'
), bases AS (
  SELECT d.* FROM domains d JOIN pg_catalog.pg_type t ON t.oid = d.oid AND t.typtype <> 'd'
)`

// CastName is the SQL expression for the Type.Cast of a row b of pg_type, with its schema's
// row bn and a modifier. The name always carries the schema: format_type leaves it out for a
// type that the search path happens to find.
//
// The modifier is left out, except for types whose cast rounds just as the assignment does:
// an upsert compares keys before they are assigned, and must see them as the unique index
// will.
func CastName(modifier string) string {
	return `CASE WHEN ` + modifier + ` >= 0 AND b.oid IN (1083, 1114, 1184, 1186, 1266, 1700)
            THEN pg_catalog.format_type(b.oid, ` + modifier + `)
            ELSE pg_catalog.quote_ident(bn.nspname) || '.' || pg_catalog.quote_ident(b.typname) END`
}

// Resolve finds types by the names that people write. It returns them in the names' order.
func Resolve(ctx context.Context, tx sinks.Tx, names []string) ([]Type, error) {
	rows, err := tx.Query(ctx, `
WITH RECURSIVE `+Domains+`
SELECT x.name, b.oid IS NOT NULL, coalesce(`+CastName("-1")+`, ''), coalesce(b.oid, 0),
       coalesce(b.typcategory::pg_catalog.text, ''), CASE WHEN b.typcategory = 'A' THEN coalesce(e.oid, b.typelem) ELSE 0 END
  FROM pg_catalog.unnest($1::pg_catalog.text[]) WITH ORDINALITY AS x(name, ord)
  LEFT JOIN bases d ON d.of = pg_catalog.to_regtype(x.name)
  LEFT JOIN pg_catalog.pg_type b ON b.oid = coalesce(d.oid, pg_catalog.to_regtype(x.name)) AND b.typtype <> 'p'
  LEFT JOIN pg_catalog.pg_namespace bn ON bn.oid = b.typnamespace
  LEFT JOIN bases e ON e.of = b.typelem
 ORDER BY x.ord`, names)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (t Type, err error) {
		var found bool
		var category string
		if err = row.Scan(&t.Name, &found, &t.Cast, &t.OID, &category, &t.Element); err != nil {
			return t, err
		}
		if !found {
			return t, fmt.Errorf("there is no type %s that a column can have; name one with its schema, such as public.mood", t.Name)
		}
		if category != "" {
			t.Category = category[0]
		}
		return t, nil
	})
}
