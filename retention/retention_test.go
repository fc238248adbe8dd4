package retention_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/dedupd/dedupd/retention"
)

// store is a scope with few dead letters.
type store struct {
	passes atomic.Int64
	age    time.Duration
	led    bool
	err    error
	hang   bool
}

func (s *store) ExpireDeadLetters(ctx context.Context, age time.Duration) (int64, bool, error) {
	s.passes.Add(1)
	s.age = age
	if s.hang {
		<-ctx.Done()
		return 0, false, ctx.Err()
	}
	return 2, s.led, s.err
}

func (s *store) Stats(context.Context) (retention.Stats, error) {
	return retention.Stats{Generations: 1, Claims: 10, ClaimsBytes: 1000, OldestClaim: time.Hour, DeadLetters: 3}, nil
}

func newLoop(s *store, log *slog.Logger) (*retention.Loop, *prometheus.Registry) {
	reg := prometheus.NewRegistry()
	return &retention.Loop{Store: s, Schedule: time.Minute, DeadLetterAge: 30 * 24 * time.Hour, Logger: log, Metrics: retention.NewMetrics(reg)}, reg
}

func TestPassesFollowTheSchedule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &store{led: true}
		loop, reg := newLoop(s, slog.New(slog.DiscardHandler))
		ctx, stop := context.WithCancel(t.Context())
		go loop.Run(ctx)
		time.Sleep(5 * time.Second)
		if n := s.passes.Load(); n != 1 {
			t.Errorf("%d passes right after the start, want 1", n)
		}
		time.Sleep(time.Hour)
		// Each wait is a minute and up to a tenth.
		if n := s.passes.Load(); n < 54 || n > 61 {
			t.Errorf("%d passes in an hour", n)
		}
		stop()
		synctest.Wait()
		if s.age != 30*24*time.Hour {
			t.Errorf("dead letters were kept for %s", s.age)
		}
		if n, err := testutil.GatherAndCount(reg); err != nil || n == 0 {
			t.Errorf("%d metrics, %v", n, err)
		}
		if err := testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP dedupd_dead_letters Dead letters kept.
# TYPE dedupd_dead_letters gauge
dedupd_dead_letters 3
`), "dedupd_dead_letters"); err != nil {
			t.Error(err)
		}
	})
}

func TestFailuresAreToldOnceAndTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		s := &store{err: errors.New("permission denied")}
		loop, _ := newLoop(s, slog.New(slog.NewTextHandler(&log, nil)))
		ctx, stop := context.WithCancel(t.Context())
		go loop.Run(ctx)
		time.Sleep(time.Hour)
		stop()
		synctest.Wait()
		if n := s.passes.Load(); n < 50 {
			t.Errorf("%d passes in an hour of failures", n)
		}
		if n := strings.Count(log.String(), "permission denied"); n != 1 {
			t.Errorf("the same failure was logged %d times", n)
		}
	})
}

func TestAPassThatHangsIsCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &store{hang: true}
		loop, _ := newLoop(s, slog.New(slog.DiscardHandler))
		if err := loop.Pass(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
}
