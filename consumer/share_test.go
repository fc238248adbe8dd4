package consumer

import (
	"context"
	"testing"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// Little work is one writer's; much is shared among those that are free.
func TestShareAmongWriters(t *testing.T) {
	for _, test := range []struct {
		name       string
		lanes      int
		each       int
		idle       int // other writers
		alone      int // this lane is to be alone; -1: none
		want, left int
	}{
		{"little", 8, 10, 3, -1, 8, 0},
		{"much", 8, 1000, 3, -1, 2, 6},
		{"much, nobody else free", 8, 400, 0, -1, 8, 0},
		{"more than one group may hold", 8, 1000, 0, -1, 4, 4},
		{"a lane larger than a group", 2, 5000, 1, -1, 1, 1},
		{"a lane that failed goes alone", 3, 10, 1, 0, 1, 2},
		{"a lane that failed ends the group", 3, 10, 1, 2, 2, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := &Worker{MaxMessages: 4000, MaxBytes: 1 << 20, hard: context.Background(), idle: test.idle, lanes: map[*Lane]struct{}{}, transactions: map[int]*transaction{}}
			w.work.L = &w.mu
			for i := range test.lanes {
				l := &Lane{w: w, queued: true, alone: i == test.alone, space: make(chan struct{}, 1)}
				l.pending = &queuedBatch{batch: lane.Batch{Messages: make([]message.Message, test.each)}}
				w.ready = append(w.ready, l)
			}
			got, _, cancel := w.nextTransaction(0)
			defer cancel()
			if len(got.group) != test.want || len(w.ready) != test.left {
				t.Errorf("took %d lanes and left %d, want %d and %d", len(got.group), len(w.ready), test.want, test.left)
			}
		})
	}
}

// What a lane holds ahead falls with the number of lanes that have something to
// do; quiet ones take nothing from the others.
func TestShareAmongLanes(t *testing.T) {
	const mib = 1 << 20
	for _, test := range []struct {
		name         string
		busy, quiet  int
		budget       int64
		messages     int
		bytes        int64
		writers, max int
	}{
		{"one lane has a group", 1, 0, 128 * mib, 4000, 8 * mib, 3, 4000},
		{"few lanes have one each", 4, 0, 128 * mib, 4000, 8 * mib, 3, 4000},
		{"sixteen share what two groups for each writer are", 16, 0, 128 * mib, 1500, 3 * mib, 3, 4000},
		{"quiet lanes don't count", 4, 60, 128 * mib, 4000, 8 * mib, 3, 4000},
		{"hundreds keep what is worth a transaction", 500, 0, 128 * mib, fairShare, 100663, 3, 4000},
		{"thousands keep what is worth a fetch", 5000, 0, 128 * mib, fairShare, leastShare, 3, 4000},
		{"half of a small budget is shared", 16, 0, 16 * mib, 1500, mib / 2, 3, 4000},
		{"groups smaller than a share stay the most", 2, 0, 128 * mib, 10, 8 * mib, 3, 10},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := &Worker{Writers: test.writers, MaxMessages: test.max, MaxBytes: 8 * mib, Budget: NewBudget(test.budget), lanes: map[*Lane]struct{}{}}
			for range test.busy {
				w.lanes[&Lane{w: w, lag: 1}] = struct{}{}
			}
			for range test.quiet {
				w.lanes[&Lane{w: w}] = struct{}{}
			}
			if messages, bytes := w.shareLocked(); messages != test.messages || bytes != test.bytes {
				t.Errorf("a share is %d messages or %d bytes, want %d or %d", messages, bytes, test.messages, test.bytes)
			}
		})
	}
}
