package consumer_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dedupd/dedupd/consumer"
)

func TestBudget(t *testing.T) {
	acquire := func(b *consumer.Budget, n int64) <-chan error {
		c := make(chan error, 1)
		go func() { c <- b.Acquire(context.Background(), n) }()
		synctest.Wait()
		return c
	}
	granted := func(c <-chan error) bool {
		synctest.Wait()
		return len(c) > 0
	}
	bubble(t, "first come, first served", func(t *testing.T) {
		b := consumer.NewBudget(100)
		<-acquire(b, 60)
		large, small := acquire(b, 50), acquire(b, 10)
		if granted(large) || granted(small) {
			t.Error("granted beyond the limit, or out of turn")
		}
		b.Release(10)
		if !granted(large) || granted(small) {
			t.Error("the first in line was not served first")
		}
		b.Adjust(-40)
		if !granted(small) || b.Used() != 70 {
			t.Errorf("used %d", b.Used())
		}
		b.Release(70)
	})
	bubble(t, "one that is larger than all waits for an empty budget", func(t *testing.T) {
		b := consumer.NewBudget(100)
		<-acquire(b, 1)
		huge := acquire(b, 1000)
		if granted(huge) {
			t.Error("granted while something is held")
		}
		b.Release(1)
		if !granted(huge) || b.Used() != 1000 {
			t.Error("not granted")
		}
		b.Release(1000)
	})
	bubble(t, "one that gives up makes way", func(t *testing.T) {
		b := consumer.NewBudget(100)
		<-acquire(b, 50)
		ctx, cancel := context.WithCancel(t.Context())
		gone := make(chan error, 1)
		go func() { gone <- b.Acquire(ctx, 80) }()
		synctest.Wait()
		next := acquire(b, 50)
		if granted(next) {
			t.Error("out of turn")
		}
		cancel()
		if err := <-gone; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if !granted(next) || b.Used() != 100 {
			t.Errorf("used %d", b.Used())
		}
	})
	bubble(t, "each part has its own bytes", func(t *testing.T) {
		parts := consumer.NewBudgets(100, 2)
		<-acquire(parts[0], 50)
		if !granted(acquire(parts[1], 50)) || parts[1].TryAcquire(1) {
			t.Error("the other part hasn't 50 bytes")
		}
		parts[0].Release(50)
		if parts[1].TryAcquire(1) {
			t.Error("a part lends")
		}
		parts[1].Release(50)
	})
	bubble(t, "of parts, one at a time exceeds its bytes, or who has waited for long", func(t *testing.T) {
		parts := consumer.NewBudgets(150, 3)
		<-acquire(parts[0], 60)
		second := acquire(parts[1], 70)
		if granted(second) || parts[1].TryAcquire(51) {
			t.Error("two parts exceed their bytes")
		}
		parts[0].Release(10)
		if !granted(second) {
			t.Error("not granted, though no other part exceeds its bytes")
		}
		third := acquire(parts[2], 80)
		time.Sleep(4 * time.Second)
		if granted(third) {
			t.Error("granted too early")
		}
		time.Sleep(2 * time.Second)
		if !granted(third) {
			t.Error("waits for another part for ever")
		}
		for i, n := range []int64{50, 70, 80} {
			parts[i].Release(n)
			if parts[i].Used() != 0 {
				t.Errorf("part %d holds %d", i, parts[i].Used())
			}
		}
	})
}
