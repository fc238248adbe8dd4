package dedup_test

import (
	"errors"
	"iter"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup"
)

func only(ids ...string) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for _, id := range ids {
			if !yield(id, nil) {
				return
			}
		}
	}
}

func (f *fixture) importIDs(seq iter.Seq2[string, error]) (dedup.Imported, error) {
	f.t.Helper()
	return f.Store.Import(f.t.Context(), dedup.Import{Actor: "ann@host", Input: "ids.txt", Unit: "line", MaxBytes: 64 << 10, IDs: seq})
}

func (f *fixture) wantImport(seq iter.Seq2[string, error], want dedup.Imported) {
	f.t.Helper()
	if got, err := f.importIDs(seq); err != nil || got != want {
		f.t.Errorf("imported %+v, %v; want %+v", got, err, want)
	}
}

// TestImport claims ids in several transactions, beside what is claimed by lanes
// and in sealed generations.
func TestImport(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("sealed"))
	f.rotate()
	f.handle(l.batch("open"))

	list := append(ids("id-", 45_000), "sealed", "open", "id-0", "id-44999", "open")
	slices.Reverse(list[20_000:]) // id-44999 is then twice in one transaction, id-0 in two
	f.wantImport(only(list...), dedup.Imported{Read: 45_005, New: 45_000, Known: 2, Repeated: 3})
	if line, _ := f.audited(); line != "test ann@host claims import ids.txt" {
		t.Errorf("audit: %s", line)
	}
	// Started again, it finds all of them known.
	f.wantImport(only(list[:30_000]...), dedup.Imported{Read: 30_000, New: 0, Known: 29_998, Repeated: 2})

	if c := f.find("id-7").Claim; c == nil || c.LaneNumber != nil || c.Position != nil || c.Fingerprint != nil {
		t.Errorf("%+v", c)
	}
	f.handle(l.batch("id-0", "id-44999=whatever", "x"))
	f.wantLanded("sealed", "open", "x")
	f.wantBooks(l, books{applied: 3, resent: 2, next: 5})
}

// TestImportBesideALane counts what a lane claims meanwhile apart from the input's own
// repetitions.
func TestImportBesideALane(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.wantImport(func(yield func(string, error) bool) {
		for i, id := range append(ids("id-", 20_001), "meanwhile", "id-0") {
			if i == 20_000 {
				f.handle(l.batch("meanwhile", "id-1"))
			}
			if !yield(id, nil) {
				return
			}
		}
	}, dedup.Imported{Read: 20_003, New: 20_001, Known: 1, Repeated: 1})
	f.wantLanded("meanwhile")
}

// TestImportFollowsRotations has the generations change between transactions,
// and in the middle of one.
func TestImportFollowsRotations(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Store.Generations().ChunkClaims = 9_000
	other := attach(t, f.db)
	list := ids("id-", 60_000)
	list = append(list, list[:20_000]...)
	told := []int64{}
	n, err := f.Store.Import(t.Context(), dedup.Import{Actor: "ann@host", Unit: "line", MaxBytes: 10, IDs: only(list...), Told: func(n dedup.Imported) {
		told = append(told, n.Read)
		other.rotate()
		if n.Read == 20_000 {
			other.buildFilters()
		}
	}})
	if want := (dedup.Imported{Read: 80_000, New: 60_000, Repeated: 20_000}); err != nil || n != want {
		t.Errorf("imported %+v, %v; want %+v", n, err, want)
	}
	if !slices.Equal(told, []int64{20_000, 40_000, 60_000, 80_000}) {
		t.Errorf("told of %v", told)
	}
	if c := other.find("id-1").Claim; c == nil || c.Generation != 1 {
		t.Errorf("%+v", c)
	}
	if c := other.find("id-59999").Claim; c == nil || c.Generation != 3 {
		t.Errorf("%+v", c)
	}
}

// TestImportLoadsFilters saves look-ups, in the process of a command.
func TestImportLoadsFilters(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.wantImport(only(ids("old-", 1000)...), dedup.Imported{Read: 1000, New: 1000})
	f.rotate()
	f.buildFilters()
	command := attach(t, f.db)
	command.wantImport(only(ids("old-", 2000)...), dedup.Imported{Read: 2000, New: 1000, Known: 1000})
	if command.Store.Generations().FilterBytes() == 0 || command.Store.Generations().FiltersBehind() {
		t.Error("no filter was loaded")
	}
}

// TestImportTriesAgain lets a transaction fail twice, as a deadlock would.
func TestImportTriesAgain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.exec(`
		CREATE SEQUENCE public.fails;
		CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF nextval('public.fails') <= 2 THEN RAISE EXCEPTION 'deadlock detected' USING ERRCODE = '40P01'; END IF;
			RETURN NULL;
		END $$;
		CREATE TRIGGER fail AFTER INSERT ON dedupd.claims_test_1 EXECUTE FUNCTION public.fail()`)
	f.wantImport(only("a", "b", "a"), dedup.Imported{Read: 3, New: 2, Repeated: 1})
	f.wantImport(only("a", "c"), dedup.Imported{Read: 2, New: 1, Known: 1})

	// What stays is reported, and what was claimed before is kept.
	f.exec(`CREATE OR REPLACE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF nextval('public.fails') > 5 THEN RAISE EXCEPTION 'no' USING ERRCODE = 'XY000'; END IF;
			RETURN NULL;
		END $$`)
	list := ids("id-", 30_000)
	n, err := f.importIDs(only(list...))
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "XY000" || n.New != 20_000 || !strings.Contains(err.Error(), "the first 20000 are claimed") {
		t.Errorf("imported %+v, %v", n, err)
	}
	f.exec(`DROP TRIGGER fail ON dedupd.claims_test_1`)
	f.wantImport(only(list...), dedup.Imported{Read: 30_000, New: 10_000, Known: 20_000})
}

