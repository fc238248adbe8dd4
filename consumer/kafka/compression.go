package kafka

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"sync"

	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/segmentio/kafka-go/compress"
)

// maxBatchBytes is the most bytes an answer may have. A batch comes whole, whatever was
// asked for.
const maxBatchBytes = 256 << 20

var errTooLarge = fmt.Errorf("a record batch of more than the %d MiB that dedupd reads at once", maxBatchBytes>>20)

// room reserves memory before it is used; false: there is none now.
type room func(bytes int64) bool

// untilForgotten has room until forget is called: an answer that nobody waits for any
// more may still be read. A nil room stays nil.
func (has room) untilForgotten() (_ room, forget func()) {
	if has == nil {
		return nil, func() {}
	}
	var mu sync.Mutex
	forgotten := false
	return func(bytes int64) bool {
			mu.Lock()
			defer mu.Unlock()
			return !forgotten && has(bytes)
		}, func() {
			mu.Lock()
			defer mu.Unlock()
			forgotten = true
		}
}

// inflate decompresses a batch's records, into memory of their own and of exactly their
// size, after reserving it. A few bytes can become gigabytes, and the size they state
// may be wrong: it uses no more memory than they can become, nor than the limit.
//
// Small batches are decompressed into a buffer that exists already. The size of a large
// one is found out first, and one is decompressed at a time.
func inflate(codec compress.Compression, records []byte, limit int64, has room) (plain []byte, err error) {
	switch codec {
	case compress.Snappy:
		plain, err = unsnap(records, limit, has)
	case compress.Zstd:
		plain, err = unzstd(records, limit, has)
	case compress.Gzip, compress.Lz4:
		open := func() io.ReadCloser { return codec.Codec().NewReader(bytes.NewReader(records)) }
		plain, err = unstream(open, limit, has)
	default:
		return nil, fmt.Errorf("records of an unknown compression type, %d", codec)
	}
	var large *inflatedError
	if err != nil && !errors.Is(err, errNoRoom) && !errors.As(err, &large) {
		err = fmt.Errorf("decompress %s: %w", codec, err)
	}
	return plain, err
}

// errNoRoom says that there is no memory for it now.
var errNoRoom = errors.New("no room for a decompressed record batch")

// inflatedError says that a batch takes more memory than the limit.
type inflatedError struct {
	least, limit int64 // least is what it takes at least
}

func (e *inflatedError) Error() string {
	return fmt.Sprintf("it takes %s of memory or more, and batch.max_inflated_bytes is %s", mebibytes(e.least), mebibytes(e.limit))
}

func mebibytes(n int64) string { return fmt.Sprintf("%.1fMiB", math.Ceil(float64(n)/(1<<20)*10)/10) }

// scratchBytes is how large a batch may be, decompressed, to use a scratch buffer.
const scratchBytes = 4 << 20

// scratch are the buffers that small batches are decompressed into, since their size
// isn't known before. Their number bounds how many are decompressed at a time.
var scratch = sync.OnceValue(func() chan []byte {
	n := min(runtime.GOMAXPROCS(0), 8)
	all := make(chan []byte, n)
	for range n {
		all <- nil
	}
	return all
})

// large is locked while a large batch is decompressed: decoders use memory beside the
// result that isn't counted.
var large sync.Mutex

// inScratch returns a copy of what fill makes, after reserving its memory. The buffer
// may grow to scratchBytes, and may still be smaller.
func inScratch(has room, fill func(buf []byte) ([]byte, error)) ([]byte, error) {
	buf := <-scratch()
	defer func() { scratch() <- buf }()
	got, err := fill(buf[:0])
	if cap(got) > cap(buf) && cap(got) <= 2*scratchBytes {
		buf = got
	}
	if err != nil {
		return nil, err
	}
	if !has(int64(len(got))) {
		return nil, errNoRoom
	}
	return bytes.Clone(got), nil
}

// errNotSmall says that a stream has more than fits in a scratch buffer.
var errNotSmall = errors.New("not small")

// unstream reads a stream that doesn't state its size. It reads a large one twice: to
// count it, then to keep it.
func unstream(open func() io.ReadCloser, limit int64, has room) ([]byte, error) {
	plain, err := inScratch(has, func(buf []byte) ([]byte, error) {
		r := open()
		defer r.Close()
		b := bytes.NewBuffer(buf)
		n, err := b.ReadFrom(io.LimitReader(r, scratchBytes+1))
		if n > scratchBytes {
			err = errNotSmall
		}
		return b.Bytes(), err
	})
	if !errors.Is(err, errNotSmall) {
		return plain, err
	}
	large.Lock()
	defer large.Unlock()
	size, err := count(open, limit)
	if err != nil {
		return nil, err
	}
	if !has(size) {
		return nil, errNoRoom
	}
	r := open()
	defer r.Close()
	plain = make([]byte, size)
	_, err = io.ReadFull(r, plain)
	return plain, err
}

