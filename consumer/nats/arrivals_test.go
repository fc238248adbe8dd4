package nats

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestArrivalsAreNeverTooLate lets a stream's messages pass in the order in which they
// are delivered, some again and some through another worker, and asks from ack
// floors that rise.
func TestArrivalsAreNeverTooLate(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var p arrivals
		start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		const length = 3000
		sent := make([]time.Time, length)
		at := start
		steps := rapid.SliceOfN(rapid.Int64Range(-5, 2000), 16, 16).Draw(t, "milliseconds between messages")
		for i := range sent {
			at = at.Add(time.Duration(steps[i%len(steps)]) * time.Millisecond)
			sent[i] = at
		}
		mine := rapid.SliceOfN(rapid.Bool(), 8, 8).Draw(t, "mine")
		seen := make([]bool, length)
		floor := 0
		for i := range length {
			if !mine[i%len(mine)] {
				continue
			}
			p.record(uint64(i), sent[i])
			seen[i] = true
			if i%37 == 0 && i > floor { // delivered again, after others
				late := rapid.IntRange(floor, i).Draw(t, "late")
				p.record(uint64(late), sent[late])
				seen[late] = true
			}
			if i%101 != 0 {
				continue
			}
			floor = rapid.IntRange(floor, i).Draw(t, "floor")
			since := p.since(uint64(floor))
			if since.IsZero() {
				for below := range floor + 1 {
					if seen[below] {
						t.Fatalf("nothing is known from %d on, and %d has passed", floor, below)
					}
				}
				continue
			}
			for j := floor; j <= i; j++ {
				if seen[j] && sent[j].Before(since) {
					t.Fatalf("from %d on: since %s, and message %d is of %s", floor, since, j, sent[j])
				}
			}
			if n := len(p.marks); n > maxMarks {
				t.Fatalf("%d marks", n)
			}
		}
	})
}

// TestArrivalsKeepUp has an ack floor right behind what is delivered, and one that
// has stood still for a day.
func TestArrivalsKeepUp(t *testing.T) {
	t.Parallel()
	var p arrivals
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(sequence uint64) time.Time { return start.Add(time.Duration(sequence) * 100 * time.Millisecond) }
	for sequence := uint64(1); sequence <= 1000; sequence++ {
		p.record(sequence, at(sequence))
		if behind := at(sequence).Sub(p.since(sequence)); behind > firstSpacing {
			t.Fatalf("at message %d the time is %s behind", sequence, behind)
		}
	}
	const held, last = 1000, 1000 + 24*60*60*10
	for sequence := uint64(held); sequence <= last; sequence++ {
		p.record(sequence, at(sequence))
		p.since(held)
	}
	if since := p.since(held); since.After(at(held)) || at(held).Sub(since) > firstSpacing {
		t.Errorf("a message of %s is still out, and all is since %s", at(held), since)
	}
	// It comes to the end of what gathered behind it.
	for sequence := uint64(held); sequence <= last; sequence += 1000 {
		if behind := at(sequence).Sub(p.since(sequence)); behind < 0 || behind > 24*time.Hour/100 {
			t.Fatalf("at message %d the time is %s behind", sequence, behind)
		}
	}
}
