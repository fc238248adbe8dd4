package kafka

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/segmentio/kafka-go/compress"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/twmb/franz-go/pkg/kmsg"
	"pgregory.net/rapid"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

func newDecoder() *decoder {
	return &decoder{lane: message.Lane{Source: "main", Name: "t/0"}, topic: "t", readCommitted: true, limit: testLimit}
}

// testLimit bounds what a batch decodes to in these tests.
const testLimit = 32 << 20

// wireBatch is a record batch, written by franz-go's code.
type wireBatch struct {
	base       int64
	last       int32 // delta; 0: the last record's
	attributes int16
	first, max int64
	producer   int64
	count      int32 // 0: as many as there are
	records    []kmsg.Record
	trailing   string // bytes behind the records, inside of the batch
}

func (w wireBatch) plain() []byte {
	var plain []byte
	for _, r := range w.records {
		r.Length = int32(len(r.AppendTo(nil)) - 1) // a length of 0 takes a byte
		plain = r.AppendTo(plain)
	}
	return append(plain, w.trailing...)
}

func (w wireBatch) bytes() []byte {
	last, count := w.last, w.count
	if n := len(w.records); n > 0 && last == 0 {
		last = w.records[n-1].OffsetDelta
	}
	if count == 0 {
		count = int32(len(w.records))
	}
	plain := w.plain()
	if codec := compress.Compression(w.attributes & codecMask).Codec(); codec != nil && codec.Code() != 0 {
		plain = compressed(codec, plain)
	}
	return sealed(kmsg.RecordBatch{
		FirstOffset: w.base, PartitionLeaderEpoch: -1, Attributes: w.attributes, LastOffsetDelta: last,
		FirstTimestamp: w.first, MaxTimestamp: w.max, ProducerID: w.producer, ProducerEpoch: -1, FirstSequence: -1,
		NumRecords: count, Records: plain,
	})
}

// sealed adds a batch's length and checksum.
func sealed(k kmsg.RecordBatch) []byte {
	k.Magic, k.Length = 2, int32(batchHeader-batchLengthEnd+len(k.Records))
	return seal(k.AppendTo(nil))
}

func seal(b []byte) []byte {
	binary.BigEndian.PutUint32(b[batchChecksum:], crc32.Checksum(b[batchChecksum+4:], castagnoli))
	return b
}

func compressed(codec compress.Codec, plain []byte) []byte {
	var b bytes.Buffer
	z := codec.NewWriter(&b)
	if _, err := z.Write(plain); err != nil {
		panic(err)
	}
	if err := z.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// answered is what a fetch of these batches brings.
func answered(aborted []transaction, batches ...wireBatch) *fetched {
	f := &fetched{aborted: aborted}
	for _, b := range batches {
		f.records = append(f.records, b.bytes()...)
	}
	return f
}

// at is a batch with records at these positions.
func at(base int64, positions ...int64) wireBatch {
	b := wireBatch{base: base, producer: -1}
	for _, p := range positions {
		b.records = append(b.records, kmsg.Record{OffsetDelta: int32(p - base), Value: []byte("v")})
	}
	return b
}

// to makes the batch span the positions up to last, as compaction does.
func (w wireBatch) to(last int64) wireBatch { w.last = int32(last - w.base); return w }

func transactional(base, producer int64, positions ...int64) wireBatch {
	b := at(base, positions...)
	b.attributes, b.producer = isTransactional, producer
	return b
}

func control(base, producer int64, kind byte) wireBatch {
	return wireBatch{
		base: base, attributes: isTransactional | isControl, producer: producer,
		records: []kmsg.Record{{Key: []byte{0, 0, 0, kind}, Value: []byte{0, 0, 0, 0, 0, 0}}},
	}
}

func offsets(all []message.Message) []int64 {
	var o []int64
	for _, m := range all {
		o = append(o, m.Position.Offset)
	}
	return o
}

func TestDecodeKeepsNilAndEmptyApart(t *testing.T) {
	t.Parallel()
	f := answered(nil, wireBatch{base: 7, producer: -1, records: []kmsg.Record{
		{TimestampDelta64: -1},
		{OffsetDelta: 1, Key: []byte{}, Value: []byte{}},
		{
			OffsetDelta: 2, TimestampDelta64: 1234, Key: []byte("k"), Value: []byte("v"),
			Headers: []kmsg.Header{{Key: "a"}, {Key: "a", Value: []byte{}}, {Key: "b", Value: []byte{0, 255}}},
		},
		{OffsetDelta: 3, TimestampDelta64: -1, Headers: []kmsg.Header{{Key: "c"}}},
	}})
	got, err := newDecoder().decode(f, 7, nil)
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
		{Topic: "t", Position: message.Position{Lane: lane, Offset: 10}, Headers: []message.Header{{Key: "c"}}},
	}
	if diff := cmp.Diff(want, got.messages); diff != "" {
		t.Error(diff)
	}
	if got.next != 11 {
		t.Errorf("next %d", got.next)
	}
	// Appending to one slice must not write into its neighbour.
	_ = append(got.messages[2].Key, "XXXX"...)
	_ = append(got.messages[2].Headers[2].Value, "XXXX"...)
	_ = append(got.messages[2].Headers, message.Header{Key: "X"})
	if diff := cmp.Diff(want, got.messages); diff != "" {
		t.Error("a slice's capacity reaches into the next one:", diff)
	}
}