func TestImportRefusesWhatIsNoID(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for text, seq := range map[string]iter.Seq2[string, error]{
		"line 3 is empty": only("a", "b", "", "c"),
		"line 2 is longer than an id may be, id.max_bytes: 65536; nothing was claimed": only("a", strings.Repeat("x", 64<<10+1)),
		"the disk is gone; the first 20000 are claimed": func(yield func(string, error) bool) {
			for _, id := range ids("id-", 25_000) {
				if !yield(id, nil) {
					return
				}
			}
			yield("", errors.New("the disk is gone"))
		},
	} {
		if n, err := f.importIDs(seq); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%q: %+v, %v", text, n, err)
		}
	}
	if f.find("a").Found || !f.find("id-19999").Found || f.find("id-20000").Found {
		t.Error("claimed is not what was told")
	}
}

func (f *fixture) query(sql string) ([]string, int64, error) {
	f.t.Helper()
	var all []string
	estimate := int64(-1)
	for id, err := range f.Store.QueryIDs(f.t.Context(), sql, func(rows int64) { estimate = rows }) {
		if err != nil {
			return all, estimate, err
		}
		all = append(all, id)
	}
	return all, estimate, nil
}

func isOfQuery(err error) bool {
	var query *dedup.QueryError
	return errors.As(err, &query)
}

func TestIDsOfAQuery(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.exec(`CREATE TABLE public.orders AS SELECT n, 'order ' || n AS id, n::text::bytea AS raw, n::text::char(9) AS fixed, nullif(n, 3) AS hole FROM generate_series(1, 50000) n; ANALYZE public.orders`)
	all, estimate, err := f.query(`SELECT id, n FROM public.orders ORDER BY n;`)
	if err != nil || len(all) != 50_000 || all[0] != "order 1" || all[49_999] != "order 50000" || estimate != 50_000 {
		t.Errorf("%d ids, %d estimated, %v", len(all), estimate, err)
	}
	for sql, want := range map[string]string{
		`SELECT 7`: "7", `SELECT '6F1C2D3E-0000-4000-8000-000000000001'::uuid`: "6f1c2d3e-0000-4000-8000-000000000001", `VALUES ('a b')`: "a b",
		`WITH x AS (SELECT 1 AS y) SELECT y FROM x`: "1",
	} {
		if got, _, err := f.query(sql); err != nil || len(got) != 1 || got[0] != want {
			t.Errorf("%s: %q, %v", sql, got, err)
		}
	}
	for sql, text := range map[string]string{
		`SELECT raw FROM public.orders`:                           "bytea",
		`SELECT fixed FROM public.orders`:                         "character(n)",
		`SELECT hole FROM public.orders ORDER BY n`:               "row 3 is NULL",
		`SELECT FROM public.orders`:                               "no column",
		`SELECT x FROM public.orders`:                             "42703",
		`SELECT 1; SELECT 2`:                                      "42601",
		`SELECT 1 / (n - 30000) FROM public.orders`:               "22012",
		`DELETE FROM public.orders RETURNING id`:                  "25006",
		`SELECT pg_catalog.lo_create(0) FROM public.orders`:       "25006",
		`SELECT nextval('dedupd.audit_id_seq') FROM pg_namespace`: "25006",
	} {
		_, _, err := f.query(sql)
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", sql, err)
		}
		// What a row holds isn't the query's fault.
		if isOfQuery(err) != (text != "row 3 is NULL") {
			t.Errorf("%s: the query is at fault: %v", sql, isOfQuery(err))
		}
	}
	f.exec(`CREATE FUNCTION public.fail(code text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = code; END $$`)
	for code, want := range map[string]bool{
		"42P01": true, "42883": true, "22P02": true, "P0001": true, "54001": true, "0A000": true,
		"42501": false, "08006": false, "40P01": false, "53100": false, "55P03": false, "57014": false, "57P01": false, "58030": false,
		"25P03": false, "25P04": false, "HV00N": false, "XX000": false,
	} {
		if _, _, err := f.query(`SELECT public.fail('` + code + `')`); err == nil || !strings.Contains(err.Error(), code) || isOfQuery(err) != want {
			t.Errorf("%v: the query is at fault: %v, want %v", err, isOfQuery(err), want)
		}
	}
	// Who wants no more ends it at once, and the connection is free again.
	start := time.Now()
	for range 20 {
		for range f.Store.QueryIDs(t.Context(), `SELECT 1 FROM generate_series(1, 10000) a, generate_series(1, 10000) b`, func(int64) {}) {
			break
		}
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("it read on for %s", took)
	}
	f.wantImport(f.Store.QueryIDs(t.Context(), `SELECT id FROM public.orders`, func(int64) {}), dedup.Imported{Read: 50_000, New: 50_000})
}
