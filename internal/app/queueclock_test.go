package app

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/internal/natstest"
)

// TestAMessageIsOutForLongerThanTheWindow lets somebody else hold a message of a queue
// whose id is claimed, while the worker lands later ones for longer than the window.
// When that message comes again, its id is still claimed.
func TestAMessageIsOutForLongerThanTheWindow(t *testing.T) {
	t.Parallel()
	again := map[string]func(js jetstream.JetStream, held jetstream.Msg) error{
		"given back": func(_ jetstream.JetStream, held jetstream.Msg) error { return held.Nak() },
		"all rewound": func(js jetstream.JetStream, _ jetstream.Msg) error {
			return js.DeleteConsumer(t.Context(), "ORDERS", "orders")
		},
	}
	for name, again := range again {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, js := natstest.Start(t)
			q := &queueRig{newRig(t, fmt.Sprintf("{nats: {servers: %q, stream: ORDERS}}", url)), js}
			q.exec(t, `ALTER TABLE public.orders DROP CONSTRAINT orders_pkey`)
			held := q.hold(t, "a")
			q.publish(t, "a") // a second copy, which the worker gets
			q.start(t)
			q.await(t, `SELECT count(*) FROM public.orders WHERE id = 'a'`)
			q.rotate(t)

			const window = time.Second
			sealed, sent := time.Now(), 0
			for ; time.Since(sealed) < window+5*time.Second; sent++ { // the durable is looked at every two seconds
				q.land(t, fmt.Sprint("b", sent))
				if n := q.expire(t, window); n != 0 {
					t.Fatalf("the claims of a message that is still out expired after %s", time.Since(sealed))
				}
			}
			if err := again(js, held); err != nil {
				t.Fatal(err)
			}
			q.await(t, `SELECT count(*) FROM dedupd.books WHERE duplicates > 0`)
			q.await(t, fmt.Sprintf(`SELECT count(*) FROM dedupd.books WHERE applied = %d`, sent+1))

			// No message is outstanding any more: the clock follows the messages.
			for deadline := time.Now().Add(30 * time.Second); q.expire(t, window) == 0; sent++ {
				if time.Now().After(deadline) {
					t.Fatal("the queue's clock stands still")
				}
				q.land(t, fmt.Sprint("b", sent))
			}
			var rows, ids int
			if err := q.pool.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT id) FROM public.orders`).Scan(&rows, &ids); err != nil || rows != ids || ids != sent+1 {
				t.Errorf("%d rows of %d ids, want %d: %v", rows, ids, sent+1, err)
			}
		})
	}
}

// queueRig is a rig that reads a queue.
type queueRig struct {
	*rig
	js jetstream.JetStream
}

func (q *queueRig) publish(t *testing.T, id string) {
	t.Helper()
	if _, err := q.js.PublishMsg(t.Context(), &nats.Msg{Subject: "orders", Header: nats.Header{"message-id": {id}}}); err != nil {
		t.Fatal(err)
	}
}

// hold publishes a message and fetches it from the durable, like a worker that then
// hangs.
func (q *queueRig) hold(t *testing.T, id string) jetstream.Msg {
	t.Helper()
	q.publish(t, id)
	durable, err := q.js.CreateConsumer(t.Context(), "ORDERS", jetstream.ConsumerConfig{Durable: "orders", AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	held, err := durable.Next()
	if err != nil {
		t.Fatal(err)
	}
	return held
}

// start runs a worker until the test ends.
func (q *queueRig) start(t *testing.T) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	ended := q.begin(ctx, t, slog.DiscardHandler)
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// land publishes a message and waits until it is in the sink.
func (q *queueRig) land(t *testing.T, id string) {
	t.Helper()
	q.publish(t, id)
	q.await(t, fmt.Sprintf(`SELECT count(*) FROM public.orders WHERE id = '%s'`, id))
}

// rotate seals the open generation. The worker may be running retention.
func (q *queueRig) rotate(t *testing.T) {
	t.Helper()
	q.await(t, `SELECT count(*) FROM dedupd.generations WHERE state = 'next'`)
	for {
		open := q.await(t, `SELECT generation FROM dedupd.generations WHERE state = 'open'`)
		rotated, _, _, err := q.store.Generations().Rotate(t.Context(), open)
		if err != nil {
			t.Fatal(err)
		}
		if rotated {
			return
		}
	}
}

// expire expires the claims that may go, and returns how many generations that were.
func (q *queueRig) expire(t *testing.T, window time.Duration) int {
	t.Helper()
	for {
		n, led, err := q.store.Generations().Expire(t.Context(), window, 1000*time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		if led {
			return n
		}
	}
}
