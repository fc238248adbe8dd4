package consumertest

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/message"
)

// Broker is a partitioned log in memory with one consumer group, as honest and
// as forgetful as a real one: it delivers at least once, revokes partitions
// whenever it likes, and refuses commits of an old generation. All methods may
// be called concurrently.
type Broker struct {
	mu         sync.Mutex
	changed    chan struct{} // closed and renewed with every change
	partitions []*partition
	members    []*member
	generation int64
	revoked    chan struct{} // closed when the generation ends
	refuse     error         // what commits are answered with
}

type partition struct {
	log       []message.Message
	next      int64 // offset of the next record
	committed int64
}

// NewBroker makes a broker with that many partitions.
func NewBroker(partitions int) *Broker {
	b := &Broker{changed: make(chan struct{}), revoked: make(chan struct{})}
	for range partitions {
		b.partitions = append(b.partitions, &partition{committed: -1})
	}
	return b
}

// Produce appends a message to a partition. The broker sets its Position, and its
// Time if that is zero.
func (b *Broker) Produce(partition int, m message.Message) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.partitions[partition]
	m.Position.Offset = p.next
	if m.Time.IsZero() {
		m.Time = time.Now()
	}
	p.next++
	p.log = append(p.log, m)
	b.notify()
}

// Hole skips n offsets, as compaction and transaction markers do.
func (b *Broker) Hole(partition int, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.partitions[partition].next += n
	b.notify()
}

// Committed is the group's committed position; -1: none.
func (b *Broker) Committed(partition int) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.partitions[partition].committed
}

// SetCommitted moves the group's position, as an operator does.
func (b *Broker) SetCommitted(partition int, position int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.partitions[partition].committed = position
}

// RefuseCommits answers all commits with err; nil ends that.
func (b *Broker) RefuseCommits(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refuse = err
}

// Rebalance revokes all partitions and hands them out anew.
func (b *Broker) Rebalance() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rebalance()
}

// Source is a new member of the group, for one Run. Its lanes are named by the
// partitions' numbers.
func (b *Broker) Source(name string) consumer.Source { return &member{broker: b, name: name} }

// Intercepted is a Source whose commits of a position pass through around, which
// decides whether and when to send them: so a test can look at what is durable
// before each one, lose one, or let the worker die just after it. It is called
// within the lane's callbacks.
func (b *Broker) Intercepted(name string, around func(partition int, position int64, commit func() error) error) consumer.Source {
	return &member{broker: b, name: name, around: around}
}

func (b *Broker) notify() {
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *Broker) rebalance() {
	b.generation++
	close(b.revoked)
	b.revoked = make(chan struct{})
}

func (b *Broker) join(m *member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.members = append(b.members, m)
	b.rebalance()
}

func (b *Broker) leave(m *member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.members = slices.DeleteFunc(b.members, func(o *member) bool { return o == m })
	b.rebalance()
}

type assignment struct {
	generation int64
	partitions []int
	revoked    chan struct{}
}

func (b *Broker) assign(m *member) assignment {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := assignment{generation: b.generation, revoked: b.revoked}
	mine := slices.Index(b.members, m)
	for i := range b.partitions {
		if i%len(b.members) == mine {
			a.partitions = append(a.partitions, i)
		}
	}
	return a
}

// pollWait is how long a fetch that finds nothing is held.
const pollWait = 100 * time.Millisecond

// fetch waits for at least one record, or a hole, at or after a position. When
// none has come for a while, next is that position.
func (b *Broker) fetch(ctx context.Context, number int, from int64, n int) (msgs []message.Message, next, lag int64, err error) {
	expired := time.After(pollWait)
	for {
		b.mu.Lock()
		p, changed := b.partitions[number], b.changed
		at, _ := slices.BinarySearchFunc(p.log, from, func(m message.Message, o int64) int { return int(m.Position.Offset - o) })
		rest := p.log[at:]
		next = p.next
		if len(rest) > n {
			next = rest[n].Position.Offset
			lag = int64(len(rest) - n)
			rest = rest[:n]
		}
		msgs = slices.Clone(rest)
		b.mu.Unlock()
		if next > from {
			return msgs, next, lag, nil
		}
		select {
		case <-changed:
		case <-expired:
			return nil, from, 0, nil
		case <-ctx.Done():
			return nil, 0, 0, ctx.Err()
		}
	}
}

func (b *Broker) commit(generation int64, number int, next int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.refuse != nil {
		return b.refuse
	}
	if generation != b.generation {
		return errOldGeneration
	}
	b.partitions[number].committed = next
	return nil
}
