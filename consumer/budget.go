package consumer

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Budget bounds the bytes of messages that a process holds, over all sources. A
// fetcher acquires what it is about to ask for, adjusts that to what came, and hands
// the bytes over with the batch; the worker releases them when the batch is committed
// or abandoned.
type Budget struct {
	limit int64
	// Sharers is how many workers share it; zero: one has it alone. Set it before their Run.
	// Then each looks ahead less: a lane that can't go on holds a batch, what waits behind it
	// and what was fetched, and workers whose database is away must leave the others some.
	Sharers int

	mu      sync.Mutex
	used    int64
	waiting []*waiter // first come, first served: no lane starves
}

type waiter struct {
	bytes int64
	since time.Time
	ready chan struct{}
}

// starvedAfter is how long somebody must have waited for bytes before held lanes are
// evicted.
const starvedAfter = 5 * time.Second

// starves reports whether somebody has waited for that long.
func (b *Budget) starves() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.waiting) > 0 && time.Since(b.waiting[0].since) >= starvedAfter
}

// NewBudget bounds to limit bytes.
func NewBudget(limit int64) *Budget { return &Budget{limit: limit} }

// ahead is what the lanes of one worker may hold together as their shares.
func (b *Budget) ahead() int64 {
	if b.Sharers > 1 {
		return b.limit / 4 / int64(b.Sharers)
	}
	return b.limit / 2
}

// Acquire waits until bytes fit. A request larger than the whole budget is
// granted when nothing else is held: a message may be larger than anybody
// planned for, and must still get through.
func (b *Budget) Acquire(ctx context.Context, bytes int64) error {
	b.mu.Lock()
	if len(b.waiting) == 0 && b.fitsLocked(bytes) {
		b.used += bytes
		b.mu.Unlock()
		return nil
	}
	w := &waiter{bytes, time.Now(), make(chan struct{})}
	b.waiting = append(b.waiting, w)
	b.mu.Unlock()

	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.Index(b.waiting, w); i >= 0 {
		b.waiting = slices.Delete(b.waiting, i, i+1)
	} else { // granted between the two cases: give it back
		b.used -= bytes
	}
	b.grantLocked() // those behind a large request may fit
	return ctx.Err()
}

// TryAcquire is Acquire without waiting, for callers that hold bytes already: two of
// them would wait for each other for ever. It doesn't pass those who wait.
func (b *Budget) TryAcquire(bytes int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.waiting) > 0 || !b.fitsLocked(bytes) {
		return false
	}
	b.used += bytes
	return true
}

// Adjust corrects what was acquired, by more or by less, without waiting.
func (b *Budget) Adjust(bytes int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used += bytes
	b.grantLocked()
}

// Release gives bytes back.
func (b *Budget) Release(bytes int64) { b.Adjust(-bytes) }

// Used is how many bytes are held now.
func (b *Budget) Used() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

func (b *Budget) fitsLocked(bytes int64) bool { return b.used == 0 || b.used+bytes <= b.limit }

func (b *Budget) grantLocked() {
	for len(b.waiting) > 0 && b.fitsLocked(b.waiting[0].bytes) {
		b.used += b.waiting[0].bytes
		close(b.waiting[0].ready)
		b.waiting = b.waiting[1:]
	}
}
