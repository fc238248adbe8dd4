package generations

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/dedupd/dedupd/dedup/claimkey"
)

var lowestKey, highestKey = claimkey.Key{}, claimkey.Key(slices.Repeat([]byte{0xFF}, 16))

// keySets draws sorted and distinct keys of the kinds that may stand in a
// generation: hashes, neighbours, keys that differ in a few bits only, and the
// ends of the space.
func keySets(least, most int) *rapid.Generator[[]claimkey.Key] {
	return rapid.Custom(func(t *rapid.T) []claimkey.Key {
		n := rapid.OneOf(rapid.IntRange(least, min(most, least+3)), rapid.IntRange(least, most)).Draw(t, "keys")
		kind := rapid.SampledFrom([]string{"random", "neighbours", "few bits"}).Draw(t, "kind")
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		keys := make([]claimkey.Key, 0, n+2)
		base := random.Uint64()
		for i := range n {
			var k claimkey.Key
			switch kind {
			case "random":
				binary.BigEndian.PutUint64(k[:8], random.Uint64())
				binary.BigEndian.PutUint64(k[8:], random.Uint64())
			case "neighbours":
				binary.BigEndian.PutUint64(k[:8], base)
				binary.BigEndian.PutUint64(k[8:], uint64(i)-uint64(n/2)) // across the middle of the key, too
				if i < n/2 {
					binary.BigEndian.PutUint64(k[:8], base-1)
				}
			case "few bits":
				k[0], k[7], k[8], k[15] = byte(random.IntN(2)), byte(random.IntN(3)), byte(random.IntN(3)), byte(random.IntN(200))
			}
			keys = append(keys, k)
		}
		if rapid.Bool().Draw(t, "with the lowest key") {
			keys = append(keys, lowestKey)
		}
		if rapid.Bool().Draw(t, "with the highest key") {
			keys = append(keys, highestKey)
		}
		return sortKeys(keys)
	})
}

func sortKeys(keys []claimkey.Key) []claimkey.Key {
	slices.SortFunc(keys, func(a, b claimkey.Key) int { return a.Compare(&b) })
	return slices.Compact(keys)
}

// beside is the key that is by n above k, or below it; what lies beyond an end of
// the space comes in again at the other.
func beside(k claimkey.Key, n int) claimkey.Key {
	hi, lo := binary.BigEndian.Uint64(k[:8]), binary.BigEndian.Uint64(k[8:])
	sum := lo + uint64(n)
	switch {
	case n > 0 && sum < lo:
		hi++
	case n < 0 && sum > lo:
		hi--
	}
	binary.BigEndian.PutUint64(k[:8], hi)
	binary.BigEndian.PutUint64(k[8:], sum)
	return k
}

func hashesOf(keys []claimkey.Key) []uint64 {
	hashes := make([]uint64, len(keys))
	for i := range keys {
		hashes[i] = keys[i].Hash()
	}
	return hashes
}

// everywhere is a generation of one chunk that covers all keys.
func everywhere(c *chunk) *Table {
	c.lastKey, c.last = highestKey, true
	return &Table{first: lowestKey, last: highestKey, chunks: []*chunk{c}}
}

// TestAFilterNeverDeniesAKeyItHolds stores filters of any set of keys and reads
// them again. A filter that denied one key would have its message applied twice.
func TestAFilterNeverDeniesAKeyItHolds(t *testing.T) {
	t.Parallel()
	for range 10 {
		rapid.Check(t, func(t *rapid.T) {
			keys := keySets(1, 3000).Draw(t, "set")
			data, err := buildFilter(keys)
			if err != nil {
				t.Fatal(err)
			}
			c := &chunk{claims: int32(len(keys))}
			if err := c.decode(data); err != nil {
				t.Fatal(err)
			}
			if c.bytes() != int64(len(data)-filterHeader) {
				t.Errorf("the chunk takes %d bytes, of %d stored", c.bytes(), len(data))
			}
			hashes := hashesOf(keys)
			found, unfiltered, excluded := everywhere(c).Candidates(keys, hashes)
			if len(found) != len(keys) || unfiltered != len(keys) || excluded != 0 {
				t.Errorf("of %d keys %d are found, %d by the filter, and %d excluded", len(keys), len(found), unfiltered, excluded)
			}
			for _, h := range hashes {
				if !c.filter.Contains(h) {
					t.Fatalf("the filter denies the hash %x", h)
				}
			}
			// A piece of a filter is none.
			cut := rapid.IntRange(0, len(data)-1).Draw(t, "cut")
			if err := new(chunk).decode(data[:cut]); err == nil {
				t.Errorf("%d of %d bytes pass for a filter", cut, len(data))
			}
			if err := new(chunk).decode(append(slices.Clone(data), 0)); err == nil {
				t.Error("a filter with a byte too many passes for one")
			}
		})
	}
}

