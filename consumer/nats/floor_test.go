package nats_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/consumer/nats"
)

// loser is a server that may lose what it has stored of a stream.
type loser struct {
	t      *testing.T
	folder string
	server *server.Server
	js     jetstream.JetStream
}

func newLoser(t *testing.T) *loser {
	t.Helper()
	f := &loser{t: t, folder: t.TempDir()}
	f.start()
	return f
}

func (f *loser) start(change ...func(*server.Options)) {
	f.t.Helper()
	f.server = startServer(f.t, append(change, func(o *server.Options) { o.StoreDir = f.folder })...)
	f.js = connect(f.t, f.server)
}

// lose stops the server, removes files of the stream, and starts it again where it was.
func (f *loser) lose(paths ...string) {
	f.t.Helper()
	at := port(f.server)
	f.server.Shutdown()
	f.server.WaitForShutdown()
	for _, path := range paths {
		full := filepath.Join(f.folder, "jetstream", "$G", "streams", "ORDERS", path)
		if _, err := os.Stat(full); err != nil {
			f.t.Fatal(err)
		}
		if err := os.RemoveAll(full); err != nil {
			f.t.Fatal(err)
		}
	}
	f.start(func(o *server.Options) { o.Port = at })
}

const stateOfDurable = "obs/dedupd/o.dat"

func keepingSource(t *testing.T, f *loser, after time.Duration) *nats.Source {
	t.Helper()
	source := newSource(t, f.server)
	source.KeepFloorAfter(after)
	return source
}

// A durable whose state is lost, and whose configuration isn't, goes on where it was.
func TestADurableLosesItsState(t *testing.T) {
	t.Parallel()
	for name, running := range map[string]bool{"under a worker": true, "while nobody reads": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newLoser(t)
			createStream(t, f.js, jetstream.StreamConfig{})
			publish(t, f.js, 0, 2000)
			store := consumertest.NewStore()
			r := start(t, keepingSource(t, f, time.Second), store)
			wait(t, store, 2000)
			eventually(t, "the durable to keep its floor", func() bool { return nats.Floor(durable(t, f.js)) == 2000 })
			if !running {
				r.stop()
			}
			f.lose(stateOfDurable)
			if !running {
				r = start(t, keepingSource(t, f, time.Second), store)
			}
			eventually(t, "the durable to be set forward", func() bool { return r.log.count("has lost its state, and would deliver again") == 1 })
			publish(t, f.js, 2000, 100)
			wait(t, store, 2100)
			if handled, again, _ := store.Counts(); handled != 2100 || again != 0 {
				t.Errorf("%d messages were handled, %d of them again", handled, again)
			}
		})
	}
}

// Where the stream is lost with the state of its durable, what has the same sequences by
// now are other messages: nothing is skipped, and somebody is to look.
func TestADurableLosesItsStateWithTheStream(t *testing.T) {
	t.Parallel()
	f := newLoser(t)
	createStream(t, f.js, jetstream.StreamConfig{})
	publish(t, f.js, 0, 100)
	store := consumertest.NewStore()
	r := start(t, keepingSource(t, f, time.Second), store)
	wait(t, store, 100)
	eventually(t, "the durable to keep its floor", func() bool { return nats.Floor(durable(t, f.js)) == 100 })
	r.stop()
	f.lose(stateOfDurable, "msgs")
	publish(t, f.js, 100, 300)
	r = start(t, keepingSource(t, f, time.Second), store)
	const why = "younger messages there, which are others"
	eventually(t, "the queue to be held", func() bool { return r.Ready() != nil && r.log.has(why) })
	r.stop()
	if n := len(store.Effects()); n != 100 {
		t.Errorf("%d effects, while it isn't known what they are of", n)
	}

	// As the reason says.
	stream, err := f.js.Stream(t.Context(), "ORDERS")
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.DeleteConsumer(t.Context(), "dedupd"); err != nil {
		t.Fatal(err)
	}
	store.Lose(queue)
	start(t, keepingSource(t, f, time.Second), store)
	wait(t, store, 300) // what the stream has
}

// What a server forgets in a crash comes again, and the durable stays what it is.
func TestAFloorThatIsYoungIsNotKept(t *testing.T) {
	t.Parallel()
	f := newLoser(t)
	createStream(t, f.js, jetstream.StreamConfig{})
	publish(t, f.js, 0, 100)
	store := consumertest.NewStore()
	start(t, keepingSource(t, f, time.Hour), store)
	wait(t, store, 100)
	created := durable(t, f.js).Created
	f.lose(stateOfDurable)
	publish(t, f.js, 100, 10)
	wait(t, store, 110)
	eventually(t, "all of it to come again", func() bool { handled, _, _ := store.Counts(); return handled == 210 })
	if now := durable(t, f.js); nats.Floor(now) != 0 || !now.Created.Equal(created) {
		t.Errorf("the durable was made anew, or keeps %d", nats.Floor(now))
	}
}
