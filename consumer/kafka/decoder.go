package kafka

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/segmentio/kafka-go/compress"

	"github.com/dedupd/dedupd/lane"
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

// records are what was decoded of one fetch.
type records struct {
	// messages are the records to deliver, in order of position. Their keys, values
	// and headers are parts of the answer, or of what a batch was decompressed to.
	messages []message.Message
	// held is the memory, in bytes, that is in use until the last message is freed.
	held int64
	// next is the position to go on at: above every record, delivered or not, and
	// never below the position that was asked for.
	next int64
	// epochs are those of the leaders that wrote what is below next.
	epochs []lane.LeaderEpoch
}

// decoder makes messages of a partition's records. It is safe for concurrent use.
type decoder struct {
	lane          message.Lane
	topic         string
	readCommitted bool
	// limit bounds what one record batch takes in memory.
	limit int64
}

var errNoProgress = errors.New("the broker has sent no whole record batch that reaches there")

// decode decodes what is at position and above, as far as there is memory for it. The
// error is errNoRoom if there is none for the first batch; memory.wanted is then what
// it needs.
//
// It delivers what comes before a batch that can't be read. The next call begins with
// that batch, and its error is about that batch alone.
func (d *decoder) decode(f *fetched, position int64, memory *grant) (records, error) {
	if len(f.records) == 0 {
		return records{next: position}, nil
	}
	batches, err := splitBatches(f.records)
	r := reading{decoder: d, memory: memory, from: position, next: position, aborts: newAborts(f.aborted)}
	if n := expected(batches); memory.take(int64(n) * messageBytes) {
		r.messages = make([]message.Message, 0, n)
	}
	for i := range batches {
		if r.held() > maxFetchBytes {
			break // the answer was compressed that much: the rest is fetched again
		}
		bad := r.batch(&batches[i])
		if errors.Is(bad, errNoRoom) {
			if r.next == position {
				return records{next: position}, bad
			}
			break // the same
		}
		if bad != nil {
			err = d.about(bad, &batches[i])
			break
		}
	}
	if r.next == position {
		return records{next: position}, d.stuck(err, position)
	}
	if len(r.messages) == 0 {
		return records{next: r.next, epochs: r.epochs}, nil
	}
	held := r.held() + int64(cap(r.messages)-len(r.messages))*messageBytes
	if r.inPlace {
		held += int64(len(f.records))
	}
	return records{messages: r.messages, held: held, next: r.next, epochs: r.epochs}, nil
}

// about adds to an error which batch it is about.
func (d *decoder) about(bad error, b *batch) error {
	bad = fmt.Errorf("%w, in the record batch of positions %d to %d, of %d bytes", bad, b.base, b.last, len(b.records)+batchHeader)
	if errors.As(bad, new(*inflatedError)) {
		return fmt.Errorf("%w. Raise the limit, or skip the batch: dedupd lanes set-position %s %s %d", bad, d.lane.Source, d.lane.Name, b.last+1)
	}
	return bad
}

// stuck is the error of the first batch. A batch that is larger than the limit holds
// the lane.
func (d *decoder) stuck(err error, position int64) error {
	switch {
	case errors.As(err, new(*inflatedError)):
		return &lane.HoldError{Lane: d.lane, Err: err}
	case err == nil:
		err = errNoProgress
	}
	return fmt.Errorf("records of lane %s at position %d: %w (if that lasts: \"dedupd lanes set-position %s %s POSITION\" skips them)",
		d.lane, position, err, d.lane.Source, d.lane.Name)
}

// expected estimates how many messages there will be, and may be too low: a count that
// the records are too short for isn't believed.
func expected(batches []batch) int {
	n := 0
	for i := range batches {
		n += min(batches[i].count, len(batches[i].records)/leastRecord)
	}
	return min(n, int(maxFetchBytes/messageBytes))
}

// reading is one call of decode.
type reading struct {
	decoder  *decoder
	memory   *grant
	aborts   aborts
	messages []message.Message
	from     int64
	next     int64
	epochs   []lane.LeaderEpoch
	inPlace  bool  // messages are parts of the answer itself
	unpacked int64 // bytes that messages take elsewhere, headers included
}

// held is the memory that is used beside the answer.
func (r *reading) held() int64 { return int64(len(r.messages))*messageBytes + r.unpacked }

// batch reads one batch: all of it, or nothing with an error.
func (r *reading) batch(b *batch) error {
	// The transaction that a marker ends may have begun below what was asked for. It
	// must be opened before it is closed, or the producer's next transaction would be
	// dropped too.
	r.aborts.upTo(b.base)
	switch {
	case b.has(isControl): // no message, but it has a position
		kind, err := b.marker()
		if err != nil {
			return err
		}
		if kind == abortMarker {
			r.aborts.end(b.producer)
		}
	case b.last < r.next: // all of it is below what was asked for
	case r.decoder.readCommitted && b.has(isTransactional) && r.aborts.open[b.producer]:
	default:
		if err := r.deliver(b); err != nil {
			return err
		}
	}
	if n := len(r.epochs); b.last >= r.next && (n == 0 || r.epochs[n-1].Epoch != b.epoch) {
		r.epochs = append(r.epochs, lane.LeaderEpoch{Epoch: b.epoch, From: max(b.base, r.from)})
	}
	// All of it is done, also what was compacted away.
	r.next = max(r.next, b.last+1)
	return nil
}

