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
	"github.com/segmentio/kafka-go/protocol/fetch"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// respond writes an answer by franz-go's code for it.
func respond(version int16, code int16, topic string, partition int32) []byte {
	p := kmsg.NewFetchResponseTopicPartition()
	p.Partition, p.ErrorCode, p.HighWatermark, p.LastStableOffset, p.LogStartOffset = partition, code, 70, 60, 50
	p.AbortedTransactions = []kmsg.FetchResponseTopicPartitionAbortedTransaction{{ProducerID: 1, FirstOffset: 2}, {ProducerID: 3, FirstOffset: 4}}
	p.RecordBatches = []byte("records")
	t := kmsg.NewFetchResponseTopic()
	t.Topic, t.Partitions = topic, []kmsg.FetchResponseTopicPartition{p}
	r := kmsg.NewFetchResponse()
	r.Version, r.Topics = version, []kmsg.FetchResponseTopic{t}
	return r.AppendTo(nil)
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	want := &fetched{highWatermark: 70, lastStableOffset: 60, aborted: []transaction{{1, 2}, {3, 4}}, records: []byte("records")}
	for version := int16(minFetchVersion); version <= maxFetchVersion; version++ {
		body := respond(version, 0, "t", 3)
		got, err := (&answer{version, body}).partition("t", 3)
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(fetched{}, transaction{})); diff != "" || err != nil {
			t.Errorf("version %d: %v %s", version, err, diff)
		}
		for n := range body {
			if got, err := (&answer{version, body[:n]}).partition("t", 3); !errors.Is(err, errAnswer) {
				t.Errorf("version %d, %d bytes of %d: %+v, %v", version, n, len(body), got, err)
			}
		}
		// A broker may write anything anywhere.
		for i := range body {
			bad := bytes.Clone(body)
			bad[i] ^= 0x80
			_, _ = (&answer{version, bad}).partition("t", 3)
		}
		if _, err := (&answer{version, respond(version, 1, "t", 3)}).partition("t", 3); !errors.Is(err, kafkago.OffsetOutOfRange) {
			t.Errorf("version %d: %v", version, err)
		}
		for _, body := range [][]byte{respond(version, 0, "u", 3), respond(version, 0, "t", 4)} {
			if _, err := (&answer{version, body}).partition("t", 3); !errors.Is(err, errAnswer) {
				t.Errorf("version %d: %v", version, err)
			}
		}
	}
}

// wire is a connection to a broker that answers with the id of what it was asked.
type wire struct {
	answer func(id []byte) []byte
	io.Reader
}

func (w *wire) Write(request []byte) (int, error) {
	w.Reader = bytes.NewReader(w.answer(request[8:12])) // behind size, key and version
	return len(request), nil
}

func TestExchange(t *testing.T) {
	t.Parallel()
	sized := func(size int, parts ...[]byte) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(size)), bytes.Join(parts, nil)...)
	}
	for _, test := range []struct {
		name    string
		version int16
		answer  func(id []byte) []byte
		want    error
	}{
		{"an answer", 11, func(id []byte) []byte { return sized(8, id, []byte("body")) }, nil},
		{"a version we don't know", 17, func(id []byte) []byte { return sized(8, id, []byte("body")) }, nil},
		{"another's", 11, func(id []byte) []byte { return sized(8, []byte{id[0], id[1], id[2], ^id[3]}, []byte("body")) }, errAnswer},
		{"too short", 11, func(id []byte) []byte { return sized(3, id) }, errAnswer},
		{"a negative size", 11, func(id []byte) []byte { return sized(-1, id) }, errAnswer},
		{"cut off", 11, func(id []byte) []byte { return sized(9, id, []byte("body")) }, io.ErrUnexpectedEOF},
		{"none", 11, func([]byte) []byte { return nil }, io.ErrUnexpectedEOF},
		{"too much", 11, func(id []byte) []byte { return sized(maxBatchBytes+5, id) }, errTooLarge},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := &exchange{Request: &fetch.Request{}, clientID: "c"}
			if !e.Required(map[protocol.ApiKey]int16{protocol.Fetch: test.version}) {
				t.Fatal("kafka-go would read the answer")
			}
			got, err := e.RawExchange(&wire{answer: test.answer})
			if !errors.Is(err, test.want) {
				t.Fatalf("got %v", err)
			}
			if err == nil {
				if a, ok := got.(*answer); !ok || a.version != 11 || string(a.body) != "body" {
					t.Errorf("got %+v", got)
				}
			}
		})
	}
	e := &exchange{Request: &fetch.Request{}}
	e.Required(map[protocol.ApiKey]int16{protocol.Fetch: 3})
	if _, err := e.RawExchange(&wire{}); err == nil {
		t.Error("a broker too old is asked")
	}
}
