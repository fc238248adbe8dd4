package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// die ends the goroutine that is at the sink, and with it the hand-over: the worker does
// nothing more, and its connection is lost. A process that is killed does the same.
func die(t *testing.T, f *fixture, values ...string) {
	f.sink.fail = func(m *message.Message) error {
		if slices.Contains(values, string(m.Value)) {
			runtime.Goexit()
		}
		return nil
	}
}

// survives hands batches over, and says whether there was an answer.
func (f *fixture) survives(batches ...lane.Batch) (err error, ok bool) {
	f.t.Helper()
	done := make(chan bool)
	go func() {
		answered := false
		defer func() { done <- answered }()
		err = f.Handle(f.t.Context(), batches)
		answered = true
	}()
	return err, <-done
}

// life is one more process of a worker on the same database.
func (f *fixture) life() *fixture {
	f.t.Helper()
	next := attach(f.t, f.db)
	next.sink, next.Sink = f.sink, f.Sink
	next.MaxMessages, next.MaxDeadShare, next.DeadWindow = f.MaxMessages, f.MaxDeadShare, f.DeadWindow
	if err := next.Start(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	return next
}

// livesUntil starts processes that acquire the lanes and hand over what is left of them,
// until one survives, and counts those that didn't.
func (f *fixture) livesUntil(most int, lanes map[string][]string) (ended int) {
	f.t.Helper()
	for ; ended <= most; ended++ {
		w := f.life()
		var batches []lane.Batch
		for name, ids := range lanes {
			l := w.acquire("kafka", name)
			if l.at < int64(len(ids)) {
				batches = append(batches, l.batch(ids[l.at:]...))
			}
		}
		err, ok := w.survives(batches...)
		if err != nil {
			f.t.Fatal(err)
		}
		if ok {
			return ended
		}
	}
	f.t.Fatalf("%d processes have ended", ended)
	return ended
}

func (f *fixture) recorded() (n int) {
	f.t.Helper()
	if err := f.pool.QueryRow(f.t.Context(), `SELECT count(*) FROM dedupd.attempts`).Scan(&n); err != nil {
		f.t.Fatal(err)
	}
	return n
}

func numbered(n int, others map[int]string) (ids []string) {
	for i := range n {
		ids = append(ids, fmt.Sprint("m", i)+others[i])
	}
	return ids
}

func TestMessageThatEndsTheProcess(t *testing.T) {
	t.Parallel()
	t.Run("is dead-lettered alone", deadlyMessageAlone)
	t.Run("and so is the next", deadlyMessagesInARow)
	t.Run("not those of other lanes that died with it", deadlyMessageBesideOtherLanes)
	t.Run("beside one that the sink refuses", deadlyMessageBesideRefusedOnes)
	t.Run("of a queue", deadlyMessageOfAQueue)
	t.Run("isn't given to the sink while the guard holds the lane", deadlyMessageOfAHeldLane)
}

func deadlyMessageAlone(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	die(t, f, "deadly")
	ended := f.livesUntil(5, map[string][]string{"orders/0": numbered(200, map[int]string{137: "=deadly"})})
	t.Logf("%d processes ended", ended)
	f.wantBooks(&ownedLane{Lane: message.Lane{Source: "kafka", Name: "orders/0"}}, books{applied: 199, dead: 1, next: 200})
	f.wantDead("poison@137")
	if landed := f.landed(); len(landed) != 199 || !slices.IsSortedFunc(landed, func(a, b string) int { return num(a) - num(b) }) {
		t.Errorf("the neighbours are missing or out of order: %q", landed)
	}
	if n := f.recorded(); n != 0 {
		t.Errorf("%d attempts stay on record", n)
	}
	deadLetters, err := f.Store.DeadLetters(t.Context(), dedup.DeadLetterFilter{Limit: 1})
	if err != nil || deadLetters[0].Attempts != 3 || !strings.Contains(deadLetters[0].Reason, "the worker ended 3 times while it applied this message, between 20") {
		t.Errorf("%v; after %d attempts, the reason: %q", err, deadLetters[0].Attempts, deadLetters[0].Reason)
	}
}

func deadlyMessagesInARow(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	die(t, f, "deadly")
	// In quarantine already, each one more takes three.
	ended := f.livesUntil(8, map[string][]string{"orders/0": numbered(200, map[int]string{37: "=deadly", 38: "=deadly"})})
	t.Logf("%d processes ended", ended)
	f.wantDead("poison@37", "poison@38")
	f.wantBooks(&ownedLane{Lane: message.Lane{Source: "kafka", Name: "orders/0"}}, books{applied: 198, dead: 2, next: 200})
}

func deadlyMessageBesideOtherLanes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	die(t, f, "deadly")
	lanes := map[string][]string{"a": {"a0", "a1"}, "m": {"m0", "m1=deadly", "m2"}, "z": {"z0", "z1"}}
	f.livesUntil(5, lanes)
	f.wantDead("poison@1")
	if landed := f.landed(); len(landed) != 6 {
		t.Errorf("landed %q", landed)
	}
}

