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
	"github.com/segmentio/kafka-go/protocol/apiversions"

	"github.com/dedupd/dedupd/lane"
)

// The versions of the fetch request that are used here. The first came with Kafka
// 0.11, as did the record batches that decoder.go reads. 12 (Kafka 2.7) carries the
// epoch of the leader that wrote what was read last, and 13 (3.1) names the topic by its id.
const (
	minFetchVersion  = 4
	nameFetchVersion = 12
	maxFetchVersion  = 13
)

// fetchTags and epochTags are the first versions in which tagged fields end each
// structure, and lengths are written in as few bytes as they need.
const (
	fetchTags = 12
	epochTags = 4
)

// The versions of the request for the end of a leader epoch. The first whose answer
// names the epoch came with Kafka 2.0.
const (
	minEpochVersion = 1
	maxEpochVersion = 4
)

// exchange is a request in a version that kafka-go doesn't have. kafka-go sends it to
// the right broker, over a connection that it has made and logged in, and leaves the
// bytes to us (decisions 0019 and 0025).
type exchange struct {
	key      protocol.ApiKey
	request  func(version int16) outgoing
	clientID string
	conns    *connections
	// room reserves memory before the answer is read; nil: it needn't.
	room room
	// oldest and latest bound the version. If the broker supports none of them, the
	// answer has version 0 and no body.
	oldest, latest int16
	// tags is the first version with tagged fields.
	tags int16
	// broker chooses whom to ask.
	broker func(protocol.Cluster) (protocol.Broker, error)
}

var (
	_ protocol.RawExchanger  = (*exchange)(nil)
	_ protocol.BrokerMessage = (*exchange)(nil)
)

// ApiKey makes it a message of kafka-go's.
func (e *exchange) ApiKey() protocol.ApiKey { return e.key } //nolint:staticcheck // kafka-go's name

// Broker chooses whom to ask.
func (e *exchange) Broker(cluster protocol.Cluster) (protocol.Broker, error) {
	e.conns.learn(cluster)
	return e.broker(cluster)
}

// leaderOf is a partition's leader, as kafka-go last learned.
func leaderOf(cluster protocol.Cluster, topic string, partition int) (protocol.Broker, error) {
	t, ok := cluster.Topics[topic]
	if !ok {
		return protocol.Broker{ID: -1}, kafkago.UnknownTopicOrPartition
	}
	p, ok := t.Partitions[int32(partition)]
	if !ok {
		return protocol.Broker{ID: -1}, kafkago.UnknownTopicOrPartition
	}
	leader, ok := cluster.Brokers[p.Leader]
	if !ok {
		return protocol.Broker{ID: -1}, kafkago.LeaderNotAvailable
	}
	return leader, nil
}

// Required: kafka-go would agree on a version of its own.
func (e *exchange) Required(map[protocol.ApiKey]int16) bool { return true }

// RawExchange sends the request and reads the whole answer. An error ends the
// connection.
func (e *exchange) RawExchange(conn io.ReadWriter) (protocol.Message, error) {
	supported, err := e.conns.versions(conn, e.clientID)
	if err != nil {
		return nil, err
	}
	v, ok := supported[int16(e.key)]
	if !ok || v.max < e.oldest || v.min > e.latest {
		return &answer{key: e.key}, nil
	}
	use := min(v.max, e.latest)
	id := rand.Int32()
	if _, err := conn.Write(e.request(use).framed(e.key, use, id, e.clientID)); err != nil {
		return nil, err
	}
	body, err := readAnswer(conn, id, e.room)
	if err != nil {
		return nil, err
	}
	a := &answer{key: e.key, version: use, body: incoming{cursor: cursor{b: body}, tagged: use >= e.tags}}
	a.body.end() // of its header
	// The broker reads nothing from this connection for that long: the next request
	// over it would wait as well.
	if wait := a.throttled(); wait > 0 {
		return nil, &throttledError{wait}
	}
	return a, nil
}

// throttledError says that the broker left the answer out, since the client is over its
// quota. It ends the connection.
type throttledError struct{ wait time.Duration }

func (e *throttledError) Error() string {
	return fmt.Sprintf("the broker throttles this client, which is over its quota, for %s", e.wait)
}

// answer is a broker's answer to an exchange.
type answer struct {
	key     protocol.ApiKey
	version int16 // 0: the broker supports none of ours
	body    incoming
}

// ApiKey makes it a message of kafka-go's.
func (a *answer) ApiKey() protocol.ApiKey { return a.key } //nolint:staticcheck // kafka-go's name

// version is a range of versions that a broker supports.
type version struct{ min, max int16 }

