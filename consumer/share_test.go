package consumer

import (
	"context"
	"testing"
	"time"

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
			w := &Worker{MaxMessages: 4000, MaxBytes: 1 << 20, hard: context.Background(), idle: test.idle, lanes: map[*Lane]struct{}{}, busy: map[int]time.Time{}}
			w.work.L = &w.mu
			for i := range test.lanes {
				l := &Lane{w: w, queued: true, alone: i == test.alone, space: make(chan struct{}, 1)}
				l.pending = &parcel{batch: message.Batch{Messages: make([]message.Message, test.each)}}
				w.ready = append(w.ready, l)
			}
			group, _, cancel := w.takeGroup(0)
			defer cancel()
			if len(group) != test.want || len(w.ready) != test.left {
				t.Errorf("took %d lanes and left %d, want %d and %d", len(group), len(w.ready), test.want, test.left)
			}
		})
	}
}
