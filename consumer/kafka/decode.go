package kafka

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/segmentio/kafka-go/compress"

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
	// messages are the records to deliver, in order of position. Their keys,
	// values and headers stand where they came: in the answer, or in what one of
	// its batches was decompressed to.
	messages []message.Message
	// held is the memory, in bytes, that is in use for as long as the last of
	// them is.
	held int64
	// next is the position to go on at: above every record seen, delivered or
	// not, and never below the one that was asked for.
	next int64
}

// decoder makes messages of a partition's records. It may be used by many
// goroutines.
type decoder struct {
	lane          message.Lane
	topic         string
	readCommitted bool
}

var errNoProgress = errors.New("the broker has sent no whole record batch that reaches there")

// decode takes what stands at position and above. What stands before a batch that
// can't be read is delivered all the same: the next call then begins with that
// batch, and its error is about that alone.
func (d *decoder) decode(f *fetched, position int64) (records, error) {
	if len(f.records) == 0 {
		return records{next: position}, nil
	}
	batches, err := cutBatches(f.records)
	r := reading{decoder: d, next: position, aborts: newAborts(f.aborted)}
	r.messages = make([]message.Message, 0, expected(batches))
	for i := range batches {
		if r.held() > maxFetchBytes {
			break // so much has come of a few bytes: the rest is fetched again
		}
		if bad := r.batch(&batches[i]); bad != nil {
			err = fmt.Errorf("%w, in the record batch of positions %d to %d", bad, batches[i].base, batches[i].last)
			break
		}
	}
	if r.next == position {
		if err == nil {
			err = errNoProgress
		}
		return records{next: position}, fmt.Errorf("records of lane %s at position %d: %w (should it stay so: \"dedupd lanes set-position %s %s POSITION\" leaves them out)",
			d.lane, position, err, d.lane.Source, d.lane.Name)
	}
	if len(r.messages) == 0 {
		return records{next: r.next}, nil
	}
	held := r.held() + int64(cap(r.messages)-len(r.messages))*messageBytes
	if r.inPlace {
		held += int64(len(f.records))
	}
	return records{messages: r.messages, held: held, next: r.next}, nil
}

// expected is how many messages there will be, or fewer: what is said of their
// number need not be so.
func expected(batches []batch) int {
	n := 0
	for i := range batches {
		n += min(batches[i].count, len(batches[i].records)/leastRecord)
	}
	return min(n, int(maxFetchBytes/messageBytes))
}

// reading is one call of decode.
type reading struct {
	*decoder
	aborts   aborts
	messages []message.Message
	next     int64
	inPlace  bool  // messages stand in the answer itself
	unpacked int64 // bytes that messages take elsewhere, headers included
}

// held is the memory that was taken beside the answer.
func (r *reading) held() int64 { return int64(len(r.messages))*messageBytes + r.unpacked }

// batch goes over one batch. With an error nothing of it is taken.
func (r *reading) batch(b *batch) error {
	// The transaction that a marker ends may have begun below what was asked for:
	// it must be opened before it is closed, or else it would take the producer's
	// next one with it.
	r.aborts.upTo(b.base)
	switch {
	case b.has(isControl): // not a message, yet it takes a position
		kind, err := b.marker()
		if err != nil {
			return err
		}
		if kind == abortMarker {
			r.aborts.end(b.producer)
		}
	case b.last < r.next: // all of it stands below what was asked for
	case r.readCommitted && b.has(isTransactional) && r.aborts.has(b.producer):
	default:
		if err := r.deliver(b); err != nil {
			return err
		}
	}
	// Whatever stood in it is settled, be it compacted away.
	r.next = max(r.next, b.last+1)
	return nil
}

// deliver takes a batch's messages.
func (r *reading) deliver(b *batch) error {
	plain, unpacked := b.records, int64(0)
	codec := compress.Compression(b.attributes & codecMask)
	if codec != compress.None {
		var err error
		if plain, err = decompress(codec, plain); err != nil {
			return err
		}
		unpacked = int64(len(plain))
	}
	var (
		messages = r.messages
		headers  []message.Header
		next     = r.next
		c        = cursor{b: plain}
	)
	for left := b.count; left > 0; left-- {
		rec, err := b.record(&c)
		if err != nil {
			return err
		}
		// The broker sends whole batches: the first may begin below.
		if rec.offset < next {
			continue
		}
		next = rec.offset + 1
		messages = append(messages, message.Message{
			Topic: r.topic, Key: rec.key, Value: rec.value,
			Position: message.Position{Lane: r.lane, Offset: rec.offset},
		})
		m := &messages[len(messages)-1]
		if rec.time >= 0 { // -1: the producer gave none
			m.Time = time.UnixMilli(rec.time).UTC()
		}
		if rec.headers > 0 {
			if cap(headers)-len(headers) < rec.headers {
				// For all that follow, if they have as many.
				headers = make([]message.Header, 0, rec.headers+min(rec.headers*(left-1), len(c.b)/leastHeader))
				unpacked += int64(cap(headers)) * headerBytes
			}
			from := len(headers)
			if headers, err = rec.appendHeaders(headers); err != nil {
				return err
			}
			m.Headers = headers[from:len(headers):len(headers)]
		}
		if unpacked+int64(len(messages)-len(r.messages))*messageBytes > maxBatchBytes {
			return errTooLarge
		}
	}
	if len(c.b) > 0 {
		return errBadRecord
	}
	if len(messages) > len(r.messages) {
		r.unpacked += unpacked
		r.inPlace = r.inPlace || codec == compress.None
	}
	r.messages = messages
	return nil
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
	coming []transaction      // by first offset
	open   map[int64]struct{} // by producer
}

func newAborts(all []transaction) aborts {
	slices.SortFunc(all, func(a, b transaction) int {
		return cmp.Compare(a.first, b.first)
	})
	return aborts{coming: all, open: make(map[int64]struct{})}
}

func (a *aborts) upTo(offset int64) {
	for len(a.coming) > 0 && a.coming[0].first <= offset {
		a.open[a.coming[0].producer] = struct{}{}
		a.coming = a.coming[1:]
	}
}

func (a *aborts) has(producer int64) bool {
	_, ok := a.open[producer]
	return ok
}

func (a *aborts) end(producer int64) { delete(a.open, producer) }
