package kafka

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
	"unsafe"

	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"

	"github.com/dedupd/dedupd/message"
)

// What a message costs in memory beside its key and value.
const (
	messageBytes = int64(unsafe.Sizeof(message.Message{}))
	headerBytes  = int64(unsafe.Sizeof(message.Header{}))
)

// abortMarker is the type of the control record that ends a transaction without
// effect; 1 commits.
const abortMarker = 0

// records are what one fetch brought.
type records struct {
	// messages are the records to deliver, in order of position. Their keys and
	// values share one allocation.
	messages []message.Message
	// next is the position to go on at: above every record seen, delivered or
	// not, and never below the one that was asked for.
	next int64
	// some tells that the answer held anything at all.
	some bool
}

// decoder makes messages of a partition's records. It may be used by one
// goroutine at a time; what it returns stays valid for ever.
type decoder struct {
	lane          message.Lane
	topic         string
	readCommitted bool

	found []found // kept between calls for its memory
}

// found is a record to deliver, still in the library's memory.
type found struct {
	offset     int64
	time       time.Time
	key, value protocol.Bytes
	headers    []protocol.Header
}

// decode takes what stands at position and above. An error means that the data
// can't be read, and that nothing of it is delivered.
func (d *decoder) decode(p *fetch.ResponsePartition, position int64) (records, error) {
	defer d.release()
	r := records{next: position}
	stream, _ := p.RecordSet.Records.(*protocol.RecordStream) // nil when there is nothing
	if stream == nil {
		return r, nil
	}
	aborts := newAborts(p.AbortedTransactions)
	for _, item := range stream.Records {
		r.some = true
		var err error
		switch b := item.(type) {
		case *protocol.ControlBatch:
			// Not a message, yet it takes a position. The transaction it ends may
			// have begun below what was asked for: it must be opened before it is
			// closed, or else it would take the producer's next one with it.
			aborts.upTo(b.BaseOffset)
			if rec, err := b.ReadControlRecord(); err == nil && rec.Type == abortMarker {
				aborts.end(b.ProducerID)
			}
			r.next = max(r.next, b.BaseOffset+1)
		case *protocol.RecordBatch:
			aborts.upTo(b.BaseOffset)
			skip := d.readCommitted && b.Attributes.Transactional() && aborts.has(b.ProducerID)
			// Whatever stood below this batch is settled, be it compacted away.
			r.next = max(r.next, b.BaseOffset)
			r.next, err = d.read(b, position, r.next, skip)
		case *protocol.MessageSet: // a format without transactions
			r.next, err = d.read(b, position, r.next, false)
		default:
			err = fmt.Errorf("records of unknown type %T", item)
		}
		if err != nil {
			return records{next: position, some: true}, fmt.Errorf("decode records from position %d: %w", position, err)
		}
	}
	var err error
	r.messages, err = d.copy()
	if err != nil {
		return records{next: position, some: true}, err
	}
	return r, nil
}

// read collects a batch's records from a position on.
func (d *decoder) read(batch protocol.RecordReader, position, next int64, skip bool) (int64, error) {
	for {
		rec, err := batch.ReadRecord()
		if errors.Is(err, io.EOF) {
			return next, nil
		}
		if err != nil {
			return next, err
		}
		next = max(next, rec.Offset+1)
		// The broker sends whole batches: the first may begin below.
		if skip || rec.Offset < position {
			closeBytes(rec.Key)
			closeBytes(rec.Value)
			continue
		}
		d.found = append(d.found, found{rec.Offset, rec.Time, rec.Key, rec.Value, rec.Headers})
	}
}

// copy moves the records found out of the library's memory, which goes back to
// its pool: one allocation for all bytes, one for the messages, one for their
// headers.
func (d *decoder) copy() ([]message.Message, error) {
	if len(d.found) == 0 {
		return nil, nil
	}
	size, headers := 0, 0
	for i := range d.found {
		size += length(d.found[i].key) + length(d.found[i].value)
		headers += len(d.found[i].headers)
	}
	arena := make([]byte, 0, size)
	messages := make([]message.Message, len(d.found))
	var all []message.Header
	if headers > 0 {
		all = make([]message.Header, 0, headers)
	}
	for i := range d.found {
		f := &d.found[i]
		m := &messages[i]
		m.Topic = d.topic
		m.Position = message.Position{Lane: d.lane, Offset: f.offset}
		if f.time.UnixMilli() >= 0 { // -1: the producer gave none
			m.Time = f.time.UTC()
		}
		var err error
		if m.Key, arena, err = take(arena, f.key); err != nil {
			return nil, err
		}
		if m.Value, arena, err = take(arena, f.value); err != nil {
			return nil, err
		}
		if len(f.headers) > 0 {
			from := len(all)
			for _, h := range f.headers { // their bytes are ours already
				all = append(all, message.Header{Key: h.Key, Value: h.Value})
			}
			m.Headers = all[from:len(all):len(all)]
		}
	}
	return messages, nil
}

// take appends b to the arena and returns its part of it; nil stays nil.
func take(arena []byte, b protocol.Bytes) (part, rest []byte, err error) {
	if b == nil {
		return nil, arena, nil
	}
	from, to := len(arena), len(arena)+b.Len()
	arena = arena[:to]
	part = arena[from:to:to]
	if _, err := io.ReadFull(b, part); err != nil {
		return nil, arena, err
	}
	return part, arena, nil
}

func (d *decoder) release() {
	for i := range d.found {
		closeBytes(d.found[i].key)
		closeBytes(d.found[i].value)
	}
	clear(d.found)
	d.found = d.found[:0]
}

func closeBytes(b protocol.Bytes) {
	if b != nil {
		_ = b.Close() // memory only
	}
}

func length(b protocol.Bytes) int {
	if b == nil {
		return 0
	}
	return b.Len()
}

// footprint is the memory that messages hold, in bytes.
func footprint(messages []message.Message) int64 {
	n := int64(len(messages)) * messageBytes
	for i := range messages {
		m := &messages[i]
		n += int64(len(m.Key) + len(m.Value))
		for _, h := range m.Headers {
			n += headerBytes + int64(len(h.Key)+len(h.Value))
		}
	}
	return n
}

// aborts are the transactions without effect among a fetch's records. A
// producer's records count as aborted from the first offset of such a
// transaction to its marker.
type aborts struct {
	coming []fetch.ResponseTransaction // by first offset
	open   map[int64]struct{}          // by producer
}

func newAborts(all []fetch.ResponseTransaction) aborts {
	slices.SortFunc(all, func(a, b fetch.ResponseTransaction) int {
		return cmp.Compare(a.FirstOffset, b.FirstOffset)
	})
	return aborts{coming: all, open: make(map[int64]struct{})}
}

func (a *aborts) upTo(offset int64) {
	for len(a.coming) > 0 && a.coming[0].FirstOffset <= offset {
		a.open[a.coming[0].ProducerID] = struct{}{}
		a.coming = a.coming[1:]
	}
}

func (a *aborts) has(producer int64) bool {
	_, ok := a.open[producer]
	return ok
}

func (a *aborts) end(producer int64) { delete(a.open, producer) }
