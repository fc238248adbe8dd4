package table

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// How two values of a column compare is read from the catalog. A bare = would be that of the
// search path: a citext whose schema isn't on it compares as text. And a key compares as its
// unique index does, which may have another collation than its column. DISTINCT, GROUP BY and
// ORDER BY take the type's own operators wherever they are, and the collation of the
// expression: see comparedExpr.

// classSQL is the pg_opclass that a type is compared by if nothing else is said, as Postgres
// finds it: that of the type itself, of the pseudo-type that it belongs to, or of a type that
// it can pass for. b is the type's row of pg_type.
const classSQL = `
SELECT k.opcfamily, k.opcintype FROM pg_catalog.pg_opclass k JOIN pg_catalog.pg_am m ON m.oid = k.opcmethod AND m.amname = 'btree'
 WHERE k.opcdefault AND (k.opcintype = b.oid
       OR k.opcintype = CASE WHEN b.typtype = 'e' THEN 'pg_catalog.anyenum' WHEN b.typtype = 'r' THEN 'pg_catalog.anyrange' WHEN b.typtype = 'm' THEN 'pg_catalog.anymultirange'
                             WHEN b.typtype = 'c' THEN 'pg_catalog.record' WHEN b.typcategory = 'A' THEN 'pg_catalog.anyarray' END::pg_catalog.regtype
       OR EXISTS (SELECT FROM pg_catalog.pg_cast s WHERE s.castsource = b.oid AND s.casttarget = k.opcintype AND s.castmethod = 'b' AND s.castcontext = 'i'))
 ORDER BY k.opcintype <> b.oid, NOT (SELECT p.typispreferred FROM pg_catalog.pg_type p WHERE p.oid = k.opcintype) LIMIT 1`

// operatorSQL selects what of the operator for a strategy, 3 is = and 5 is >, of k: a row
// that has opcfamily and opcintype.
func operatorSQL(what string, strategy int) string {
	return fmt.Sprintf(`(SELECT %s FROM pg_catalog.pg_amop f JOIN pg_catalog.pg_operator o ON o.oid = f.amopopr JOIN pg_catalog.pg_namespace os ON os.oid = o.oprnamespace
         WHERE f.amopfamily = k.opcfamily AND f.amoplefttype = k.opcintype AND f.amoprighttype = k.opcintype AND f.amopstrategy = %d)`, what, strategy)
}

// operatorName is an operator as SQL.
const operatorName = `'OPERATOR(' || pg_catalog.quote_ident(os.nspname) || '.' || o.oprname || ')'`

// collationName is a collation as SQL.
const collationName = `pg_catalog.quote_ident(ln.nspname) || '.' || pg_catalog.quote_ident(l.collname)`

// adoptKey gives the key's columns the collation of the unique index, and its way with NULLs.
func (s *Sink) adoptKey(t *target) {
	index := s.keyIndex(t)
	if index == nil {
		return
	}
	for i, name := range index.columns {
		if a := t.attribute(name); a != nil {
			a.collation = index.collations[i]
			a.nullsEqual = index.nullsNotDistinct && !a.notNull
		}
	}
}

// equal is the condition that two expressions of a column's type are equal, as the key's
// unique index compares them, or the type if the column isn't of the key. It is NULL if one
// of them is. The index can serve it if left is the column.
func (t *target) equal(column, left, right string) string {
	return t.compared(column, left, t.attribute(column).equals, right)
}

// same is IS NOT DISTINCT FROM: as equal, but two NULLs are the same. It is true or false.
// No index can serve it.
func (t *target) same(column, left, right string) string {
	a := t.attribute(column)
	if a.equals == "" || byText(a.typ) {
		return fmt.Sprintf("coalesce((%s)::pg_catalog.text OPERATOR(pg_catalog.=) (%s)::pg_catalog.text, (%[1]s) IS NULL AND (%[2]s) IS NULL)", left, right)
	}
	return fmt.Sprintf("coalesce(%s, (%s) IS NULL AND (%s) IS NULL)", t.equal(column, left, right), left, right)
}

// matches is the condition that the unique index takes two values of a column of the key for
// the same: equal, but for an index whose NULLs aren't distinct. It is true, false or NULL.
// The index can serve it if left is the column.
func (t *target) matches(column, left, right string) string {
	if t.attribute(column).nullsEqual {
		return fmt.Sprintf("(%s OR (%s) IS NULL AND (%s) IS NULL)", t.equal(column, left, right), left, right)
	}
	return t.equal(column, left, right)
}