func TestDecodePositions(t *testing.T) {
	t.Parallel()
	aborted := func(producer, first int64) transaction { return transaction{producer: producer, first: first} }
	tests := []struct {
		name     string
		position int64
		answer   *fetched
		want     []int64
		next     int64
	}{
		{"nothing", 5, &fetched{}, nil, 5},
		{"the batch begins below", 5, answered(nil, at(3, 3, 4, 5, 6)), []int64{5, 6}, 7},
		{"holes", 5, answered(nil, at(3, 4, 8), at(20, 22)), []int64{8, 22}, 23},
		{"its end is compacted away", 5, answered(nil, at(3, 3, 4).to(9)), nil, 10},
		{"all of it is", 5, answered(nil, at(3).to(9)), nil, 10},
		{"a batch below, then one that reaches there", 5, answered(nil, at(3, 3), at(4, 4, 5)), []int64{5}, 6},
		{"batches that overlap", 5, answered(nil, at(5, 5, 6), at(6, 6, 7)), []int64{5, 6, 7}, 8},
		{"batches that go back", 5, answered(nil, at(8, 8), at(5, 5, 6)), []int64{8}, 9},
		{"a marker takes a position", 5, answered(nil, control(5, 1, 1), at(6, 6)), []int64{6}, 7},
		{"only a marker", 5, answered(nil, control(5, 1, 0)), nil, 6},
		{"a marker compacted away", 5, answered(nil, wireBatch{base: 5, attributes: isTransactional | isControl, producer: 1}), nil, 6},
		{"aborted, then committed by the same producer", 0, answered([]transaction{aborted(1, 0)},
			transactional(0, 1, 0), control(1, 1, 0), transactional(2, 1, 2), control(3, 1, 1)), []int64{2}, 4},
		{"only the marker of the aborted one", 1, answered([]transaction{aborted(1, 0)},
			control(1, 1, 0), transactional(2, 1, 2), control(3, 1, 1)), []int64{2}, 4},
		{"two producers interleave", 0, answered([]transaction{aborted(2, 1)},
			transactional(0, 1, 0), transactional(1, 2, 1), transactional(2, 1, 2), control(3, 2, 0), control(4, 1, 1)), []int64{0, 2}, 5},
		{"a plain record of a producer that aborts", 0, answered([]transaction{aborted(1, 0)},
			transactional(0, 1, 0), func() wireBatch { b := at(1, 1); b.producer = 1; return b }(), control(2, 1, 0)), []int64{1}, 3},
		{"unsorted aborts", 0, answered([]transaction{aborted(1, 4), aborted(1, 0)},
			transactional(0, 1, 0), control(1, 1, 0), transactional(2, 1, 2), control(3, 1, 1), transactional(4, 1, 4), control(5, 1, 0)), []int64{2}, 6},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := newDecoder().decode(test.answer, test.position, nil)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, offsets(got.messages)); diff != "" || got.next != test.next {
				t.Errorf("next %d, want %d; offsets %s", got.next, test.next, diff)
			}
		})
	}
}

