package kafka

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"
	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// respond writes a broker's answer to a fetch.
func respond(version int16, code int16, topic string, id [16]byte, partition int32) []byte {
	p := kmsg.NewFetchResponseTopicPartition()
	p.Partition, p.ErrorCode, p.HighWatermark, p.LastStableOffset, p.LogStartOffset = partition, code, 70, 60, 50
	p.AbortedTransactions = []kmsg.FetchResponseTopicPartitionAbortedTransaction{{ProducerID: 1, FirstOffset: 2}, {ProducerID: 3, FirstOffset: 4}}
	p.RecordBatches = []byte("records")
	p.DivergingEpoch.Epoch, p.DivergingEpoch.EndOffset = 5, 6
	t := kmsg.NewFetchResponseTopic()
	t.Topic, t.TopicID, t.Partitions = topic, id, []kmsg.FetchResponseTopicPartition{p}
	r := kmsg.NewFetchResponse()
	r.Version, r.Topics = version, []kmsg.FetchResponseTopic{t}
	return r.AppendTo(nil)
}

// speaking answers like a broker that supports fetches up to a version: with a body in
// that version, each time.
type speaking struct {
	latest int16
	body   func(version int16) []byte
	asked  int // for its versions
	frame  func(id, body []byte) []byte
	io.Reader
}

func framed(id, body []byte) []byte {
	return append(append(binary.BigEndian.AppendUint32(nil, uint32(4+len(body))), id...), body...)
}

func (s *speaking) Write(request []byte) (int, error) {
	key, version, id := int16(binary.BigEndian.Uint16(request[4:])), int16(binary.BigEndian.Uint16(request[6:])), request[8:12]
	if kmsg.Key(key) == kmsg.ApiVersions {
		s.asked++
		r := kmsg.NewApiVersionsResponse()
		r.Version, r.ApiKeys = version, []kmsg.ApiVersionsResponseApiKey{{ApiKey: int16(kmsg.Fetch), MaxVersion: s.latest}}
		s.Reader = bytes.NewReader(framed(id, r.AppendTo(nil)))
		return len(request), nil
	}
	body := s.body(version)
	if version >= nameFetchVersion {
		body = append([]byte{0}, body...)
	}
	frame := s.frame
	if frame == nil {
		frame = framed
	}
	s.Reader = bytes.NewReader(frame(id, body))
	return len(request), nil
}

func (s *speaking) fetch(want *wanted) (*fetched, error) {
	all := []*wanted{want}
	res, err := (&exchange{
		key: protocol.Fetch, clientID: "c", oldest: minFetchVersion, latest: latestFetch(all), tags: fetchTags,
		request: func(version int16) outgoing { return fetchRequest(version, 1, want.maxBytes, all) },
	}).RawExchange(s)
	if err != nil {
		return nil, err
	}
	got, err := res.(*answer).fetched(all)
	if err != nil {
		return nil, err
	}
	return got[0].fetched, got[0].err
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	id := [16]byte{1, 15: 2}
	for latest := int16(minFetchVersion); latest <= maxFetchVersion+3; latest++ {
		want := &fetched{highWatermark: 70, lastStableOffset: 60, aborted: []transaction{{1, 2}, {3, 4}}, records: []byte("records")}
		if latest >= nameFetchVersion {
			want.diverging = &epochEnd{5, 6}
		}
		asked := &wanted{topic: "t", id: id, partition: 3}
		answered := func(code int16, topic string, id [16]byte, partition int32) (*fetched, error) {
			return (&speaking{latest: latest, body: func(version int16) []byte {
				if version != min(latest, maxFetchVersion) {
					t.Errorf("version %d is asked of a broker that knows %d", version, latest)
				}
				return respond(version, code, topic, id, partition)
			}}).fetch(asked)
		}
		got, err := answered(0, "t", id, 3)
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(fetched{}, transaction{}, epochEnd{})); diff != "" || err != nil {
			t.Errorf("version %d: %v %s", latest, err, diff)
		}
		if _, err := answered(1, "t", id, 3); !errors.Is(err, kafkago.OffsetOutOfRange) {
			t.Errorf("version %d: %v", latest, err)
		}
		if _, err := answered(0, "u", [16]byte{1}, 3); !errors.Is(err, errAnswer) {
			t.Errorf("version %d, another topic: %v", latest, err)
		}
		if _, err := answered(0, "t", id, 4); !errors.Is(err, errAnswer) {
			t.Errorf("version %d, another partition: %v", latest, err)
		}
		body := respond(min(latest, maxFetchVersion), 0, "t", id, 3)
		for n := range body {
			if got, err := (&speaking{latest: latest, body: func(int16) []byte { return body[:n] }}).fetch(asked); !errors.Is(err, errAnswer) {
				t.Errorf("version %d, %d bytes of %d: %+v, %v", latest, n, len(body), got, err)
			}
			// A broker may write anything anywhere.
			bad := bytes.Clone(body)
			bad[n] ^= 0x80
			_, _ = (&speaking{latest: latest, body: func(int16) []byte { return bad }}).fetch(asked)
		}
	}
}

