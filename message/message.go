// Package message is what a sink sees: messages and lanes, where a message's id comes
// from, and the places in a message that configuration names.
package message

import (
	"strings"
	"time"
)

// Lane names one stream of positions: a Kafka partition ("orders/3"), a NATS
// partition lane, or a NATS queue. Source is the name of the configured source.
type Lane struct {
	Source string
	Name   string
}

func (l Lane) String() string { return l.Source + ":" + l.Name }

// Compare orders lanes by source, then by name: the order in which every
// transaction touches their rows.
func (l Lane) Compare(o Lane) int {
	if c := strings.Compare(l.Source, o.Source); c != 0 {
		return c
	}
	return strings.Compare(l.Name, o.Name)
}

// Position is a message's place: its lane, and the Kafka offset or the stream sequence
// within it.
type Position struct {
	Lane   Lane
	Offset int64
}

// Header is one header of a message. A key may occur more than once; the last one
// counts. A nil value differs from an empty one.
type Header struct {
	Key   string
	Value []byte
}

// Message is one delivery from a broker. Its byte slices are read-only and
// stay valid until the batch it belongs to is committed or abandoned.
type Message struct {
	// ID is the identity the producer gave the message, as raw bytes. A source
	// leaves it empty; dedup fills it in before a sink sees the message.
	ID string
	// Topic is the Kafka topic or the NATS subject.
	Topic string
	// Key is nil where there is none.
	Key []byte
	// Value is nil for a Kafka tombstone.
	Value   []byte
	Headers []Header
	// Time is the broker's timestamp of the message.
	Time     time.Time
	Position Position
	// Damaged says what of the message could not be read, such as its headers; empty:
	// nothing. A damaged message becomes a dead letter, and no sink sees it.
	Damaged string
	// Deliveries is how often the broker has delivered it, including this time; 0: the
	// broker doesn't say.
	Deliveries int
}

// Header returns the value of the last header with that key (compared byte by
// byte), and whether there is one.
func (m *Message) Header(key string) ([]byte, bool) {
	for i := len(m.Headers) - 1; i >= 0; i-- {
		if m.Headers[i].Key == key {
			return m.Headers[i].Value, true
		}
	}
	return nil, false
}