// A topic may have the broker's time instead of the producer's.
func TestDecodeTimes(t *testing.T) {
	t.Parallel()
	b := wireBatch{base: 1, first: 1000, max: 5000, records: []kmsg.Record{{}, {OffsetDelta: 1, TimestampDelta64: 700}}}
	for attributes, want := range map[int16][]int64{0: {1000, 1700}, logAppendTime: {5000, 5000}} {
		b.attributes = attributes
		got, err := newDecoder().decode(answered(nil, b), 1, nil)
		if err != nil {
			t.Fatal(err)
		}
		if times := []int64{got.messages[0].Time.UnixMilli(), got.messages[1].Time.UnixMilli()}; !slices.Equal(times, want) {
			t.Errorf("attributes %d: got %v, want %v", attributes, times, want)
		}
	}
}

// The broker cuts its answer off at the size that was asked for, wherever that is.
func TestDecodeLeavesOutAPartOfABatch(t *testing.T) {
	t.Parallel()
	f := answered(nil, at(0, 0, 1), at(2, 2, 3))
	first := len(at(0, 0, 1).bytes())
	for n := range len(f.records) {
		got, err := newDecoder().decode(&fetched{records: f.records[:n]}, 0, nil)
		switch {
		case n >= first:
			if err != nil || got.next != 2 || len(got.messages) != 2 {
				t.Errorf("%d bytes: %d messages, next %d, %v", n, len(got.messages), got.next, err)
			}
		case n > 0:
			if !errors.Is(err, errNoProgress) || got.next != 0 {
				t.Errorf("%d bytes: next %d, %v", n, got.next, err)
			}
		}
	}
}