func deadlyMessageBesideRefusedOnes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	die(t, f, "deadly")
	f.livesUntil(5, map[string][]string{"orders/0": numbered(80, map[int]string{3: "=check", 37: "=deadly", 79: "=check"})})
	f.wantDead("poison@3", "poison@37", "poison@79")
	if n := f.recorded(); n != 0 {
		t.Errorf("%d attempts stay on record", n)
	}
}

func deadlyMessageOfAQueue(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	die(t, f, "deadly")
	ids := numbered(150, map[int]string{77: "=deadly"})
	for deliveries := 1; ; deliveries++ {
		if deliveries > 7 {
			t.Fatal("six processes have ended, and so does the next")
		}
		w := f.life()
		b := w.acquireQueue("nats").batch(ids...)
		for i := range b.Messages {
			b.Messages[i].Deliveries = deliveries
		}
		// New messages come all the time.
		fresh := w.acquireQueue("nats").batchAt(int64(1000+deliveries), fmt.Sprint("new", deliveries))
		b.Messages = append(b.Messages, fresh.Messages...)
		if err, ok := w.survives(b); ok {
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("survived delivery %d", deliveries)
			break
		}
	}
	f.wantDead("poison@77")
	if landed := f.landed(); len(landed) < 150 || slices.Contains(landed, "m77") {
		t.Errorf("%d landed", len(landed))
	}
	if n := f.recorded(); n != 0 {
		t.Errorf("%d attempts stay on record", n)
	}
}

func deadlyMessageOfAHeldLane(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.MaxDeadShare = 0
	die(t, f, "deadly")
	for range 5 {
		w := f.life()
		if _, ok := w.survives(w.acquire("kafka", "orders/0").batch("a=deadly")); ok {
			t.Fatal("survived")
		}
	}
	for range 3 {
		w := f.life()
		err, ok := w.survives(w.acquire("kafka", "orders/0").batch("a=deadly"))
		if !ok {
			t.Fatal("the sink was given it once more")
		}
		wantHold(t, err, "max_share")
	}
	if n := f.recorded(); n != 1 {
		t.Errorf("%d attempts are on record", n)
	}
}

// quarantine acquires a lane like workers that crash each time.
func (f *fixture) quarantine(source, name string) *ownedLane {
	f.t.Helper()
	f.acquire(source, name)
	f.acquire(source, name)
	return f.acquire(source, name)
}

// writes are the sizes of the sink's calls.
type writes struct {
	t     *testing.T
	sizes []int
}

// want wants the sizes since the last time.
func (w *writes) want(want ...int) {
	w.t.Helper()
	if !slices.Equal(w.sizes, want) {
		w.t.Errorf("the sink was given %v messages at a time, want %v", w.sizes, want)
	}
	w.sizes = nil
}

func newCountedFixture(t *testing.T) (*fixture, *writes) {
	t.Helper()
	t.Parallel()
	f, w := newFixture(t), &writes{t: t}
	f.MaxMessages = 100
	f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
		w.sizes = append(w.sizes, len(msgs))
		return f.sink.Write(ctx, tx, sinks.NewBatch(msgs))
	})
	return f, w
}

func TestQuarantine(t *testing.T) {
	t.Parallel()
	t.Run("ends after a batch's worth", quarantineEndsAfterABatch)
	t.Run("ends when the lane is caught up", quarantineEndsOnceCaughtUp)
	t.Run("isn't for a lane that was released", noQuarantineAfterARelease)
	t.Run("begins although an earlier owner releases the lane", quarantineDespiteAnEarlierOwner)
	t.Run("isn't for a lane that moves", noQuarantineOfALaneThatMoves)
	t.Run("is for one lane alone", quarantineOfOneLane)
	t.Run("ends when an operator moves the lane", quarantineEndsByAnOperator)
}

