package table

import (
	"crypto/rand"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
)

// BenchmarkWrite writes batches of three columns (uuid, jsonb of 220 bytes,
// timestamptz) into an empty table; the transaction is rolled back outside the
// clock. "prepared" is the part of it that runs in this process.
func BenchmarkWrite(b *testing.B) {
	pool := pgtest.New(b).Pool(b)
	exec(b, pool, `CREATE TABLE heap (id uuid, payload jsonb, at timestamptz); CREATE TABLE keyed (id uuid PRIMARY KEY, payload jsonb, at timestamptz);
		CREATE TABLE plain (id text, payload bytea, at timestamptz); CREATE TABLE there (LIKE keyed INCLUDING ALL)`)
	for _, c := range []struct {
		name   string
		config Config
	}{
		{"insert", Config{Name: "public.heap"}},
		{"insert with constraint", Config{Name: "public.keyed"}},
		{"insert with key", Config{Name: "public.keyed", Key: []string{"id"}}},
		{"upsert", Config{Name: "public.keyed", Mode: "upsert", Key: []string{"id"}}},
		{"upsert of rows that are there", Config{Name: "public.there", Mode: "upsert", Key: []string{"id"}}},
		{"update", Config{Name: "public.there", Mode: "update", Key: []string{"id"}, Expect: map[string]string{"at": "time"}}},
		{"insert text and bytea", Config{Name: "public.plain"}},
	} {
		c.config.Columns = map[string]string{"id": "id", "payload": "value", "at": "time"}
		for _, n := range []int{1, 100, 4000} {
			b.Run(fmt.Sprintf("%s/%d", c.name, n), func(b *testing.B) {
				s, msgs := build(b, c.config), benchMessages(n)
				if c.config.Name == "public.there" {
					adds := c.config
					adds.Mode, adds.Expect = "upsert", nil
					if err := write(b, pool, build(b, adds), msgs...); err != nil {
						b.Fatal(err)
					}
				}
				if err := prepare(b, pool, s); err != nil {
					b.Fatal(err)
				}
				b.ReportAllocs()
				for b.Loop() {
					b.StopTimer()
					tx, err := pool.Begin(b.Context())
					if err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
					if err := s.Write(b.Context(), tx, sinks.NewBatch(msgs)); err != nil {
						b.Fatal(err)
					}
					b.StopTimer()
					_ = tx.Rollback(b.Context())
					b.StartTimer()
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n)/1000, "µs/row")
			})
		}
	}
}

// BenchmarkUpsertOfParts writes batches of 4000 messages with ten columns, of which some lack
// one, to rows of which none, half or all are there.
func BenchmarkUpsertOfParts(b *testing.B) {
	const n = 4000
	pool := pgtest.New(b).Pool(b)
	exec(b, pool, `CREATE TABLE t (k text PRIMARY KEY, c1 text NOT NULL, c2 int DEFAULT 7, c3 text, c4 bigint, c5 timestamptz, c6 text, c7 numeric, c8 bool, c9 jsonb)`)
	s := build(b, Config{Name: "public.t", Mode: ModeUpsert, Key: []string{"k"}, Columns: map[string]string{
		"k": "id", "c1": "json:c1", "c2": "json:c2", "c3": "json:c3", "c4": "json:c4", "c5": "time", "c6": "json:c6", "c7": "json:c7", "c8": "json:c8", "c9": "value",
	}})
	if err := prepare(b, pool, s); err != nil {
		b.Fatal(err)
	}
	const whole = `{"c1":"a","c2":2,"c3":"some text","c4":44,"c6":"more text","c7":12.5,"c8":true}`
	for _, c := range []struct{ name, lacks string }{
		{"whole", ""}, {"one column lacks a default", `"c3":"some text",`}, {"one column has a default", `"c2":2,`},
	} {
		for _, there := range []int{0, 50, 100} {
			b.Run(fmt.Sprintf("%s/%d%% there", c.name, there), func(b *testing.B) {
				exec(b, pool, fmt.Sprintf(`TRUNCATE t; INSERT INTO t (k, c1) SELECT i, '' FROM generate_series(0, %d) AS i WHERE i %% 100 < %d; ANALYZE t`, n-1, there))
				msgs := make([]message.Message, n)
				for i := range msgs {
					text := whole
					if i%3 == 0 {
						text = strings.Replace(whole, c.lacks, "", 1)
					}
					msgs[i] = msg(fmt.Sprint(i), text)
				}
				for b.Loop() {
					tx, err := pool.Begin(b.Context())
					if err != nil {
						b.Fatal(err)
					}
					if err := s.Write(b.Context(), tx, sinks.NewBatch(msgs)); err != nil {
						b.Fatal(err)
					}
					b.StopTimer()
					_ = tx.Rollback(b.Context())
					b.StartTimer()
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n)/1000, "µs/row")
			})
		}
	}
}

