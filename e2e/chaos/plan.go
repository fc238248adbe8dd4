package main

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/dedupd/dedupd/e2e/shape"
)

// job is one run that is to be done.
type job struct {
	fault *fault
	shape *shape.Shape // nil: claim
	kind  string       // of the broker
	times int
	seed  uint64
	// until, unless zero, ends it early.
	until time.Time
	// binary is the program to try; empty: the rig's.
	binary string
}

// plan are the runs that are wanted, each with a seed of its own: every fault in shape claim,
// and the other shapes by the dice.
func (c *choice) plan() (jobs []job) {
	if c.shape == nil || c.shape == shape.Claim {
		for i, f := range faults {
			for _, kind := range c.brokers {
				if n := c.howOften(f, kind); n > 0 && c.wants(f, kind) {
					own := c.seed + uint64(2*i)
					if kind == "nats" {
						own++
					}
					jobs = append(jobs, job{fault: f, kind: kind, times: n, seed: own})
				}
			}
		}
	}
	switch {
	case c.shape == shape.Claim:
		return jobs
	case c.shape != nil:
		return append(jobs, c.meetings(c.shape)...)
	}
	rng := rand.New(rand.NewPCG(c.seed, 1))
	others := shape.All[1:]
	if c.short {
		for _, s := range others {
			if all := c.meetings(s); len(all) > 0 {
				jobs = append(jobs, all[rng.IntN(len(all))])
			}
		}
		return jobs
	}
	// Each shape comes, and each fault: as many runs as there are more of.
	for i := range max(len(others), len(shaped)) {
		var all []job
		for _, j := range c.meetings(others[i%len(others)]) {
			if j.fault.name == shaped[(i+int(c.seed%uint64(len(shaped))))%len(shaped)] {
				all = append(all, j)
			}
		}
		if len(all) > 0 {
			jobs = append(jobs, all[rng.IntN(len(all))])
		}
	}
	return jobs
}

// meetings are the runs of a shape with each of its faults.
func (c *choice) meetings(s *shape.Shape) (jobs []job) {
	for i, name := range shaped {
		f := faultNamed(name)
		for _, kind := range c.brokers {
			if n := c.howOften(f, kind); n > 0 && c.wants(f, kind) && fits(s, kind) {
				jobs = append(jobs, job{fault: f, shape: s, kind: kind, times: n, seed: c.seed + uint64(1000+i)})
			}
		}
	}
	return jobs
}

func (c *choice) wants(f *fault, kind string) bool {
	return c.pattern.MatchString(f.name) && (f.brokers == nil || slices.Contains(f.brokers, kind))
}

// fits reports whether a broker has what a shape needs.
func fits(s *shape.Shape, kind string) bool { return kind == "kafka" || !s.Ordered }

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

// draw are two long runs of everything, one upon the other at a random order, in one shape
// or any.
func draw(seed uint64, d time.Duration, only *shape.Shape) []job {
	now := time.Now()
	rng := rand.New(rand.NewPCG(seed, 1))
	shapeFor := func(kind string) *shape.Shape {
		if only != nil && fits(only, kind) {
			return only
		}
		all := slices.DeleteFunc(slices.Clone(shape.All), func(s *shape.Shape) bool { return !fits(s, kind) })
		return all[rng.IntN(len(all))]
	}
	return []job{
		{fault: faultNamed(mixture), shape: shapeFor("kafka"), kind: "kafka", times: math.MaxInt, seed: seed, until: now.Add(d / 2)},
		{fault: faultNamed(mixture), shape: shapeFor("nats"), kind: "nats", times: math.MaxInt, seed: seed + 1, until: now.Add(d)},
	}
}
