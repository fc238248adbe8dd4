package e2e

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"
)

// Three workers of one group, killed ten times and restarted one after the other
// while a producer sends and sends again: every id lands once, in the order of
// its lane, and the books account for every message.
func TestKafkaKills(t *testing.T) {
	needServices(t)
	t.Parallel()
	const (
		messages, duplicates = 200_000, 40_000
		partitions           = 4
		kills                = 10
		scope                = "e2e-kills"
	)
	rng := dice(t)
	db := newDatabase(t)
	db.exec(ordersTable)
	tp := newTopic(t, "e2e-kills", partitions)
	config := configFile(t, fmt.Sprintf("scope: %s\nsources:\n  - kafka: {brokers: [%q], topics: [%s]}\ndatabase:\n  url: %q\n%s%s",
		scope, tp.broker.Addr(), tp.name, db.url, ordersSink, rotating))
	f := newFleet(t, rng, 3, config)
	s := newSampler(db, tp, scope)

	plan, ids := newPlan(rng, messages, duplicates, partitions)
	// Slow enough to last until the faults are over, so that all of them hit work.
	var pace atomic.Int64
	pace.Store(1800)
	produced := make(chan error, 1)
	began := time.Now()
	go func() { produced <- tp.produceAll(plan, func() int { return int(pace.Load()) }) }()

	for n := 1; n <= kills; n++ {
		// A death makes the whole group wait for the dead one's session to end.
		// Half of the kills come while it is at work, the others at any moment.
		if n%2 == 1 {
			before := s.fetched()
			await(t, fmt.Sprintf("messages land before kill %d", n), time.Minute, func() error {
				f.mustLive()
				if s.fetched() == before && before < messages {
					return fmt.Errorf("still %d", before)
				}
				return nil
			})
		}
		f.pause(50*time.Millisecond, 1500*time.Millisecond)
		s.lose(f.killOne(n))
	}
	// A group that still has a dead member hands nothing over, so each restart
	// waits until there is none and all have lanes again.
	settled := func() {
		await(t, "a group of three with lanes", time.Minute, func() error {
			f.mustLive()
			members, err := tp.members(t.Context(), scope)
			if err != nil {
				return err
			}
			if members != len(f.workers) {
				return fmt.Errorf("%d members", members)
			}
			for _, w := range f.workers {
				if s.owned(w.Pid()) == 0 {
					return fmt.Errorf("%s has none", w.name)
				}
			}
			return nil
		})
	}
	settled()
	f.roll(s.lose, settled)
	t.Logf("%d kills and a rolling restart in %.0f s; %d of %d messages in the books", kills, time.Since(began).Seconds(), s.fetched(), messages)

	pace.Store(0)
	if err := <-produced; err != nil {
		t.Fatal("produce: ", err)
	}
	await(t, "everything landed", 2*time.Minute, func() error {
		f.mustLive()
		if n := s.fetched(); n < messages {
			return fmt.Errorf("%d of %d messages are in the books", n, messages)
		}
		return nil
	})
	t.Logf("%d messages in %.0f s, faults included", messages, time.Since(began).Seconds())
	tp.awaitGroup(scope, 20*time.Second)
	f.end()
	s.stop()
	s.judge()

	log, err := tp.rawLog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	byLane := db.audit(log, true)
	db.auditClaims(scope, ids)
	db.auditRotations(scope)
	lanes, sum := db.settledBooks(scope)
	for lane, entries := range log {
		p := lanes[lane]
		if end := int64(len(entries)); p.NextPosition != end || p.Fetched != end {
			t.Errorf("%s: %d messages in the log, %d fetched, and the next position is %d", lane, end, p.Fetched, p.NextPosition)
		}
		if p.Applied != byLane[lane] {
			t.Errorf("%s: the books say %d applied, the sink has %d rows of it", lane, p.Applied, byLane[lane])
		}
	}
	if sum.Fetched != messages || sum.Applied != int64(ids) || sum.Duplicates != duplicates || sum.Conflicts != 0 || sum.Dead != 0 || len(lanes) != partitions {
		t.Errorf("the books say %+v in %d lanes; want %d fetched, %d applied, %d duplicates", sum, len(lanes), messages, ids, duplicates)
	}
}