// The error of what can't be read names its place and the remedy. What comes before it
// is delivered, and nothing after it.
func TestDecodeErrors(t *testing.T) {
	t.Parallel()
	changed := func(b wireBatch, change func(b []byte)) []byte {
		all := b.bytes()
		change(all)
		return all
	}
	resealed := func(b wireBatch, change func(b []byte)) []byte { return seal(changed(b, change)) }
	two := at(10, 10, 11)
	with := func(change func(b *wireBatch)) []byte {
		b := two
		b.records = slices.Clone(b.records)
		change(&b)
		return b.bytes()
	}
	for _, test := range []struct {
		name string
		bad  []byte
		want string
	}{
		{"a flipped bit", changed(two, func(b []byte) { b[len(b)-1] ^= 1 }), "checksum"},
		{"an old format", resealed(two, func(b []byte) { b[batchMagic] = 1 }), "message format 1"},
		{"a format to come", resealed(two, func(b []byte) { b[batchMagic] = 3 }), "message format 3"},
		{"a length below the header's", resealed(two, func(b []byte) { binary.BigEndian.PutUint32(b[8:], 48) }), "48 bytes"},
		{"a negative length", resealed(two, func(b []byte) { binary.BigEndian.PutUint32(b[8:], 1<<31) }), "impossible"},
		{"a negative position", with(func(b *wireBatch) { b.base = -1 }), "impossible"},
		{"a position too far", with(func(b *wireBatch) { b.base = 1<<63 - 5 }), "impossible"},
		{"a negative span", with(func(b *wireBatch) { b.last = -1 }), "impossible"},
		{"a negative number of records", with(func(b *wireBatch) { b.count = -1 }), "impossible"},
		{"fewer records than it says", with(func(b *wireBatch) { b.count = 1 << 30 }), "doesn't end"},
		{"more records than it says", with(func(b *wireBatch) { b.count = 1 }), "doesn't end"},
		{"a record behind its end", with(func(b *wireBatch) { b.records[1].OffsetDelta, b.last = 2, 1 }), "doesn't end"},
		{"a record below its base", with(func(b *wireBatch) { b.records[0].OffsetDelta = -1 }), "doesn't end"},
		{"bytes behind the records", with(func(b *wireBatch) { b.trailing = "x" }), "doesn't end"},
		{"a codec of the future", with(func(b *wireBatch) { b.attributes = 5 }), "unknown compression type, 5"},
		{"no gzip", resealed(two, func(b []byte) { b[22] |= 1 }), "decompress gzip"},
		{"no snappy", resealed(two, func(b []byte) { b[22] |= 2 }), "decompress snappy"},
		{"no lz4", resealed(two, func(b []byte) { b[22] |= 3 }), "decompress lz4"},
		{"no zstd", resealed(two, func(b []byte) { b[22] |= 4 }), "decompress zstd"},
		{"a marker without a type", func() []byte {
			b := control(10, 1, 0)
			b.records[0].Key = []byte{0, 0, 0}
			return b.bytes()
		}(), "control record"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := newDecoder().decode(&fetched{records: slices.Concat(test.bad, at(12, 12).bytes())}, 10, nil)
			if err == nil || got.messages != nil || got.next != 10 {
				t.Fatalf("got %d messages, next %d, %v", len(got.messages), got.next, err)
			}
			for _, part := range []string{test.want, "main:t/0", "position 10", "dedupd lanes set-position main t/0"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("no %q in: %v", part, err)
				}
			}
			got, err = newDecoder().decode(&fetched{records: slices.Concat(at(8, 8, 9).bytes(), test.bad, at(12, 12).bytes())}, 8, nil)
			if diff := cmp.Diff([]int64{8, 9}, offsets(got.messages)); diff != "" || err != nil || got.next != 10 {
				t.Errorf("with good ones before: next %d, %v, offsets %s", got.next, err, diff)
			}
		})
	}
}

// A few bytes that decompress to very many are refused before memory is allocated for
// them. Not parallel, since it measures allocations.
func TestDecodeRefusesBombs(t *testing.T) {
	for _, codec := range codecs {
		t.Run(codec.String(), func(t *testing.T) {
			bomb := sealed(kmsg.RecordBatch{
				FirstOffset: 5, Attributes: int16(codec), LastOffsetDelta: 9, NumRecords: 10, Records: fuse(codec),
			})
			var err error
			allocates(t, 5*scratchBytes+testLimit, func() { _, err = newDecoder().decode(&fetched{records: bomb}, 5, nil) })
			var hold *lane.HoldError
			if !errors.As(err, &hold) || hold.Lane.Name != "t/0" || !errors.As(err, new(*inflatedError)) {
				t.Fatalf("got %v", err)
			}
			for _, part := range []string{"positions 5 to 14", "max_inflated_bytes is 32.0MiB", "32.1MiB", "set-position main t/0 15"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("no %q in: %v", part, err)
				}
			}
		})
	}
	// Empty records take more memory as messages than on the wire.
	many := wireBatch{records: make([]kmsg.Record, testLimit/messageBytes+1)}
	for i := range many.records {
		many.records[i].OffsetDelta = int32(i)
	}
	if got, err := newDecoder().decode(answered(nil, many), 0, nil); !errors.As(err, new(*inflatedError)) {
		t.Errorf("%d messages, %v", len(got.messages), err)
	}
}

var codecs = []compress.Compression{compress.Gzip, compress.Snappy, compress.Lz4, compress.Zstd}

// allocates fails if a function allocates more than that many bytes.
func allocates(t *testing.T, most uint64, do func()) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	if got := after.TotalAlloc - before.TotalAlloc; got > most {
		t.Errorf("%d bytes were allocated, %d are allowed", got, most)
	}
}

