package main

import (
	"context"
	"encoding/json"
	"os"
	"time"
)

// sampler looks ten times a second at what the broker knows of each lane, and
// then at the lane's row, and writes both down.
//
// While the database is away no lane moves, and what the broker is told must be
// durable all the same: such a sample waits for the rows as they are found when the
// database is back.
type sampler struct {
	waiting []sample
	run     *run
	file    *os.File
	quit    chan struct{}
	ended   chan struct{}
	failed  error
}

// sample is one line of its file.
type sample struct {
	At     time.Time `json:"at"`     // the broker was asked
	RowAt  time.Time `json:"row_at"` // the lane's row was read
	Lane   string    `json:"lane"`
	Broker int64     `json:"broker"`
	Next   int64     `json:"next"`
}

func (r *run) startSampler(file string) (*sampler, error) {
	f, err := os.Create(file)
	if err != nil {
		return nil, err
	}
	s := &sampler{run: r, file: f, quit: make(chan struct{}), ended: make(chan struct{})}
	go s.loop()
	return s, nil
}

func (s *sampler) stop() error {
	close(s.quit)
	<-s.ended
	if err := s.file.Close(); s.failed == nil {
		s.failed = err
	}
	return s.failed
}

func (s *sampler) loop() {
	defer close(s.ended)
	lines := json.NewEncoder(s.file)
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for last := false; !last; {
		select {
		case <-s.quit:
			last = true // a lane that was put back has caught up since the one before
		case <-ticker.C:
		}
		s.look(lines)
	}
}

func (s *sampler) look(lines *json.Encoder) {
	ctx, cancel := context.WithTimeout(s.run.ctx, requestTimeout)
	defer cancel()
	told, err := s.run.broker.Told(ctx)
	if err != nil {
		return // a server that is down can't be asked, which is no fault here
	}
	now := time.Now()
	for lane, at := range told {
		s.waiting = append(s.waiting, sample{At: now, Lane: lane, Broker: at})
	}
	next, err := s.run.positions(ctx)
	if err != nil {
		return
	}
	read := time.Now()
	for _, w := range s.waiting {
		w.RowAt, w.Next = read, next[w.Lane]
		if err := lines.Encode(w); err != nil {
			s.failed = err
		}
	}
	s.waiting = s.waiting[:0]
}
