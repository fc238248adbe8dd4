package generations

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/dedupd/dedupd/dedup/claimkey"
)

// BenchmarkCandidates looks 4000 new random keys up in the filters of 24
// generations of 4.2 million claims, which together take 227 MB: more than any
// cache. What the filters hold doesn't matter, only where they are looked at.
func BenchmarkCandidates(b *testing.B) {
	if testing.Short() {
		b.Skip("takes 230 MB of memory")
	}
	keys := make([]claimkey.Key, chunkClaims)
	for i := range keys {
		keys[i] = randomKey()
	}
	data, err := buildFilter(keys)
	if err != nil {
		b.Fatal(err)
	}
	var sealed []*Table
	for range 24 {
		g := &Table{last: claimkey.Key(slices.Repeat([]byte{0xFF}, 16))}
		for n := range 8 {
			c := &chunk{number: int32(n), lastKey: claimkey.Key{byte((n+1)*32 - 1)}, last: n == 7}
			if n == 7 {
				c.lastKey = g.last
			}
			if err := c.decode(data); err != nil {
				b.Fatal(err)
			}
			for i := range c.filter.Fingerprints {
				c.filter.Fingerprints[i] = uint16(rand.Uint32())
			}
			g.chunks = append(g.chunks, c)
		}
		sealed = append(sealed, g)
	}
	batch := make([]claimkey.Key, 4000)
	hashes := make([]uint64, len(batch))
	b.ReportAllocs()
	found := 0
	for b.Loop() {
		b.StopTimer()
		for i := range batch {
			batch[i] = randomKey()
		}
		slices.SortFunc(batch, func(a, c claimkey.Key) int { return a.Compare(&c) })
		for i := range batch {
			hashes[i] = batch[i].Hash()
		}
		b.StartTimer()
		for _, g := range sealed {
			maybe, _, _ := g.Candidates(batch, hashes)
			found += len(maybe)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/4000, "ns/key")
	b.ReportMetric(float64(found)/float64(b.N), "maybes/op")
}

func randomKey() (k claimkey.Key) {
	for i := range k {
		k[i] = byte(rand.Uint32())
	}
	return k
}
