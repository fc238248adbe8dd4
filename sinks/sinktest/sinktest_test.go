package sinktest

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// honest is a sink as simple as can be that keeps every promise.
type honest struct{}

const insert = "INSERT INTO public.effects (id, n) VALUES ($1, $2)"

func (honest) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	msgs := batch.Messages()
	for i := range msgs {
		if _, err := tx.Exec(ctx, insert, msgs[i].ID, string(msgs[i].Value)); err != nil {
			return fmt.Errorf("write %d: %w", i, err)
		}
	}
	return nil
}

func (honest) Prepare(ctx context.Context, tx sinks.Tx) error {
	_, err := tx.Exec(ctx, "SELECT 1 FROM public.effects LIMIT 1")
	return err
}

// sinkFunc is a sink that breaks one promise.
type sinkFunc func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error

// staleSink calls a message stale that it has written.
type staleSink struct{ honest }

func (s staleSink) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	batch.Outcome(0, sinks.Stale)
	return s.honest.Write(ctx, tx, batch)
}

// resultSink gives results.
type resultSink struct {
	honest
	result func(i int) []byte
}

func (s resultSink) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	for i := range batch.Messages() {
		if r := s.result(i); r != nil {
			batch.Result(i, r)
		}
	}
	return s.honest.Write(ctx, tx, batch)
}

func (f sinkFunc) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	msgs := batch.Messages()
	return f(ctx, tx, msgs)
}

func config(t testing.TB) Config {
	pool := pgtest.New(t).Pool(t)
	if pool.Config().MaxConns < 6 {
		c := pool.Config()
		c.MaxConns = 6
		var err error
		if pool, err = pgxpool.NewWithConfig(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
	}
	if _, err := pool.Exec(t.Context(), `CREATE TABLE public.effects (id text, n int)`); err != nil {
		t.Fatal(err)
	}
	return Config{
		Pool:  pool,
		New:   func() sinks.Sink { return honest{} },
		Count: Rows("public.effects"),
		Message: func(n int) message.Message {
			return message.Message{
				ID: fmt.Sprintf("id-%d", n), Value: []byte(fmt.Sprint(n)), Key: []byte{},
				Headers: []message.Header{{Key: "h", Value: []byte("v")}}, Time: time.Unix(int64(n), 0),
			}
		},
		Poison:  func() message.Message { return message.Message{ID: "poison", Value: []byte("not a number")} },
		Timeout: 2 * time.Second,
	}
}

func TestHonestSinkPasses(t *testing.T) {
	t.Parallel()
	Run(t, config(t))
}

// brokenSink breaks a rule, which says so.
type brokenSink struct {
	rule string
	make func(pool *pgxpool.Pool) sinks.Sink
	says string
}

var writeHonestly = honest{}.Write

var brokenSinks = map[string]brokenSink{
	"own connection": {rule: "WritesWithinTheTransaction", make: func(pool *pgxpool.Pool) sinks.Sink {
		return sinkFunc(func(ctx context.Context, _ sinks.Tx, msgs []message.Message) error {
			return writeHonestly(ctx, poolTx{pool}, sinks.NewBatch(msgs))
		})
	}, says: "before the commit, seen from outside"},
	"commits": {rule: "LeavesTheTransactionOpen", make: func(*pgxpool.Pool) sinks.Sink {
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			if err := writeHonestly(ctx, tx, sinks.NewBatch(msgs)); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "COMMIT AND CHAIN")
			return err
		})
	}, says: "ended the transaction"},
	"commits and is seen": {rule: "WritesWithinTheTransaction", make: func(*pgxpool.Pool) sinks.Sink {
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			if err := writeHonestly(ctx, tx, sinks.NewBatch(msgs)); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "COMMIT AND CHAIN")
			return err
		})
	}, says: "after the rollback"},
	"leaves some out": {rule: "AllOfABatchOrAnError", make: func(*pgxpool.Pool) sinks.Sink {
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			return writeHonestly(ctx, tx, sinks.NewBatch(msgs[:min(len(msgs), 500)]))
		})
	}, says: "503 effects are there, want 1003"},
	"says stale": {rule: "SaysWhatItWrote", make: func(*pgxpool.Pool) sinks.Sink { return staleSink{} }, says: "says that it wrote 4 of 5"},
	"remembers": {rule: "WritesAgainAfterARollback", make: func(*pgxpool.Pool) sinks.Sink {
		var seen sync.Map
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			for i := range msgs {
				if _, ok := seen.LoadOrStore(msgs[i].ID, true); !ok {
					if err := writeHonestly(ctx, tx, sinks.NewBatch(msgs[i:i+1])); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}, says: "0 effects"},
	"gives a result once": {rule: "GivesResultsThatAreKept", make: func(*pgxpool.Pool) sinks.Sink {
		given := 0
		return resultSink{result: func(int) []byte {
			if given++; given > 15 {
				return nil
			}
			return []byte("done")
		}}
	}, says: "message 5 has a result: true; and when it is written again after a rollback: false"},
	"gives too large a result": {rule: "GivesResultsThatAreKept", make: func(*pgxpool.Pool) sinks.Sink {
		return resultSink{result: func(i int) []byte {
			if i < 3 {
				return make([]byte, sinks.MaxResult)
			}
			return make([]byte, sinks.MaxResult+1)
		}}
	}, says: "the result of message 3 has 65537 bytes"},
	"swallows poison": {rule: "NamesThePoison", make: func(*pgxpool.Pool) sinks.Sink {
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			for i := range msgs {
				if msgs[i].ID != "poison" {
					if err := writeHonestly(ctx, tx, sinks.NewBatch(msgs[i:i+1])); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}, says: "says that it is written"},
	"hides poison": {rule: "NamesThePoison", make: func(*pgxpool.Pool) sinks.Sink {
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			if err := writeHonestly(ctx, tx, sinks.NewBatch(msgs)); err != nil {
				return fmt.Errorf("it failed: %v", err) // %v, not %w
			}
			return nil
		})
	}, says: "tried for ever"},
	"hangs on poison": {rule: "NamesThePoison", make: func(*pgxpool.Pool) sinks.Sink {
		return sinkFunc(func(_ context.Context, _ sinks.Tx, msgs []message.Message) error {
			if msgs[0].ID == "poison" {
				select {} // for ever
			}
			return sinks.Permanent(fmt.Errorf("bad"))
		})
	}, says: "hangs"},
	"blames another": {rule: "NamesThePoison", make: func(*pgxpool.Pool) sinks.Sink {
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			return sinks.PermanentAt(0, writeHonestly(ctx, tx, sinks.NewBatch(msgs)))
		})
	}, says: "names message 0"},
	"shares its transaction": {rule: "TransactionsAreApart", make: func(*pgxpool.Pool) sinks.Sink {
		var first sinks.Tx
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			if first == nil {
				first = tx
			}
			return writeHonestly(ctx, first, sinks.NewBatch(msgs))
		})
	}, says: "in the first of two transactions: 7"},
	"one at a time": {rule: "ManyWriteAtATime", make: func(*pgxpool.Pool) sinks.Sink {
		var mu sync.Mutex
		var buf []message.Message // shared, though each call has its own
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			mu.Lock()
			buf = append(buf[:0], msgs...)
			mine := buf
			mu.Unlock()
			time.Sleep(time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			seen := map[string]bool{}
			for i := range msgs {
				if mine[i].ID != msgs[i].ID || seen[mine[i].ID] {
					return fmt.Errorf("another batch overwrote message %d", i)
				}
			}
			return writeHonestly(ctx, tx, sinks.NewBatch(msgs))
		})
	}, says: "overwrote"},
	"own context": {rule: "EndsWithItsContext", make: func(*pgxpool.Pool) sinks.Sink {
		return sinkFunc(func(_ context.Context, tx sinks.Tx, msgs []message.Message) error {
			return writeHonestly(context.Background(), tx, sinks.NewBatch(msgs))
		})
	}, says: "doesn't end with its context"},
	"succeeds after the end": {rule: "EndsWithItsContext", make: func(*pgxpool.Pool) sinks.Sink {
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			_ = writeHonestly(ctx, tx, sinks.NewBatch(msgs))
			return nil
		})
	}, says: "context that has ended says that all is written"},
	"changes bytes": {rule: "LeavesMessagesAlone", make: func(*pgxpool.Pool) sinks.Sink {
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			err := writeHonestly(ctx, tx, sinks.NewBatch(msgs))
			msgs[2].Headers[0].Value[0] = 'X'
			return err
		})
	}, says: "changed message 2"},
	"sorts": {rule: "LeavesMessagesAlone", make: func(*pgxpool.Pool) sinks.Sink {
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			msgs[0], msgs[1] = msgs[1], msgs[0]
			return writeHonestly(ctx, tx, sinks.NewBatch(msgs))
		})
	}, says: "changed the order"},
	"keeps": {rule: "LeavesMessagesAlone", make: func(*pgxpool.Pool) sinks.Sink {
		var kept []message.Message
		return sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
			late := kept
			kept = msgs[len(msgs)-1:]
			return writeHonestly(ctx, tx, sinks.NewBatch(append(late[:len(late):len(late)], msgs[:len(msgs)-1]...)))
		})
	}, says: "after the commit: 19"},
	"prepares once": {rule: "PreparesMoreThanOnce", make: func(*pgxpool.Pool) sinks.Sink {
		return &preparesOnce{}
	}, says: "Prepare: "},
}

