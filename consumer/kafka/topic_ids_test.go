package kafka

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/message"
)

// A topic that was deleted and created anew has grown past the lane's position: reading
// from there would miss what is below, and positions don't show it.
func TestATopicCreatedAnewIsNoticed(t *testing.T) {
	t.Parallel()
	onBrokers(t, func(t *testing.T, b *kafkatest.Broker) {
		r := newRig(t, b, 1, nil)
		r.store.ID = func(m *message.Message) string { return string(m.Value) }
		anew := func(n int, what string) {
			t.Helper()
			r.check(b.DeleteTopic(r.ctx, r.topic))
			r.until("the name is free", func() bool { return b.CreateTopic(r.ctx, r.topic, 1, nil) == nil })
			c := r.client()
			values := make([]string, n)
			for i := range values {
				values[i] = fmt.Sprint(what, i)
			}
			r.put(c, 0, values...)
		}
		held := func(w *work, times int) {
			t.Helper()
			r.until("the lane is held", func() bool { return r.log.count("it was created anew") == times })
			if err := w.worker.Ready(); err == nil {
				t.Error("ready with a lane that can't be read")
			}
		}

		r.put(r.client(), 0, "a", "b", "c")
		w := r.start(nil)
		r.untilNext(0, 3)
		w.stop()
		anew(5, "second")
		w = r.start(nil)
		held(w, 1)
		if n := len(r.store.Effects()); n != 3 {
			t.Errorf("%d messages were handled, want the first topic's 3", n)
		}
		r.store.SetPosition(r.lane(0), 0)
		r.untilNext(0, 5)
		w.untilReady()
		if n := len(r.store.Effects()); n != 8 {
			t.Errorf("%d messages were handled, want 8", n)
		}

		// And under a running worker that fetches nothing meanwhile.
		_, _, before := r.store.Counts()
		release := r.store.Hold()
		r.put(r.client(), 0, "in hand")
		r.until("it is in its transaction", func() bool { _, _, calls := r.store.Counts(); return calls > before })
		anew(500, "third")
		r.until("the worker notices", func() bool { return r.log.count("joining the group anew") == 1 })
		release()
		held(w, 2)
		r.store.SetPosition(r.lane(0), 0)
		r.untilNext(0, 500)
		w.untilReady()
		third := 0
		for _, e := range r.store.Effects()[8:] {
			if strings.HasPrefix(e.ID, "third") {
				third++
			} else if e.ID != "in hand" { // which is cut off where the rebalance can't wait for it
				t.Errorf("%s was handled", e.ID)
			}
		}
		if third != 500 {
			t.Errorf("%d messages of the third topic were handled, want 500", third)
		}
	})
}

// answered10 is an answer written by franz-go's code.
func answered10(topics map[string][16]byte) []byte {
	rack := "r1"
	m := kmsg.NewMetadataResponse()
	m.Version, m.ClusterID, m.ControllerID = topicIDsVersion, &rack, 1
	for i := range int32(3) {
		b := kmsg.NewMetadataResponseBroker()
		b.NodeID, b.Host, b.Port = i, "a-host", 9092
		if i > 0 {
			b.Rack = &rack
		}
		m.Brokers = append(m.Brokers, b)
	}
	for _, name := range []string{"orders", "payments", "gone"} {
		id, ok := topics[name]
		t := kmsg.NewMetadataResponseTopic()
		t.Topic, t.TopicID = &name, id
		if !ok {
			t.ErrorCode = 3
		}
		for i := range int32(2) {
			p := kmsg.NewMetadataResponseTopicPartition()
			p.Partition, p.Replicas, p.ISR, p.OfflineReplicas = i, []int32{0, 1, 2}, []int32{0, 1}, []int32{2}
			t.Partitions = append(t.Partitions, p)
		}
		t.UnknownTags.Set(7, []byte("from the future"))
		m.Topics = append(m.Topics, t)
	}
	m.UnknownTags.Set(300, []byte("too"))
	return append([]byte{0}, m.AppendTo(nil)...)
}

