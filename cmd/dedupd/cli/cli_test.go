package cli

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/pgtest"
	_ "github.com/dedupd/dedupd/sinks/statement"
	_ "github.com/dedupd/dedupd/sinks/table"
)

var update = flag.Bool("update", false, "write the golden files of the scripts anew")

func TestMain(m *testing.M) {
	testscript.Main(stopping{m}, map[string]func(){
		"dedupd": func() { os.Exit(Main(os.Args[1:], os.Stdout, os.Stderr)) },
	})
}

// stopping ends the database server after the tests.
type stopping struct{ *testing.M }

func (m stopping) Run() int {
	defer pgtest.Shutdown()
	return m.M.Run()
}

// TestScripts runs what people type: output, exit codes, help.
func TestScripts(t *testing.T) {
	testscript.Run(t, params("testdata/script"))
}

// TestDatabaseScripts are those that need a database, which they find as
// $DATABASE_URL.
func TestDatabaseScripts(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a database")
	}
	p := params("testdata/database")
	p.Setup = func(env *testscript.Env) error {
		db := pgtest.New(t)
		env.Setenv("DATABASE_URL", db.URL)
		// A role that every server has and that may read none of our tables.
		nobody, err := url.Parse(db.URL)
		if err != nil {
			return err
		}
		query := nobody.Query()
		query.Set("options", "-crole=pg_signal_backend") // a blank would be encoded as a plus, which Postgres keeps
		nobody.RawQuery = query.Encode()
		env.Setenv("NOBODY_URL", nobody.String())
		stranger, err := url.Parse(db.URL)
		if err != nil {
			return err
		}
		stranger.User = url.UserPassword("stranger", "secret")
		env.Setenv("STRANGER_URL", stranger.String())
		return nil
	}
	p.Cmds["psql"] = psql
	testscript.Run(t, p)
}

// psql runs the SQL of a file in the script's database.
func psql(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: psql FILE")
	}
	conn, err := pgx.Connect(context.Background(), ts.Getenv("DATABASE_URL"))
	ts.Check(err)
	defer conn.Close(context.Background())
	_, err = conn.Exec(context.Background(), ts.ReadFile(args[0]))
	ts.Check(err)
}

func params(dir string) testscript.Params {
	return testscript.Params{
		Dir:                 dir,
		UpdateScripts:       *update,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"code": code,
		},
	}
}

// code runs a command and wants its exit code: code 2 dedupd config check. Its
// output is then that of the last command.
func code(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N COMMAND…")
	}
	err := ts.Exec(args[1], args[2:]...)
	got := 0
	var exit interface{ ExitCode() int }
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if fmt.Sprint(got) != args[0] {
		ts.Fatalf("exit code %d, want %s", got, args[0])
	}
}

func TestExitCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
	}{
		{errors.New("x"), 1},
		{usageError{errors.New("x")}, 2},
		{fmt.Errorf("wrapped: %w", config.Problems{{Message: "x"}}), 2},
		{exitError{code: 130}, 130},
		{&schema.Error{Have: 1, Want: 2}, 3},
		{fmt.Errorf("migrate: %w", &schema.Error{Have: 2, Want: 1}), 3},
		{fmt.Errorf("migrate: %w", &schema.EncodingError{Encoding: "LATIN1"}), 3},
		{&pgconn.PgError{Code: "42501"}, 3},
		{&pgconn.PgError{Code: "28P01"}, 3},
		{&pgconn.PgError{Code: "42P01"}, 3},
		{&pgconn.PgError{Code: "23505"}, 1},
		{fmt.Errorf("import: %w", &dedup.QueryError{Err: &pgconn.PgError{Code: "42P01"}}), 2},
		{&net.OpError{Op: "dial", Err: errors.New("refused")}, 3},
		{&net.OpError{Op: "read", Err: errors.New("reset")}, 1},
		{fmt.Errorf("ping: %w", context.DeadlineExceeded), 3},
		{dedup.ErrNoDeadLetter, 1},
	} {
		if got := exitCode(c.err); got != c.want {
			t.Errorf("%v: %d, want %d", c.err, got, c.want)
		}
	}
}

func TestTable(t *testing.T) {
	tab := table{columns: []column{left("NAME"), right("N"), left("END")}}
	tab.add("a", 1, "x")
	tab.add("ü\x1b[2Jb\nc", 1234, "")
	var b bytes.Buffer
	if err := tab.write(&b); err != nil {
		t.Fatal(err)
	}
	want := "NAME         N  END\na            1  x\nü [2Jb c  1234\n"
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}

func TestColourOnlyOnATerminal(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	device, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0) // a character device, as a terminal is
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	if colourful(file) || colourful(new(bytes.Buffer)) || !colourful(device) {
		t.Error("colour in a file, or none on a terminal")
	}
	t.Setenv("NO_COLOR", "1")
	if colourful(device) {
		t.Error("NO_COLOR is ignored")
	}
}

func TestRaw(t *testing.T) {
	for _, c := range []struct {
		in   []byte
		want string
	}{{nil, "-"}, {[]byte{}, ""}, {[]byte("grün"), "grün"}, {[]byte{0xff, 0}, "base64:/wA="}} {
		if got := newRaw(c.in).inLine(); got != c.want {
			t.Errorf("%q is shown as %q, want %q", c.in, got, c.want)
		}
	}
}

func TestStatsAddUp(t *testing.T) {
	lag := int64(5)
	s := newStats("s", []dedup.Books{
		{Fetched: 10, Applied: 6, Duplicates: 3, Redelivered: 1, Resent: 1, CrossSource: 1, Dead: 1, Lag: &lag},
		{Fetched: 10, Applied: 9, Conflicts: 1},
	}, nil, 1)
	if s.Totals.Fetched != 20 || s.Totals.Applied != 15 || s.Rates.Duplicates != 0.15 || s.Rates.Dead != 0.05 || *s.Totals.Lag != 5 {
		t.Errorf("%+v", s)
	}
	if empty := newStats("s", nil, nil, 0); empty.Lanes == nil || empty.Generations == nil || empty.Rates.Duplicates != 0 {
		t.Errorf("%+v", empty)
	}
}
