package main

import (
	"context"
	"time"
)

// broker is where messages come from: a Kafka topic, or a JetStream stream. Its
// methods may be called by several goroutines, but for Kill and Restart.
type broker interface {
	// Kind is kafka or nats.
	Kind() string
	// Source is the part of a worker's configuration that tells where to read.
	Source() string
	// Ordered tells whether each lane is read in order.
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
	// Done tells whether the broker has nothing left of what stood below ends.
	Done(ctx context.Context, ends map[string]int64) (bool, error)
	// Kill ends the server as a crash does, Restart starts it on what it left.
	Kill() error
	Restart() error
	// Judge are the arguments that lead the checker to the raw log.
	Judge() []string
	// Close gives up the connections, not the server.
	Close()
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
