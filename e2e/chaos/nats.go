package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/e2e/rig"
	"github.com/dedupd/dedupd/internal/child"
)

// natsServer is a server in a process of its own, which can be killed.
type natsServer struct {
	binary, folder string
	addr           string
	relayed        string   // the address of a relay in front of it; empty: there is none
	cluster        []string // arguments
	process        *child.Process
}

// startNATS starts a server, or a cluster, each with a folder of its own.
func startNATS(binary, folder string, nodes int, relay func(string) (string, error)) ([]*natsServer, error) {
	addrs, err := rig.FreeAddresses(2 * nodes)
	if err != nil {
		return nil, err
	}
	all := make([]*natsServer, nodes)
	for i := range all {
		name := fmt.Sprint("node-", i+1)
		s := &natsServer{binary: binary, folder: filepath.Join(folder, name), addr: addrs[i]}
		if nodes > 1 {
			s.cluster = []string{
				"--name", name, "--cluster_name", "chaos", "--cluster", "nats://" + addrs[nodes+i],
				"--routes", "nats://" + strings.Join(addrs[nodes:], ",nats://"),
			}
		}
		if relay != nil {
			if s.relayed, err = relay(s.addr); err != nil {
				return nil, err
			}
		}
		if err := os.MkdirAll(s.folder, 0o700); err != nil {
			return nil, err
		}
		if err := s.Restart(); err != nil {
			return nil, err
		}
		all[i] = s
	}
	return all, nil
}

func (s *natsServer) Stop() error { return s.Kill() }

func (s *natsServer) Kill() error {
	s.process.Kill()
	return nil
}

// Restart starts the server on its folder and port, and returns when it takes
// connections.
func (s *natsServer) Restart() error {
	host, port, err := net.SplitHostPort(s.addr)
	if err != nil {
		return err
	}
	args := append([]string{"-a", host, "-p", port, "-js", "-sd", filepath.Join(s.folder, "data")}, s.cluster...)
	if s.process, err = rig.Start(exec.Command(s.binary, args...), filepath.Join(s.folder, "log")); err != nil {
		return err
	}
	for end := time.Now().Add(30 * time.Second); ; {
		conn, err := natsgo.Connect("nats://"+s.addr, natsgo.Timeout(time.Second))
		if err == nil {
			conn.Close()
			return nil
		}
		if s.process.Ended() || time.Now().After(end) {
			s.process.Kill()
			return fmt.Errorf("the NATS server doesn't take connections: %w", err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// natsStream is a stream at a server that several runs share.
type natsStream struct {
	servers    []*natsServer
	name       string
	partitions int // subjects
	conn       *natsgo.Conn
	js         jetstream.JetStream
}

// natsLane is the name of a queue's one lane.
const natsLane = "queue"

func newNATSStream(ctx context.Context, servers []*natsServer, name string, partitions int) (*natsStream, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	n := &natsStream{servers: servers, name: name, partitions: partitions}
	conn, err := natsgo.Connect(strings.Join(n.urls(false), ","), natsgo.MaxReconnects(-1), natsgo.ReconnectWait(100*time.Millisecond), natsgo.ReconnectJitter(0, 0))
	if err != nil {
		return nil, err
	}
	n.conn = conn
	// A message that the server doesn't confirm is not sent again: it may be there.
	n.js, err = jetstream.New(conn, jetstream.WithPublishAsyncMaxPending(10_000), jetstream.WithPublishAsyncTimeout(10*time.Second))
	if err == nil {
		err = n.createStream(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return n, nil
}

// createStream tries again while a young cluster has no leader, or knows of too
// few servers.
func (n *natsStream) createStream(ctx context.Context) error {
	for {
		attempt, cancel := context.WithTimeout(ctx, requestTimeout)
		_, err := n.js.CreateStream(attempt, jetstream.StreamConfig{
			Name: n.name, Subjects: []string{n.name + ".>"}, Storage: jetstream.FileStorage, Replicas: len(n.servers),
		})
		cancel()
		if err == nil || len(n.servers) == 1 || !sleep(ctx, 200*time.Millisecond) {
			return err
		}
	}
}

func (n *natsStream) Kind() string { return "nats" }
func (n *natsStream) Source() string {
	return fmt.Sprintf("nats: {servers: [%s], stream: %s}", quoted(n.urls(n.servers[0].relayed != "")), n.name)
}
func (n *natsStream) Ordered() bool   { return false }
func (n *natsStream) Partitions() int { return n.partitions }
func (n *natsStream) Close()          { n.conn.Close() }
func (n *natsStream) Judge() []string {
	return []string{"-nats", strings.Join(n.urls(false), ","), "-stream", n.name, "-source", sourceName}
}

func (n *natsStream) Servers() (all []server) {
	for _, s := range n.servers {
		all = append(all, s)
	}
	return all
}

// urls are the servers', or their relays'.
func (n *natsStream) urls(relayed bool) (all []string) {
	for _, s := range n.servers {
		addr := s.addr
		if relayed {
			addr = s.relayed
		}
		all = append(all, "nats://"+addr)
	}
	return all
}

func (n *natsStream) Send(ctx context.Context, m sent, done func(error)) {
	msg := natsgo.NewMsg(fmt.Sprintf("%s.%d", n.name, m.partition))
	// Not in Nats-Msg-Id: the server itself would drop the copies.
	if m.id != "" {
		msg.Header.Set(idHeader, m.id)
	}
	msg.Data = bytes.Clone(m.value)
	ack, err := n.js.PublishMsgAsync(msg)
	if err != nil {
		done(err)
		return
	}
	go func() {
		select {
		case <-ack.Ok():
			done(nil)
		case err := <-ack.Err():
			done(err)
		case <-ctx.Done():
			done(ctx.Err())
		}
	}()
}

func (n *natsStream) Ends(ctx context.Context) (map[string]int64, error) {
	s, err := n.js.Stream(ctx, n.name)
	if err != nil {
		return nil, err
	}
	return map[string]int64{natsLane: int64(s.CachedInfo().State.LastSeq) + 1}, nil
}

func (n *natsStream) consumer(ctx context.Context) (*jetstream.ConsumerInfo, error) {
	c, err := n.js.Consumer(ctx, n.name, scope)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return c.CachedInfo(), nil
}

func (n *natsStream) Told(ctx context.Context) (map[string]int64, error) {
	info, err := n.consumer(ctx)
	if err != nil || info == nil {
		return nil, err
	}
	return map[string]int64{natsLane: int64(info.AckFloor.Stream) + 1}, nil
}

func (n *natsStream) Done(ctx context.Context, ends map[string]int64) (bool, error) {
	info, err := n.consumer(ctx)
	if err != nil || info == nil {
		return false, err
	}
	// The floor passes over what was purged or never delivered only with the next
	// ack, so a queue that holds nothing at all is done, too.
	return int64(info.AckFloor.Stream)+1 >= ends[natsLane] || info.NumPending == 0 && info.NumAckPending == 0, nil
}
