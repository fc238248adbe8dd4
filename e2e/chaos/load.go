package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dedupd/dedupd/e2e/shape"
)

// load is a producer that sends, and sends again, and notes what it meant to
// send and what the broker said to it.
type load struct {
	broker broker
	rng    *rand.Rand
	file   *os.File
	cancel context.CancelFunc
	ended  chan struct{}
	// next, unless nil, draws what a shape's producers send. The dice below are for a load
	// without one.
	next func() []shape.Message

	rate         atomic.Int64 // messages a second
	hot          atomic.Int64 // of a hundred messages so many carry the one hot id
	poison       atomic.Int64 // of a thousand so many can't be applied
	copiesAtOnce atomic.Int64 // of a hundred so many are sent to two lanes at once; 1 unless set
	far          atomic.Int64 // how many ids a copy may lie back; 0: any number
	differ       atomic.Int64 // of a hundred copies so many have another payload
	total        atomic.Int64
	firsts       atomic.Int64 // of those, what isn't a copy

	mu      sync.Mutex
	lines   *json.Encoder
	failed  error
	unknown int
}

// intent is one line of the file.
type intent struct {
	ID    string `json:"id"`
	Copy  int    `json:"copy"`
	Sum   string `json:"sum"`
	Lane  string `json:"lane"`
	State string `json:"state"` // acked or unknown
}

func newLoad(b broker, rng *rand.Rand, file string) (*load, error) {
	f, err := os.Create(file)
	if err != nil {
		return nil, err
	}
	return &load{broker: b, rng: rng, file: f, lines: json.NewEncoder(f), ended: make(chan struct{})}, nil
}

// start sends at the rate until stop.
func (l *load) start(ctx context.Context, rate int) {
	ctx, l.cancel = context.WithCancel(ctx)
	l.rate.Store(int64(rate))
	go l.run(ctx)
}

// stop ends the sending, waits until every message has its answer, and returns
// how many were sent.
func (l *load) stop() (int64, error) {
	l.cancel()
	<-l.ended
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.file.Close(); l.failed == nil {
		l.failed = err
	}
	return l.total.Load(), l.failed
}

const tick = 20 * time.Millisecond

func (l *load) run(ctx context.Context) {
	defer close(l.ended)
	// What was handed over gets its answer even when the load ends.
	sending, giveUp := context.WithTimeout(context.WithoutCancel(ctx), 24*time.Hour)
	defer giveUp()
	var open sync.WaitGroup
	defer func() {
		late := time.AfterFunc(90*time.Second, giveUp)
		open.Wait()
		late.Stop()
	}()
	next := 0
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	debt := 0.0
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		debt = min(debt+float64(l.rate.Load())*tick.Seconds(), 20_000)
		for ; debt >= 1; debt-- {
			for _, m := range l.draw(&next) {
				l.total.Add(1)
				if m.copy == 0 {
					l.firsts.Add(1)
				}
				sum := sha256.Sum256(m.value)
				open.Add(1)
				l.broker.Send(sending, m, func(err error) {
					defer open.Done()
					l.note(m, hex.EncodeToString(sum[:]), err)
				})
			}
		}
	}
}

func (l *load) note(m sent, sum string, err error) {
	state := "acked"
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		state = "unknown"
		l.unknown++
	}
	if err := l.lines.Encode(intent{m.id, m.copy, sum, "", state}); err != nil && l.failed == nil {
		l.failed = err
	}
}

// draw is the next message, and sometimes a copy on another lane at the same
// moment. A fifth are copies: half of them of what was just sent, the others of
// anything, mostly of late.
func (l *load) draw(next *int) (all []sent) {
	if l.next != nil {
		for _, m := range l.next() {
			all = append(all, sent{m.ID, m.Copy, m.Partition, m.Value})
		}
		return all
	}
	n, dice := *next, l.rng.IntN(10)
	switch {
	case n == 0:
	case int64(l.rng.IntN(100)) < l.hot.Load():
		return []sent{l.message(0, 1)}
	case dice == 0:
		return []sent{l.message(max(0, n-1-l.rng.IntN(20)), 1)}
	case dice == 1:
		// A tail as of Zipf's law: the further back, the rarer.
		tail := n
		if far := int(l.far.Load()); far > 0 {
			tail = min(tail, far)
		}
		back := int(float64(tail) * l.rng.Float64() * l.rng.Float64() * l.rng.Float64())
		return []sent{l.message(n-1-back, 1)}
	}
	*next++
	m := l.message(n, 0)
	if int64(n%100) < max(l.copiesAtOnce.Load(), 1) && l.broker.Partitions() > 1 {
		other := l.message(n, 1)
		other.partition = (m.partition + 1) % l.broker.Partitions()
		return []sent{m, other}
	}
	return []sent{m}
}

// message is a copy of what the nth id stands for: all have the same bytes, unless
// they are to differ. One in eight copies goes to another partition.
func (l *load) message(n, copies int) sent {
	m := sent{id: idOf(n), copy: copies, partition: n % l.broker.Partitions()}
	if copies > 0 && l.rng.IntN(8) == 0 {
		m.partition = l.rng.IntN(l.broker.Partitions())
	}
	m.value = fmt.Appendf(nil, `{"n":%d,"note":"what the %d-th order is about, at some length"}`, n, n)
	if copies > 0 && int64(l.rng.IntN(100)) < l.differ.Load() {
		m.value = fmt.Appendf(nil, `{"n":%d,"note":"something else under the same id: %d"}`, n, l.rng.IntN(3))
	}
	switch share := l.poison.Load(); {
	case share == 0 || int64(hash(n)%1000) >= share:
	case n%4 == 0:
		m.value = fmt.Appendf(nil, `{"n":"not a number","of":%d}`, n)
	case n%4 == 1:
		m.value = fmt.Appendf(nil, `{"n":%d, and then nonsense`, n)
	case n%4 == 2:
		m.id = ""
	default:
		m.value = fmt.Appendf(nil, `{"n":1e40,"of":%d}`, n)
	}
	return m
}

// idOf is text for half of the ids, a UUID for the others.
func idOf(n int) string {
	if n%2 == 0 {
		return fmt.Sprintf("order-%09d", n)
	}
	h := sha256.Sum256(fmt.Appendf(nil, "order-%d", n))
	h[6], h[8] = h[6]&0x0f|0x40, h[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

func hash(n int) uint64 {
	x := uint64(n) * 0x9e3779b97f4a7c15
	x ^= x >> 32
	return x * 0xd6e8feb86659fd93 >> 20
}
