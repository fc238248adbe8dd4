package consumer

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
)

// Who gives up in the moment in which the bytes are granted hands them back, and
// whoever stands behind gets them.
func TestBytesGrantedToOneThatGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBudget(100)
		if err := b.Acquire(t.Context(), 100); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		first, second := make(chan error, 1), make(chan error, 1)
		go func() { first <- b.Acquire(ctx, 60) }()
		synctest.Wait()
		go func() { second <- b.Acquire(t.Context(), 70) }()
		synctest.Wait()

		b.pool.mu.Lock()
		cancel()   // it wakes up by this …
		b.used = 0 // … and is granted its bytes before it can take itself out of the line
		b.grantLocked()
		if b.used != 60 {
			t.Errorf("%d bytes are used, want those of the first", b.used)
		}
		b.pool.mu.Unlock()

		if err := <-first; !errors.Is(err, context.Canceled) {
			t.Errorf("the first: %v", err)
		}
		synctest.Wait()
		if used := b.Used(); used != 70 || len(second) != 1 {
			t.Errorf("%d bytes are used, want those of the second, which was granted them: %t", used, len(second) == 1)
		}
		if len(second) == 1 && <-second != nil {
			t.Error("the second failed")
		}
		b.Release(70)
	})
}
