package table

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// COPY is a faster way to the same rows: whatever the batch's size, the table
// holds the same, and the same is refused.
func TestCopyWritesWhatInsertWrites(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE DOMAIN short AS varchar(12) CHECK (VALUE <> 'id-5000');
		CREATE TABLE t (n int GENERATED ALWAYS AS IDENTITY, id short, u uuid, k bytea, v jsonb, j json, x text, p bigint, at timestamptz(0), c char(4), h varchar(3), d text DEFAULT 'd') PARTITION BY RANGE (p);
		CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (300); CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (300) TO (10000)`)
	s := build(t, Config{Name: "public.t", Columns: map[string]string{
		"id": "id", "u": "json:u", "k": "key", "v": "value", "j": "json:j",
		"x": "json:x", "p": "position", "at": "time", "c": "const:ab", "h": "header:h",
	}})
	if err := prepare(t, pool, s); err != nil {
		t.Fatal(err)
	}
	if !s.current.Load().copies {
		t.Fatal("this table is not copied to")
	}
	msgs := make([]message.Message, 600)
	for i := range msgs {
		m := msg(fmt.Sprint("id-", i), fmt.Sprintf(`{"u":"00000000-0000-0000-0000-%012d","j":{"a" : %d},"x":"é🎈\n%d"}`, i, i, i))
		m.Position.Offset = int64(i)
		m.Headers = []message.Header{{Key: "h", Value: []byte(fmt.Sprint(i))}}
		switch i % 5 {
		case 1:
			m.Value, m.Key = nil, nil
		case 2:
			m.Value, m.Headers = []byte(`{}`), nil
		case 3:
			m.Key = []byte{}
		case 4:
			m.Time = m.Time.AddDate(-2500, 0, 0).Local()
		}
		msgs[i] = m
	}
	all := `SELECT (t.*)::text FROM t ORDER BY n`
	if err := write(t, pool, s, msgs...); err != nil {
		t.Fatal(err)
	}
	copied := rows(t, pool, all)
	exec(t, pool, `TRUNCATE t RESTART IDENTITY`)
	for from := 0; from < len(msgs); from += copyFrom - 1 {
		if err := write(t, pool, s, msgs[from:min(from+copyFrom-1, len(msgs))]...); err != nil {
			t.Fatal(err)
		}
	}
	if d := cmp.Diff(rows(t, pool, all), copied); d != "" || len(copied) != len(msgs) {
		t.Errorf("%d rows (-insert +copy):\n%s", len(copied), d)
	}

	for name, spoil := range map[string]func(*message.Message){
		"22001": func(m *message.Message) { m.ID = strings.Repeat("x", 13) },
		"23514": func(m *message.Message) { m.ID = "id-5000" },
		"22P02": func(m *message.Message) { m.Value = []byte(`{"u":null,"q":"\ud800"}`) },
	} {
		for _, n := range []int{3, copyFrom + 50} {
			bad := append([]message.Message(nil), msgs[:n]...)
			spoil(&bad[n/2])
			var pg *pgconn.PgError
			if err := write(t, pool, s, bad...); !errors.As(err, &pg) || pg.Code != name {
				t.Errorf("%d messages: the error is %v, want SQLSTATE %s", n, err, name)
			}
		}
	}
}

// Documents go to the server unread. When it refuses them, all that are at fault
// are named at once; for a while they are then named before anything is sent.
func TestCopyNamesBadDocuments(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (id uuid, v jsonb, k jsonb, h json)`)
	s := build(t, Config{Name: "public.t", Columns: map[string]string{"id": "id", "v": "value", "k": "key", "h": "header:h"}})
	msgs := make([]message.Message, copyFrom+100)
	for i := range msgs {
		msgs[i] = msg(fmt.Sprintf("00000000-0000-0000-0000-%012d", i), `{"a":1}`)
		msgs[i].Key, msgs[i].Headers = []byte(`[2]`), []message.Header{{Key: "h", Value: []byte(`"\u0000"`)}}
	}
	// The copies that a Write asks for, and its error.
	try := func(msgs []message.Message) (copies int, err error) {
		err = inTx(t, pool, func(tx pgx.Tx) error {
			c := &countCopies{Tx: tx}
			defer func() { copies = c.n }()
			return s.Write(t.Context(), c, sinks.NewBatch(msgs))
		})
		return copies, err
	}
	named := func(err error) []int { return slices.Sorted(maps.Keys(sinks.AllPermanent(err))) }

	for name, c := range map[string]struct {
		spoil  func(bad []message.Message)
		want   []int
		unread int // copies that were asked for before anybody looked
	}{
		"documents": {func(bad []message.Message) {
			bad[7].Value, bad[200].Key, bad[300].Headers = []byte(`{"a":`), []byte(`x`), []message.Header{{Key: "h", Value: nil}, {Key: "h", Value: []byte(`'`)}}
		}, []int{7, 200, 300}, 1},
		"an escaped NUL":     {func(bad []message.Message) { bad[9].Value = []byte(`{"a":"\u0000"}`) }, []int{9}, 1},
		"an empty one":       {func(bad []message.Message) { bad[9].Value = []byte{} }, []int{9}, 1},
		"and other faults":   {func(bad []message.Message) { bad[3].Value, bad[5].ID = []byte(`}`), "no uuid" }, []int{3, 5}, 0},
		"no text":            {func(bad []message.Message) { bad[4].Value = []byte("\"\xff\"") }, []int{4}, 0},
		"depth, as we count": {func(bad []message.Message) { bad[4].Value = deep(message.MaxJSONDepth + 1) }, []int{4}, 0},
	} {
		s.doubt.Store(0)
		bad := slices.Clone(msgs)
		c.spoil(bad)
		copies, err := try(bad)
		if !slices.Equal(named(err), c.want) || copies != c.unread {
			t.Errorf("%s: %v after %d copies, want %v after %d: %v", name, named(err), copies, c.want, c.unread, err)
		}
		if copies, err = try(bad); !slices.Equal(named(err), c.want) || copies != 0 {
			t.Errorf("%s, in doubt: %v after %d copies: %v", name, named(err), copies, err)
		}
	}
	s.doubt.Store(time.Now().Add(-time.Second).UnixNano())
	if copies, err := try(msgs); err != nil || copies != 1 {
		t.Errorf("good ones: %d copies, %v", copies, err)
	}
	msgs[0].Value = deep(message.MaxJSONDepth)
	if _, err := try(msgs); err != nil {
		t.Errorf("as deep as may be: %v", err)
	}
	// Only the server minds this one: what it says is what there is to say.
	s.doubt.Store(0)
	msgs[1].Value = []byte(`"\ud800"`)
	var pg *pgconn.PgError
	if _, err := try(msgs); !errors.As(err, &pg) || sinks.AllPermanent(err) != nil && len(named(err)) > 0 || s.readsFirst() {
		t.Errorf("half a pair: %v; documents are read from now on: %v", err, s.readsFirst())
	}
}

