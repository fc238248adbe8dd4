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

// topicIDsVersion is the first version of the metadata request whose answer has
// topics' ids (KIP-516). It came with Kafka 2.8.
const topicIDsVersion = 10

// topicIDsRequest asks a broker for the ids of topics. The answer to kafka-go's own
// metadata request has none: positions of a topic that was deleted and created anew
// would pass for those of the old one.
type topicIDsRequest struct {
	topics   []string
	clientID string
	conns    *connections
}

var _ protocol.RawExchanger = (*topicIDsRequest)(nil)

// ApiKey makes it a message of kafka-go's.
func (*topicIDsRequest) ApiKey() protocol.ApiKey { return protocol.Metadata } //nolint:staticcheck // kafka-go's name

// Required: kafka-go would agree on a version of its own.
func (*topicIDsRequest) Required(map[protocol.ApiKey]int16) bool { return true }

// RawExchange asks, if this very broker knows of ids. An error ends the connection.
func (r *topicIDsRequest) RawExchange(conn io.ReadWriter) (protocol.Message, error) {
	supported, err := r.conns.versions(conn, r.clientID)
	if err != nil {
		return nil, err
	}
	if v, ok := supported[int16(protocol.Metadata)]; ok && v.min <= topicIDsVersion && topicIDsVersion <= v.max {
		return r.ask(conn)
	}
	return topicIDs{}, nil
}

func (r *topicIDsRequest) ask(conn io.ReadWriter) (protocol.Message, error) {
	id := rand.Int32()
	if _, err := conn.Write(r.request(id)); err != nil {
		return nil, err
	}
	body, err := readAnswer(conn, id, nil)
	if err != nil {
		return nil, err
	}
	return readTopicIDs(body)
}

// request is a metadata request.
func (r *topicIDsRequest) request(id int32) []byte {
	out := outgoing{tagged: true}
	out.count(len(r.topics))
	for _, t := range r.topics {
		out.b = append(out.b, make([]byte, 16)...) // by name, not by id
		out.text(t)
		out.end()
	}
	out.int8(0) // create none
	out.int8(0) // who may do what isn't asked,
	out.int8(0) // neither of the cluster nor of the topics
	out.end()
	return out.framed(protocol.Metadata, topicIDsVersion, id, r.clientID)
}

// topicIDs are topics' ids by name, as Kafka's tools print them. A topic that has
// none, or isn't there, is missing.
type topicIDs map[string]string

// raw is a topic's id as requests carry it; zero: not known.
func (i topicIDs) raw(topic string) (id [16]byte) {
	if b, err := base64.RawURLEncoding.DecodeString(i[topic]); err == nil && len(b) == len(id) {
		copy(id[:], b)
	}
	return id
}

// ApiKey makes it a message of kafka-go's.
func (topicIDs) ApiKey() protocol.ApiKey { return protocol.Metadata } //nolint:staticcheck // kafka-go's name

// readTopicIDs reads the answer.
func readTopicIDs(body []byte) (topicIDs, error) {
	c := cursor{b: body}
	c.tags()
	c.int32() // throttle time
	for range c.compact() {
		c.int32()           // node
		c.take(c.compact()) // host
		c.int32()           // port
		c.take(c.compact()) // rack
		c.tags()
	}
	c.take(c.compact()) // cluster
	c.int32()           // controller
	ids := topicIDs{}
	for range c.compact() {
		c.int16() // its error: it isn't there, or has no leader yet
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

// topicIDs are those of the source's topics, as one broker knows them now.
func (c *cluster) topicIDs(ctx context.Context) (topicIDs, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	res, err := c.transport.RoundTrip(ctx, c.addr, &topicIDsRequest{topics: c.topics, clientID: c.transport.ClientID, conns: c.conns})
	if err != nil {
		return nil, fmt.Errorf("look up the topics' ids: %w", err)
	}
	ids, ok := res.(topicIDs)
	if !ok {
		return nil, fmt.Errorf("look up the topics' ids: %w", errAnswer)
	}
	return ids, nil
}

// acquiredIDs are the topics' ids under which a group generation's lanes were
// acquired.
type acquiredIDs struct {
	mu  sync.Mutex
	ids topicIDs
}

// add keeps the first id of a topic.
func (a *acquiredIDs) add(topic, id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ids == nil {
		a.ids = topicIDs{}
	}
	if a.ids[topic] == "" && id != "" {
		a.ids[topic] = id
	}
}

// changed is a topic that now has another id; empty: none.
func (a *acquiredIDs) changed(now topicIDs) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	for topic, id := range now {
		if was := a.ids[topic]; was != "" && was != id {
			return topic
		}
	}
	return ""
}
