package kafka

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"

	"github.com/segmentio/kafka-go/protocol"
)

// identifyVersion is the metadata request that first tells topics' ids (KIP-516).
// It came with Kafka 2.8.
const identifyVersion = 10

// identify asks a broker for the ids of topics. kafka-go's metadata request is too
// old to tell them: positions of a topic that was deleted and created anew would
// pass for those of the old one.
type identify struct {
	topics   []string
	clientID string
	conns    *connections
}

var _ protocol.RawExchanger = (*identify)(nil)

// ApiKey makes it a message of kafka-go's.
func (*identify) ApiKey() protocol.ApiKey { return protocol.Metadata } //nolint:staticcheck // kafka-go's name

// Required: kafka-go would agree on a version of its own.
func (*identify) Required(map[protocol.ApiKey]int16) bool { return true }

// RawExchange finds out whether this very broker knows of ids, and asks. An error
// ends the connection.
func (i *identify) RawExchange(conn io.ReadWriter) (protocol.Message, error) {
	spoken, err := i.conns.versions(conn, i.clientID)
	if err != nil {
		return nil, err
	}
	if v, ok := spoken[int16(protocol.Metadata)]; ok && v.min <= identifyVersion && identifyVersion <= v.max {
		return i.ask(conn)
	}
	return identities{}, nil
}

func (i *identify) ask(conn io.ReadWriter) (protocol.Message, error) {
	id := rand.Int32()
	if _, err := conn.Write(i.request(id)); err != nil {
		return nil, err
	}
	body, err := readAnswer(conn, id, nil)
	if err != nil {
		return nil, err
	}
	return identified(body)
}

// request is a metadata request.
func (i *identify) request(id int32) []byte {
	out := outgoing{tagged: true}
	out.count(len(i.topics))
	for _, t := range i.topics {
		out.b = append(out.b, make([]byte, 16)...) // by name, not by id
		out.text(t)
		out.end()
	}
	out.int8(0) // create none
	out.int8(0) // who may do what isn't asked,
	out.int8(0) // neither of the cluster nor of the topics
	out.end()
	return out.framed(protocol.Metadata, identifyVersion, id, i.clientID)
}

// identities are topics' ids by name, as Kafka's tools print them. A topic that
// has none, or isn't there, is missing.
type identities map[string]string

// raw is a topic's id as requests have it; zero: it isn't known.
func (i identities) raw(topic string) (id [16]byte) {
	if b, err := base64.RawURLEncoding.DecodeString(i[topic]); err == nil && len(b) == len(id) {
		copy(id[:], b)
	}
	return id
}

// ApiKey makes it a message of kafka-go's.
func (identities) ApiKey() protocol.ApiKey { return protocol.Metadata } //nolint:staticcheck // kafka-go's name

// identified reads the answer.
func identified(body []byte) (identities, error) {
	c := cursor{b: body}
	c.tags()
	c.int32() // for how long the broker has throttled us
	for range c.compact() {
		c.int32()           // node
		c.take(c.compact()) // host
		c.int32()           // port
		c.take(c.compact()) // rack
		c.tags()
	}
	c.take(c.compact()) // cluster
	c.int32()           // controller
	ids := identities{}
	for range c.compact() {
		c.int16() // that it isn't there, or has no leader yet
		name := string(c.take(c.compact()))
		id := c.take(16)
		c.take(1) // internal
		for range c.compact() {
			c.int16()     // its error
			c.int32()     // partition
			c.int32()     // leader
			c.int32()     // leader's epoch
			for range 3 { // replicas, those in sync, those offline
				c.take(4 * c.compact())
			}
			c.tags()
		}
		c.int32() // what we may do
		c.tags()
		if c.bad {
			return nil, errAnswer
		}
		if [16]byte(id) != ([16]byte{}) {
			ids[name] = base64.RawURLEncoding.EncodeToString(id)
		}
	}
	if c.bad {
		return nil, errAnswer
	}
	return ids, nil
}

// identities are those of the source's topics, as one broker knows them now.
func (c *cluster) identities(ctx context.Context) (identities, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	res, err := c.transport.RoundTrip(ctx, c.addr, &identify{topics: c.topics, clientID: c.transport.ClientID, conns: c.conns})
	if err != nil {
		return nil, fmt.Errorf("look up the topics' ids: %w", err)
	}
	ids, ok := res.(identities)
	if !ok {
		return nil, fmt.Errorf("look up the topics' ids: %w", errAnswer)
	}
	return ids, nil
}

// logs are the topics' ids under which lanes of a generation were taken.
type logs struct {
	mu  sync.Mutex
	ids identities
}

// note keeps the first id of a topic.
func (l *logs) note(topic, id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ids == nil {
		l.ids = identities{}
	}
	if l.ids[topic] == "" && id != "" {
		l.ids[topic] = id
	}
}

// anew is a topic that now has another id; empty: none.
func (l *logs) anew(now identities) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	for topic, id := range now {
		if was := l.ids[topic]; was != "" && was != id {
			return topic
		}
	}
	return ""
}