// count is the size of a stream.
func count(open func() io.ReadCloser, limit int64) (int64, error) {
	r := open()
	defer r.Close()
	n, err := io.Copy(io.Discard, io.LimitReader(r, limit+1))
	if err == nil && n > limit {
		err = &inflatedError{n, limit}
	}
	return n, err
}

// zstdReader is safe for concurrent use, and decodes as many batches at a time as there
// are processors. It decodes only into memory that it is given.
var zstdReader = sync.OnceValues(func() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecodeAllCapLimit(true))
})

func unzstd(records []byte, limit int64, has room) ([]byte, error) {
	z, err := zstdReader()
	if err != nil {
		return nil, err
	}
	most, err := zstdBound(records)
	if err != nil {
		return nil, err
	}
	if most <= scratchBytes {
		return inScratch(has, func(buf []byte) ([]byte, error) {
			if int64(cap(buf)) < most {
				buf = make([]byte, 0, scratchBytes)
			}
			return z.DecodeAll(records, buf)
		})
	}
	large.Lock()
	defer large.Unlock()
	size := min(most, limit)
	if !has(size) {
		return nil, errNoRoom
	}
	plain, err := z.DecodeAll(records, make([]byte, 0, size))
	switch {
	case errors.Is(err, zstd.ErrDecoderSizeExceeded) && size == limit:
		return nil, &inflatedError{limit + 1, limit}
	case err == nil && len(plain) < cap(plain)/2:
		plain = bytes.Clone(plain)
	}
	return plain, err
}

// zstdBlock is the most that one block of zstd decompresses to.
const zstdBlock = 128 << 10

// zstdBound is the most that frames of zstd can decompress to, by their blocks: a frame
// may state its size, but isn't believed more than its blocks allow (RFC 8878).
func zstdBound(b []byte) (most int64, err error) {
	for len(b) > 0 {
		var h zstd.Header
		if err := h.Decode(b); err != nil {
			return 0, err
		}
		c := cursor{b: b[h.HeaderSize:]}
		if h.Skippable {
			c.take(int(h.SkippableSize))
		} else {
			frame := zstdBlocks(&c)
			if h.HasCheckSum {
				c.take(4)
			}
			if h.HasFCS {
				if h.FrameContentSize > uint64(frame) {
					return 0, zstd.ErrFrameSizeMismatch
				}
				frame = int64(h.FrameContentSize)
			}
			most += frame
		}
		if c.bad {
			return 0, io.ErrUnexpectedEOF
		}
		b = c.b
	}
	return most, nil
}

// zstdBlocks passes over a frame's blocks, and returns the most they decompress to.
func zstdBlocks(c *cursor) (most int64) {
	for last := false; !last && !c.bad; {
		head := c.take(3)
		if head == nil {
			return 0
		}
		n := int(head[0]) | int(head[1])<<8 | int(head[2])<<16
		size := n >> 3
		last = n&1 != 0
		switch n >> 1 & 3 {
		case 0: // as it is
			c.take(size)
			most += int64(size)
		case 1: // one byte, many times
			c.take(1)
			most += int64(size)
		default:
			c.take(size)
			most += zstdBlock
		}
	}
	return most
}

// xerialMagic begins what Java clients write: blocks of snappy, each with its length in
// front. Others write a single block without a frame.
var xerialMagic = []byte("\x82SNAPPY\x00")

// snappyRatio is more than snappy can compress: 64 bytes to three at best.
const snappyRatio = 32

func unsnap(records []byte, limit int64, has room) ([]byte, error) {
	blocks := [][]byte{records}
	if bytes.HasPrefix(records, xerialMagic) {
		blocks = nil
		c := cursor{b: records}
		c.take(len(xerialMagic) + 4 + 4) // and two versions
		for len(c.b) > 0 {
			blocks = append(blocks, c.take(int(c.int32())))
		}
		if c.bad {
			return nil, snappy.ErrCorrupt
		}
	}
	// The sizes that the blocks state are checked and added up first.
	size := int64(0)
	for _, b := range blocks {
		n, err := snappy.DecodedLen(b)
		if err != nil {
			return nil, err
		}
		if n > snappyRatio*len(b) {
			return nil, snappy.ErrCorrupt
		}
		size += int64(n)
	}
	if size > limit {
		return nil, &inflatedError{size, limit}
	}
	if !has(size) {
		return nil, errNoRoom
	}
	plain := make([]byte, 0, size)
	for _, b := range blocks {
		got, err := snappy.Decode(plain[len(plain):], b)
		if err != nil {
			return nil, err
		}
		plain = append(plain, got...) // onto itself, as it had room
	}
	return plain, nil
}
