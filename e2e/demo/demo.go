package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// demo is one run: the servers, the producer, the worker, and what is shown.
type demo struct {
	options
	screen   *screen
	postgres *postgres
	broker   *broker
	producer *producer
	worker   *worker
	began    time.Time

	mu     sync.Mutex
	books  books
	note   string // what is going on just now
	kills  []kill
	pid    int // of the worker; 0 while there is none
	starts int // of workers
	held   int // messages that the broker waits for
}

// kill is one SIGKILL of the worker.
type kill struct {
	applied int64         // by the books, when it happened
	down    time.Duration // until the next worker was started
}

const (
	pollEvery = 200 * time.Millisecond
	untilIdle = 2 * time.Second
)

// run is the demo from beginning to end. It leaves nothing behind, whatever
// happens: what was started is stopped in reverse order.
func run(ctx context.Context, o options, s *screen) (err error) {
	folder, release, err := newFolder()
	if err != nil {
		return err
	}
	var undo []func() error
	defer func() {
		s.done()
		for i := len(undo) - 1; i >= 0; i-- {
			err = errors.Join(err, undo[i]())
		}
	}()
	undo = append(undo, release)

	d := &demo{options: o, screen: s, note: "starting"}
	if d.binary == "" {
		s.say("building dedupd …")
		if d.binary, err = build(ctx, folder); err != nil {
			return err
		}
	} else if _, err := os.Stat(d.binary); err != nil {
		return fmt.Errorf("%w; make it with: go build -o %s ./cmd/dedupd", err, d.binary)
	}
	if d.postgres, err = startPostgres(ctx, o.postgres, s); err != nil {
		return err
	}
	undo = append(undo, d.postgres.stop)
	if d.broker, err = startBroker(ctx, folder); err != nil {
		return err
	}
	undo = append(undo, func() error { d.broker.stop(); return nil })
	d.producer = &producer{js: d.broker.js, dice: newDice(o.messages, o.resend, o.seed), rate: o.rate}
	if d.worker, err = newWorker(d.binary, folder, d.broker.url, d.postgres.url); err != nil {
		return err
	}
	undo = append(undo, d.worker.stop)

	s.say("Postgres %-8s %s", d.postgres.version, d.postgres.url)
	s.say("NATS %-12s %s, streams %s and %s", d.broker.version(), d.broker.url, shopStream, edgeStream)
	s.say("dedupd run        -c %s", d.worker.config)
	s.say("metrics           http://%s/metrics", d.worker.metrics)
	s.say("")

	if err := d.play(ctx); err != nil {
		return err
	}
	if err := d.report(ctx); err != nil {
		return err
	}
	if o.keep {
		return d.linger(ctx)
	}
	return nil
}

// play sends the messages, keeps the worker going, kills it now and then, and
// returns when everything has landed.
func (d *demo) play(ctx context.Context) error {
	d.began = time.Now()
	limit, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	ctx, stop := context.WithCancelCause(limit)

	var background sync.WaitGroup
	defer background.Wait()
	defer stop(nil)
	produced := make(chan struct{})
	background.Go(func() {
		if err := d.producer.run(ctx, d.messages); err != nil {
			stop(err)
			return
		}
		close(produced)
	})
	background.Go(func() {
		if err := d.watch(ctx); err != nil {
			stop(err)
		}
	})
	err := d.supervise(ctx, produced)
	d.screen.last(d.snapshot())
	if err == nil {
		return nil
	}
	if limit.Err() != nil && errors.Is(context.Cause(limit), context.DeadlineExceeded) {
		s := d.snapshot()
		return d.worker.failed(fmt.Errorf("after %s only %s of %s orders have landed, and the broker holds %s messages",
			d.timeout, count(s.books.Applied), count(s.orders), count(int64(s.held))))
	}
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, context.Canceled) {
		return cause
	}
	return err
}

// supervise is the hand that starts and kills the worker.
func (d *demo) supervise(ctx context.Context, produced <-chan struct{}) error {
	// The producer has a small start: the first worker finds a backlog.
	if !sleep(ctx, 500*time.Millisecond) {
		return ctx.Err()
	}
	if err := d.startWorker(untilIdle); err != nil {
		return err
	}
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-d.worker.process.Done():
			if err := d.worker.process.Err(); err != nil {
				return d.worker.failed(fmt.Errorf("the worker ended by itself: %w", err))
			}
			over, err := d.isOver(ctx, produced)
			if err != nil || over {
				return err
			}
			if err := d.startWorker(untilIdle); err != nil {
				return err
			}
		case <-tick.C:
			if d.isTimeToKill() {
				if err := d.killWorker(ctx); err != nil {
					return err
				}
			}
		}
	}
}

