package consumertest

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

var errOldGeneration = errors.New("the generation has ended")

// member is one reader of a Broker's group.
type member struct {
	broker *Broker
	name   string
	around func(partition int, position int64, commit func() error) error // nil: commits aren't intercepted
}

func (m *member) commit(generation int64, number int, next int64) error {
	commit := func() error { return m.broker.commit(generation, number, next) }
	if m.around != nil {
		return m.around(number, next, commit)
	}
	return commit()
}

func (m *member) Name() string { return m.name }

func (m *member) Run(ctx context.Context, in *consumer.Session) error {
	m.broker.join(m)
	defer m.broker.leave(m)
	for ctx.Err() == nil {
		m.generation(ctx, in, m.broker.assign(m))
	}
	in.Ready(false)
	return nil
}

// generation reads the lanes of one assignment until they are revoked.
func (m *member) generation(ctx context.Context, in *consumer.Session, a assignment) {
	ctx, revoke := context.WithCancel(ctx)
	defer revoke()
	in.Rebalanced()
	var readers sync.WaitGroup
	for _, p := range a.partitions {
		readers.Go(func() {
			for ctx.Err() == nil {
				m.read(ctx, in, a.generation, p)
			}
		})
	}
	in.Ready(true)
	select {
	case <-ctx.Done():
	case <-a.revoked:
		revoke()
	}
	readers.Wait()
}

// read reads one lane until it is lost or ctx ends.
func (m *member) read(ctx context.Context, in *consumer.Session, generation int64, number int) {
	committed := m.broker.Committed(number)
	got, err := in.Acquire(ctx, lane.Acquire{
		Lane: m.lane(number), Ordered: true, GroupGeneration: generation, Committed: committed, HonourReset: true,
	})
	if err != nil {
		select { // the new generation's owner has it, or the store is away
		case <-ctx.Done():
		case <-time.After(time.Millisecond):
		}
		return
	}
	var confirmed atomic.Int64
	confirmed.Store(got.BrokerPosition)
	tell := func(next int64, _ []any) {
		if m.commit(generation, number, next) != nil {
			in.CommitFailed()
			return
		}
		confirmed.Store(next)
	}
	if committed < got.Next {
		tell(got.Next, nil) // committed without the broker knowing
	}
	open := in.Open(consumer.LaneOptions{Lane: m.lane(number), Epoch: got.Epoch, Next: got.Next, Committed: tell})
	defer func() {
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), in.Drain())
		defer cancel()
		open.Close(drain)
	}()
	fetching, lost := context.WithCancel(ctx)
	defer lost()
	go func() {
		select {
		case <-open.Lost():
			lost()
		case <-fetching.Done():
		}
	}()
	m.offer(fetching, in, open, got, number, &confirmed)
}

func (m *member) offer(ctx context.Context, in *consumer.Session, l *consumer.Lane, got lane.Assignment, number int, confirmed *atomic.Int64) {
	from := got.Next
	for {
		asked := time.Now()
		if m.broker.at(number) <= from {
			l.SetLag(0)
			l.SetCaughtUp(asked)
		}
		msgs, next, lag, err := m.broker.fetch(ctx, number, from, in.MaxMessages())
		if err != nil {
			return
		}
		if next == from {
			continue
		}
		batch := lane.Batch{
			Lane: m.lane(number), Ordered: true, StreamID: got.StreamID, Epoch: got.Epoch,
			From: from, Next: next, Messages: msgs, Lag: lag, BrokerPosition: confirmed.Load(), Bytes: size(msgs),
		}
		for i := range msgs {
			msgs[i].Position.Lane = batch.Lane
		}
		if in.Budget().Acquire(ctx, batch.Bytes) != nil || l.Offer(ctx, batch, nil) != nil {
			return
		}
		from = next
	}
}

func (m *member) lane(number int) message.Lane {
	return message.Lane{Source: m.name, Name: strconv.Itoa(number)}
}

// at is the end of a partition.
func (b *Broker) at(number int) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.partitions[number].next
}

// size is the memory that messages hold, roughly.
func size(msgs []message.Message) int64 {
	n := int64(0)
	for i := range msgs {
		n += 128 + int64(len(msgs[i].Key)+len(msgs[i].Value))
		for _, h := range msgs[i].Headers {
			n += int64(len(h.Key) + len(h.Value))
		}
	}
	return n
}
