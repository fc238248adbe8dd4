package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"
)

// application writes to the sink's table beside the workers, as the run's shape has it.
type application struct {
	cancel context.CancelFunc
	ended  chan struct{}
	writes int
}

func (r *run) startApplication(rng *rand.Rand) {
	ctx, cancel := context.WithCancel(r.ctx)
	a := &application{cancel: cancel, ended: make(chan struct{})}
	r.beside = a
	go func() {
		defer close(a.ended)
		for sleep(ctx, 2*time.Millisecond) {
			write, done := context.WithTimeout(ctx, requestTimeout)
			if _, err := r.pool.Load().Exec(write, r.shape.Beside(rng, int(r.load.firsts.Load()))); err == nil { // the database may be away
				a.writes++
			}
			done()
		}
	}()
}

func (a *application) stop() error {
	a.cancel()
	<-a.ended
	if a.writes == 0 {
		return errors.New("the application beside the workers could never write")
	}
	return nil
}