func quarantineEndsAfterABatch(t *testing.T) {
	f, writes := newCountedFixture(t)
	l := f.quarantine("kafka", "orders/0")
	f.handle(l.batch(numbered(70, nil)...))
	writes.want(64, 6)
	f.handle(l.batch("a", "b", "c"))
	f.handle(l.batch(numbered(150, nil)[73:]...))
	writes.want(3, 64, 13)
	f.handle(l.batch(numbered(250, nil)[150:]...))
	writes.want(100)
	if n := f.recorded(); n != 0 {
		t.Errorf("%d attempts stay on record", n)
	}
}

func quarantineEndsOnceCaughtUp(t *testing.T) {
	f, writes := newCountedFixture(t)
	l := f.quarantine("kafka", "orders/0")
	if _, err := f.Store.Heartbeat(t.Context(), []lane.Heartbeat{{Lane: l.Lane, Epoch: l.Epoch, Next: l.Next, Checkpoint: l.Checkpoint}}); err != nil {
		t.Fatal(err)
	}
	f.handle(l.batch(numbered(70, nil)...))
	writes.want(70)
	f.acquire("kafka", "orders/0")
	f.handle(f.acquire("kafka", "orders/0").batch(numbered(140, nil)[70:]...))
	writes.want(70)
}

func noQuarantineAfterARelease(t *testing.T) {
	f, writes := newCountedFixture(t)
	var l *ownedLane
	for range 10 {
		l = f.acquire("kafka", "orders/0")
		if err := f.Store.Release(t.Context(), l.Lane, l.Epoch); err != nil {
			t.Fatal(err)
		}
	}
	f.handle(l.batch(numbered(70, nil)...))
	writes.want(70)
}

func quarantineDespiteAnEarlierOwner(t *testing.T) {
	f, writes := newCountedFixture(t)
	was := f.acquire("kafka", "orders/0")
	f.acquire("kafka", "orders/0")
	if err := f.Store.Release(t.Context(), was.Lane, was.Epoch); err != nil {
		t.Fatal(err)
	}
	f.handle(f.acquire("kafka", "orders/0").batch(numbered(70, nil)...))
	writes.want(64, 6)
}

func noQuarantineOfALaneThatMoves(t *testing.T) {
	f, writes := newCountedFixture(t)
	for i := range 5 {
		f.handle(f.acquire("kafka", "orders/0").batch(fmt.Sprint(i)))
	}
	writes.sizes = nil
	f.handle(f.acquire("kafka", "orders/0").batch(numbered(70, nil)...))
	writes.want(70)
}

func quarantineOfOneLane(t *testing.T) {
	f, writes := newCountedFixture(t)
	quarantined := f.quarantine("kafka", "b")
	f.handle(f.acquire("kafka", "a").batch("a1", "a2"), quarantined.batch("b1"), f.acquire("kafka", "c").batch("c1"))
	writes.want(3, 1)
	f.wantLanded("a1", "a2", "c1", "b1")
}

func quarantineEndsByAnOperator(t *testing.T) {
	f, writes := newCountedFixture(t)
	die(t, f, "deadly")
	for range 3 {
		w := f.life()
		w.survives(w.acquire("kafka", "orders/0").batch("a=deadly"))
	}
	if f.recorded() != 1 {
		t.Fatalf("%d attempts are on record", f.recorded())
	}
	if _, err := f.Store.SetPosition(t.Context(), "somebody", "kafka", "orders/0", 1, true); err != nil {
		t.Fatal(err)
	}
	w := f.life()
	l := w.acquire("kafka", "orders/0")
	if n := f.recorded(); n != 0 {
		t.Errorf("%d attempts stay on record", n)
	}
	writes.sizes = nil
	w.handle(l.batch("b"))
	w.wantLanded("b")
}

// What has an answer hasn't crashed the process, however often it fails.
func TestAnsweredAttempts(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]error{
		"transient": &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "40001", Message: "not now"},
		"hold":      errors.New("out of ink"),
		"cut off":   context.Canceled,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.sink.fail = func(*message.Message) error { return answer }
			for range 8 {
				w := f.life()
				if err, ok := w.survives(w.acquire("kafka", "orders/0").batch("a", "b")); err == nil || !ok {
					t.Fatalf("%v, %t", err, ok)
				}
			}
			for i := range 8 {
				w := f.life()
				b := delivered(w.acquireQueue("nats").batch("qa", "qb"), i+1)
				if err, ok := w.survives(b); err == nil || !ok || strings.Contains(err.Error(), "never acquired") {
					t.Fatalf("%v, %t", err, ok)
				}
			}
			if n := f.recorded(); n != 0 {
				t.Errorf("%d attempts stay on record", n)
			}
			f.sink.fail = nil
			w := f.life()
			w.handle(w.acquire("kafka", "orders/0").batch("a", "b"), w.acquireQueue("nats").batch("qa", "qb"))
			w.wantLanded("qa", "qb", "a", "b") // what is quarantined comes last
			w.wantDead()
		})
	}
}

