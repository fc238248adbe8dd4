package main

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"
)

// job is one run that is to be done.
type job struct {
	fault *fault
	kind  string // of the broker
	times int
	seed  uint64
	// until, unless zero, ends it early.
	until time.Time
	// binary is the program to try; empty: the rig's.
	binary string
}

// plan are the runs of the faults that are wanted, each with a seed of its own.
func plan(seed uint64, brokers []string, wanted func(*fault) bool, times func(f *fault, kind string) int) (jobs []job) {
	for i, f := range faults {
		for _, kind := range brokers {
			if !wanted(f) || f.brokers != nil && !slices.Contains(f.brokers, kind) {
				continue
			}
			if n := times(f, kind); n > 0 {
				own := seed + uint64(2*i)
				if kind == "nats" {
					own++
				}
				jobs = append(jobs, job{fault: f, kind: kind, times: n, seed: own})
			}
		}
	}
	return jobs
}

// slice is how often a fault strikes in what every change must pass.
func slice(f *fault, kind string) int {
	if f.name == "killed at a point" && kind == "kafka" {
		return f.short / 2 // each costs the group's wait for a dead member
	}
	return f.short
}

// doAll does the jobs, so many at a time: mostly they wait. Each outcome is told
// when it is there, never two at a time. The first error of the rig ends it.
func (g *servers) doAll(ctx context.Context, jobs []job, atOnce int, tell func(outcome) error) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var telling sync.Mutex
	do := func(j job) {
		if ctx.Err() != nil {
			return
		}
		o, err := g.do(ctx, j)
		telling.Lock()
		defer telling.Unlock()
		if err == nil {
			err = tell(o)
		}
		if err != nil {
			stop(err)
		}
	}
	queue := make(chan job)
	var workers sync.WaitGroup
	for range atOnce {
		workers.Go(func() {
			for j := range queue {
				do(j)
			}
		})
	}
	for _, j := range jobs {
		queue <- j
	}
	close(queue)
	workers.Wait()
	return context.Cause(ctx)
}

// draw are two long runs of everything, one upon the other at a random order.
func draw(seed uint64, d time.Duration) []job {
	now := time.Now()
	return []job{
		{fault: faultNamed(mixture), kind: "kafka", times: math.MaxInt, seed: seed, until: now.Add(d / 2)},
		{fault: faultNamed(mixture), kind: "nats", times: math.MaxInt, seed: seed + 1, until: now.Add(d)},
	}
}
