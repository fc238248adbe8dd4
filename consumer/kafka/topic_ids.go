package kafka

import (
	"context"
	"encoding/base64"
	"fmt"

	"github.com/segmentio/kafka-go/protocol"
)

// topicIDsVersion is the first version of the metadata request whose answer has
// topics' ids (KIP-516). It came with Kafka 2.8.
const topicIDsVersion = 10

// topicIDsExchange asks a broker, if it knows of ids, for those of topics. The answer
// to kafka-go's own metadata request has none: positions of a topic that was deleted
// and created anew would pass for those of the old one.
func topicIDsExchange(topics []string) *exchange {
	return &exchange{
		key: protocol.Metadata, oldest: topicIDsVersion, latest: topicIDsVersion, tags: topicIDsVersion,
		broker:  func(protocol.Cluster) (protocol.Broker, error) { return protocol.Broker{ID: -1}, nil }, // any
		request: func(int16) outgoing { return topicIDsRequest(topics) },
	}
}

// topicIDsRequest is a metadata request.
func topicIDsRequest(topics []string) outgoing {
	out := outgoing{tagged: true}
	out.count(len(topics))
	for _, t := range topics {
		out.b = append(out.b, make([]byte, 16)...) // by name, not by id
		out.text(t)
		out.end()
	}
	out.int8(0) // create none
	out.int8(0) // who may do what isn't asked,
	out.int8(0) // neither of the cluster nor of the topics
	out.end()
	return out
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

// topicIDs reads the answer; nil: the broker is too old to know ids.
func (a *answer) topicIDs() (topicIDs, error) {
	if a.version == 0 {
		return nil, nil
	}
	c := a.body.cursor
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
	a, err := c.exchange(ctx, topicIDsExchange(c.topics))
	var ids topicIDs
	if err == nil {
		ids, err = a.topicIDs()
	}
	if err != nil {
		return nil, fmt.Errorf("look up the topics' ids: %w", err)
	}
	return ids, nil
}

// createdAnew is a topic that now has another id than when its lanes were acquired;
// empty: none.
func (g *groupGeneration) createdAnew(now topicIDs) string {
	for topic, id := range now {
		if was, ok := g.topicIDs.Load(topic); ok && was != id {
			return topic
		}
	}
	return ""
}
