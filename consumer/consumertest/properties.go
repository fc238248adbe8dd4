package consumertest

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

func testEverything(f *fixture) {
	f.produce(f.Messages / 2)
	r := f.start()
	f.produce(f.Messages / 2)
	f.all()
	f.acked()
	f.eventually("readiness", func() bool { return r.worker.Ready() == nil })
	f.stop(r)
	if handled, _, _ := f.store.Counts(); handled != f.produced {
		f.Errorf("%d messages were handed over for %d records, though nothing failed", handled, f.produced)
	}
}

func testAckAfterCommit(f *fixture) {
	release := f.store.Hold()
	defer release()
	f.produce(100)
	r := f.start()
	f.eventually("a hand-over", func() bool { _, _, calls := f.store.Counts(); return calls > 0 })
	for range 20 {
		if n := f.sub.Acked(f.T); n > 0 {
			f.Fatalf("%d records are done for the broker, none in the store", n)
		}
		time.Sleep(10 * time.Millisecond)
	}
	release()
	f.store.Delay(time.Millisecond)
	for n := 0; n < f.produced; {
		n = f.sub.Acked(f.T) // first: what the store has can only have grown since
		if effects := len(f.store.Effects()); n > effects {
			f.Fatalf("%d records are done for the broker, %d in the store", n, effects)
		}
		if f.ctx.Err() != nil {
			f.Fatalf("only %d records are done for the broker", n)
		}
		time.Sleep(time.Millisecond)
	}
	f.all()
	f.stop(r)
}

var errTransient = errors.New("the connection was lost")

func testTransient(f *fixture) {
	f.produce(f.Messages / 2)
	f.store.FailBefore(5, errTransient)
	r := f.start()
	f.eventually("some effects", func() bool { return len(f.store.Effects()) > 0 })
	f.store.FailBefore(3, errTransient)
	f.produce(f.Messages / 2)
	f.all()
	f.acked()
	f.stop(r)
}

