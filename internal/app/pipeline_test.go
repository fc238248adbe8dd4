package app

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
)

// brokenSource can't work once it has begun.
type brokenSource struct {
	err   error
	begun chan struct{}
}

func (s *brokenSource) Name() string { return "kafka" }

func (s *brokenSource) Run(ctx context.Context, _ *consumer.Session) error {
	close(s.begun)
	if s.err != nil {
		return s.err
	}
	<-ctx.Done()
	return nil
}

// A pipeline that comes to an end ends the others, and its error is the process's.
func TestOnePipelinesEndEndsAll(t *testing.T) {
	var all pipelines
	good, bad := &brokenSource{nil, make(chan struct{})}, &brokenSource{lane.ErrLoss, make(chan struct{})}
	for name, source := range map[string]*brokenSource{"good": good, "bad": bad} {
		budget := consumer.NewBudget(1 << 20)
		all = append(all, &pipeline{name: name, worker: &consumer.Worker{
			Sources: []consumer.Source{source}, MaxMessages: 1, MaxBytes: 1, Budget: budget, Drain: time.Second,
			Logger: slog.New(slog.DiscardHandler), Metrics: consumer.NewMetrics(prometheus.NewRegistry(), budget),
		}})
	}
	ended := make(chan error, 1)
	go func() { ended <- all.run(t.Context()) }()
	select {
	case err := <-ended:
		var of *PipelineError
		var server *ServerError
		if !errors.As(err, &of) || of.Scope != "bad" || !errors.As(err, &server) || !errors.Is(err, lane.ErrLoss) {
			t.Errorf("the error is %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the other one goes on")
	}
	<-good.begun
}
