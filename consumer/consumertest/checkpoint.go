package consumertest

import (
	"context"
	"fmt"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// origin is what the broker keeps of a lane.
type origin struct {
	epoch, began, checkpoint int64
	log                      string
}

const originFormat = "epoch %d began %d checkpoint %d log %q"

func (o origin) String() string {
	return fmt.Sprintf(originFormat, o.epoch, o.began, o.checkpoint, o.log)
}

func parseOrigin(text string) (o origin, ok bool) {
	n, _ := fmt.Sscanf(text, originFormat, &o.epoch, &o.began, &o.checkpoint, &o.log)
	return o, n == 4
}

func (s *Store) name() string { return fmt.Sprint("instance ", s.instance) }

// reached tells that the database is the one that a queue was taken in, and has come
// as far as is known.
func (s *Store) reached(r *row, c lane.Checkpoint) bool {
	return c.Instance == s.name() && r.Checkpoint >= c.Number
}

func (s *Store) takeQueue(r *row, t lane.Acquire, taken *lane.Assignment) {
	was, ok := parseOrigin(t.OffsetMetadata)
	behind := ok && was.epoch == r.Epoch && was.checkpoint > r.Checkpoint
	lost := ok && was.epoch != r.Epoch
	switch {
	case lost && (r.BrokerPosition < 0 || was.began < r.BrokerPosition), behind && r.BrokerPosition < 0:
		r.BrokerPosition = was.began
	case !lost && !behind && r.BrokerPosition < 0:
		r.BrokerPosition = t.Committed
	}
	if ok && !lost && !behind {
		r.BrokerPosition = max(r.BrokerPosition, t.Acknowledged)
	}
	if r.began < 0 || r.BrokerPosition < r.began {
		r.began = r.BrokerPosition
	}
	taken.Rewound = behind || lost
	taken.Checkpoint = lane.Checkpoint{Number: r.Checkpoint, Instance: s.name()}
	if taken.Rewound {
		taken.Checkpoint.Number = max(r.Checkpoint, was.checkpoint) + 1
	}
	taken.OffsetMetadata = origin{r.Epoch, r.began, taken.Checkpoint.Number, r.StreamID}.String()
}

// Confirm tells whether a queue's database is still what it was.
func (s *Store) Confirm(ctx context.Context, c lane.Confirm) (lane.Confirmation, error) {
	if err := ctx.Err(); err != nil {
		return lane.Confirmation{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	r := s.rows[c.Lane]
	if r == nil {
		s.untaken(c.Lane, "is to be confirmed")
	}
	was, ok := parseOrigin(c.OffsetMetadata)
	if r == nil || r.Epoch != c.Epoch || !s.reached(r, c.Checkpoint) || ok && (was.epoch != r.Epoch || was.checkpoint > r.Checkpoint) {
		return lane.Confirmation{}, &lane.FencedError{Lanes: []message.Lane{c.Lane}}
	}
	if c.Raise {
		r.Checkpoint++
	}
	return lane.Confirmation{
		Checkpoint:     lane.Checkpoint{Number: r.Checkpoint, Instance: s.name()},
		OffsetMetadata: origin{r.Epoch, r.began, r.Checkpoint, r.StreamID}.String(),
	}, nil
}

// Resumed lets a queue move again.
func (s *Store) ConfirmRewind(ctx context.Context, lane message.Lane, taken lane.Assignment, from int64) (sure int64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notify()
	r := s.rows[lane]
	if r == nil {
		s.untaken(lane, "resumes")
		return from, nil
	}
	if r.Epoch != taken.Epoch {
		return from, nil
	}
	sure = max(r.BrokerPosition, 1)
	if from <= sure {
		r.Checkpoint = max(r.Checkpoint, taken.Checkpoint.Number)
		if from > 0 {
			r.BrokerPosition = from
		}
	}
	return sure, nil
}