// Where the topic's id isn't known, it is asked for by name.
func TestFetchByName(t *testing.T) {
	t.Parallel()
	s := &speaking{latest: 17, body: func(version int16) []byte { return respond(version, 0, "t", [16]byte{}, 3) }}
	if f, err := s.fetch(&wanted{topic: "t", partition: 3}); err != nil || f.highWatermark != 70 {
		t.Error(f, err)
	}
}

func TestExchange(t *testing.T) {
	t.Parallel()
	answer := respond(11, 0, "t", [16]byte{}, 3)
	for _, test := range []struct {
		name  string
		frame func(id, body []byte) []byte
		want  error
	}{
		{"an answer", framed, nil},
		{"another's", func(id, body []byte) []byte { return framed([]byte{id[0], id[1], id[2], ^id[3]}, body) }, errAnswer},
		{"too short", func(id, _ []byte) []byte { return append([]byte{0, 0, 0, 3}, id...) }, errAnswer},
		{"a negative size", func(id, _ []byte) []byte { return append([]byte{0xff, 0xff, 0xff, 0xff}, id...) }, errAnswer},
		{"cut off", func(id, body []byte) []byte { b := framed(id, body); return b[:len(b)-1] }, io.ErrUnexpectedEOF},
		{"none", func(_, _ []byte) []byte { return nil }, io.ErrUnexpectedEOF},
		{"too much", func(id, _ []byte) []byte { return append(binary.BigEndian.AppendUint32(nil, maxBatchBytes+5), id...) }, errTooLarge},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := &speaking{latest: 11, body: func(int16) []byte { return answer }, frame: test.frame}
			if f, err := s.fetch(&wanted{topic: "t", partition: 3}); !errors.Is(err, test.want) || err == nil && f.highWatermark != 70 {
				t.Fatalf("got %+v, %v", f, err)
			}
		})
	}
	s := &speaking{latest: minFetchVersion - 1, body: func(int16) []byte { t.Error("a broker too old is asked"); return nil }}
	if _, err := s.fetch(&wanted{topic: "t", partition: 3}); !errors.Is(err, errOldBroker) {
		t.Error(err)
	}
}

