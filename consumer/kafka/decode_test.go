package kafka

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"

	"github.com/dedupd/dedupd/message"
)

func newDecoder() *decoder {
	return &decoder{lane: message.Lane{Source: "main", Name: "t/0"}, topic: "t", readCommitted: true}
}

// answer is a fetch's answer with these batches.
func answer(aborted []fetch.ResponseTransaction, batches ...protocol.RecordReader) *fetch.ResponsePartition {
	return &fetch.ResponsePartition{
		AbortedTransactions: aborted,
		RecordSet:           protocol.RecordSet{Records: &protocol.RecordStream{Records: batches}},
	}
}

func batch(base int64, records ...protocol.Record) *protocol.RecordBatch {
	return &protocol.RecordBatch{BaseOffset: base, ProducerID: -1, Records: protocol.NewRecordReader(records...)}
}

func at(offset int64) protocol.Record {
	return protocol.Record{Offset: offset, Time: time.UnixMilli(1000), Value: protocol.NewBytes([]byte("v"))}
}

func offsets(all []message.Message) []int64 {
	var o []int64
	for _, m := range all {
		o = append(o, m.Position.Offset)
	}
	return o
}

func TestDecodeKeepsNilAndEmptyApart(t *testing.T) {
	got, err := newDecoder().decode(answer(nil, batch(7,
		protocol.Record{Offset: 7, Time: time.UnixMilli(-1)},
		protocol.Record{Offset: 8, Time: time.UnixMilli(0), Key: protocol.NewBytes([]byte{}), Value: protocol.NewBytes([]byte{})},
		protocol.Record{
			Offset: 9, Time: time.UnixMilli(1234), Key: protocol.NewBytes([]byte("k")), Value: protocol.NewBytes([]byte("v")),
			Headers: []protocol.Header{{Key: "a"}, {Key: "a", Value: []byte{}}, {Key: "b", Value: []byte{0, 255}}},
		},
	)), 7)
	if err != nil {
		t.Fatal(err)
	}
	lane := message.Lane{Source: "main", Name: "t/0"}
	want := []message.Message{
		{Topic: "t", Position: message.Position{Lane: lane, Offset: 7}},
		{Topic: "t", Position: message.Position{Lane: lane, Offset: 8}, Key: []byte{}, Value: []byte{}, Time: time.UnixMilli(0).UTC()},
		{
			Topic: "t", Position: message.Position{Lane: lane, Offset: 9}, Key: []byte("k"), Value: []byte("v"), Time: time.UnixMilli(1234).UTC(),
			Headers: []message.Header{{Key: "a"}, {Key: "a", Value: []byte{}}, {Key: "b", Value: []byte{0, 255}}},
		},
	}
	if diff := cmp.Diff(want, got.messages); diff != "" {
		t.Error(diff)
	}
	if got.next != 10 || !got.some {
		t.Errorf("next %d, some %t", got.next, got.some)
	}
	// Whoever appends to one slice must not write into its neighbour.
	_ = append(got.messages[2].Key, 'X')
	if string(got.messages[2].Value) != "v" {
		t.Error("a key's capacity reaches into the value")
	}
}

