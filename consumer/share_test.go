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
		{name: "little", lanes: 8, each: 10, idle: 3, alone: -1, want: 8},
		{name: "much", lanes: 8, each: 1000, idle: 3, alone: -1, want: 2, left: 6},
		{name: "much, nobody else free", lanes: 8, each: 400, alone: -1, want: 8},
		{name: "more than one group may hold", lanes: 8, each: 1000, alone: -1, want: 4, left: 4},
		{name: "a lane larger than a group", lanes: 2, each: 5000, idle: 1, alone: -1, want: 1, left: 1},
		{name: "a lane that failed goes alone", lanes: 3, each: 10, idle: 1, want: 1, left: 2},
		{name: "a lane that failed ends the group", lanes: 3, each: 10, idle: 1, alone: 2, want: 2, left: 1},
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
		{name: "one lane has a group", busy: 1, budget: 128 * mib, messages: 4000, bytes: 8 * mib, writers: 3, max: 4000},
		{name: "few lanes have one each", busy: 4, budget: 128 * mib, messages: 4000, bytes: 8 * mib, writers: 3, max: 4000},
		{name: "sixteen share what two groups for each writer are", busy: 16, budget: 128 * mib, messages: 1500, bytes: 3 * mib, writers: 3, max: 4000},
		{name: "quiet lanes don't count", busy: 4, quiet: 60, budget: 128 * mib, messages: 4000, bytes: 8 * mib, writers: 3, max: 4000},
		{name: "hundreds keep what is worth a transaction", busy: 500, budget: 128 * mib, messages: fairShare, bytes: 100663, writers: 3, max: 4000},
		{name: "thousands keep what is worth a fetch", busy: 5000, budget: 128 * mib, messages: fairShare, bytes: leastShare, writers: 3, max: 4000},
		{name: "half of a small budget is shared", busy: 16, budget: 16 * mib, messages: 1500, bytes: mib / 2, writers: 3, max: 4000},
		{name: "groups smaller than a share stay the most", busy: 2, budget: 128 * mib, messages: 10, bytes: 8 * mib, writers: 3, max: 10},
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