// franz-go reads what we write, in every version.
func TestRequests(t *testing.T) {
	t.Parallel()
	id := [16]byte{3, 15: 4}
	read := func(key kmsg.Key, version int16, framed []byte) kmsg.Request {
		t.Helper()
		req := key.Request()
		req.SetVersion(version)
		header := 4 + 2 + 2 + 4 + 2 + len("me") // size, key, version, id, client
		if req.IsFlexible() {
			header++
		}
		if got := int(binary.BigEndian.Uint32(framed)); got != len(framed)-4 {
			t.Errorf("%s version %d: says that it has %d bytes, of %d", key.Name(), version, got, len(framed)-4)
		}
		if err := req.ReadFrom(framed[header:]); err != nil {
			t.Errorf("%s version %d: %v", key.Name(), version, err)
		}
		if again := req.AppendTo(nil); !bytes.Equal(again, framed[header:]) {
			t.Errorf("%s version %d: wrote\n%x\nnot\n%x", key.Name(), version, framed[header:], again)
		}
		return req
	}
	want := &wanted{topic: "orders", id: id, partition: 3, position: 7, epoch: 5, maxBytes: 1000}
	for v := int16(minFetchVersion); v <= maxFetchVersion; v++ {
		r := read(kmsg.Fetch, v, fetchRequest(v, 1, 1000, []*wanted{want}).framed(protocol.Fetch, v, 9, "me")).(*kmsg.FetchRequest)
		topic, epoch := "orders", int32(-1)
		if v >= 12 {
			epoch = 5
		}
		if v >= 13 {
			topic = ""
		}
		p := r.Topics[0].Partitions[0]
		if r.MaxWaitMillis != 1000 || r.MinBytes != 1 || r.MaxBytes != 1000 || r.IsolationLevel != 1 || r.ReplicaID != -1 || v >= 7 && r.SessionEpoch != -1 ||
			r.Topics[0].Topic != topic || (topic == "") != (r.Topics[0].TopicID == id) ||
			p.Partition != 3 || p.FetchOffset != 7 || p.LastFetchedEpoch != epoch || p.CurrentLeaderEpoch != -1 || p.PartitionMaxBytes != 1000 {
			t.Errorf("version %d asks for %+v", v, r)
		}
	}
	// Partitions of a topic are asked for together. A topic that was created anew is another.
	many := []*wanted{
		{topic: "a", id: [16]byte{1}, partition: 0, position: 10, epoch: 1, maxBytes: 100},
		{topic: "a", id: [16]byte{1}, partition: 1, position: 11, epoch: 2, maxBytes: 100},
		{topic: "a", id: [16]byte{2}, partition: 2, position: 12, epoch: 3, maxBytes: 100},
		{topic: "b", id: [16]byte{3}, partition: 0, position: 13, epoch: 4, maxBytes: 100},
	}
	for v := int16(minFetchVersion); v <= maxFetchVersion; v++ {
		r := read(kmsg.Fetch, v, fetchRequest(v, 1, 1000, many).framed(protocol.Fetch, v, 9, "me")).(*kmsg.FetchRequest)
		var got []*wanted
		for _, topic := range r.Topics {
			for _, p := range topic.Partitions {
				got = append(got, &wanted{topic: topic.Topic, id: topic.TopicID, partition: int(p.Partition), position: p.FetchOffset, epoch: p.LastFetchedEpoch, maxBytes: int(p.PartitionMaxBytes)})
			}
		}
		var want []*wanted
		for _, w := range many {
			w := *w
			if v > nameFetchVersion {
				w.topic = ""
			} else {
				w.id = [16]byte{}
			}
			if v < 12 {
				w.epoch = -1
			}
			want = append(want, &w)
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(wanted{})); diff != "" || r.MaxBytes != 1000 {
			t.Errorf("version %d: %s", v, diff)
		}
	}
	if v := latestFetch(append(many, &wanted{topic: "c"})); v != nameFetchVersion {
		t.Errorf("a topic whose id isn't known is asked for in version %d", v)
	}
	for v := int16(minEpochVersion); v <= maxEpochVersion; v++ {
		r := read(kmsg.OffsetForLeaderEpoch, v, epochRequest(v, "orders", 3, 5).framed(protocol.OffsetForLeaderEpoch, v, 9, "me")).(*kmsg.OffsetForLeaderEpochRequest)
		if p := r.Topics[0].Partitions[0]; r.Topics[0].Topic != "orders" || p.Partition != 3 || p.LeaderEpoch != 5 || p.CurrentLeaderEpoch != -1 || v >= 3 && r.ReplicaID != -1 {
			t.Errorf("version %d asks for %+v", v, r)
		}
	}
}

func TestEpochEnds(t *testing.T) {
	t.Parallel()
	for v := int16(minEpochVersion); v <= maxEpochVersion; v++ {
		answered := func(code int16, epoch int32, end int64) []byte {
			p := kmsg.NewOffsetForLeaderEpochResponseTopicPartition()
			p.Partition, p.ErrorCode, p.LeaderEpoch, p.EndOffset = 3, code, epoch, end
			r := kmsg.NewOffsetForLeaderEpochResponse()
			r.Version = v
			r.Topics = []kmsg.OffsetForLeaderEpochResponseTopic{{Topic: "t", Partitions: []kmsg.OffsetForLeaderEpochResponseTopicPartition{p}}}
			return r.AppendTo(nil)
		}
		read := func(body []byte, topic string, partition int) (epochEnd, bool, error) {
			return (&answer{version: v, body: incoming{cursor: cursor{b: body}, tagged: v >= epochTags}}).epochEnd(topic, partition)
		}
		if end, ok, err := read(answered(0, 5, 70), "t", 3); end != (epochEnd{5, 70}) || !ok || err != nil {
			t.Errorf("version %d: %v %v %v", v, end, ok, err)
		}
		if end, ok, err := read(answered(0, -1, -1), "t", 3); end != (epochEnd{-1, -1}) || !ok || err != nil {
			t.Errorf("version %d: %v %v %v", v, end, ok, err)
		}
		if _, _, err := read(answered(6, -1, -1), "t", 3); !errors.Is(err, kafkago.NotLeaderForPartition) {
			t.Errorf("version %d: %v", v, err)
		}
		body := answered(0, 5, 70)
		for n := range body {
			if _, _, err := read(body[:n], "t", 3); !errors.Is(err, errAnswer) {
				t.Errorf("version %d, %d bytes of %d: %v", v, n, len(body), err)
			}
		}
		for _, other := range []struct {
			topic     string
			partition int
		}{{"u", 3}, {"t", 4}} {
			if _, _, err := read(body, other.topic, other.partition); !errors.Is(err, errAnswer) {
				t.Errorf("version %d: %v", v, err)
			}
		}
	}
	if _, ok, err := (&answer{}).epochEnd("t", 3); ok || err != nil {
		t.Error(ok, err)
	}
}