// isOver is asked when the worker found nothing more to do. What a killed one
// had in hand may still be on its way: then there is more to come.
func (d *demo) isOver(ctx context.Context, produced <-chan struct{}) (bool, error) {
	held, err := d.broker.held(ctx)
	if err != nil {
		return false, err
	}
	d.mu.Lock()
	d.held = held
	d.mu.Unlock()
	if held == 0 {
		select {
		case <-produced:
			d.notes(0, "caught up, and ended by itself")
			return true, d.poll(ctx)
		default:
		}
	}
	d.notes(0, "waiting for the broker to deliver again")
	return false, nil
}

// isTimeToKill spreads the kills evenly over the messages.
func (d *demo) isTimeToKill() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := len(d.kills)
	if n >= d.options.kills {
		return false
	}
	due := int64(d.messages) * int64(n+1) / int64(d.options.kills+1)
	return d.books.sum().Fetched >= due
}

const killed = "killed"

func (d *demo) killWorker(ctx context.Context) error {
	d.worker.kill()
	began := time.Now()
	d.notes(0, killed)
	d.mu.Lock()
	at := len(d.kills)
	d.kills = append(d.kills, kill{applied: d.books.sum().Applied})
	d.mu.Unlock()
	if err := d.broker.hurry(ctx); err != nil {
		return fmt.Errorf("after the kill: %w", err)
	}
	if err := d.startWorker(untilIdle); err != nil {
		return err
	}
	d.mu.Lock()
	d.kills[at].down = time.Since(began)
	d.mu.Unlock()
	return nil
}

func (d *demo) startWorker(untilIdle time.Duration) error {
	if err := d.worker.start(untilIdle); err != nil {
		return err
	}
	d.notes(d.worker.process.Pid(), "running")
	return nil
}

func (d *demo) notes(pid int, note string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if pid != 0 {
		d.starts++
	}
	d.pid, d.note = pid, note
}

// watch reads the books and shows them until ctx ends.
func (d *demo) watch(ctx context.Context) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		if err := d.poll(ctx); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		d.screen.show(d.snapshot())
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (d *demo) poll(ctx context.Context) error {
	b, err := readBooks(ctx, d.postgres.pool)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.books = b
	return nil
}

func (d *demo) snapshot() snapshot {
	d.mu.Lock()
	defer d.mu.Unlock()
	return snapshot{
		elapsed: time.Since(d.began),
		total:   int64(d.messages),
		sent:    d.producer.sent.Load(),
		orders:  d.producer.orders.Load(),
		books:   d.books.sum(),
		kills:   len(d.kills),
		ofKills: d.options.kills,
		starts:  d.starts,
		pid:     d.pid,
		note:    d.note,
		held:    d.held,
	}
}

// linger leaves everything running, with a trickle of messages, until ctx ends.
// That is how it is meant to end, so it isn't an error.
func (d *demo) linger(ctx context.Context) error {
	if err := d.startWorker(0); err != nil {
		return err
	}
	const trickle = 50 // messages a second
	p := &producer{js: d.producer.js, dice: d.producer.dice, rate: trickle}
	const many = 1 << 40
	p.dice.messages, p.dice.resends = many, int(float64(many)*d.resend)
	d.screen.say("Everything goes on, at %d messages a second, until Ctrl-C:", trickle)
	d.screen.say("  psql '%s' -c 'TABLE dedupd.books'", d.postgres.url)
	d.screen.say("  curl -s http://%s/metrics | grep ^dedupd_", d.worker.metrics)
	d.screen.say("  %s stats -c %s", d.worker.binary, d.worker.config)
	ended := make(chan error, 1)
	inner, cancel := context.WithCancel(ctx)
	go func() { ended <- p.run(inner, many) }()
	var err error
	select {
	case <-ctx.Done():
	case err = <-ended:
		ended <- nil
	case <-d.worker.process.Done():
		err = d.worker.failed(fmt.Errorf("the worker ended by itself: %w", d.worker.process.Err()))
	}
	cancel()
	<-ended //nolint:errcheck // whichever ended first is the reason
	if ctx.Err() != nil {
		d.screen.say("Stopping …")
		return nil
	}
	return err
}
