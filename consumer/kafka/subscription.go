package kafka

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"maps"
	"slices"
)

// Members and their leader speak Kafka's consumer protocol in its first version, so
// that Kafka's own tools can show it: numbers, and strings and lists with their length
// in front. To the user data, which is each program's own, we write a number of
// partitions for each topic, as JSON: those the member sees, or those the leader has
// divided.

func writeSubscription(seen map[string]int) []byte {
	b := []byte{0, 0} // version
	b = binary.BigEndian.AppendUint32(b, uint32(len(seen)))
	for _, topic := range slices.Sorted(maps.Keys(seen)) {
		b = appendString(b, topic)
	}
	return appendCounts(b, seen)
}

// readSubscription returns the topics that a member wants to read, and how many
// partitions it sees of each. The member may be another program.
func readSubscription(b []byte) (topics []string, seen map[string]int, err error) {
	c := cursor{b: b}
	c.int16() // version: later ones append fields
	for range c.length(2) {
		topics = append(topics, string(c.take(int(c.int16()))))
	}
	seen = readCounts(&c)
	if c.bad {
		return nil, nil, errors.New("its subscription is not in the consumer protocol")
	}
	return topics, seen, nil
}

func writeAssignment(topics map[string][]int, divided map[string]int) []byte {
	b := []byte{0, 0} // version
	b = binary.BigEndian.AppendUint32(b, uint32(len(topics)))
	for _, topic := range slices.Sorted(maps.Keys(topics)) {
		b = appendString(b, topic)
		b = binary.BigEndian.AppendUint32(b, uint32(len(topics[topic])))
		for _, p := range topics[topic] {
			b = binary.BigEndian.AppendUint32(b, uint32(p))
		}
	}
	return appendCounts(b, divided)
}

// readAssignment returns the partitions that we were assigned, and how many of each
// topic were divided; nil: the leader, which may be another program, doesn't say.
func readAssignment(b []byte) (topics map[string][]int, divided map[string]int, err error) {
	topics = make(map[string][]int)
	if len(b) == 0 {
		return topics, nil, nil
	}
	c := cursor{b: b}
	c.int16() // version
	for range c.length(2 + 4) {
		topic := string(c.take(int(c.int16())))
		for range c.length(4) {
			topics[topic] = append(topics[topic], int(c.int32()))
		}
	}
	divided = readCounts(&c)
	if c.bad {
		return nil, nil, errors.New("the group's leader has written an assignment that dedupd can't read")
	}
	return topics, divided, nil
}

func appendString(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint16(b, uint16(len(s))), s...)
}

func appendCounts(b []byte, counts map[string]int) []byte {
	text, _ := json.Marshal(counts) // a map of numbers always works
	b = binary.BigEndian.AppendUint32(b, uint32(len(text)))
	return append(b, text...)
}

// maxPartitions bounds what another member is believed to see of a topic.
const maxPartitions = 1 << 17

// readCounts reads what appendCounts wrote; nil: another program wrote it.
func readCounts(c *cursor) (counts map[string]int) {
	if json.Unmarshal(c.take(max(int(c.int32()), 0)), &counts) != nil { // -1: nothing
		return nil
	}
	maps.DeleteFunc(counts, func(_ string, n int) bool { return n < 1 || n > maxPartitions })
	return counts
}