func readTopicIDs(body []byte) (topicIDs, error) {
	a := &answer{version: topicIDsVersion, body: incoming{cursor: cursor{b: body}, tagged: true}}
	a.body.end()
	return a.topicIDs()
}

func TestIdentities(t *testing.T) {
	t.Parallel()
	id := [16]byte{15: 1}
	body := answered10(map[string][16]byte{"orders": {0: 0xff, 1: 0xff}, "payments": id})
	want := topicIDs{"orders": "__8AAAAAAAAAAAAAAAAAAA", "payments": base64.RawURLEncoding.EncodeToString(id[:])}
	got, err := readTopicIDs(body)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Fatal(err, diff)
	}
	for n := range body {
		if got, err := readTopicIDs(body[:n]); err == nil && !cmp.Equal(got, want) {
			t.Errorf("%d bytes of %d: %v", n, len(body), got)
		}
		// A broker may write anything anywhere.
		for bit := range 8 {
			bad := bytes.Clone(body)
			bad[n] ^= 1 << bit
			_, _ = readTopicIDs(bad)
		}
	}
	if _, err := readTopicIDs(bytes.Repeat([]byte{0xff}, 100)); !errors.Is(err, errAnswer) {
		t.Error(err)
	}
}

func FuzzIdentified(f *testing.F) {
	f.Add(answered10(map[string][16]byte{"orders": {1}}))
	f.Fuzz(func(t *testing.T, body []byte) {
		if ids, err := readTopicIDs(body); err == nil && len(ids) > len(body)/16 {
			t.Errorf("%d ids in %d bytes", len(ids), len(body))
		}
	})
}

// oldBroker supports metadata requests up to a version.
type oldBroker struct {
	t      *testing.T
	latest int16
	asked  int
	io.Reader
}

func (b *oldBroker) Write(request []byte) (int, error) {
	key, version, id := int16(binary.BigEndian.Uint16(request[4:])), int16(binary.BigEndian.Uint16(request[6:])), request[8:12]
	var body []byte
	switch key {
	case int16(kmsg.ApiVersions):
		r := kmsg.NewApiVersionsResponse()
		r.ApiKeys = []kmsg.ApiVersionsResponseApiKey{{ApiKey: 1, MaxVersion: 11}, {ApiKey: 3, MaxVersion: b.latest}}
		r.Version = version
		body = r.AppendTo(nil)
	case int16(kmsg.Metadata):
		b.asked++
		r := kmsg.NewMetadataRequest()
		r.Version = version
		// Behind the header: key, version, id, "me", and no tags.
		if err := r.ReadFrom(request[4+2+2+4+2+2+1:]); err != nil || version != topicIDsVersion {
			b.t.Errorf("version %d is asked for, %v", version, err)
		}
		if len(r.Topics) != 1 || *r.Topics[0].Topic != "orders" || r.AllowAutoTopicCreation {
			b.t.Errorf("asked %+v", r)
		}
		body = answered10(map[string][16]byte{"orders": {1}})
	}
	answer := binary.BigEndian.AppendUint32(nil, uint32(4+len(body)))
	b.Reader = bytes.NewReader(append(append(answer, id...), body...))
	return len(request), nil
}

func TestOnlyBrokersThatKnowAreAskedForIDs(t *testing.T) {
	t.Parallel()
	for latest, want := range map[int16]int{9: 0, 10: 1, 13: 1} {
		b := &oldBroker{t: t, latest: latest}
		e := topicIDsExchange([]string{"orders"})
		e.clientID = "me"
		var ids topicIDs
		got, err := e.RawExchange(b)
		if err == nil {
			ids, err = got.(*answer).topicIDs()
		}
		if err != nil || len(ids) != want || b.asked != want {
			t.Errorf("a broker that knows version %d was asked %d times, and told %v, %v", latest, b.asked, ids, err)
		}
	}
}