func testFailedIsNotAcked(f *fixture) {
	held := f.store.Hold() // until all lanes have something at hand
	defer held()
	const forEver = 1_000_000
	f.store.FailBefore(forEver, errTransient)
	f.produce(f.Messages)
	r := f.start(func(w *consumer.Worker) { w.Writers = 2 })
	calls := func(n int) {
		f.Helper()
		_, _, before := f.store.Counts()
		f.eventually("more hand-overs", func() bool { _, _, all := f.store.Counts(); return all >= before+n })
	}
	none := func(of string) {
		f.Helper()
		for range 20 {
			if n := f.sub.Acked(f.T); n > 0 {
				f.Fatalf("%d records are done for the broker after %s, none in the store", n, of)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	f.eventually("a hand-over", func() bool { _, _, all := f.store.Counts(); return all > 0 })
	held()
	calls(3)
	none("transient errors")
	f.store.Heal()
	f.store.FailBefore(forEver, &lane.HoldError{Lane: f.store.Lanes()[0], Err: errors.New("the table is missing")})
	calls(2)
	none("holds of one lane")
	f.store.Heal()
	f.all()
	f.acked()
	f.stop(r)
}

func testAmbiguous(f *fixture) {
	f.produce(f.Messages / 2)
	f.store.FailAfter(3, errTransient)
	r := f.start()
	f.eventually("some effects", func() bool { return len(f.store.Effects()) > 0 })
	f.store.FailAfter(2, errTransient)
	f.produce(f.Messages / 2)
	f.all()
	f.acked()
	f.stop(r)
}

func testRestart(f *fixture) {
	f.store.Delay(2 * time.Millisecond)
	for i := range 5 {
		f.produce(f.Messages / 5)
		r := f.start()
		want := f.Messages / 5 * i
		f.eventually("some effects", func() bool { return len(f.store.Effects()) > want })
		f.stop(r)
		// The broker knows no more than what was committed.
		if n, effects := f.sub.Acked(f.T), len(f.store.Effects()); n > effects {
			f.Fatalf("%d records are done for the broker, %d in the store", n, effects)
		}
	}
	r := f.start()
	f.all()
	f.acked()
	f.stop(r)
}

func testCutOff(f *fixture) {
	release := f.store.Hold()
	f.produce(f.Messages)
	r := f.start(func(w *consumer.Worker) { w.Drain = 50 * time.Millisecond })
	f.eventually("a hand-over", func() bool { _, _, calls := f.store.Counts(); return calls > 0 })
	f.stop(r)
	release()
	if n := f.sub.Acked(f.T); n > 0 {
		f.Fatalf("%d records are done for the broker, none in the store", n)
	}
	r = f.start()
	f.all()
	f.acked()
	f.stop(r)
}

func testHeld(f *fixture) {
	f.store.FailBefore(3, &lane.HoldError{Err: errors.New("the table is missing")})
	f.produce(f.Messages / 4)
	r := f.start()
	f.eventually("the hold to be reported", func() bool {
		var hold *lane.HoldError
		_, _, calls := f.store.Counts()
		return errors.As(r.worker.Ready(), &hold) || calls > 3
	})
	f.all()
	f.acked()
	f.eventually("readiness", func() bool { return r.worker.Ready() == nil })
	f.stop(r)
}

func testLatency(f *fixture) {
	r := f.start()
	f.produce(1)
	f.all()
	var slowest time.Duration
	for range 20 {
		begun := time.Now()
		f.produce(1)
		f.all()
		slowest = max(slowest, time.Since(begun))
	}
	if slowest > time.Second {
		f.Errorf("a single message took %s", slowest)
	}
	f.acked()
	f.stop(r)
}

func testStopIdle(f *fixture) {
	f.produce(1)
	r := f.start()
	f.all()
	f.acked()
	time.Sleep(100 * time.Millisecond) // in its long poll now
	begun := time.Now()
	f.stop(r)
	if d := time.Since(begun); d > 5*time.Second {
		f.Errorf("an idle source took %s to stop", d)
	}
	// And one that has hardly begun.
	f.stop(f.start())
}

func testUntilIdle(f *fixture) {
	idle := func(w *consumer.Worker) { w.UntilIdle = 300 * time.Millisecond }
	f.ended(f.start(idle)) // an empty topic is caught up
	f.produce(f.Messages)
	f.store.Delay(5 * time.Millisecond)
	f.ended(f.start(idle))
	if n := len(f.store.Effects()); n != f.produced {
		f.Errorf("Run ended as caught up with %d of %d records", n, f.produced)
	}
	f.check()
	f.acked()
	f.ended(f.start(idle)) // nothing new
}

func testHeartbeat(f *fixture) {
	const interval = 20 * time.Millisecond
	// asOf is the time as of which all lanes, or any of them, are caught up.
	asOf := func() (all, anyLane time.Time) {
		for i, lane := range f.store.Lanes() {
			row, _ := f.store.Row(lane)
			if i == 0 || row.Heartbeat.Before(all) {
				all = row.Heartbeat
			}
			if row.Heartbeat.After(anyLane) {
				anyLane = row.Heartbeat
			}
		}
		return all, anyLane
	}
	reported := func(since time.Time) {
		f.Helper()
		f.eventually("all lanes to be reported as caught up", func() bool { all, _ := asOf(); return all.After(since) })
	}
	r := f.start(func(w *consumer.Worker) { w.HeartbeatInterval = interval })
	reported(time.Now()) // an empty topic is caught up
	f.produce(f.Messages)
	f.all()
	reported(time.Now())

	release := f.store.Hold()
	defer release()
	f.produce(f.Features.Partitions) // one for each lane
	held := time.Now()
	time.Sleep(2500 * time.Millisecond) // the broker is asked every two seconds, at least
	if _, last := asOf(); last.After(held) {
		f.Errorf("a lane was reported as caught up %s after a message had come that isn't durable", last.Sub(held))
	}
	release()
	f.all()
	reported(time.Now())
	f.stop(r)
}

func testPayloads(f *fixture) {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	blank := []byte{}
	if f.Features.NilValues {
		blank = nil
	}
	text := []byte("x")
	records := []Record{
		{Value: []byte("plain")},
		{Value: every, Key: every},
		{Value: []byte{}, Key: []byte{}},
		{Value: blank, Key: nil},
		{Value: bytes.Repeat([]byte{0}, 200_000), Key: text},
		{Value: text, Headers: []message.Header{{Key: "a", Value: []byte("1")}, {Key: "a", Value: []byte("2")}, {Key: "A", Value: []byte("3")}}},
		{Value: text, Headers: []message.Header{{Key: "empty", Value: []byte{}}}},
	}
	if f.Features.BinaryHeaders {
		records = append(records, Record{Value: text, Headers: []message.Header{{Key: "bin", Value: every}, {Key: "nil"}, {Key: "é \n:", Value: text}}})
	}
	for i := range records {
		id := message.Header{Key: IDHeader, Value: fmt.Appendf(nil, "p%d", i)}
		records[i].Headers = append(records[i].Headers, id)
	}
	begun := time.Now()
	f.sub.Produce(f.T, records)
	r := f.start()
	if err := f.store.WaitEffects(f.ctx, len(records)); err != nil {
		f.Fatalf("%d of %d records had their effect", len(f.store.Effects()), len(records))
	}
	f.stop(r)
	for _, e := range f.store.Effects() {
		var i int
		if _, err := fmt.Sscanf(e.ID, "p%d", &i); err != nil {
			f.Fatalf("an effect of %q, which was not produced", e.ID)
		}
		want, got := records[i], e.Message
		same := func(a, b []byte) bool { return bytes.Equal(a, b) && (a == nil) == (b == nil) }
		if !same(want.Value, got.Value) {
			f.Errorf("record %d: value of %d bytes (nil: %t), want %d bytes (nil: %t)", i, len(got.Value), got.Value == nil, len(want.Value), want.Value == nil)
		}
		if f.Features.Keys && !same(want.Key, got.Key) {
			f.Errorf("record %d: key %q (nil: %t), want %q (nil: %t)", i, got.Key, got.Key == nil, want.Key, want.Key == nil)
		}
		if !f.Features.Keys && got.Key != nil {
			f.Errorf("record %d: key %q, though the broker has none", i, got.Key)
		}
		f.sameHeaders(i, want.Headers, got.Headers)
		if got.Time.Before(begun.Add(-time.Minute)) || got.Time.After(time.Now().Add(time.Minute)) {
			f.Errorf("record %d: time %s", i, got.Time)
		}
		if got.Topic == "" || got.ID != "" {
			f.Errorf("record %d: topic %q, id %q", i, got.Topic, got.ID)
		}
	}
}

// sameHeaders compares per key, for not every broker keeps the order among keys.
func (f *fixture) sameHeaders(i int, want, got []message.Header) {
	f.Helper()
	group := func(all []message.Header) map[string][][]byte {
		m := make(map[string][][]byte)
		for _, h := range all {
			m[h.Key] = append(m[h.Key], h.Value)
		}
		return m
	}
	if w, g := group(want), group(got); !reflect.DeepEqual(w, g) {
		f.Errorf("record %d: headers %q, want %q", i, g, w)
	}
}