// fuse is a little data that decompresses to a byte more than the limit. All codecs but
// snappy allow several streams in a row; lz4's reader allocates for each of them if its
// pool is empty.
func fuse(codec compress.Compression) []byte {
	if codec == compress.Snappy || codec == compress.Lz4 {
		return compressed(codec.Codec(), make([]byte, testLimit+1))
	}
	return append(bytes.Repeat(compressed(codec.Codec(), make([]byte, 1<<20)), testLimit>>20), compressed(codec.Codec(), []byte{0})...)
}

// The size that a frame states is believed only as far as its bytes allow.
func TestDecodeBelievesNoClaims(t *testing.T) {
	zstdFrame := func(claim uint64) []byte { // single segment, 8 bytes of content size, one raw block of a byte
		return append(binary.LittleEndian.AppendUint64([]byte{0x28, 0xb5, 0x2f, 0xfd, 0xe0}, claim), 1|1<<3, 0, 0, 'x')
	}
	for name, test := range map[string]struct {
		codec   compress.Compression
		records []byte
	}{
		"snappy, more than there is":      {compress.Snappy, binary.AppendUvarint(nil, 1<<32-1)},
		"snappy, within the limit":        {compress.Snappy, binary.AppendUvarint(nil, testLimit/2)},
		"xerial":                          {compress.Snappy, append(append(xerialMagic[:8:8], 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 5), binary.AppendUvarint(nil, 1<<32-1)...)},
		"zstd, more than there is":        {compress.Zstd, zstdFrame(1 << 40)},
		"zstd, within the limit":          {compress.Zstd, zstdFrame(testLimit / 2)},
		"zstd, a window of gigabytes":     {compress.Zstd, []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xf8, 1 | 2<<1 | 1<<3, 0, 0, 0}},
		"zstd, a frame without an end":    {compress.Zstd, zstdFrame(1)[:10]},
		"zstd, a block without its bytes": {compress.Zstd, []byte{0x28, 0xb5, 0x2f, 0xfd, 0x20, 0xff, 0xff, 0xff, 0xff}},
		"lz4, a content of gigabytes":     {compress.Lz4, append(binary.LittleEndian.AppendUint64([]byte{0x04, 0x22, 0x4d, 0x18, 0x68, 0x40}, 1<<40), 0)},
	} {
		t.Run(name, func(t *testing.T) {
			b := sealed(kmsg.RecordBatch{Attributes: int16(test.codec), NumRecords: 1, Records: test.records})
			allocates(t, 3*scratchBytes, func() {
				if _, err := newDecoder().decode(&fetched{records: b}, 0, nil); err == nil {
					t.Error("no error")
				}
			})
		})
	}
}

// Batches, small and large, are decompressed to exactly their size, in no more memory
// than was granted.
func TestDecodeLargeBatches(t *testing.T) {
	for _, codec := range codecs {
		for _, size := range []int{100, scratchBytes - 100, scratchBytes + 100, 20 << 20} {
			t.Run(fmt.Sprint(codec, " of ", size), func(t *testing.T) {
				b := wireBatch{attributes: int16(codec), producer: -1}
				for range 10 {
					b.records = append(b.records, kmsg.Record{OffsetDelta: int32(len(b.records)), Value: make([]byte, size/10), Headers: []kmsg.Header{{Key: "k"}}})
				}
				whole := b.bytes()
				budget := consumer.NewBudget(24 << 20)
				memory := &grant{budget: budget}
				memory.answer(int64(len(whole)))
				got, err := newDecoder().decode(&fetched{records: whole}, 0, memory)
				if err != nil || len(got.messages) != 10 || len(got.messages[9].Value) != size/10 {
					t.Fatalf("%d messages, %v", len(got.messages), err)
				}
				if memory.used < got.held {
					t.Errorf("%d bytes are held, and %d were granted", got.held, memory.used)
				}
				if most := int64(len(whole) + size + 10*int(messageBytes+headerBytes) + 1000); got.held > most+zstdBlock {
					t.Errorf("%d bytes are held, of %d", got.held, most)
				}
			})
		}
	}
}

