package columns

// Domains is a common table expression (for WITH RECURSIVE): for each domain the
// type behind it, and that type's modifier. The modifier can only stand on the
// innermost domain of a chain.
const Domains = `domains(of, oid, typmod) AS (
  SELECT oid, typbasetype, typtypmod FROM pg_catalog.pg_type WHERE typtype = 'd'
   UNION ALL
  SELECT d.of, t.typbasetype, t.typtypmod
    FROM domains d JOIN pg_catalog.pg_type t ON t.oid = d.oid AND t.typtype = 'd'
), bases AS (
  SELECT d.* FROM domains d JOIN pg_catalog.pg_type t ON t.oid = d.oid AND t.typtype <> 'd'
)`

// CastName is the SQL expression for Type.Cast of a row b of pg_type with its
// schema bn and its modifier. The name is built from the catalog's own and
// always carries the schema: format_type leaves that out for a type that today's
// search path happens to find.
//
// The modifier is left out but for the types whose cast does just what the
// assignment does, which is to round: an upsert compares keys before they are
// assigned, and must see them as the unique index will.
func CastName(modifier string) string {
	return `CASE WHEN ` + modifier + ` >= 0 AND b.oid IN (1083, 1114, 1184, 1186, 1266, 1700)
            THEN pg_catalog.format_type(b.oid, ` + modifier + `)
            ELSE pg_catalog.quote_ident(bn.nspname) || '.' || pg_catalog.quote_ident(b.typname) END`
}