// TestAFilterExcludesNearlyAllOthers counts what a filter says of keys that it
// doesn't hold: one in 65,536 is expected to pass.
func TestAFilterExcludesNearlyAllOthers(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	keys := make([]claimkey.Key, 300_000)
	for i := range keys {
		binary.BigEndian.PutUint64(keys[i][:8], random.Uint64())
		binary.BigEndian.PutUint64(keys[i][8:], random.Uint64())
	}
	data, err := buildFilter(keys[:50_000])
	if err != nil {
		t.Fatal(err)
	}
	c := new(chunk)
	if err := c.decode(data); err != nil {
		t.Fatal(err)
	}
	others := sortKeys(keys[50_000:])
	found, _, _ := everywhere(c).Candidates(others, hashesOf(others))
	if len(found) > 20 {
		t.Errorf("%d of %d keys pass that the filter doesn't hold: about 4 are expected", len(found), len(others))
	}
	if perKey := float64(len(data)) / 50_000; perKey > 2.6 {
		t.Errorf("the filter takes %.2f bytes a key", perKey)
	}
}

// TestCandidatesAreWhatAnExactSearchWouldAsk cuts generations into chunks at any
// place, loads some of them, and asks for keys within, between and beyond them.
// Every answer is the one of a search that looks at each key by itself.
func TestCandidatesAreWhatAnExactSearchWouldAsk(t *testing.T) {
	t.Parallel()
	for range 20 {
		rapid.Check(t, func(t *rapid.T) {
			held := keySets(1, 300).Draw(t, "held")
			g := &Table{first: held[0], last: held[len(held)-1]}
			// Claims that were forgotten by hand leave a zone that is wider than
			// what the chunks cover.
			if rapid.Bool().Draw(t, "forgotten below") {
				g.first = lowestKey
			}
			if rapid.Bool().Draw(t, "forgotten above") {
				g.last = highestKey
			}
			var chunks []*chunk
			for from := 0; from < len(held); {
				n := rapid.IntRange(1, len(held)-from).Draw(t, "claims of the chunk")
				data, err := buildFilter(held[from : from+n])
				if err != nil {
					t.Fatal(err)
				}
				from += n
				c := &chunk{number: int32(len(chunks)), claims: int32(n), lastKey: held[from-1], last: from == len(held)}
				if err := c.decode(data); err != nil {
					t.Fatal(err)
				}
				chunks = append(chunks, c)
			}
			g.chunks = chunks[:rapid.IntRange(0, len(chunks)).Draw(t, "loaded")]

			asked := keySets(0, 100).Draw(t, "others")
			for range rapid.IntRange(0, 40).Draw(t, "asked at the held") {
				k := held[rapid.IntRange(0, len(held)-1).Draw(t, "at")]
				asked = append(asked, beside(k, rapid.SampledFrom([]int{0, 0, -1, 1}).Draw(t, "beside")))
			}
			for _, c := range chunks {
				if rapid.Bool().Draw(t, "asked at the chunk's end") {
					asked = append(asked, c.lastKey, beside(c.lastKey, 1))
				}
			}
			asked = sortKeys(asked)

			found, unfiltered, excluded := g.Candidates(asked, hashesOf(asked))

			var passed, probed []int32
			denied := 0
			for i, k := range asked {
				if k.Compare(&g.first) < 0 || k.Compare(&g.last) > 0 {
					continue
				}
				at := slices.IndexFunc(chunks, func(c *chunk) bool { return k.Compare(&c.lastKey) <= 0 })
				switch {
				case at >= 0 && at < len(g.chunks):
					maybe := g.chunks[at].filter.Contains(k.Hash())
					if _, holds := slices.BinarySearchFunc(held, k, func(a, b claimkey.Key) int { return a.Compare(&b) }); holds && !maybe {
						t.Fatalf("the filter of chunk %d denies the key %s, which it holds", at, k)
					}
					if maybe {
						passed = append(passed, int32(i))
					} else {
						denied++
					}
				case at < 0 && len(g.chunks) == len(chunks):
					// Above all that was ever claimed here.
				default:
					probed = append(probed, int32(i))
				}
			}
			if want := append(passed, probed...); !slices.Equal(found, want) || unfiltered != len(passed) || excluded != denied {
				t.Errorf("candidates %v, %d of them filtered, %d excluded; want %v, %d, %d", found, unfiltered, excluded, want, len(passed), denied)
			}
		})
	}
}

