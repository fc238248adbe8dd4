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
	"syscall"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/internal/child"
)

// natsServer is a server in a process of its own, which can be killed.
type natsServer struct {
	binary, folder string
	addr           string
	process        *child.Process
}

func startNATS(binary, folder string) (*natsServer, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &natsServer{binary: binary, folder: folder, addr: l.Addr().String()}
	_ = l.Close()
	return s, s.Restart()
}

func (s *natsServer) url() string { return "nats://" + s.addr }

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
	log, err := os.OpenFile(filepath.Join(s.folder, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(s.binary, "-a", host, "-p", port, "-js", "-sd", filepath.Join(s.folder, "data"))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if s.process, err = child.Start(cmd, syscall.SIGKILL); err != nil {
		return err
	}
	for end := time.Now().Add(30 * time.Second); ; {
		conn, err := natsgo.Connect(s.url(), natsgo.Timeout(time.Second))
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

func (s *natsServer) stop() { s.process.Kill() }

// natsStream is a stream at a server that several runs share.
type natsStream struct {
	server     *natsServer
	name       string
	partitions int // subjects
	conn       *natsgo.Conn
	js         jetstream.JetStream
}

// natsLane is the name of a queue's one lane.
const natsLane = "queue"

func newNATSStream(ctx context.Context, server *natsServer, name string, partitions int) (*natsStream, error) {
	conn, err := natsgo.Connect(server.url(), natsgo.MaxReconnects(-1), natsgo.ReconnectWait(100*time.Millisecond), natsgo.ReconnectJitter(0, 0))
	if err != nil {
		return nil, err
	}
	n := &natsStream{server: server, name: name, partitions: partitions, conn: conn}
	// A message that the server doesn't confirm is not sent again: it may be there.
	n.js, err = jetstream.New(conn, jetstream.WithPublishAsyncMaxPending(10_000), jetstream.WithPublishAsyncTimeout(10*time.Second))
	if err == nil {
		_, err = n.js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}, Storage: jetstream.FileStorage})
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return n, nil
}

func (n *natsStream) Kind() string { return "nats" }
func (n *natsStream) Source() string {
	return fmt.Sprintf("nats: {servers: [%q], stream: %s}", n.server.url(), n.name)
}
func (n *natsStream) Ordered() bool   { return false }
func (n *natsStream) Partitions() int { return n.partitions }
func (n *natsStream) Kill() error     { return n.server.Kill() }
func (n *natsStream) Restart() error  { return n.server.Restart() }
func (n *natsStream) Close()          { n.conn.Close() }
func (n *natsStream) Judge() []string {
	return []string{"-nats", n.server.url(), "-stream", n.name, "-source", sourceName}
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