func TestDecodePositions(t *testing.T) {
	control := func(base, producer int64, kind int16) *protocol.ControlBatch {
		b := protocol.NewControlBatch(protocol.ControlRecord{Offset: base, Type: kind, Data: []byte{0, 0, 0, 0, 0, 0}})
		b.BaseOffset, b.ProducerID = base, producer
		return b
	}
	transactional := func(base, producer int64, records ...protocol.Record) *protocol.RecordBatch {
		b := batch(base, records...)
		b.Attributes, b.ProducerID = protocol.Transactional, producer
		return b
	}
	aborted := func(producer, first int64) fetch.ResponseTransaction {
		return fetch.ResponseTransaction{ProducerID: producer, FirstOffset: first}
	}
	tests := []struct {
		name     string
		position int64
		answer   *fetch.ResponsePartition
		want     []int64
		next     int64
	}{
		{"nothing", 5, &fetch.ResponsePartition{}, nil, 5},
		{"the batch begins below", 5, answer(nil, batch(3, at(3), at(4), at(5), at(6))), []int64{5, 6}, 7},
		{"holes", 5, answer(nil, batch(3, at(4), at(8)), batch(20, at(22))), []int64{8, 22}, 23},
		{"all of it is below: no progress", 5, answer(nil, batch(3, at(3), at(4))), nil, 5},
		{"the next batch tells how far", 5, answer(nil, batch(3, at(3)), batch(9)), nil, 9},
		{"an empty batch", 5, answer(nil, batch(8)), nil, 8},
		{"a marker takes a position", 5, answer(nil, control(5, 1, 1), batch(6, at(6))), []int64{6}, 7},
		{"only a marker", 5, answer(nil, control(5, 1, 0)), nil, 6},
		{"aborted, then committed by the same producer", 0, answer([]fetch.ResponseTransaction{aborted(1, 0)},
			transactional(0, 1, at(0)), control(1, 1, 0), transactional(2, 1, at(2)), control(3, 1, 1)), []int64{2}, 4},
		{"only the marker of the aborted one", 1, answer([]fetch.ResponseTransaction{aborted(1, 0)},
			control(1, 1, 0), transactional(2, 1, at(2)), control(3, 1, 1)), []int64{2}, 4},
		{"two producers interleave", 0, answer([]fetch.ResponseTransaction{aborted(2, 1)},
			transactional(0, 1, at(0)), transactional(1, 2, at(1)), transactional(2, 1, at(2)), control(3, 2, 0), control(4, 1, 1)), []int64{0, 2}, 5},
		{"a plain record of a producer that aborts", 0, answer([]fetch.ResponseTransaction{aborted(1, 0)},
			transactional(0, 1, at(0)), batch(1, at(1)), control(2, 1, 0)), []int64{1}, 3},
		{"unsorted aborts", 0, answer([]fetch.ResponseTransaction{aborted(1, 4), aborted(1, 0)},
			transactional(0, 1, at(0)), control(1, 1, 0), transactional(2, 1, at(2)), control(3, 1, 1), transactional(4, 1, at(4)), control(5, 1, 0)), []int64{2}, 6},
		{"an old format", 5, answer(nil, &protocol.MessageSet{BaseOffset: 4, Records: protocol.NewRecordReader(at(4), at(5))}), []int64{5}, 6},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := newDecoder().decode(test.answer, test.position)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, offsets(got.messages)); diff != "" || got.next != test.next {
				t.Errorf("next %d, want %d; offsets %s", got.next, test.next, diff)
			}
		})
	}
}

type brokenReader struct{}

func (brokenReader) ReadRecord() (*protocol.Record, error) { return nil, errors.New("bad crc") }

// A batch that can't be read fails the fetch: going on behind it would skip it.
func TestDecodeErrorDeliversNothing(t *testing.T) {
	got, err := newDecoder().decode(answer(nil, batch(0, at(0)), &protocol.RecordBatch{BaseOffset: 1, Records: brokenReader{}}), 0)
	if err == nil || got.next != 0 || got.messages != nil {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestPortion(t *testing.T) {
	all := make([]message.Message, 10)
	for i := range all {
		all[i].Value = make([]byte, 1000)
	}
	each := footprint(all[:1])
	for _, test := range []struct {
		most     int
		maxBytes int64
		want     int
	}{{100, 1 << 20, 10}, {3, 1 << 20, 3}, {100, 3 * each, 3}, {100, 1, 1}, {0, 0, 1}} {
		if n, bytes := portion(all, test.most, test.maxBytes); n != test.want || bytes != int64(n)*each {
			t.Errorf("most %d, %d bytes: got %d, %d bytes", test.most, test.maxBytes, n, bytes)
		}
	}
}

// BenchmarkDecode copies the records of one fetch out of the library's memory.
func BenchmarkDecode(b *testing.B) {
	for _, headers := range []int{0, 1, 4} {
		b.Run(fmt.Sprintf("headers=%d", headers), func(b *testing.B) {
			const n, size = 4000, 250
			records := make([]protocol.Record, n)
			d := newDecoder()
			b.ReportAllocs()
			b.SetBytes(n * size)
			for b.Loop() {
				b.StopTimer()
				for i := range records {
					records[i] = protocol.Record{Offset: int64(i), Key: protocol.NewBytes(make([]byte, 16)), Value: protocol.NewBytes(make([]byte, size))}
					for range headers {
						records[i].Headers = append(records[i].Headers, protocol.Header{Key: "message-id", Value: []byte("0123456789")})
					}
				}
				a := answer(nil, batch(0, records...))
				b.StartTimer()
				if got, err := d.decode(a, 0); err != nil || len(got.messages) != n {
					b.Fatal(len(got.messages), err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/message")
		})
	}
}
