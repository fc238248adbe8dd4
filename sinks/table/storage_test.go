package table

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/message"
)

const foreign = `CREATE FOREIGN DATA WRAPPER far; CREATE SERVER elsewhere FOREIGN DATA WRAPPER far;`

func idsOf(table string) Config {
	return Config{Name: "public." + table, Columns: map[string]string{"id": "id", "p": "position"}}
}

// What doesn't outlive a crash, or is committed by another server, isn't written to.
func TestTablesThatAreNotDurableAreRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		create string
		want   string // "": it is taken
	}{
		"logged":                       {`CREATE TABLE t (id text, p bigint)`, ""},
		"unlogged":                     {`CREATE UNLOGGED TABLE t (id text, p bigint)`, `"public"."t" is UNLOGGED`},
		"foreign":                      {foreign + `CREATE FOREIGN TABLE t (id text, p bigint) SERVER elsewhere`, `"public"."t" is a foreign table`},
		"partition":                    {`CREATE TABLE t (id text, p bigint) PARTITION BY RANGE (p); CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)`, ""},
		"unlogged partition":           {`CREATE TABLE t (id text, p bigint) PARTITION BY RANGE (p); CREATE UNLOGGED TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)`, `"public"."t1" is UNLOGGED`},
		"unlogged sub-partition":       {`CREATE TABLE t (id text, p bigint) PARTITION BY RANGE (p); CREATE TABLE t1 PARTITION OF t DEFAULT PARTITION BY HASH (id); CREATE UNLOGGED TABLE t2 PARTITION OF t1 FOR VALUES WITH (MODULUS 1, REMAINDER 0)`, `"public"."t2" is UNLOGGED`},
		"foreign partition":            {foreign + `CREATE TABLE t (id text, p bigint) PARTITION BY RANGE (p); CREATE FOREIGN TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10) SERVER elsewhere`, `"public"."t1" is a foreign table`},
		"child that is not written to": {`CREATE TABLE t (id text, p bigint); CREATE UNLOGGED TABLE t1 () INHERITS (t)`, ""},
		"child that a trigger fills": {`CREATE TABLE t (id text, p bigint); CREATE UNLOGGED TABLE t1 () INHERITS (t);
			CREATE FUNCTION route() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO t1 VALUES (NEW.*); RETURN NULL; END $$;
			CREATE TRIGGER route BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION route()`, `"public"."t1" is UNLOGGED`},
		"view":               {`CREATE TABLE behind (id text, p bigint); CREATE UNLOGGED TABLE beside (id text); CREATE VIEW t AS SELECT * FROM behind WHERE id NOT IN (SELECT id FROM beside)`, ""},
		"view of unlogged":   {`CREATE UNLOGGED TABLE behind (id text, p bigint); CREATE VIEW between AS SELECT * FROM behind; CREATE VIEW t AS SELECT * FROM between`, `"public"."behind" is UNLOGGED`},
		"rule into unlogged": {`CREATE UNLOGGED TABLE behind (id text, p bigint); CREATE TABLE t (id text, p bigint); CREATE RULE r AS ON INSERT TO t DO ALSO INSERT INTO behind VALUES (NEW.*)`, `"public"."behind" is UNLOGGED`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).Pool(t)
			exec(t, pool, c.create)
			err := prepare(t, pool, build(t, idsOf("t")))
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("the error is %v, want %q", err, c.want)
			}
		})
	}
	t.Run("temporary", func(t *testing.T) {
		t.Parallel()
		pool := pgtest.New(t).Pool(t)
		err := inTx(t, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `CREATE TEMPORARY TABLE t (id text, p bigint)`); err != nil {
				return err
			}
			var schema string
			if err := tx.QueryRow(t.Context(), `SELECT pg_my_temp_schema()::regnamespace::text`).Scan(&schema); err != nil {
				return err
			}
			c := idsOf("t")
			c.Name = schema + ".t"
			return build(t, c).Prepare(t.Context(), tx)
		})
		if err == nil || !strings.Contains(err.Error(), "is a temporary table") {
			t.Errorf("the error is %v", err)
		}
	})
}

// A table may come to that while it is written to. No transaction commits then.
func TestTablesThatBecomeNotDurable(t *testing.T) {
	t.Parallel()
	batch := func(from, n int) (msgs []message.Message) {
		for i := range n {
			m := msg(fmt.Sprint(from+i), "")
			m.Position.Offset = int64(from + i)
			msgs = append(msgs, m)
		}
		return msgs
	}
	for _, n := range []int{1, copyFrom} {
		for name, c := range map[string]struct{ create, change, undo string }{
			"altered": {`CREATE TABLE t (id text, p bigint)`, `ALTER TABLE t SET UNLOGGED`, `ALTER TABLE t SET LOGGED`},
			"made anew": {
				`CREATE TABLE t (id text, p bigint)`,
				`ALTER TABLE t RENAME TO old; CREATE UNLOGGED TABLE t (LIKE old)`, `DROP TABLE t; ALTER TABLE old RENAME TO t`,
			},
			"a partition attached": {
				`CREATE TABLE t (id text, p bigint) PARTITION BY RANGE (p); CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (1000)`,
				`CREATE UNLOGGED TABLE t2 (id text, p bigint); ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (1000) TO (2000)`,
				`ALTER TABLE t2 SET LOGGED`,
			},
		} {
			t.Run(fmt.Sprintf("%s, %d rows", name, n), func(t *testing.T) {
				t.Parallel()
				pool := pgtest.New(t).Pool(t)
				exec(t, pool, c.create)
				s := build(t, idsOf("t"))
				if err := prepare(t, pool, s); err != nil {
					t.Fatal(err)
				}
				if err := write(t, pool, s, batch(0, n)...); err != nil {
					t.Fatal(err)
				}
				exec(t, pool, c.change)
				if err := write(t, pool, s, batch(1000, n)...); err == nil || !strings.Contains(err.Error(), "is UNLOGGED") {
					t.Errorf("writing gives %v", err)
				}
				if err := prepare(t, pool, s); err == nil || !strings.Contains(err.Error(), "is UNLOGGED") {
					t.Errorf("looking gives %v", err)
				}
				exec(t, pool, c.undo)
				if err := prepare(t, pool, s); err != nil {
					t.Error(err)
				}
				if err := write(t, pool, s, batch(1000, n)...); err != nil {
					t.Error(err)
				}
				wantRows(t, pool, `SELECT count(*)::text FROM t`, fmt.Sprint(2*n))
			})
		}
	}
}