func deep(levels int) []byte {
	return []byte(strings.Repeat("[", levels) + strings.Repeat("]", levels))
}

type countCopies struct {
	pgx.Tx
	n int
}

func (c *countCopies) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	c.n++
	return c.Tx.CopyFrom(ctx, table, columns, rows)
}

func TestNoCopyWhereItWouldDiffer(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE plain (id text PRIMARY KEY, n numeric, at timestamptz);
		CREATE TABLE ruled (id text); CREATE RULE r AS ON INSERT TO ruled DO INSTEAD INSERT INTO plain VALUES (NEW.id || '!');
		CREATE TABLE guarded (id text); ALTER TABLE guarded ENABLE ROW LEVEL SECURITY;
		CREATE VIEW seen AS SELECT * FROM plain`)
	id := map[string]string{"id": "id"}
	for name, c := range map[string]struct {
		config Config
		copies bool
	}{
		"plain":  {Config{Name: "public.plain", Columns: id}, true},
		"key":    {Config{Name: "public.plain", Key: []string{"id"}, Columns: id}, false},
		"now":    {Config{Name: "public.plain", Columns: map[string]string{"id": "id", "at": "now"}}, false},
		"cast":   {Config{Name: "public.plain", Columns: map[string]string{"id": "id", "n": "position"}}, false},
		"rules":  {Config{Name: "public.ruled", Columns: id}, false},
		"policy": {Config{Name: "public.guarded", Columns: id}, false},
		"view":   {Config{Name: "public.seen", Columns: id}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := build(t, c.config)
			if err := prepare(t, pool, s); err != nil {
				t.Fatal(err)
			}
			if got := s.current.Load().copies; got != c.copies {
				t.Errorf("copies is %v, want %v", got, c.copies)
			}
		})
	}
	s := build(t, Config{Name: "public.ruled", Columns: id})
	msgs := make([]message.Message, copyFrom)
	for i := range msgs {
		msgs[i] = msg(fmt.Sprint(i), "")
	}
	if err := write(t, pool, s, msgs...); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT count(*)::text FROM plain WHERE id LIKE '%!'`, fmt.Sprint(copyFrom))
}