// askVersions asks which versions a broker supports, by the requests' keys.
func askVersions(conn io.ReadWriter, clientID string) (map[int16]version, error) {
	known, err := protocol.RoundTrip(conn, 0, rand.Int32(), clientID, &apiversions.Request{})
	if err != nil {
		return nil, err
	}
	r, ok := known.(*apiversions.Response)
	if !ok {
		return nil, errAnswer
	}
	if r.ErrorCode != 0 {
		return nil, kafkago.Error(r.ErrorCode)
	}
	all := make(map[int16]version, len(r.ApiKeys))
	for _, v := range r.ApiKeys {
		all[v.ApiKey] = version{v.MinVersion, v.MaxVersion}
	}
	return all, nil
}

// readAnswer reads the answer to the request of that id, without its frame. The error
// is errNoRoom if there is no room for it; a nil has always has room.
func readAnswer(conn io.Reader, id int32, has room) ([]byte, error) {
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
	if has != nil && !has(size) {
		return nil, errNoRoom // the rest of it ends with the connection
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

// fetched is what a partition's leader says about it, and what it has sent.
type fetched struct {
	highWatermark    int64
	lastStableOffset int64
	aborted          []transaction
	records          []byte // record batches, the last of which may be cut off
	// diverging, unless nil, says that the leader's log isn't the one that was read:
	// they are the same at most up to the end of this epoch.
	diverging *epochEnd
}

// transaction is an aborted one: its producer, and where it begins.
type transaction struct{ producer, first int64 }

// epochEnd is where a leader's log ends in a leader epoch.
type epochEnd struct {
	epoch int32
	end   int64
}

var errOldBroker = errors.New("the broker is older than Kafka 0.11, which introduced the record format that dedupd reads")

// throttled is for how long the broker will read nothing more, if it left the answer to
// a fetch out for that; else 0.
func (a *answer) throttled() time.Duration {
	if a.key != protocol.Fetch {
		return 0
	}
	in := a.body
	wait := time.Duration(in.int32()) * time.Millisecond
	if a.version >= 7 && in.int16() != 0 {
		return 0 // an error
	}
	if a.version >= 7 {
		in.int32() // session
	}
	if in.count() != 0 || in.bad {
		return 0
	}
	return wait
}

// spot is a partition as an answer names it: by the topic's name or by its id.
type spot struct {
	topic     string
	id        [16]byte
	partition int32
}

// outcome is what a fetch brought of one partition: records, or an error.
type outcome struct {
	fetched *fetched
	err     error
}

// fetched returns what the answer has of each partition that was asked for, in the same
// order. A partition's error is a kafkago.Error.
func (a *answer) fetched(wanted []*wanted) ([]outcome, error) {
	if a.version == 0 {
		return nil, errOldBroker
	}
	in := a.body
	in.int32() // throttle time
	if a.version >= 7 {
		if code := in.int16(); code != 0 {
			return nil, kafkago.Error(code)
		}
		in.int32() // session
	}
	found := make(map[spot]outcome, len(wanted))
	for range in.count() {
		var at spot
		if a.version > nameFetchVersion {
			copy(at.id[:], in.take(16))
		} else {
			at.topic = in.text()
		}
		for range in.count() {
			at.partition = in.int32()
			f, code := in.partition(a.version)
			if in.bad {
				return nil, errAnswer
			}
			found[at] = outcome{fetched: f}
			if code != 0 {
				found[at] = outcome{err: kafkago.Error(code)}
			}
		}
		in.end()
	}
	in.end()
	if in.bad || len(found) != len(wanted) {
		return nil, errAnswer
	}
	all := make([]outcome, len(wanted))
	for i, w := range wanted {
		var ok bool
		if all[i], ok = found[w.at(a.version)]; !ok {
			return nil, errAnswer
		}
	}
	return all, nil
}

// partition reads what follows a partition's number.
func (in *incoming) partition(version int16) (f *fetched, code int16) {
	code = in.int16()
	f = &fetched{highWatermark: in.int64(), lastStableOffset: in.int64()}
	if version >= 5 {
		in.int64() // where the log begins
	}
	for range in.count() {
		t := transaction{producer: in.int64(), first: in.int64()}
		in.end()
		if in.bad {
			return f, code
		}
		f.aborted = append(f.aborted, t)
	}
	if version >= 11 {
		in.int32() // the replica to read from: we didn't name our rack
	}
	f.records = in.bytes()
	in.fields(func(tag uint64, field incoming) {
		if tag == divergingTag {
			f.diverging = &epochEnd{field.int32(), field.int64()}
			in.bad = in.bad || field.bad
		}
	})
	return f, code
}

// divergingTag is the tagged field for a log that isn't the one that was read.
const divergingTag = 0

// epochEnd reads where the leader's log ends in the epoch that was asked for, or in the
// last epoch before it that the leader has; epoch -1: the leader doesn't know the epoch.
// ok is false if the broker is too old to answer.
func (a *answer) epochEnd(topic string, partition int) (end epochEnd, ok bool, err error) {
	if a.version == 0 {
		return end, false, nil
	}
	in := a.body
	if a.version >= 2 {
		in.int32() // throttle time
	}
	if in.count() != 1 || in.text() != topic || in.count() != 1 {
		return end, false, errAnswer
	}
	code, number := in.int16(), in.int32()
	end = epochEnd{in.int32(), in.int64()}
	for range 3 { // the partition, the topic and the answer
		in.end()
	}
	switch {
	case in.bad || number != int32(partition):
		return end, false, errAnswer
	case code != 0:
		return end, false, kafkago.Error(code)
	case end.epoch < 0 || end.end < 0:
		end = epochEnd{-1, -1}
	}
	return end, true, nil
}

// wanted says what to fetch.
type wanted struct {
	topic     string
	id        [16]byte // zero: not known
	partition int
	position  int64
	epoch     int32 // of the leader that wrote what is before the position; -1: not known
	maxBytes  int
}

// at is its place in an answer.
func (w *wanted) at(version int16) spot {
	if version > nameFetchVersion {
		return spot{id: w.id, partition: int32(w.partition)}
	}
	return spot{topic: w.topic, partition: int32(w.partition)}
}

// latestFetch is the latest version that can ask for all of them.
func latestFetch(all []*wanted) int16 {
	for _, w := range all {
		if w.id == ([16]byte{}) {
			return nameFetchVersion
		}
	}
	return maxFetchVersion
}

// ofTopic reports whether another partition is of the same topic.
func (w *wanted) ofTopic(other *wanted) bool { return w.topic == other.topic && w.id == other.id }

// fetchRequest asks for partitions. Those of a topic must be next to each other.
func fetchRequest(version int16, isolation int8, maxBytes int, all []*wanted) outgoing {
	out := outgoing{tagged: version >= fetchTags}
	out.int32(-1) // we are no replica
	out.int32(int32(fetchWait / time.Millisecond))
	out.int32(1) // byte at least
	out.int32(int32(maxBytes))
	out.int8(isolation)
	if version >= 7 {
		out.int32(0)  // no session,
		out.int32(-1) // nor do we begin one
	}
	topics := 0
	for i, w := range all {
		if i == 0 || !w.ofTopic(all[i-1]) {
			topics++
		}
	}
	out.count(topics)
	for len(all) > 0 {
		n := 1
		for n < len(all) && all[n].ofTopic(all[0]) {
			n++
		}
		if version > nameFetchVersion {
			out.b = append(out.b, all[0].id[:]...)
		} else {
			out.text(all[0].topic)
		}
		out.count(n)
		for _, w := range all[:n] {
			w.write(&out, version)
		}
		out.end() // of the topic
		all = all[n:]
	}
	if version >= 7 {
		out.count(0) // forgotten
	}
	if version >= 11 {
		out.text("") // our rack
	}
	out.end()
	return out
}

func (w *wanted) write(out *outgoing, version int16) {
	out.int32(int32(w.partition))
	if version >= 9 {
		out.int32(-1) // whichever leader epoch it is
	}
	out.int64(w.position)
	if version >= 12 {
		out.int32(w.epoch)
	}
	if version >= 5 {
		out.int64(-1) // we have no log
	}
	out.int32(int32(w.maxBytes))
	out.end()
}

// epochRequest asks where a partition's log ends in an epoch.
func epochRequest(version int16, topic string, partition int, epoch int32) outgoing {
	out := outgoing{tagged: version >= epochTags}
	if version >= 3 {
		out.int32(-1) // we are no replica
	}
	out.count(1)
	out.text(topic)
	out.count(1)
	out.int32(int32(partition))
	if version >= 2 {
		out.int32(-1) // whichever leader epoch it is
	}
	out.int32(epoch)
	for range 3 { // the partition, the topic and the request
		out.end()
	}
	return out
}

// lastEpoch is the leader epoch of what is right before a position; -1: not known.
func lastEpoch(epochs []lane.LeaderEpoch, position int64) int32 {
	if epochs = lane.EpochsBelow(epochs, position); len(epochs) > 0 {
		return epochs[len(epochs)-1].Epoch
	}
	return -1
}