// mostNullable is how many columns of a key may be NULL for matchesAll to serve an index.
const mostNullable = 4

// matchesAll is the condition that the unique index takes two keys for the same: matches, for
// each of the columns. Those that may be NULL are tried with and without, each time all of
// them. So the index can serve all columns at once, where lefts are its columns: by a condition
// for each column, it would be asked for all rows that have NULL in one of them.
func (t *target) matchesAll(columns, lefts, rights []string) string {
	ways := []string{""}
	nullable := 0
	for i, c := range columns {
		conditions := []string{t.equal(c, lefts[i], rights[i])}
		if t.attribute(c).nullsEqual {
			if nullable++; nullable <= mostNullable {
				conditions = append(conditions, fmt.Sprintf("(%s) IS NULL AND (%s) IS NULL", lefts[i], rights[i]))
			} else {
				conditions[0] = t.matches(c, lefts[i], rights[i])
			}
		}
		var longer []string
		for _, way := range ways {
			for _, condition := range conditions {
				if way != "" {
					condition = way + " AND " + condition
				}
				longer = append(longer, condition)
			}
		}
		ways = longer
	}
	if len(ways) == 1 {
		return ways[0]
	}
	return "(" + strings.Join(ways, " OR ") + ")"
}

// above is the condition that an expression of a column's type is above another. It is NULL
// if one of them is.
func (t *target) above(column, left, right string) string {
	return t.compared(column, left, t.attribute(column).isAbove, right)
}

func (t *target) compared(column, left, operator, right string) string {
	return fmt.Sprintf("%s %s (%s)", t.collated(column, "("+left+")"), operator, right)
}

// collated is an expression of a column's type as an index or a version compares it.
func (t *target) collated(column, expr string) string {
	if c := t.attribute(column).collation; c != "" {
		expr += " COLLATE " + c
	}
	return expr
}

// comparedExpr is column i of a row as an index or a version compares it.
func (s *Sink) comparedExpr(t *target, set *columns.Set, i int) string {
	return t.collated(set.Columns()[i].Name, set.Expr(i))
}

// rows is the target to read or update rows of, as SQL. The key's unique index knows nothing
// of the rows of tables that inherit from it. Those of partitions it knows.
func (s *Sink) rows(t *target) string {
	if t.kind == "r" {
		return "ONLY " + s.sql()
	}
	return s.sql()
}

// checkCompared says which columns of the key compare in a way that the statements can't
// follow.
func (s *Sink) checkCompared(t *target) error {
	index := s.keyIndex(t)
	if index == nil {
		return nil
	}
	for i, name := range index.columns {
		if a := t.attribute(name); a != nil && index.equals[i] != a.equalsOID {
			return fmt.Errorf("key: the unique index %s compares column %q by the operator class %s, which takes other values for equal than type %s does; "+
				"make a unique index with the type's default operator class", quote(index.name), name, index.classes[i], a.typ.Name)
		}
	}
	for i := range t.unique {
		if u := &t.unique[i]; slices.Equal(u.columns, index.columns) && !u.asEqual(index) {
			return fmt.Errorf("key: the unique indexes %s and %s on these columns take different rows for the same (their collations or NULLS NOT DISTINCT differ), "+
				"so whether a message is a new row depends on which is asked; drop one of them", quote(index.name), quote(u.name))
		}
	}
	return nil
}

// comparesAsColumns says which columns an index compares in another way than by their own
// type and collation.
func (t *target) comparesAsColumns(index *uniqueIndex) error {
	var errs []error
	for i, name := range index.columns {
		switch a := t.attribute(name); {
		case a == nil:
		case index.equals[i] != a.equalsOID:
			errs = append(errs, fmt.Errorf("the unique index %s compares column %q by the operator class %s; make it with the type's default operator class", quote(index.name), name, index.classes[i]))
		case index.collations[i] != a.collation:
			errs = append(errs, fmt.Errorf("the unique index %s compares column %q by another collation than the column's; make it with the column's", quote(index.name), name))
		}
	}
	return errors.Join(errs...)
}

// asEqual reports whether two indexes on the same columns take the same rows for equal.
// Collations make a difference only if one of them takes different texts for equal.
func (u *uniqueIndex) asEqual(v *uniqueIndex) bool {
	if u.nullsNotDistinct != v.nullsNotDistinct {
		return false
	}
	for i := range u.columns {
		if u.collations[i] != v.collations[i] && (u.folds[i] || v.folds[i]) || u.equals[i] != v.equals[i] {
			return false
		}
	}
	return true
}
