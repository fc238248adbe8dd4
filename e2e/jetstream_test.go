package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// stream is a JetStream stream on disk, on a server of its own within this
// process, as a producer and an auditor see it.
type stream struct {
	t       *testing.T
	url     string
	name    string
	js      jetstream.JetStream
	server  *server.Server
	options server.Options

	mu sync.Mutex
	// ids are the published messages' by sequence, from 1, as far as the server
	// has confirmed all of them.
	ids []string
}

func newStream(t *testing.T, name string) *stream {
	t.Helper()
	needServices(t)
	st := &stream{t: t, name: name, options: server.Options{
		ServerName: "dedupd-e2e", Host: "127.0.0.1", Port: server.RANDOM_PORT,
		JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true,
	}}
	st.startServer()
	t.Cleanup(st.stopServer)
	conn, err := natsgo.Connect(st.url, natsgo.MaxReconnects(-1), natsgo.ReconnectWait(100*time.Millisecond))
	if err != nil {
		t.Fatal("NATS: ", err)
	}
	t.Cleanup(conn.Close)
	if st.js, err = jetstream.New(conn, jetstream.WithPublishAsyncMaxPending(4000)); err != nil {
		t.Fatal("NATS: ", err)
	}
	if _, err := st.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}, Storage: jetstream.FileStorage}); err != nil {
		t.Fatal("NATS: ", err)
	}
	return st
}

// startServer starts the server on its folder, and again on its port.
func (st *stream) startServer() {
	st.t.Helper()
	options := st.options
	srv, err := server.NewServer(&options)
	if err != nil {
		st.t.Fatal("NATS: ", err)
	}
	srv.Start()
	st.server = srv
	if !srv.ReadyForConnections(20 * time.Second) {
		st.t.Fatal("NATS: the server doesn't take connections")
	}
	st.url = srv.ClientURL()
	st.options.Port = srv.Addr().(*net.TCPAddr).Port
}

func (st *stream) stopServer() {
	st.server.Shutdown()
	st.server.WaitForShutdown()
}

// publishAll sends a plan, so many a second as pace says at the time (0: as many
// as go), and returns when the server has all.
func (st *stream) publishAll(plan []send, pace func() int) error {
	for len(plan) > 0 {
		n := min(len(plan), 2000)
		if rate := pace(); rate > 0 {
			n = min(n, rate/50)
			time.Sleep(time.Second / 50)
		}
		acks := make([]jetstream.PubAckFuture, n)
		for i, s := range plan[:n] {
			var err error
			if acks[i], err = st.js.PublishMsgAsync(st.message(s.partition, s.id(), s.body())); err != nil {
				return err
			}
		}
		for i, ack := range acks {
			select {
			case a := <-ack.Ok():
				st.mu.Lock()
				if a.Sequence != uint64(len(st.ids))+1 {
					st.mu.Unlock()
					return fmt.Errorf("sequence %d follows on %d", a.Sequence, len(st.ids))
				}
				st.ids = append(st.ids, plan[i].id())
				st.mu.Unlock()
			case err := <-ack.Err():
				return err
			case <-st.t.Context().Done():
				return st.t.Context().Err()
			}
		}
		plan = plan[n:]
	}
	return nil
}

// message carries its id in a header of ours. In Nats-Msg-Id the server itself
// would drop copies, for as long as its own window lasts.
func (st *stream) message(partition int32, id string, body []byte) *natsgo.Msg {
	msg := natsgo.NewMsg(fmt.Sprintf("%s.%d", st.name, partition))
	msg.Header.Set(idHeader, id)
	msg.Data = body
	return msg
}

// known are the ids of the first so many sequences, or of fewer.
func (st *stream) known(upTo uint64) []string {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.ids[:min(uint64(len(st.ids)), upTo)]
}

// durable is how the server sees a durable consumer; nil while there is none.
func (st *stream) durable(ctx context.Context, name string) (*jetstream.ConsumerInfo, error) {
	c, err := st.js.Consumer(ctx, st.name, name)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return c.CachedInfo(), nil
}

// rawLog reads the whole stream again: the ids by sequence.
func (st *stream) rawLog(ctx context.Context, lane string) (map[string][]string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	info, err := st.js.Stream(ctx, st.name)
	if err != nil {
		return nil, err
	}
	state := info.CachedInfo().State
	ids := make([]string, state.LastSeq+1) // sequences begin at 1
	reader, err := st.js.OrderedConsumer(ctx, st.name, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, err
	}
	messages, err := reader.Messages()
	if err != nil {
		return nil, err
	}
	defer messages.Stop()
	for range state.Msgs {
		msg, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return nil, err
		}
		meta, err := msg.Metadata()
		if err != nil {
			return nil, err
		}
		ids[meta.Sequence.Stream] = msg.Headers().Get(idHeader)
	}
	return map[string][]string{lane: ids}, nil
}