// deliver decodes a batch's messages.
func (r *reading) deliver(b *batch) error {
	plain, unpacked := b.records, int64(0)
	codec := compress.Compression(b.attributes & codecMask)
	if codec != compress.None {
		var tooLarge error
		var err error
		plain, err = inflate(codec, plain, r.decoder.limit, func(bytes int64) bool {
			n := min(int64(b.count), bytes/leastRecord)
			if tooLarge = r.fits(bytes + n*messageBytes); tooLarge != nil {
				return false
			}
			return r.memory.take(bytes + r.forMessages(n))
		})
		if err = cmp.Or(tooLarge, err); err != nil {
			return err
		}
		unpacked = int64(len(plain))
	}
	n, headers := min(b.count, len(plain)/leastRecord), 0
	// Reading the records twice would cost all batches a third more. For small batches
	// the headers are estimated, and memory is reserved for that, too.
	if len(plain) > scratchBytes {
		var err error
		if n, headers, err = b.countRecords(plain, r.next); err != nil {
			return err
		}
	}
	if err := r.fits(unpacked + int64(n)*messageBytes + int64(headers)*headerBytes); err != nil {
		return err
	}
	more := int64(headers) * headerBytes
	if codec == compress.None { // else it is reserved already
		more += r.forMessages(int64(n))
	}
	if !r.memory.take(more) {
		return errNoRoom
	}
	if n > cap(r.messages)-len(r.messages) { // for these and no more: there may be many
		r.messages = append(make([]message.Message, 0, len(r.messages)+n), r.messages...)
	}
	before := len(r.messages)
	headers, err := r.add(b, plain, headers)
	if err != nil {
		return err
	}
	if len(r.messages) > before {
		r.unpacked += unpacked + int64(headers)*headerBytes
		r.inPlace = r.inPlace || codec == compress.None
	}
	return nil
}

// fits returns an error if a batch takes more than the limit.
func (r *reading) fits(bytes int64) error {
	if bytes > r.decoder.limit {
		return &inflatedError{bytes, r.decoder.limit}
	}
	return nil
}

// forMessages is the memory that n more messages take, beside their bytes.
func (r *reading) forMessages(n int64) int64 {
	return max(int64(len(r.messages))+n-int64(cap(r.messages)), 0) * messageBytes
}

// add makes messages of a batch's records at next and above: all of them, or none with
// an error. Memory is reserved for counted headers; it reserves more if that is too
// little, and returns for how many there is in the end.
func (r *reading) add(b *batch, plain []byte, counted int) (room int, err error) {
	var (
		messages = r.messages
		headers  = make([]message.Header, 0, counted)
		next     = r.next
		c        = cursor{b: plain}
	)
	room = counted
	for left := b.count; left > 0; left-- {
		rec, err := b.record(&c)
		if err != nil {
			return 0, err
		}
		// The broker sends whole batches: the first may begin below.
		if rec.offset < next {
			continue
		}
		next = rec.offset + 1
		messages = append(messages, message.Message{
			Topic: r.decoder.topic, Key: rec.key, Value: rec.value,
			Position: message.Position{Lane: r.decoder.lane, Offset: rec.offset},
		})
		m := &messages[len(messages)-1]
		if rec.time >= 0 { // -1: the producer gave none
			m.Time = time.UnixMilli(rec.time).UTC()
		}
		if rec.headers == 0 {
			continue
		}
		if cap(headers)-len(headers) < rec.headers {
			// For all that follow, if they have as many.
			n := rec.headers + min(rec.headers*(left-1), len(c.b)/leastHeader)
			if !r.memory.take(int64(n) * headerBytes) {
				return 0, errNoRoom
			}
			room += n
			headers = make([]message.Header, 0, n)
		}
		from := len(headers)
		if headers, err = rec.appendHeaders(headers); err != nil {
			return 0, err
		}
		m.Headers = headers[from:len(headers):len(headers)]
	}
	if len(c.b) > 0 {
		return 0, errBadRecord
	}
	r.messages = messages
	return room, nil
}

// footprint is the memory that messages take, in bytes.
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

// aborts are the aborted transactions among a fetch's records. A producer's records
// are aborted from the first offset of such a transaction to its marker.
type aborts struct {
	coming []transaction  // by first offset
	open   map[int64]bool // by producer
}

func newAborts(all []transaction) aborts {
	slices.SortFunc(all, func(a, b transaction) int {
		return cmp.Compare(a.first, b.first)
	})
	return aborts{coming: all, open: make(map[int64]bool)}
}

func (a *aborts) upTo(offset int64) {
	for len(a.coming) > 0 && a.coming[0].first <= offset {
		a.open[a.coming[0].producer] = true
		a.coming = a.coming[1:]
	}
}

func (a *aborts) end(producer int64) { delete(a.open, producer) }