// FuzzDecodeFilter reads any bytes as a stored filter, and asks what passes for
// one: neither may panic, whatever the checksum would have said.
func FuzzDecodeFilter(f *testing.F) {
	data, err := buildFilter([]claimkey.Key{{1}, {2}, {3}})
	if err != nil {
		f.Fatal(err)
	}
	fields := func(data []byte) (uint64, uint32, uint32, []byte) {
		return binary.LittleEndian.Uint64(data), binary.LittleEndian.Uint32(data[8:]), binary.LittleEndian.Uint32(data[12:]), data[filterHeader:]
	}
	seed, length, count, body := fields(data)
	f.Add(seed, length, count, body, false, uint64(1))
	f.Add(seed, length, count, body[1:], false, uint64(1))
	f.Add(uint64(0), uint32(1), uint32(1), []byte{}, true, uint64(1<<64-1))
	f.Add(uint64(1), uint32(4), uint32(7), []byte{1, 2, 3}, true, uint64(1<<63))
	f.Add(uint64(2), uint32(3), uint32(7), []byte{}, true, uint64(0)) // no power of two
	// Sizes near and beyond what 32 bits hold: two factors of which each is
	// harmless, and whose product wraps around to the length that is there.
	for _, size := range [][2]uint32{
		{0, 0},
		{0, 1},
		{1, 0},
		{1 << 31, 1 << 31},
		{1 << 31, 1<<32 - 1},
		{1 << 16, 1<<16 - 2},
		{1 << 31, 2},
		{1 << 30, 1<<32 - 2},
		{1, 1<<32 - 1},
		{1, 1<<32 - 2},
		{2, 1 << 31},
	} {
		f.Add(uint64(0), size[0], size[1], []byte{}, true, uint64(0))
		f.Add(uint64(0), size[0], size[1], make([]byte, 12), false, uint64(1<<64-1))
	}
	f.Fuzz(func(t *testing.T, seed uint64, length, count uint32, body []byte, fit bool, hash uint64) {
		if size := (uint64(count) + 2) * uint64(length); fit && size < 1<<16 {
			// A fuzzer hardly ever finds the one length that fits.
			body = append(slices.Clone(body), make([]byte, 2*size)...)[:2*size]
		}
		data := binary.LittleEndian.AppendUint64(nil, seed)
		data = binary.LittleEndian.AppendUint32(data, length)
		data = binary.LittleEndian.AppendUint32(data, count)
		data = append(data, body...)
		for cut := range filterHeader {
			if new(chunk).decode(data[:cut]) == nil {
				t.Errorf("%d bytes pass for a filter", cut)
			}
		}
		c := new(chunk)
		if c.decode(data) != nil {
			return
		}
		if len(body) == 0 {
			t.Error("a filter without fingerprints passes for one")
		}
		// Where in the filter is looked depends on the hash mixed with the seed, so
		// a few hashes besides the fuzzer's reach its ends.
		keys, hashes := make([]claimkey.Key, 256), make([]uint64, 256)
		for i := range hashes {
			keys[i][15] = byte(i)
			hashes[i] = hash + uint64(i)<<56 + uint64(i)
		}
		found, _, excluded := everywhere(c).Candidates(keys, hashes)
		for i, h := range hashes {
			if c.filter.Contains(h) != slices.Contains(found, int32(i)) {
				t.Errorf("the hash %x is told to be another than it is", h)
			}
		}
		if len(found)+excluded != len(keys) {
			t.Errorf("%d found and %d excluded of %d", len(found), excluded, len(keys))
		}
	})
}
