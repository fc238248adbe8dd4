package consumertest

import (
	"context"
	"fmt"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// metadata is what the broker keeps of a lane.
type metadata struct {
	epoch, began, checkpoint int64
	logID                    string
}

const metadataFormat = "epoch %d began %d checkpoint %d log %q"

func (m metadata) String() string {
	return fmt.Sprintf(metadataFormat, m.epoch, m.began, m.checkpoint, m.logID)
}

func parseMetadata(text string) (m metadata, ok bool) {
	n, _ := fmt.Sscanf(text, metadataFormat, &m.epoch, &m.began, &m.checkpoint, &m.logID)
	return m, n == 4
}

func (s *Store) name() string { return fmt.Sprint("instance ", s.instance) }

// reached reports whether the database is the one in which a queue was acquired, and has
// its last known checkpoint.
func (s *Store) reached(r *row, c lane.Checkpoint) bool {
	return c.Instance == s.name() && r.Checkpoint >= c.Number
}

// placeQueue compares a queue's row with what the broker keeps of it.
func (s *Store) placeQueue(r *row, a lane.Acquire, got *lane.Assignment) {
	was, ok := parseMetadata(a.OffsetMetadata)
	behind := ok && was.epoch == r.Epoch && was.checkpoint > r.Checkpoint
	lost := ok && was.epoch != r.Epoch
	switch {
	case lost && (r.BrokerPosition < 0 || was.began < r.BrokerPosition), behind && r.BrokerPosition < 0:
		r.BrokerPosition = was.began
	case !lost && !behind && r.BrokerPosition < 0:
		r.BrokerPosition = a.Committed
	}
	if ok && !lost && !behind {
		r.BrokerPosition = max(r.BrokerPosition, a.Acknowledged)
	}
	if r.began < 0 || r.BrokerPosition < r.began {
		r.began = r.BrokerPosition
	}
	got.Rewound = behind || lost
	got.Checkpoint = lane.Checkpoint{Number: r.Checkpoint, Instance: s.name()}
	if got.Rewound {
		got.Checkpoint.Number = max(r.Checkpoint, was.checkpoint) + 1
	}
	got.OffsetMetadata = metadata{r.Epoch, r.began, got.Checkpoint.Number, r.StreamID}.String()
}

// Confirm checks that the database still has what a queue committed.
func (s *Store) Confirm(ctx context.Context, c lane.Confirm) (lane.Confirmation, error) {
	if err := ctx.Err(); err != nil {
		return lane.Confirmation{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	r := s.rows[c.Lane]
	if r == nil {
		s.notAcquired(c.Lane, "is confirmed")
	}
	was, ok := parseMetadata(c.OffsetMetadata)
	if r == nil || r.Epoch != c.Epoch || !s.reached(r, c.Checkpoint) || ok && (was.epoch != r.Epoch || was.checkpoint > r.Checkpoint) {
		return lane.Confirmation{}, &lane.FencedError{Lanes: []message.Lane{c.Lane}}
	}
	if c.Raise {
		r.Checkpoint++
	}
	return lane.Confirmation{
		Checkpoint:     lane.Checkpoint{Number: r.Checkpoint, Instance: s.name()},
		OffsetMetadata: metadata{r.Epoch, r.began, r.Checkpoint, r.StreamID}.String(),
	}, nil
}

// ConfirmRewind lets a queue move again.
func (s *Store) ConfirmRewind(ctx context.Context, l message.Lane, a lane.Assignment, from int64) (sure int64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	r := s.rows[l]
	if r == nil {
		s.notAcquired(l, "has its rewind confirmed")
		return from, nil
	}
	if r.Epoch != a.Epoch {
		return from, nil
	}
	sure = max(r.BrokerPosition, 1)
	if from <= sure {
		r.Checkpoint = max(r.Checkpoint, a.Checkpoint.Number)
		if from > 0 {
			r.BrokerPosition = from
		}
	}
	return sure, nil
}