func TestEveryRuleFindsASinkThatBreaksIt(t *testing.T) {
	t.Parallel()
	for name, bad := range brokenSinks {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := config(t)
			c.New = func() sinks.Sink { return bad.make(c.Pool) }
			said := record(t, c, bad.rule)
			if !strings.Contains(said, bad.says) {
				t.Errorf("the rule %s says %q, want something with %q", bad.rule, said, bad.says)
			}
		})
	}
}

type preparesOnce struct {
	honest
	sync.Once
}

func (p *preparesOnce) Prepare(ctx context.Context, tx sinks.Tx) error {
	err := fmt.Errorf("already prepared")
	p.Do(func() { err = p.honest.Prepare(ctx, tx) })
	return err
}

// poolTx makes a pool look like a transaction.
type poolTx struct{ *pgxpool.Pool }

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	if err := (Config{}).check(); err == nil {
		t.Error("an empty Config is taken")
	}
}

// recorder is a testing.TB that keeps what a failing test says.
type recorder struct {
	testing.TB
	mu       sync.Mutex
	said     []string
	cleanups []func()
	ctx      context.Context
}

func (r *recorder) Helper()                  {}
func (r *recorder) Context() context.Context { return r.ctx }
func (r *recorder) Cleanup(f func())         { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said = append(r.said, fmt.Sprintf(format, args...))
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit() // of the goroutine that record started
}
func (r *recorder) Fatal(args ...any) { r.Fatalf("%s", fmt.Sprint(args...)) }

// record runs one rule and gives what it complains of.
func record(t *testing.T, c Config, name string) string {
	t.Helper()
	r := &recorder{ctx: t.Context()}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, rule := range rules {
			if rule.name == name {
				runRule(r, c, rule)
				return
			}
		}
		r.Errorf("there is no rule %s", name)
	}()
	<-done
	for i := len(r.cleanups) - 1; i >= 0; i-- {
		r.cleanups[i]()
	}
	return strings.Join(r.said, "\n")
}
