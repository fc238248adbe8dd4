package dedup_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/lane"
)

// commitCutter cuts a connection in the moment of a COMMIT, a worker's or a
// replay's, and may then let no other through.
type commitCutter struct {
	armed atomic.Int32 // 1: before it reaches the server, 2: after
	down  atomic.Bool
	then  atomic.Pointer[func()] // what happens in that moment; nil: nothing
}

func (c *commitCutter) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if c.down.Load() {
		return nil, errCut
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &replayConn{Conn: conn, c: c, lost: make(chan struct{}, 1)}, nil
}

type replayConn struct {
	net.Conn
	c *commitCutter
	// cutting: whatever the server answers is lost, and lost says that it has answered. The
	// driver may read while it writes.
	cutting atomic.Bool
	lost    chan struct{}
}

func (c *replayConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if !c.cutting.Load() {
		return n, err
	}
	select {
	case c.lost <- struct{}{}:
	default:
	}
	return 0, errCut
}

func (c *replayConn) Write(b []byte) (int, error) {
	moves := bytes.Contains(b, []byte("dedupd_replayed")) || bytes.Contains(b, []byte("dedupd_advance"))
	if !moves || !bytes.Contains(b, []byte("dedupd_commit")) {
		return c.Conn.Write(b)
	}
	how := c.c.armed.Swap(0)
	if how == 0 {
		return c.Conn.Write(b)
	}
	n, err := len(b), error(nil)
	c.cutting.Store(true)
	if how == 2 {
		n, err = c.Conn.Write(b)
		// Wait for the answer, which shows that it is done, and lose it.
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		go func() { _, _ = c.Read(make([]byte, 1)) }()
		<-c.lost
	}
	_ = c.Conn.Close()
	if then := c.c.then.Load(); then != nil {
		(*then)()
	}
	return n, err
}

// TestReplayWhoseCommitIsLost cuts the connection before and after COMMIT reached the
// server. Half of the time nothing comes through after that, as if the process had died,
// and somebody starts it again.
func TestReplayWhoseCommitIsLost(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const deadLetters = 40
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch(values("m", deadLetters, "check")...))
	f.mend()
	broken, cut := f.attachBroken()
	for i, d := range f.deadLetters() {
		how, dies := int32(1+i%2), i%4 > 1
		ctx, cancel := context.WithCancel(t.Context())
		cut.then.Store(nil)
		if dies {
			cut.then.Store(new(func() {
				cut.down.Store(true)
				cancel()
			}))
		}
		cut.armed.Store(how)
		r, err := broken.Replay(ctx, "ann@host", d.ID)
		cancel()
		cut.down.Store(false)
		again := f.replay(d.ID).Outcome
		switch {
		case cut.armed.Load() != 0:
			t.Fatal("nothing was cut")
		case !dies && (err != nil || r.Outcome != "applied" || again != "gone"):
			t.Errorf("%d: %+v, %v, and then %s", i, r, err, again)
		case dies && how == 1 && (err == nil || again != "applied"),
			dies && how == 2 && (err == nil || again != "gone"):
			t.Errorf("%d died: %+v, %v, and then %s", i, r, err, again)
		}
	}
	f.wantOnce(ids("m", deadLetters)...)
	f.wantDead()
	f.wantBooks(l, books{applied: int64(deadLetters), next: int64(deadLetters)})
	if n := f.audits(); n != deadLetters {
		t.Errorf("%d lines of audit, want %d", n, deadLetters)
	}
}

// TestReplayWhoseCommitIsLostAndThenDiscarded must not pass for applied, since the
// dead letter is gone.
func TestReplayWhoseCommitIsLostAndThenDiscarded(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.handle(f.acquire("kafka", "orders/0").batch("a=check"))
	f.mend()
	id := f.deadLetters()[0].ID
	broken, cut := f.attachBroken()
	cut.then.Store(new(func() {
		// The server learns of the lost connection, and unlocks the dead letter.
		if _, err := f.Store.DiscardDeadLetters(t.Context(), "bob", []int64{id}, nil); err != nil {
			t.Error(err)
		}
	}))
	cut.armed.Store(1)
	if r := broken.replay(id); r.Outcome != dedup.ReplayGone {
		t.Errorf("%+v", r)
	}
	f.wantLanded()
}

// attachBroken is one more worker, whose connections can be cut.
func (f *fixture) attachBroken() (*fixture, *commitCutter) {
	f.t.Helper()
	t := f.t
	config, err := pgxpool.ParseConfig(f.db.URL)
	if err != nil {
		t.Fatal(err)
	}
	cut := &commitCutter{}
	config.MaxConns = 2
	config.ConnConfig.DialFunc = cut.dial
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	broken := attach(t, f.db)
	broken.Store = newStore(t, pool, "dedupd", "test")
	return broken, cut
}

// TestReplayInAllTheNoise has people replay, discard and forget at the same dead
// letters while workers meet the same ids and generations rotate. What is not
// forgotten has one effect at most, and the books balance.
func TestReplayInAllTheNoise(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const deadLetters, rounds = 120, 6
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch(values("m", deadLetters, "check")...))
	f.mend()
	numbers, err := f.Store.DeadLetterIDs(t.Context(), dedup.DeadLetterFilter{})
	if err != nil || len(numbers) != deadLetters {
		t.Fatal(len(numbers), err)
	}
	var all sync.WaitGroup
	for i := range 3 {
		person := attach(t, f.db)
		all.Go(func() {
			for _, n := range rand.Perm(deadLetters) {
				if _, err := person.Replay(t.Context(), fmt.Sprint("person ", i), numbers[n]); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range 2 {
		worker := attach(t, f.db)
		name := worker.acquire("kafka", fmt.Sprint("resends/", i))
		all.Go(func() {
			for range rounds {
				b := values("m", deadLetters, "check")
				rand.Shuffle(len(b), func(i, j int) { b[i], b[j] = b[j], b[i] })
				if err := worker.Handle(t.Context(), []lane.Batch{name.batch(b[:deadLetters/2]...)}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	keeper := attach(t, f.db)
	all.Go(func() {
		for range rounds {
			keeper.rotate()
		}
	})
	all.Go(func() {
		for n := 0; n < deadLetters; n += 10 {
			if _, err := keeper.Store.DiscardDeadLetters(t.Context(), "bob", numbers[n:n+2], nil); err != nil {
				t.Error(err)
			}
		}
	})
	all.Wait()
	f.wantDead()
	var rows, distinct, replays, discards, balance int
	if err := f.pool.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT id), (SELECT count(*) FROM dedupd.audit WHERE action = 'dlq replay'),
		(SELECT count(*) FROM dedupd.audit WHERE action = 'dlq discard'), (SELECT sum(applied) FROM dedupd.books) FROM public.rows`).Scan(&rows, &distinct, &replays, &discards, &balance); err != nil {
		t.Fatal(err)
	}
	if rows != distinct || rows != replays || replays+discards != deadLetters || balance != rows {
		t.Errorf("%d rows of %d ids, %d applied by the books; %d replays, %d discards of %d", rows, distinct, balance, replays, discards, deadLetters)
	}
	f.wantNoDeadlocks()
}
