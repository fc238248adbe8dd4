package main

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/dedupd/dedupd/internal/kafkatest"
)

// broker is where messages come from: a Kafka topic, or a JetStream stream. Its
// methods may be called by several goroutines.
type broker interface {
	// Kind is kafka or nats.
	Kind() string
	// Source is the part of a worker's configuration that tells where to read.
	Source() string
	// Ordered reports whether each lane is read in order.
	Ordered() bool
	// Partitions is how many lanes there are to send to.
	Partitions() int
	// Send hands a message over; done is told, once, whether the broker has it. An
	// error may mean either.
	Send(ctx context.Context, m sent, done func(error))
	// Ends is where each lane ends now: the position of the next message.
	Ends(ctx context.Context) (map[string]int64, error)
	// Told is what the broker knows of each lane's position: the group's committed
	// offsets, or the ack floor.
	Told(ctx context.Context) (map[string]int64, error)
	// Done reports whether the broker has nothing left of what stood below ends.
	Done(ctx context.Context, ends map[string]int64) (bool, error)
	// Servers are its processes.
	Servers() []server
	// Judge are the arguments that lead the checker to the raw log.
	Judge() []string
	// Close gives up the connections, not the servers.
	Close()
}

// server is one process of a broker. Its methods are called by one goroutine.
type server interface {
	// Kill ends it as a crash does, Restart starts it on what it left.
	Kill() error
	Restart() error
	Stop() error
}

// sent is one message to be produced. An empty id means to send none.
type sent struct {
	id        string
	copy      int // 0 is the first
	partition int
	value     []byte
}

const idHeader = "message-id"

// requestTimeout bounds one question to a server.
const requestTimeout = 5 * time.Second

// newBroker is a topic or a stream for the run, at the servers that all share or,
// where the fault asks for them, at its own.
func (r *run) newBroker(kind, name string) (_ broker, err error) {
	partitions := cmp.Or(r.fault.partitions, 8)
	if r.fault.nodes == 0 && !r.fault.relayed && r.fault.disk != "broker" {
		return r.servers.newBroker(r.ctx, kind, name, partitions)
	}
	folder := filepath.Join(r.folder, kind)
	if r.fault.disk == "broker" {
		if r.disk, err = newDisk(256 << 20); err != nil {
			return nil, err
		}
		folder = r.disk.folder
	}
	var relay func(string) (string, error)
	if r.fault.relayed {
		relay = func(addr string) (string, error) {
			l, err := newLine(addr)
			if err != nil {
				return "", err
			}
			r.lines = append(r.lines, l)
			return l.addr(), nil
		}
	}
	switch nodes := max(r.fault.nodes, 1); kind {
	case "kafka":
		servers, err := kafkatest.StartCluster(folder, kafkatest.Options{Nodes: nodes, Relay: relay})
		if err != nil {
			return nil, err
		}
		for _, s := range servers {
			r.owned = append(r.owned, s)
		}
		return newKafkaTopic(r.ctx, servers, name, partitions)
	case "nats":
		servers, err := startNATS(r.servers.natsBinary, folder, nodes, relay)
		if err != nil {
			return nil, err
		}
		for _, s := range servers {
			r.owned = append(r.owned, s)
		}
		return newNATSStream(r.ctx, servers, name, partitions)
	}
	return nil, fmt.Errorf("there is no broker %s", kind)
}