// A batch without room is left, and how much it needs is reported. What comes before it
// is delivered.
func TestDecodeTakesWhatThereIsRoomFor(t *testing.T) {
	t.Parallel()
	for _, codec := range append([]compress.Compression{compress.None}, codecs...) {
		t.Run(codec.String(), func(t *testing.T) {
			large := func(base int64) []byte {
				b := wireBatch{base: base, attributes: int16(codec), producer: -1}
				for i := range int32(10_000) {
					b.records = append(b.records, kmsg.Record{OffsetDelta: i, Value: make([]byte, 100), Headers: []kmsg.Header{{Key: "k"}}})
				}
				return b.bytes()
			}
			f := &fetched{records: slices.Concat(large(0), large(10_000), large(20_000))}
			answer := int64(len(f.records))
			try := func(limit int64) (records, *grant, error) {
				memory := &grant{budget: consumer.NewBudget(limit)}
				memory.answer(answer)
				got, err := newDecoder().decode(f, 0, memory)
				return got, memory, err
			}
			got, memory, err := try(answer + 100<<10)
			if !errors.Is(err, errNoRoom) || got.messages != nil || got.next != 0 {
				t.Fatalf("without room: %d messages, next %d, %v", len(got.messages), got.next, err)
			}
			for tries := 0; errors.Is(err, errNoRoom); tries++ {
				if tries == 3 {
					t.Fatalf("it never has what it needs: %d", memory.wanted)
				}
				got, memory, err = try(memory.wanted)
			}
			if err != nil || len(got.messages) != 10_000 || got.next != 10_000 {
				t.Fatalf("with room for one: %d messages, next %d, %v", len(got.messages), got.next, err)
			}
			if got, _, err = try(testLimit); err != nil || got.next != 30_000 {
				t.Fatalf("with room for all: next %d, %v", got.next, err)
			}
		})
	}
}

// Of small batches that decompress to very much, a few are decoded at a time.
func TestDecodeStopsWhereMuchIsHeld(t *testing.T) {
	t.Parallel()
	var f fetched
	d := newDecoder()
	d.limit = maxFetchBytes
	for i := range int64(4) {
		b := at(i, i)
		b.attributes, b.records[0].Value = int16(compress.Zstd), make([]byte, maxFetchBytes/2)
		f.records = append(f.records, b.bytes()...)
	}
	got, err := d.decode(&f, 0, nil)
	if err != nil || got.next != 2 || len(got.messages) != 2 {
		t.Errorf("%d messages, next %d, %v", len(got.messages), got.next, err)
	}
	if got, err = d.decode(&f, got.next, nil); err != nil || got.next != 4 || len(got.messages) != 2 {
		t.Errorf("then %d messages, next %d, %v", len(got.messages), got.next, err)
	}
}

// The same for batches of empty records.
func TestDecodeStopsWhereManyAreHeld(t *testing.T) {
	t.Parallel()
	each := maxFetchBytes/messageBytes/2 + 1
	var f fetched
	d := newDecoder()
	d.limit = maxFetchBytes
	for i := range int64(4) {
		b := wireBatch{base: i * each, records: make([]kmsg.Record, each)}
		for j := range b.records {
			b.records[j].OffsetDelta = int32(j)
		}
		f.records = append(f.records, b.bytes()...)
	}
	got, err := d.decode(&f, 0, nil)
	if err != nil || got.next != 2*each || int64(len(got.messages)) != 2*each {
		t.Errorf("%d messages, next %d, %v", len(got.messages), got.next, err)
	}
}

