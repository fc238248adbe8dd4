package kafka

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/segmentio/kafka-go/compress"
)

// maxBatchBytes is the most that an answer, or one of its record batches when it is
// decompressed, may take. A batch comes whole, whatever was asked for, and a few
// bytes can stand for gigabytes.
const maxBatchBytes = 256 << 20

var errTooLarge = fmt.Errorf("a record batch of more than the %d MiB that dedupd takes at once", maxBatchBytes>>20)

// decompress gives what a batch's records are, in memory of their own and of just
// their size.
func decompress(codec compress.Compression, records []byte) (plain []byte, err error) {
	switch codec {
	case compress.Snappy:
		plain, err = unsnap(records)
	case compress.Zstd:
		plain, err = pooled(func(buf []byte) ([]byte, error) { return unzstd(records, buf) })
	case compress.Gzip, compress.Lz4:
		plain, err = pooled(func(buf []byte) ([]byte, error) {
			r := codec.Codec().NewReader(bytes.NewReader(records))
			defer r.Close()
			return readAll(r, buf)
		})
	default:
		return nil, fmt.Errorf("records compressed in a way that isn't known, %d", codec)
	}
	if err != nil && !errors.Is(err, errTooLarge) {
		err = fmt.Errorf("decompress %s: %w", codec, err)
	}
	return plain, err
}

// buffers are what is decompressed into, as it isn't known before what it will
// come to.
var buffers sync.Pool // *[]byte

func pooled(fill func(buf []byte) ([]byte, error)) ([]byte, error) {
	buf, _ := buffers.Get().(*[]byte)
	if buf == nil {
		buf = new([]byte)
	}
	defer buffers.Put(buf)
	got, err := fill((*buf)[:0])
	if cap(got) > cap(*buf) {
		*buf = got
	}
	if err != nil {
		return nil, err
	}
	return bytes.Clone(got), nil
}

// readAll is io.ReadAll into a buffer, and with an end.
func readAll(r io.Reader, buf []byte) ([]byte, error) {
	b := bytes.NewBuffer(buf)
	n, err := b.ReadFrom(io.LimitReader(r, maxBatchBytes+1))
	if n > maxBatchBytes {
		err = errTooLarge
	}
	return b.Bytes(), err
}

// zstdReader may be used by many goroutines, of which as many as there are
// processors go on at a time.
var zstdReader = sync.OnceValues(func() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxMemory(maxBatchBytes))
})

func unzstd(records, buf []byte) ([]byte, error) {
	z, err := zstdReader()
	if err != nil {
		return nil, err
	}
	plain, err := z.DecodeAll(records, buf)
	if errors.Is(err, zstd.ErrDecoderSizeExceeded) || errors.Is(err, zstd.ErrWindowSizeExceeded) {
		err = errTooLarge
	}
	return plain, err
}

// xerialMagic begins what Java's clients write: blocks of snappy, each with its
// length in front. Others write a single block without a frame.
var xerialMagic = []byte("\x82SNAPPY\x00")

func unsnap(records []byte) ([]byte, error) {
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
	// The sizes that the blocks give are added up before they are believed.
	size := 0
	for _, b := range blocks {
		n, err := snappy.DecodedLen(b)
		if err != nil {
			return nil, err
		}
		if size += n; size > maxBatchBytes {
			return nil, errTooLarge
		}
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