// A database that goes away within an attempt keeps its record, and the worker can't
// clear that before the database is back. It crashed nobody: however often that happens,
// and whoever tries in between, only real crashes count.
func TestAnOutageIsNoCrash(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	type life struct {
		*fixture
		cut *commitCutter
	}
	var lives []life
	// outage has one more worker lose the database in the moment of COMMIT.
	outage := func(b lane.Batch) {
		t.Helper()
		w, cut := f.attachBroken()
		cut.then.Store(new(func() { cut.down.Store(true) }))
		cut.armed.Store(1)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		w.acquireQueue("nats")
		if err := w.Handle(ctx, []lane.Batch{delivered(b, 4)}); err == nil || cut.armed.Load() != 0 {
			t.Fatalf("the database was there: %v", err)
		}
		lives = append(lives, life{w, cut})
	}
	back := func() {
		t.Helper()
		for i, w := range lives {
			w.cut.down.Store(false)
			w.handle(w.acquireQueue("nats").batchAt(int64(100+i), fmt.Sprint("other", i)))
		}
		lives = nil
	}
	q := f.acquireQueue("nats")
	for range 2 { // each time as many as would make a dead letter
		for range 4 {
			outage(q.batchAt(7, "good"))
		}
		if n := f.recorded(); n != 1 {
			t.Fatalf("%d attempts are on record", n)
		}
		back()
		if n := f.recorded(); n != 0 {
			t.Fatalf("%d attempts stay on record", n)
		}
	}

	// One that really crashed a worker, between two outages, is counted as one.
	outage(q.batchAt(7, "good"))
	die(t, f, "v")
	dead := f.life()
	dead.acquireQueue("nats")
	if _, ok := dead.survives(delivered(q.batchAt(7, "good"), 5)); ok {
		t.Fatal("survived")
	}
	f.sink.fail = nil
	back()
	var tries int
	if err := f.pool.QueryRow(t.Context(), `SELECT tries FROM dedupd.attempts`).Scan(&tries); err != nil || tries != 1 {
		t.Errorf("%d tries, %v; want the one that ended a worker", tries, err)
	}
	w := f.life()
	w.acquireQueue("nats")
	w.handle(delivered(q.batchAt(7, "good"), 6))
	f.wantDead()
	if !slices.Contains(f.landed(), "good") {
		t.Errorf("landed: %q", f.landed())
	}
}

