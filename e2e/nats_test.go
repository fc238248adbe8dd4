package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Three workers share a JetStream durable and are killed again and again: what
// they had in hand comes again to the others, and lands once all the same.
func TestNATSKills(t *testing.T) {
	needServices(t)
	t.Parallel()
	const (
		messages, duplicates = 200_000, 40_000
		kills                = 10
		scope                = "e2e-queue"
		lane                 = "queue"
	)
	rng := dice(t)
	db := newDatabase(t)
	db.exec(ordersTable)
	st := newStream(t, "ORDERS")
	config := configFile(t, fmt.Sprintf("scope: %s\nsources:\n  - nats: {servers: [%q], stream: %s}\ndatabase:\n  url: %q\n%s%s",
		scope, st.url, st.name, db.url, ordersSink, rotating))
	f := newFleet(t, rng, 3, config)
	floor := watchFloor(db, st, scope)

	plan, ids := newPlan(rng, messages, duplicates, 4)
	var pace atomic.Int64
	pace.Store(2500)
	produced := make(chan error, 1)
	began := time.Now()
	go func() { produced <- st.publishAll(plan, func() int { return int(pace.Load()) }) }()

	for n := 1; n <= kills; n++ {
		f.pause(500*time.Millisecond, 3*time.Second)
		f.killOne(n)
	}
	killed := time.Now()
	f.roll(func(string, int, time.Time) {}, func() { f.pause(100*time.Millisecond, 2*time.Second) })
	t.Logf("%d kills and a rolling restart in %.0f s", kills, time.Since(began).Seconds())
	pace.Store(0)
	if err := <-produced; err != nil {
		t.Fatal("publish: ", err)
	}
	// What a killed worker had in hand comes again after the durable's ack wait,
	// ten seconds.
	await(t, "the durable is empty", time.Minute, func() error {
		f.mustLive()
		info, err := st.durable(t.Context(), scope)
		switch {
		case err != nil:
			return err
		case info == nil:
			return fmt.Errorf("there is no durable")
		case info.NumPending != 0 || info.NumAckPending != 0:
			return fmt.Errorf("%d messages are pending, %d acknowledgements", info.NumPending, info.NumAckPending)
		case info.AckFloor.Stream != messages:
			return fmt.Errorf("the ack floor is %d", info.AckFloor.Stream)
		}
		return nil
	})
	t.Logf("%d messages in %.0f s, faults included; settled %.0f s after the last kill", messages, time.Since(began).Seconds(), time.Since(killed).Seconds())
	f.end()
	floor.judge()

	log, err := st.rawLog(t.Context(), lane)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(log[lane]) - 1; n != messages {
		t.Errorf("%d messages in the stream, want %d", n, messages)
	}
	byLane := db.audit(log, false)
	db.auditClaims(scope, ids)
	db.auditRotations(scope)
	lanes, sum := db.settledBooks(scope)
	// What was delivered again after it was durable is fetched once more. It counts
	// as a redelivery where it was the copy that landed, else as the resend it is.
	if sum.Fetched < messages+sum.Redelivered || sum.Duplicates != sum.Fetched-int64(ids) || sum.Applied != int64(ids) ||
		sum.Applied != byLane[lane] || sum.Conflicts != 0 || sum.Dead != 0 || len(lanes) != 1 {
		t.Errorf("the books say %+v in %d lanes, and %d rows landed; want %d applied of %d messages", sum, len(lanes), byLane[lane], ids, messages)
	}
	t.Logf("%d messages were delivered again after they were durable", sum.Fetched-messages)
}

// floorWatch proves that the server is never told more than what is durable: all
// up to the ack floor must be in the sink when it is looked at afterwards.
type floorWatch struct {
	t       *testing.T
	quit    chan struct{}
	ended   chan struct{}
	samples int
	checked uint64
	ahead   []string
	failed  error
}

func watchFloor(db *database, st *stream, durable string) *floorWatch {
	w := &floorWatch{t: db.t, quit: make(chan struct{}), ended: make(chan struct{})}
	go func() {
		defer close(w.ended)
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if err := w.sample(db, st, durable); err != nil {
					w.failed = err
				}
			case <-w.quit:
				return
			case <-db.t.Context().Done():
				return
			}
		}
	}()
	return w
}

func (w *floorWatch) sample(db *database, st *stream, durable string) error {
	ctx, cancel := context.WithTimeout(w.t.Context(), 5*time.Second)
	defer cancel()
	info, err := st.durable(ctx, durable)
	if err != nil || info == nil {
		return err
	}
	acked := st.known(info.AckFloor.Stream)
	if uint64(len(acked)) > w.checked {
		var missing []string
		err := db.pool.QueryRow(ctx, `SELECT array_agg(id) FROM unnest($1::text[]) AS acked (id)
			WHERE NOT EXISTS (SELECT FROM public.orders o WHERE o.id = acked.id)`, acked[w.checked:]).Scan(&missing)
		if err != nil {
			return err
		}
		w.ahead = append(w.ahead, missing...)
		w.checked = uint64(len(acked))
	}
	w.samples++
	return nil
}

func (w *floorWatch) judge() {
	w.t.Helper()
	close(w.quit)
	<-w.ended
	for i, id := range w.ahead {
		if i < 5 {
			w.t.Errorf("%s was acknowledged before it was durable", id)
		}
	}
	if w.samples < 20 || w.failed != nil {
		w.t.Errorf("%d samples of the ack floor; failed, at last: %v", w.samples, w.failed)
	}
}

// A stream that deletes what is acknowledged can't give it back after a failover:
// without a standby it is refused, unless the loss is accepted.
func TestWorkQueueIsRefused(t *testing.T) {
	db := newDatabase(t)
	db.exec(ordersTable)
	st := newStream(t, "PLAIN")
	if _, err := st.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "JOBS", Subjects: []string{"JOBS.>"}, Retention: jetstream.WorkQueuePolicy}); err != nil {
		t.Fatal(err)
	}
	config := configFile(t, fmt.Sprintf("scope: e2e-jobs\nsources:\n  - nats: {servers: [%q], stream: JOBS}\ndatabase:\n  url: %q\n%s", st.url, db.url, ordersSink))
	r := command(t, nil, "run", "-c", config, "--until-idle", "1s")
	if r.code != 3 || !strings.Contains(r.stderr, "stream JOBS deletes what is acknowledged") || !strings.Contains(r.stderr, "--accept-loss-on-failover") {
		t.Errorf("exit code %d, want 3; stderr:\n%s", r.code, r.stderr)
	}
	if r := command(t, nil, "run", "-c", config, "--until-idle", "1s", "--accept-loss-on-failover"); r.code != 0 {
		t.Errorf("exit code %d though the loss is accepted; stderr:\n%s", r.code, r.stderr)
	}
}
