package kafka

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"unsafe"

	"github.com/dedupd/dedupd/message"
)

// A record batch, format 2 (KIP-98, and "Record Batch" in Kafka's documentation
// of its message format), big endian:
//
//	 0 base offset       8
//	 8 length            4   of what follows
//	12 leader epoch      4
//	16 magic             1   the format: 2
//	17 checksum          4   CRC-32C of what follows
//	21 attributes        2
//	23 last offset delta 4
//	27 first timestamp   8
//	35 max timestamp     8
//	43 producer id       8
//	51 producer epoch    2
//	53 base sequence     4
//	57 records           4   their number
//	61 the records, compressed together
const (
	batchLengthEnd = 12
	batchMagic     = 16
	batchChecksum  = 17
	batchHeader    = 61

	// leastRecord is the size of a record without key, value and headers, and
	// leastHeader that of a header with neither.
	leastRecord = 7
	leastHeader = 2
)

// The attributes of a record batch.
const (
	codecMask       = 0x07
	logAppendTime   = 0x08 // records have the time at which the broker appended them
	isTransactional = 0x10
	isControl       = 0x20
)

// batch is one record batch.
type batch struct {
	base, last int64 // positions that it spans; some or all may have no record
	epoch      int32 // of the leader that wrote it; -1: not known
	attributes int16
	first, max int64 // timestamps in milliseconds: the one that records count from, and the latest
	producer   int64
	count      int
	records    []byte // as sent
}

func (b *batch) has(attribute int16) bool { return b.attributes&attribute != 0 }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// splitBatches splits an answer into batches. It leaves out a part of a batch at the
// end: the broker cuts at the size that was asked for. With an error it returns the
// batches before the one at fault.
func splitBatches(records []byte) ([]batch, error) {
	var all []batch
	for len(records) > batchMagic {
		length := int64(int32(binary.BigEndian.Uint32(records[8:])))
		if magic := records[batchMagic]; magic != 2 {
			return all, fmt.Errorf("they are in message format %d, and dedupd reads format 2, which brokers write since Kafka 0.11; copy them to another topic", magic)
		}
		if length < batchHeader-batchLengthEnd {
			return all, fmt.Errorf("a record batch of %d bytes, which is impossible", length)
		}
		if length > int64(len(records)-batchLengthEnd) {
			return all, nil
		}
		whole := records[:batchLengthEnd+length]
		records = records[len(whole):]
		b, err := readBatch(whole)
		if err != nil {
			return all, err
		}
		all = append(all, b)
	}
	return all, nil
}

// readBatch reads a batch's header.
func readBatch(whole []byte) (batch, error) {
	c := cursor{b: whole}
	base := c.int64()
	c.int32() // its length
	epoch := c.int32()
	c.take(batchChecksum - batchMagic)
	want := uint32(c.int32())
	if got := crc32.Checksum(c.b, castagnoli); got != want {
		return batch{}, fmt.Errorf("the checksum of the record batch at position %d is %08x and should be %08x", base, got, want)
	}
	b := batch{base: base, epoch: epoch, attributes: c.int16()}
	delta := c.int32()
	b.first, b.max, b.producer = c.int64(), c.int64(), c.int64()
	c.take(2 + 4) // the producer's epoch and sequence
	b.count = int(c.int32())
	b.records = c.b
	if base < 0 || base > math.MaxInt64-math.MaxInt32-1 || delta < 0 || b.count < 0 {
		return batch{}, fmt.Errorf("a record batch of %d records that spans %d positions from %d, which is impossible", b.count, delta, base)
	}
	b.last = base + int64(delta)
	return b, nil
}

var errBadRecord = errors.New("a record that doesn't end where it should")

// record is one record of a batch, in place.
type record struct {
	offset, time int64
	key, value   []byte
	headers      int // their number
	rest         cursor
}

// record takes a record off what a batch holds.
func (b *batch) record(c *cursor) (record, error) {
	rest := cursor{b: c.bytes()}
	rest.take(1) // attributes: there are none
	r := record{time: b.first + rest.varint()}
	delta := rest.varint()
	r.key, r.value = rest.bytes(), rest.bytes()
	headers := rest.varint()
	if rest.bad || delta < 0 || delta > b.last-b.base || headers < 0 || headers > int64(len(rest.b)/leastHeader) || headers == 0 && len(rest.b) > 0 {
		return r, errBadRecord
	}
	r.offset, r.headers, r.rest = b.base+delta, int(headers), rest
	if b.has(logAppendTime) {
		r.time = b.max
	}
	return r, nil
}

// countRecords counts the records in plain at next and above, and their headers.
func (b *batch) countRecords(plain []byte, next int64) (records, headers int, err error) {
	c := cursor{b: plain}
	for range b.count {
		rec, err := b.record(&c)
		if err != nil {
			return 0, 0, err
		}
		if rec.offset < next {
			continue
		}
		next = rec.offset + 1
		records++
		headers += rec.headers
	}
	if len(c.b) > 0 {
		return 0, 0, errBadRecord
	}
	return records, headers, nil
}

func (r *record) appendHeaders(all []message.Header) ([]message.Header, error) {
	for range r.headers {
		// Nothing writes to what was fetched, so its bytes may be a string.
		key := r.rest.bytes()
		all = append(all, message.Header{Key: unsafe.String(unsafe.SliceData(key), len(key)), Value: r.rest.bytes()})
	}
	if r.rest.bad || len(r.rest.b) > 0 {
		return all, errBadRecord
	}
	return all, nil
}

// marker is the type of a control batch's record; -1 if compaction removed it.
func (b *batch) marker() (int16, error) {
	if b.count == 0 {
		return -1, nil
	}
	c := cursor{b: b.records}
	r, err := b.record(&c)
	if err != nil {
		return 0, err
	}
	key := cursor{b: r.key}
	key.int16() // version
	kind := key.int16()
	if key.bad {
		return 0, errors.New("a control record without a type")
	}
	return kind, nil
}