// The byte budget counts all memory that messages keep in use.
func TestDecodeCountsWhatIsHeld(t *testing.T) {
	t.Parallel()
	value := bytes.Repeat([]byte("v"), 1000)
	header := []kmsg.Header{{Key: "k", Value: []byte("v")}}
	zip := func(b wireBatch) wireBatch { b.attributes |= int16(compress.Lz4); return b }
	one := wireBatch{base: 5, records: []kmsg.Record{{Value: value}}}
	skipped := transactional(6, 1, 6)
	skipped.records[0].Value = value
	headers := wireBatch{base: 5, records: []kmsg.Record{{Headers: header}, {OffsetDelta: 1, Headers: header}}}
	aborted := []transaction{{producer: 1, first: 6}}
	tests := []struct {
		name     string
		answer   *fetched
		messages int64
		headers  int64
		want     int // besides
	}{
		{"nothing", answered(nil, at(5).to(9)), 0, 0, 0},
		{"the answer", answered(nil, one), 1, 0, len(one.bytes())},
		{"with what isn't delivered", answered(aborted, one, skipped), 1, 0, len(one.bytes()) + len(skipped.bytes())},
		{"what it was decompressed to", answered(nil, zip(one)), 1, 0, len(one.plain())},
		{"not what isn't decompressed", answered(aborted, zip(one), zip(skipped)), 1, 0, len(one.plain())},
		{"headers", answered(nil, headers), 2, 2, len(headers.bytes())},
	}
	for _, test := range tests {
		got, err := newDecoder().decode(test.answer, 5, nil)
		if err != nil {
			t.Fatal(err)
		}
		least := int64(test.want) + test.messages*messageBytes + test.headers*headerBytes
		// The array may have room for a message that isn't delivered.
		if got.held < least || got.held > least+messageBytes || got.held < footprint(got.messages) {
			t.Errorf("%s: %d bytes are said to be held, %d are; the messages' own are %d", test.name, got.held, least, footprint(got.messages))
		}
	}
}

// We decode a record set as kafka-go does.
func TestDecodeAgreesWithKafkaGo(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var set []byte
		base := rapid.Int64Range(0, 1<<40).Draw(t, "position")
		position := base
		for range rapid.IntRange(1, 4).Draw(t, "batches") {
			b := drawBatch(t, base)
			set = append(set, b.bytes()...)
			base += int64(b.last) + 1 + rapid.Int64Range(0, 3).Draw(t, "hole")
		}
		got, err := newDecoder().decode(&fetched{records: set}, position, nil)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(byKafkaGo(t, set), got.messages); diff != "" {
			t.Fatal(diff)
		}
	})
}

func drawBatch(t *rapid.T, base int64) wireBatch {
	maybe := func(label string) []byte {
		switch rapid.IntRange(0, 3).Draw(t, label+"?") {
		case 0:
			return nil
		case 1:
			return rapid.SliceOfN(rapid.Byte(), 100, 20_000).Draw(t, label)
		}
		return rapid.SliceOf(rapid.Byte()).Draw(t, label)
	}
	b := wireBatch{
		base: base, producer: -1,
		attributes: int16(rapid.IntRange(0, 4).Draw(t, "codec")),
		first:      rapid.Int64Range(0, 1<<41).Draw(t, "time"),
	}
	for range rapid.IntRange(1, 20).Draw(t, "records") {
		r := kmsg.Record{
			OffsetDelta: b.last, TimestampDelta64: rapid.Int64Range(-b.first, 1<<40).Draw(t, "later"),
			Key: maybe("key"), Value: maybe("value"),
		}
		for range rapid.IntRange(0, 3).Draw(t, "headers") {
			r.Headers = append(r.Headers, kmsg.Header{Key: rapid.String().Draw(t, "header"), Value: maybe("header's")})
		}
		b.records = append(b.records, r)
		b.last += rapid.Int32Range(1, 100).Draw(t, "step")
	}
	return b
}

