package dedup_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/sizing"
)

// TestClaimsTakeWhatIsEstimated claims ids like a worker, and compares the disk space of
// a claim with what `dedupd size` says.
func TestClaimsTakeWhatIsEstimated(t *testing.T) {
	t.Parallel()
	const batches, of = 50, 4000
	for _, kind := range []string{sizing.IDUUID, sizing.IDUUIDv7} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			l := f.acquire("kafka", "orders/0")
			rng := rand.New(rand.NewPCG(1, 2))
			for b := range batches {
				ids := make([]string, of)
				for i := range ids {
					var key claimkey.Key
					binary.BigEndian.PutUint64(key[:], rng.Uint64())
					binary.BigEndian.PutUint64(key[8:], rng.Uint64())
					if kind == sizing.IDUUIDv7 { // milliseconds first
						binary.BigEndian.PutUint32(key[:], uint32(b*of+i)>>2)
					}
					ids[i] = key.String()
				}
				f.handle(l.batch(ids...))
			}
			generations, err := f.Store.Generations().List(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			got := float64(generations[0].Bytes) / (batches * of)
			day := 24 * time.Hour
			want := sizing.Make(sizing.Input{
				Rate: 1, ID: kind, MessageBytes: 200, Window: day, Generation: day, GenerationMaxClaims: 1 << 30, MaxHold: day, Checkpoint: day, MaxConnections: 4,
			}).BytesPerClaim
			t.Logf("a claim takes %.1f bytes, %.1f were estimated", got, want)
			if math.Abs(got/want-1) > 0.15 {
				t.Errorf("a claim takes %.1f bytes, %.1f were estimated", got, want)
			}
		})
	}
}
