package consumer

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Budget bounds the bytes of messages that a worker holds, over all its sources. A
// fetcher acquires what it is about to ask for, adjusts that to what came, and hands
// the bytes over with the batch; the worker releases them when the batch is committed
// or abandoned.
//
// Workers of one process have a part of its memory each. Nothing is lent: one whose database
// is away keeps what it has read, for as long as that takes, and another's part would never
// come back. So no worker waits for another, except for room for a batch that is larger than
// a part, and for that starvedAfter at most: they can't wait for each other for ever.
type Budget struct {
	limit int64
	pool  *pool

	// The pool's mutex guards everything below.

	used    int64
	waiting []*waiter // first come, first served: no lane starves
}

// pool is the memory of a process.
type pool struct {
	mu    sync.Mutex
	parts []*Budget
}

type waiter struct {
	bytes int64
	since time.Time
	ready chan struct{}
}

// starvedAfter is how long somebody must have waited for bytes before held lanes are
// evicted, and before a batch larger than a part no longer waits for other parts.
const starvedAfter = 5 * time.Second

func (w *waiter) starves() bool { return time.Since(w.since) >= starvedAfter }

// starves reports whether somebody has waited for that long.
func (b *Budget) starves() bool {
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	return len(b.waiting) > 0 && b.waiting[0].starves()
}

// NewBudget bounds to limit bytes.
func NewBudget(limit int64) *Budget { return NewBudgets(limit, 1)[0] }

// NewBudgets bounds to limit bytes together, in n equal parts.
func NewBudgets(limit int64, n int) []*Budget {
	p := &pool{}
	for range n {
		p.parts = append(p.parts, &Budget{limit: limit / int64(n), pool: p})
	}
	return p.parts
}

// ahead is what the lanes of one worker may hold together as their shares.
func (b *Budget) ahead() int64 { return b.limit / 2 }

// Acquire waits until bytes fit. A request larger than the whole budget is
// granted when nothing else is held: a message may be larger than anybody
// planned for, and must still get through. Of the parts of a process, one at a time is
// granted that, unless somebody has waited for starvedAfter.
func (b *Budget) Acquire(ctx context.Context, bytes int64) error {
	b.pool.mu.Lock()
	w := &waiter{bytes, time.Now(), make(chan struct{})}
	if len(b.waiting) == 0 && b.fitsLocked(w) {
		b.used += bytes
		b.pool.mu.Unlock()
		return nil
	}
	b.waiting = append(b.waiting, w)
	b.pool.mu.Unlock()
	if bytes > b.limit {
		defer time.AfterFunc(starvedAfter, func() { b.Adjust(0) }).Stop()
	}

	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	if i := slices.Index(b.waiting, w); i >= 0 {
		b.waiting = slices.Delete(b.waiting, i, i+1)
		b.grantLocked() // those behind a large request may fit
	} else { // granted between the two cases: give it back
		b.adjustLocked(-bytes)
	}
	return ctx.Err()
}

// TryAcquire is Acquire without waiting, for callers that hold bytes already: two of
// them would wait for each other for ever. It doesn't pass those who wait.
func (b *Budget) TryAcquire(bytes int64) bool {
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	if len(b.waiting) > 0 || !b.fitsLocked(&waiter{bytes: bytes, since: time.Now()}) {
		return false
	}
	b.used += bytes
	return true
}

// Adjust corrects what was acquired, by more or by less, without waiting.
func (b *Budget) Adjust(bytes int64) {
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	b.adjustLocked(bytes)
}

// Release gives bytes back.
func (b *Budget) Release(bytes int64) { b.Adjust(-bytes) }

// Used is how many bytes are held now.
func (b *Budget) Used() int64 {
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	return b.used
}

func (b *Budget) adjustLocked(bytes int64) {
	exceeded := b.used > b.limit
	b.used += bytes
	b.grantLocked()
	if exceeded && b.used <= b.limit {
		for _, other := range b.pool.parts {
			other.grantLocked()
		}
	}
}

func (b *Budget) fitsLocked(w *waiter) bool {
	if b.used+w.bytes <= b.limit {
		return true
	}
	exceeded := func(other *Budget) bool { return other.used > other.limit }
	return b.used == 0 && (w.starves() || !slices.ContainsFunc(b.pool.parts, exceeded))
}

func (b *Budget) grantLocked() {
	for len(b.waiting) > 0 && b.fitsLocked(b.waiting[0]) {
		b.used += b.waiting[0].bytes
		close(b.waiting[0].ready)
		b.waiting = b.waiting[1:]
	}
}
