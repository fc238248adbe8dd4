package balance

import (
	"context"
	"fmt"
	"testing"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/sinktest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// A sink in another module connects to its own Postgres; the rest is the same.
func TestSink(t *testing.T) {
	pool := pgtest.New(t).Pool(t)
	if _, err := pool.Exec(t.Context(), `CREATE TABLE public.balances (account text PRIMARY KEY, cents bigint NOT NULL, entries bigint NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	sinktest.Run(t, sinktest.Config{
		Pool: pool,
		New: func() sinks.Sink {
			s, err := New(func(into any) error {
				*into.(*Config) = Config{Table: "public.balances"}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			return s
		},
		Message: func(n int) message.Message {
			return message.Message{ID: fmt.Sprint(n), Value: fmt.Appendf(nil, `{"account": "a%d", "cents": %d}`, n%7, n)}
		},
		Poison: func() message.Message { return message.Message{ID: "poison", Value: []byte("not JSON")} },
		Count: func(ctx context.Context, db sinktest.Querier) (n int, err error) {
			err = db.QueryRow(ctx, `SELECT coalesce(sum(entries), 0) FROM public.balances`).Scan(&n)
			return n, err
		},
	})
}

func TestTableName(t *testing.T) {
	for _, name := range []string{"", "balances", ".balances", "public."} {
		if _, err := New(func(into any) error { into.(*Config).Table = name; return nil }); err == nil {
			t.Errorf("%q passes", name)
		}
	}
}