// A sink that returns after its worker was given up has given no answer.
func TestAnswerThatComesTooLate(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.quarantine("kafka", "orders/0")
	f.sink.fail = func(*message.Message) error {
		time.Sleep(5500 * time.Millisecond)
		return context.DeadlineExceeded
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := f.Handle(ctx, []lane.Batch{l.batch("a")}); err == nil {
		t.Fatal("no error")
	}
	if n := f.recorded(); n != 1 {
		t.Errorf("%d attempts are on record", n)
	}
	// The same process goes on after all: that one doesn't count.
	f.sink.fail = func(*message.Message) error { runtime.Goexit(); return nil }
	l.at = 0
	f.survives(l.batch("a"))
	var tries int
	if err := f.pool.QueryRow(t.Context(), `SELECT tries FROM dedupd.attempts`).Scan(&tries); err != nil || tries != 1 {
		t.Errorf("%d tries, %v", tries, err)
	}
}

// An attempt of a worker that lost the lane says nothing about the lane.
func TestAttemptOfAZombie(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	die(t, f, "deadly")
	zombie := f.quarantine("kafka", "orders/0")
	owner := f.life()
	mine := owner.acquire("kafka", "orders/0")
	if _, ok := owner.survives(mine.batch("a=deadly")); ok {
		t.Fatal("survived")
	}
	f.sink.fail = nil
	if err := f.Store.RecordAttempt(t.Context(), zombie.batchAt(0, "a=deadly")); err != nil {
		t.Fatal(err)
	}
	err := f.Handle(t.Context(), []lane.Batch{zombie.batch("a=deadly")})
	if fenced := (*lane.FencedError)(nil); !errors.As(err, &fenced) {
		t.Errorf("the zombie's hand-over: %v", err)
	}
	var tries int
	if err := f.pool.QueryRow(t.Context(), `SELECT tries FROM dedupd.attempts`).Scan(&tries); err != nil || tries != 1 {
		t.Errorf("%d tries, %v", tries, err)
	}
}

// While a message is tried that may end the process, nothing else of the process is at
// the sink: it might be what ends it.
func TestAttemptsAreAlone(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	quarantined, other := f.quarantine("kafka", "a"), f.acquire("kafka", "b")
	var inside, together atomic.Int32
	f.Sink = sinkFunc(func(ctx context.Context, tx sinks.Tx, msgs []message.Message) error {
		n := inside.Add(1)
		defer inside.Add(-1)
		time.Sleep(5 * time.Millisecond)
		if msgs[0].Position.Lane == quarantined.Lane && (n > 1 || inside.Load() > 1) {
			together.Add(1)
		}
		return f.sink.Write(ctx, tx, sinks.NewBatch(msgs))
	})
	done := make(chan error)
	go func() {
		for i := range 20 {
			if err := f.Handle(t.Context(), []lane.Batch{other.batch(fmt.Sprint("b", i))}); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for i := range 20 {
		f.handle(quarantined.batch(fmt.Sprint("a", i)))
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if n := together.Load(); n > 0 {
		t.Errorf("%d attempts were not alone", n)
	}
	if n := len(f.landed()); n != 40 {
		t.Errorf("%d landed", n)
	}
}

// The guard against many dead letters knows those that other processes wrote.
func TestGuardSurvivesRestarts(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.MaxDeadShare, f.DeadWindow = 0.1, 100
	f = f.life()
	// Two batches of a queue share its row.
	q := f.acquireQueue("nats")
	f.handle(q.batch("qa", "", "qb"), q.batch("", "qc"))
	for i := range 10 {
		w := f.life()
		w.handle(w.acquire("kafka", "orders/0").batch(fmt.Sprint(i), ""))
	}
	w := f.life()
	l := w.acquire("kafka", "orders/0")
	wantHold(t, w.Handle(t.Context(), []lane.Batch{l.batch("a", "")}), "11 of the last 22 messages")
	for i := range 8 {
		w := f.life()
		w.acquireQueue("nats")
		w.handle(q.batch("", fmt.Sprint("q", i)))
	}
	w = f.life()
	w.acquireQueue("nats")
	wantHold(t, w.Handle(t.Context(), []lane.Batch{q.batch("")}), "max_share")
	// Good ones push them out of the window.
	w = f.life()
	l = w.acquire("kafka", "orders/0")
	w.handle(l.batch(numbered(90, nil)...))
	w = f.life()
	l = w.acquire("kafka", "orders/0")
	w.handle(l.batch("", "", "", "", "", ""))
	wantHold(t, w.Handle(t.Context(), []lane.Batch{l.batch("", "", "", "", "", "")}), "max_share")
	w.wantBooks(l, books{applied: 100, dead: 16, next: 116})
	if dead := one[[]int64](w, `SELECT recent_dead FROM dedupd.lanes WHERE lane = 'orders/0'`); len(dead) > 10 || !slices.IsSorted(dead) || dead[len(dead)-1] != 116 {
		t.Errorf("the row remembers %v", dead)
	}
}

func one[T any](f *fixture, sql string) (v T) {
	f.t.Helper()
	if err := f.pool.QueryRow(f.t.Context(), sql).Scan(&v); err != nil {
		f.t.Fatal(err)
	}
	return v
}

// TestAcquiringMeetsAMove acquires a lane while its last owner's transaction, which has
// cleared its attempts, is about to move it: the one waits for the other.
func TestAcquiringMeetsAMove(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a", "b"))
	f.exec(`INSERT INTO dedupd.attempts (lane, position, worker) SELECT id, 0, gen_random_uuid() FROM dedupd.lanes`)
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), `DELETE FROM dedupd.attempts`); err != nil {
		t.Fatal(err)
	}
	assigned := make(chan error, 1)
	go func() {
		_, err := f.Store.Acquire(t.Context(), lane.Acquire{Lane: l.Lane, Ordered: true, Committed: -1})
		assigned <- err
	}()
	f.awaitLock()
	if _, err := tx.Exec(t.Context(), `UPDATE dedupd.lanes SET updated_at = now()`); err != nil {
		t.Fatalf("the lane's row, while it is acquired: %v", err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-assigned; err != nil {
		t.Fatal(err)
	}
	var left int
	if err := f.pool.QueryRow(t.Context(), `SELECT count(*) FROM dedupd.attempts`).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d records are left, %v", left, err)
	}
}
