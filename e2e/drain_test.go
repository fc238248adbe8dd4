package e2e

import (
	"fmt"
	"syscall"
	"testing"
	"time"
)

// slow makes every transaction of the sink take that long in the database.
func (db *database) slow(seconds int) {
	db.t.Helper()
	db.exec(fmt.Sprintf(`
		CREATE OR REPLACE FUNCTION public.dawdle() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(%d); RETURN NULL; END';
		CREATE OR REPLACE TRIGGER dawdle BEFORE INSERT ON public.orders FOR EACH STATEMENT EXECUTE FUNCTION public.dawdle()`, seconds))
}

// awaitInFlight waits until a transaction of the sink is under way.
func (db *database) awaitInFlight() {
	db.t.Helper()
	await(db.t, "a transaction in flight", 30*time.Second, func() error {
		if one[int64](db, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'`) == 0 {
			return fmt.Errorf("no backend sleeps")
		}
		return nil
	})
}

// plain is a plan without duplicates, for one partition.
func plain(from, messages int) (plan []send) {
	for n := range messages {
		plan = append(plan, send{int32(from + n), 0})
	}
	return plan
}

func atOnce() int { return 0 }

// SIGTERM lets the transaction in hand come to its end, and the broker hears of
// it before the worker is gone.
func TestDrain(t *testing.T) {
	db := newDatabase(t)
	db.exec(ordersTable)
	db.slow(3)
	tp := newTopic(t, "e2e-drain", 1)
	if err := tp.produceAll(plain(0, 100), atOnce); err != nil {
		t.Fatal(err)
	}
	w := newWorker(t, "worker", kafkaConfig(t, "e2e-drain", tp, db.url))
	w.start()
	db.awaitInFlight()
	began := time.Now()
	w.Signal(syscall.SIGTERM)
	// It is neither ready nor gone while it drains.
	w.probe("/readyz", 503, 2*time.Second)
	w.probe("/livez", 200, time.Second)
	w.mustEnd(drainLimit)
	t.Logf("drained in %.1f s", time.Since(began).Seconds())
	rows := one[int64](db, "SELECT count(*) FROM public.orders")
	lanes, sum := db.settledBooks("e2e-drain")
	if rows == 0 || sum.Applied != rows {
		t.Fatalf("%d rows landed by the transaction in flight; the books say %+v", rows, sum)
	}
	committed, err := tp.broker.Committed(t.Context(), "e2e-drain", tp.name)
	if err != nil || committed[0] != lanes[tp.lane(0)].NextPosition {
		t.Errorf("the group's offset is %d, %v; the lane's next position is %d", committed[0], err, lanes[tp.lane(0)].NextPosition)
	}
}

// Who sends a second signal doesn't want to wait. What was in flight comes again.
func TestSecondSignal(t *testing.T) {
	db := newDatabase(t)
	db.exec(ordersTable)
	db.slow(6)
	tp := newTopic(t, "e2e-second", 1)
	if err := tp.produceAll(plain(0, 100), atOnce); err != nil {
		t.Fatal(err)
	}
	w := newWorker(t, "worker", kafkaConfig(t, "e2e-second", tp, db.url))
	w.start()
	db.awaitInFlight()
	w.Signal(syscall.SIGTERM)
	if w.Wait(500 * time.Millisecond) {
		t.Fatalf("the first signal has ended it at once, with code %d", w.Code())
	}
	began := time.Now()
	w.Signal(syscall.SIGTERM)
	if !w.Wait(5 * time.Second) {
		t.Fatal("still there 5 s after the second signal")
	}
	t.Logf("ended %s after the second signal", time.Since(began).Round(time.Millisecond))
	if code := w.Code(); code != 128+int(syscall.SIGTERM) {
		t.Errorf("exit code %d, want %d", code, 128+int(syscall.SIGTERM))
	}
	db.exec("DROP TRIGGER dawdle ON public.orders")
	w.start()
	db.awaitRows("public.orders", 100, 60*time.Second)
	w.drain(drainLimit)
	log, err := tp.rawLog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	db.audit(log, true)
}

// How long a lane stands still when its worker goes: hardly at all after SIGTERM;
// after SIGKILL the group waits for the session to end.
func TestTakeOver(t *testing.T) {
	db := newDatabase(t)
	db.exec(ordersTable)
	tp := newTopic(t, "e2e-takeover", 4)
	f := newFleet(t, dice(t), 2, kafkaConfig(t, "e2e-takeover", tp, db.url))
	s := newSampler(db, tp, "e2e-takeover")
	share := func() {
		t.Helper()
		await(t, "two lanes each", 45*time.Second, func() error {
			if a, b := s.owned(f.workers[0].Pid()), s.owned(f.workers[1].Pid()); a != 2 || b != 2 {
				return fmt.Errorf("%d and %d", a, b)
			}
			return nil
		})
	}
	sent := 0
	lands := func(within time.Duration) time.Duration {
		t.Helper()
		plan := plain(sent, 40)
		for i := range plan {
			plan[i].partition = int32(i % 4)
		}
		sent += len(plan)
		began := time.Now()
		if err := tp.produceAll(plan, atOnce); err != nil {
			t.Fatal(err)
		}
		db.awaitRows("public.orders", int64(sent), within)
		return time.Since(began)
	}
	share()
	t.Logf("from produced to landed: %s", lands(20*time.Second).Round(time.Millisecond))

	first, second := f.workers[0], f.workers[1]
	at := time.Now()
	s.lose("SIGTERM", first.Pid(), at)
	first.drain(drainLimit)
	lands(10 * time.Second)
	t.Logf("after SIGTERM all lanes go on within %.2f s", time.Since(at).Seconds())
	first.start()
	share()

	at = time.Now()
	second.Kill()
	s.lose("SIGKILL", second.Pid(), at)
	lands(20 * time.Second)
	t.Logf("after SIGKILL all lanes go on within %.2f s", time.Since(at).Seconds())
	second.start()
	share()
	f.end()
	s.stop()
	s.judge()
}
