package kafka

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"
)

// The versions of the fetch request whose answers are understood here. The first
// came with Kafka 0.11, as did the record batches that decode.go reads.
const (
	minFetchVersion = 4
	maxFetchVersion = 11
)

// exchange is a fetch whose answer kafka-go doesn't take apart: it leads the
// request to the right broker over a connection that it has made and logged in,
// and leaves the bytes to us (decision 0019).
type exchange struct {
	*fetch.Request
	clientID string
	version  int16
}

var _ protocol.RawExchanger = (*exchange)(nil)

// Required is asked with the versions that were agreed on with the broker.
func (e *exchange) Required(versions map[protocol.ApiKey]int16) bool {
	e.version = min(versions[protocol.Fetch], maxFetchVersion)
	return true
}

// RawExchange sends the request and reads the answer whole. An error ends the
// connection.
func (e *exchange) RawExchange(conn io.ReadWriter) (protocol.Message, error) {
	if e.version < minFetchVersion {
		return nil, errors.New("the broker is older than Kafka 0.11, whose record format is the first that dedupd reads")
	}
	id := rand.Int32()
	if err := protocol.WriteRequest(conn, e.version, id, e.clientID, e.Request); err != nil {
		return nil, err
	}
	body, err := readAnswer(conn, id)
	if err != nil {
		return nil, err
	}
	a := &answer{version: e.version, body: body}
	// The broker reads nothing more from this connection for so long: other requests
	// that took it next would wait as well.
	if wait := a.throttled(); wait > 0 {
		return nil, &throttledError{wait}
	}
	return a, nil
}

// throttledError is an answer that was left out since the client is over its quota. It
// ends the connection.
type throttledError struct{ wait time.Duration }

func (e *throttledError) Error() string {
	return fmt.Sprintf("the broker throttles this client, which is over its quota, for %s", e.wait)
}

// readAnswer reads the answer to the request of that id, without what frames it.
func readAnswer(conn io.Reader, id int32) ([]byte, error) {
	var head [8]byte // the size of what follows, and the request's id
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return nil, unexpected(err)
	}
	size := int64(int32(binary.BigEndian.Uint32(head[:]))) - 4
	if size < 0 || int32(binary.BigEndian.Uint32(head[4:])) != id {
		return nil, errAnswer
	}
	if size > maxBatchBytes {
		return nil, fmt.Errorf("the broker answers with %d bytes: %w", size, errTooLarge)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(conn, body); err != nil {
		return nil, unexpected(err)
	}
	return body, nil
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// answer is what a broker answers to a fetch.
type answer struct {
	version int16
	body    []byte
}

// ApiKey makes it a message of kafka-go's.
func (*answer) ApiKey() protocol.ApiKey { return protocol.Fetch } //nolint:staticcheck // kafka-go's name

// fetched is what one partition's leader knows of it, and what it has sent.
type fetched struct {
	highWatermark    int64
	lastStableOffset int64
	aborted          []transaction
	records          []byte // record batches, the last of which may be cut off
}

// transaction is one without effect: its producer, and where it begins.
type transaction struct{ producer, first int64 }

// throttled is for how long the broker wants to hear nothing more, where it has left
// the answer out for that; else 0.
func (a *answer) throttled() time.Duration {
	c := cursor{b: a.body}
	wait := time.Duration(c.int32()) * time.Millisecond
	if a.version >= 7 && c.int16() != 0 {
		return 0 // an error
	}
	if a.version >= 7 {
		c.int32() // session
	}
	if c.int32() != 0 || c.bad {
		return 0
	}
	return wait
}

// partition reads the part of the one partition that was asked for. The
// partition's error is a kafkago.Error.
func (a *answer) partition(topic string, partition int) (*fetched, error) {
	c := cursor{b: a.body}
	c.int32() // for how long the broker has throttled us
	if a.version >= 7 {
		if code := c.int16(); code != 0 {
			return nil, kafkago.Error(code)
		}
		c.int32() // session
	}
	if c.int32() != 1 || string(c.take(int(c.int16()))) != topic || c.int32() != 1 || c.int32() != int32(partition) || c.bad {
		return nil, errAnswer
	}
	code := c.int16()
	f := &fetched{highWatermark: c.int64(), lastStableOffset: c.int64()}
	if a.version >= 5 {
		c.int64() // where the log begins
	}
	aborted := int(c.int32())
	if aborted > len(c.b)/16 {
		return nil, errAnswer
	}
	for range aborted { // -1: none
		f.aborted = append(f.aborted, transaction{producer: c.int64(), first: c.int64()})
	}
	if a.version >= 11 {
		c.int32() // the replica to read from: we didn't say where we are
	}
	if size := c.int32(); size > 0 { // -1: none
		f.records = c.take(int(size))
	}
	switch {
	case c.bad:
		return nil, errAnswer
	case code != 0:
		return nil, kafkago.Error(code)
	}
	return f, nil
}
