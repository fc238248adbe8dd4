package table

import (
	"context"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// Whatever a schema, a table and a column are called, a row goes into just these, or
// the name is one that Postgres can't have and is refused before it is asked.
func FuzzNames(f *testing.F) {
	for _, s := range [][3]string{
		{"shop", "orders", "id"},
		{`s"`, `""`, `"`},
		{"a.b", "c.d", "e.f"},
		{"Ünï", "naïve 🎈", "é"},
		{"public", "select", "from"},
		{"sch ema", "t'x", `x\y`},
		{"s", strings.Repeat("t", 63), strings.Repeat("c", 63)},
		{"s", strings.Repeat("t", 64), "c"},
		{"s", "t", strings.Repeat("é", 32)},
		{"s", strings.Repeat("é", 31), "c"},
		{"s", "t", "nul\x00"},
		{"s", "bad\xff", "c"},
		{"", "t", "c"},
		{"s", "", "c"},
		{"s", "t", ""},
		{"$1", "$$", "%s"},
		{"s;", "--", "/*"},
		{"\n", "\t", " "},
		{"e'", "U&\"x", "*"},
	} {
		f.Add(s[0], s[1], s[2])
	}
	conn, err := pgx.Connect(context.Background(), pgtest.New(f).URL)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = conn.Close(context.Background()) })
	// Postgres cuts longer names without a word, so that two would be one.
	possible := func(name string) bool {
		return name != "" && len(name) <= 63 && utf8.ValidString(name) && !strings.ContainsRune(name, 0)
	}
	// Written here by itself, as the manual has it.
	quoted := func(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }
	f.Fuzz(func(t *testing.T, schema, table, column string) {
		all := possible(schema) && possible(table) && possible(column)
		s, err := Config{Name: quoted(schema) + "." + quoted(table), Columns: map[string]string{column: "id"}}.Sink()
		if (err == nil) != all {
			t.Fatalf("%q.%q, column %q: %v; Postgres can have them: %v", schema, table, column, err, all)
		}
		if !all || strings.HasPrefix(schema, "pg_") {
			return // the server keeps those schemas to itself
		}
		ctx := context.Background()
		tx, err := conn.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tx.Rollback(ctx) }()
		target := quoted(schema) + "." + quoted(table)
		create := `CREATE SCHEMA IF NOT EXISTS ` + quoted(schema) + `; CREATE TABLE ` + target + ` (` + quoted(column) + ` text)`
		if _, err := tx.Exec(ctx, create); err != nil {
			return // such as a column called xmin, which every table has
		}
		if err := errors.Join(s.Prepare(ctx, tx), s.Write(ctx, tx, sinks.NewBatch([]message.Message{msg("the id", "")}))); err != nil {
			t.Fatalf("%s, column %q: %v", target, column, err)
		}
		var got string
		if err := tx.QueryRow(ctx, `SELECT `+quoted(column)+` FROM `+target).Scan(&got); err != nil || got != "the id" {
			t.Errorf("%s, column %q holds %q, %v", target, column, got, err)
		}
	})
}
