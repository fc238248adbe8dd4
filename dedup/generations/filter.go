package generations

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/FastFilter/xorfilter"
	"github.com/cespare/xxhash/v2"

	"github.com/dedupd/dedupd/dedup/claimkey"
)

// chunk is the filter of a range of a sealed generation's keys: a binary fuse filter
// (Graf and Lemire, "Binary Fuse Filters: Fast and Smaller Than Xor Filters", 2022) with
// fingerprints of 16 bits. It takes about 2.3 bytes a key. It says "maybe" to every key
// that it holds, and to one of 65,536 that it doesn't.
//
// Chunks bound the memory that building one takes, and let a budget hold a part of a
// generation. Chunk n covers the keys above chunk n-1's lastKey, up to its own.
type chunk struct {
	number  int32
	claims  int32
	lastKey claimkey.Key
	// last: the generation has no keys above lastKey.
	last   bool
	filter xorfilter.BinaryFuse[uint16]
}

// chunkClaims is the most keys that a chunk holds. Building one takes about 60 bytes of
// memory a key.
const chunkClaims = 1 << 19

func (c *chunk) bytes() int64 { return int64(len(c.filter.Fingerprints)) * 2 }

// filterHeader is the size of seed, segment length and segment count.
const filterHeader = 8 + 4 + 4

// buildFilter makes the stored form of a filter of keys. They are sorted and distinct,
// and there is at least one.
func buildFilter(keys []claimkey.Key) ([]byte, error) {
	hashes := make([]uint64, len(keys))
	for i := range keys {
		hashes[i] = keys[i].Hash()
	}
	f, err := xorfilter.NewBinaryFuse[uint16](hashes)
	if err != nil {
		return nil, fmt.Errorf("build the filter of %d keys: %w", len(keys), err)
	}
	data := make([]byte, filterHeader, filterHeader+2*len(f.Fingerprints))
	binary.LittleEndian.PutUint64(data, f.Seed)
	binary.LittleEndian.PutUint32(data[8:], f.SegmentLength)
	binary.LittleEndian.PutUint32(data[12:], f.SegmentCount)
	for _, v := range f.Fingerprints {
		data = binary.LittleEndian.AppendUint16(data, v)
	}
	return data, nil
}

var errFilter = errors.New("its content is not a filter")

// decode reads a filter's stored form. The bytes may be anything.
func (c *chunk) decode(data []byte) error {
	if len(data) < filterHeader {
		return errFilter
	}
	f := xorfilter.BinaryFuse[uint16]{
		Seed:          binary.LittleEndian.Uint64(data),
		SegmentLength: binary.LittleEndian.Uint32(data[8:]),
		SegmentCount:  binary.LittleEndian.Uint32(data[12:]),
	}
	data = data[filterHeader:]
	// A lookup touches three neighbouring segments.
	size := (uint64(f.SegmentCount) + 2) * uint64(f.SegmentLength)
	if f.SegmentCount == 0 || f.SegmentLength == 0 || f.SegmentLength&(f.SegmentLength-1) != 0 || size > 1<<31 || size*2 != uint64(len(data)) {
		return errFilter
	}
	f.SegmentLengthMask = f.SegmentLength - 1
	f.SegmentCountLength = f.SegmentCount * f.SegmentLength
	f.Fingerprints = make([]uint16, size)
	for i := range f.Fingerprints {
		f.Fingerprints[i] = binary.LittleEndian.Uint16(data[2*i:])
	}
	c.filter = f
	return nil
}

// checksum covers everything stored of a chunk, the generation it belongs to, and the key
// that it begins above. A filter may be built anew with other chunks; none of those must
// be taken for the one that follows an old chunk.
func (c *chunk) checksum(generation, above claimkey.Key, data []byte) int64 {
	var h xxhash.Digest
	h.Reset()
	head := append([]byte(nil), generation[:]...)
	head = append(head, above[:]...)
	head = binary.BigEndian.AppendUint32(head, uint32(c.number))
	head = binary.BigEndian.AppendUint32(head, uint32(c.claims))
	head = append(head, c.lastKey[:]...)
	if c.last {
		head = append(head, 1)
	} else {
		head = append(head, 0)
	}
	_, _ = h.Write(head) // a hash takes everything
	_, _ = h.Write(data)
	return int64(h.Sum64())
}

// maybe appends the indexes, counted from base, of the hashes that the filter may hold.
// It is BinaryFuse.Contains for many: each lookup misses every cache, and in a tight loop
// the processor waits for a dozen of them at once.
func (c *chunk) maybe(hashes []uint64, base int32, found []int32) []int32 {
	seed, length, mask, span := c.filter.Seed, c.filter.SegmentLength, c.filter.SegmentLengthMask, uint64(c.filter.SegmentCountLength)
	fingerprints := c.filter.Fingerprints
	for i, h := range hashes {
		h += seed
		h ^= h >> 33
		h *= 0xff51afd7ed558ccd
		h ^= h >> 33
		h *= 0xc4ceb9fe1a85ec53
		h ^= h >> 33
		at, _ := bits.Mul64(h, span)
		h0 := uint32(at)
		h1 := h0 + length
		h2 := h1 + length
		h1 ^= uint32(h>>18) & mask
		h2 ^= uint32(h) & mask
		if uint16(h)^uint16(h>>32) == fingerprints[h0]^fingerprints[h1]^fingerprints[h2] {
			found = append(found, base+int32(i))
		}
	}
	return found
}

// Candidates returns the indexes of the keys that the sealed generation may hold: first
// those that a filter says maybe to, then, from unfiltered on, those that no filter is
// loaded for. excluded counts the keys that a filter ruled out. keys are sorted; hashes
// are theirs.
func (g *Table) Candidates(keys []claimkey.Key, hashes []uint64) (found []int32, unfiltered, excluded int) {
	from, _ := searchKeys(keys, &g.first)
	to, exact := searchKeys(keys, &g.last)
	if exact {
		to++
	}
	for _, c := range g.chunks {
		if from >= to {
			break
		}
		end, exact := searchKeys(keys[:to], &c.lastKey)
		if exact {
			end++
		}
		end = max(end, from)
		before := len(found)
		found = c.maybe(hashes[from:end], int32(from), found)
		excluded += end - from - (len(found) - before)
		from = end
		if c.last {
			from = to // keys above were never claimed here
		}
	}
	unfiltered = len(found)
	for i := from; i < to; i++ {
		found = append(found, int32(i))
	}
	return found, unfiltered, excluded
}

func searchKeys(keys []claimkey.Key, key *claimkey.Key) (int, bool) {
	return slices.BinarySearchFunc(keys, key, func(k claimkey.Key, key *claimkey.Key) int { return k.Compare(key) })
}