// BenchmarkEncode is the part of a Write that runs in this process, without the
// driver's.
func BenchmarkEncode(b *testing.B) {
	pool := pgtest.New(b).Pool(b)
	exec(b, pool, `CREATE TABLE heap (id uuid, payload jsonb, at timestamptz, customer text)`)
	three := map[string]string{"id": "id", "payload": "value", "at": "time"}
	for _, c := range []struct {
		name    string
		columns map[string]string
		encode  func(*columns.Set, []message.Message) (*columns.Values, error)
	}{
		{"three columns", three, (*columns.Set).Encode},
		{"three columns, unread", three, (*columns.Set).EncodeUnread},
		{"with a path", map[string]string{"id": "id", "payload": "value", "at": "time", "customer": "json:customer"}, (*columns.Set).Encode},
	} {
		b.Run(c.name, func(b *testing.B) {
			s, msgs := build(b, Config{Name: "public.heap", Columns: c.columns}), benchMessages(4000)
			var p *plan
			if err := inTx(b, pool, func(tx pgx.Tx) (err error) { p, err = s.prepare(b.Context(), tx); return err }); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := c.encode(p.set, msgs); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(msgs)), "ns/row")
		})
	}
}

func benchMessages(n int) []message.Message {
	msgs := make([]message.Message, n)
	for i := range msgs {
		var u [16]byte
		_, _ = rand.Read(u[:])
		id := fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
		msgs[i] = msg(id, fmt.Sprintf(`{"order":{"id":"%s","items":[{"sku":"A-%d","qty":2,"price":12.50},{"sku":"B","qty":1,"price":3}]},"customer":"c-%d","note":"leave at the door","ok":true}`, id, i, i))
	}
	return msgs
}

// BenchmarkRowsThatSay writes batches of 4000 messages to rows that are there, and that say by
// their version or their history which messages they take. Of some batches, all or half are
// older than their rows; others have four messages of each row.
func BenchmarkRowsThatSay(b *testing.B) {
	const n = 4000
	pool := pgtest.New(b).Pool(b)
	columns := map[string]string{"k": "json:k", "v": "json:v", "text": "value"}
	configs := map[string]Config{
		"upsert":    {Mode: ModeUpsert, Absent: policy.AbsentNull},
		"versioned": {Mode: ModeVersioned, Version: "v"},
		"history":   {Mode: ModeUpsert, Absent: policy.AbsentNull, History: History{"ops", 20}},
	}
	for _, mode := range []string{"upsert", "versioned", "history"} {
		for _, c := range []struct {
			name     string
			keys, is int // one of so many messages is newer
		}{{"newer", n, 1}, {"half older", n, 2}, {"older", n, n + 1}, {"four of a row", n / 4, 1}} {
			b.Run(mode+"/"+c.name, func(b *testing.B) {
				exec(b, pool, fmt.Sprintf(`DROP TABLE IF EXISTS t; CREATE TABLE t (k int PRIMARY KEY, v bigint, text jsonb, ops text[]);
					INSERT INTO t SELECT i, 5, '{}', array['old'] FROM generate_series(0, %d) AS i; ANALYZE t`, n))
				config := configs[mode]
				config.Name, config.Key, config.Columns = "public.t", []string{"k"}, columns
				s := build(b, config)
				if err := prepare(b, pool, s); err != nil {
					b.Fatal(err)
				}
				msgs := make([]message.Message, n)
				for i := range msgs {
					id, v := "old", 1
					if (i+1)%c.is == 0 {
						id, v = fmt.Sprint(i), 6+i
					}
					msgs[i] = msg(id, fmt.Sprintf(`{"k":%d,"v":%d,"text":%q}`, i%c.keys, v, strings.Repeat("x", 150)))
				}
				for b.Loop() {
					tx, err := pool.Begin(b.Context())
					if err != nil {
						b.Fatal(err)
					}
					if err := s.Write(b.Context(), tx, sinks.NewBatch(msgs)); err != nil {
						b.Fatal(err)
					}
					b.StopTimer()
					_ = tx.Rollback(b.Context())
					b.StartTimer()
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n)/1000, "µs/row")
			})
		}
	}
}