// A column whose type changes under a running worker: bytes made for the old type
// may pass for a value of the new one.
func TestCopyFollowsAChangedTable(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (v uuid)`)
	s := build(t, Config{Name: "public.t", Columns: map[string]string{"v": "id"}})
	msgs := make([]message.Message, copyFrom)
	for i := range msgs {
		msgs[i] = msg("61616161-6161-6161-6161-616161616161", "") // its bytes are letters
	}
	if err := write(t, pool, s, msgs...); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `ALTER TABLE t ALTER v TYPE text; TRUNCATE t`)
	if err := write(t, pool, s, msgs...); err == nil {
		t.Errorf("UUIDs went into a text as %q", rows(t, pool, `SELECT v FROM t LIMIT 1`))
	} else if _, permanent := sinks.AsPermanent(err); permanent {
		t.Errorf("a changed table is called the messages' fault: %v", err)
	}
	if err := write(t, pool, s, msgs...); err != nil {
		t.Fatal(err)
	}
	wantRows(t, pool, `SELECT DISTINCT v FROM t`, msgs[0].ID)
}

// failingCopies is a transaction in which COPY fails.
type failingCopies struct {
	pgx.Tx
	err error
}

func (f *failingCopies) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	return 0, f.err
}

// An error of the driver may mean that a column isn't what it was at Prepare: the
// catalog is read again before the next try. One of the server's says nothing of
// the plan, and neither does a context that ended.
func TestCopyDistrustsWhatTheDriverRefuses(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	exec(t, pool, `CREATE TABLE t (v text)`)
	msgs := make([]message.Message, copyFrom)
	for i := range msgs {
		msgs[i] = msg(fmt.Sprint(i), "")
	}
	for name, c := range map[string]struct {
		err    error
		ended  bool
		forget bool
	}{
		"the driver":  {errors.New("cannot encode"), false, true},
		"the server":  {&pgconn.PgError{Code: "53100"}, false, false},
		"our own end": {context.Canceled, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := build(t, Config{Name: "public.t", Columns: map[string]string{"v": "id"}})
			if err := prepare(t, pool, s); err != nil {
				t.Fatal(err)
			}
			err := inTx(t, pool, func(tx pgx.Tx) error {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if c.ended {
					cancel()
				}
				return s.Write(ctx, &failingCopies{tx, c.err}, sinks.NewBatch(msgs))
			})
			if !errors.Is(err, c.err) {
				t.Fatalf("the error is %v", err)
			}
			if forgot := s.current.Load() == nil; forgot != c.forget || s.changed.Load() != c.forget {
				t.Errorf("the plan is forgotten: %v, COPY is given up: %v; want %v", forgot, s.changed.Load(), c.forget)
			}
			// The next try writes all of it, with a plan of its own where the old one is gone.
			if err := write(t, pool, s, msgs...); err != nil || s.current.Load() == nil {
				t.Errorf("the next try: %v", err)
			}
		})
	}
}