// byKafkaGo decodes with kafka-go, as the reference.
func byKafkaGo(t *rapid.T, set []byte) []message.Message {
	var rs protocol.RecordSet
	if _, err := rs.ReadFrom(bytes.NewReader(append(binary.BigEndian.AppendUint32(nil, uint32(len(set))), set...))); err != nil {
		t.Fatal(err)
	}
	all := func(b protocol.Bytes) []byte {
		if b == nil {
			return nil
		}
		got, err := protocol.ReadAll(b)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	var messages []message.Message
	for {
		r, err := rs.Records.ReadRecord()
		if errors.Is(err, io.EOF) {
			return messages
		}
		if err != nil {
			t.Fatal(err)
		}
		m := message.Message{
			Topic: "t", Key: all(r.Key), Value: all(r.Value), Time: r.Time.UTC(),
			Position: message.Position{Lane: newDecoder().lane, Offset: r.Offset},
		}
		for _, h := range r.Headers {
			m.Headers = append(m.Headers, message.Header{Key: h.Key, Value: h.Value})
		}
		messages = append(messages, m)
	}
}

// FuzzDecode: whatever a broker sends, decode doesn't panic, goes forward, and delivers
// positions in order. The checksums are corrected, or almost nothing would be decoded.
func FuzzDecode(f *testing.F) {
	for codec := range int16(6) {
		b := at(10, 10, 12)
		b.attributes, b.records[1].Headers = codec, []kmsg.Header{{Key: "k", Value: []byte("v")}}
		f.Add(int64(10), slices.Concat(b.bytes(), control(13, 1, 0).bytes(), transactional(14, 1, 14).bytes()))
	}
	f.Fuzz(func(t *testing.T, position int64, data []byte) {
		if position < 0 {
			return
		}
		for rest := data; len(rest) >= batchHeader; {
			length := int64(int32(binary.BigEndian.Uint32(rest[8:])))
			if length < batchHeader-batchLengthEnd || length > int64(len(rest)-batchLengthEnd) {
				break
			}
			seal(rest[:batchLengthEnd+length])
			rest = rest[batchLengthEnd+length:]
		}
		memory := &grant{budget: consumer.NewBudget(1 << 20)}
		memory.answer(int64(len(data)))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		got, err := newDecoder().decode(&fetched{records: data, aborted: []transaction{{producer: 1, first: 0}}}, position, memory)
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; took > 64<<20 {
			t.Fatalf("%d bytes were allocated", took)
		}
		if errors.Is(err, errNoRoom) && memory.wanted <= 1<<20 {
			t.Fatalf("no room for %d bytes", memory.wanted)
		}
		if got.held > memory.used {
			t.Fatalf("%d bytes are held, %d were granted", got.held, memory.used)
		}
		if got.next < position || err != nil && (got.next != position || got.messages != nil) || err == nil && len(data) > 0 && got.next == position {
			t.Fatalf("next %d after %d, %d messages, %v", got.next, position, len(got.messages), err)
		}
		last := position - 1
		for _, m := range got.messages {
			if m.Position.Offset <= last || m.Position.Offset >= got.next {
				t.Fatalf("position %d after %d, next %d", m.Position.Offset, last, got.next)
			}
			last = m.Position.Offset
		}
		if len(got.messages) > 0 && got.held < footprint(got.messages) {
			t.Fatalf("%d bytes said to be held, %d are", got.held, footprint(got.messages))
		}
	})
}

func TestPortion(t *testing.T) {
	t.Parallel()
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

// BenchmarkDecode makes messages of one fetch's answer.
func BenchmarkDecode(b *testing.B) {
	for _, headers := range []int{0, 1, 4} {
		b.Run(fmt.Sprintf("headers=%d", headers), func(b *testing.B) {
			const n, size = 4000, 250
			all := wireBatch{producer: -1}
			for i := range int32(n) {
				r := kmsg.Record{OffsetDelta: i, Key: make([]byte, 16), Value: make([]byte, size)}
				for range headers {
					r.Headers = append(r.Headers, kmsg.Header{Key: "message-id", Value: []byte("0123456789")})
				}
				all.records = append(all.records, r)
			}
			f := answered(nil, all)
			d := newDecoder()
			b.ReportAllocs()
			b.SetBytes(n * size)
			for b.Loop() {
				if got, err := d.decode(f, 0, nil); err != nil || len(got.messages) != n {
					b.Fatal(len(got.messages), err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/message")
		})
	}
}
