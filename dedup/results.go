package dedup

import (
	"fmt"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/sinks"
)

// Results are kept beside the claims, in a table of the claim's generation: the claim is
// written before the sink has a result, and is never updated. So claims without results cost
// nothing for them, and results go when their claims do.

// resultsAtOnce is about how many bytes of results one statement writes.
const resultsAtOnce = 4 << 20

// keepResults names the statement that keeps results.
const keepResults = "dedupd_keep_results"

// result is what the sink has given an item.
type result struct {
	item int32
	sinks.Result
}

// outcome is the label of the metric.
func (r *result) outcome(claimed bool) string {
	switch {
	case !claimed:
		return "no_claim"
	case r.Bytes == nil:
		return "too_large"
	}
	return "kept"
}

// resultSteps are the statements that keep the results with their claims. Where nothing was
// claimed there is nothing to keep them with.
func (t *txn) resultSteps() (steps []pipeline.Step) {
	if !t.claimed {
		return nil
	}
	in := t.catalog.Open
	if t.claimedIn != nil {
		in = t.claimedIn
	}
	for rest := t.results; len(rest) > 0; {
		n, size := 0, 0
		for n < len(rest) && size < resultsAtOnce {
			size += len(rest[n].Bytes)
			n++
		}
		some := rest[:n]
		rest = rest[n:]
		steps = append(steps, t.store.keepResultsStep(in.Identity, claimant{}, n, func(i int) (*claimkey.Key, sinks.Result) { return &t.items[some[i].item].key, some[i].Result }))
	}
	return steps
}

// keepResultsStep keeps n results in a generation. by, if not zero, must have made the claims
// and be the transaction that keeps their results.
func (s *Store) keepResultsStep(generation claimkey.Key, by claimant, n int, at func(i int) (*claimkey.Key, sinks.Result)) pipeline.Step {
	sizes, results := make([][]byte, n), make([][]byte, n)
	for i := range n {
		_, r := at(i)
		sizes[i], results[i] = pipeline.Int4(int32(min(r.Size, 1<<31-1))), r.Bytes
	}
	return pipeline.Step{
		Name: keepResults,
		SQL:  `SELECT ` + s.name("keep_results") + `($1::uuid, $2::uuid[], $3::integer[], $4::bytea[], $5::xid, $6::xid8)`,
		OIDs: []uint32{pgtype.UUIDOID, pgtype.UUIDArrayOID, pgtype.Int4ArrayOID, pgtype.ByteaArrayOID, pgtype.XIDOID, pgtype.XID8OID},
		Params: [][]byte{
			generation[:],
			pipeline.AppendKeys(nil, n, func(i int) *claimkey.Key { key, _ := at(i); return key }),
			pipeline.Array(pgtype.Int4OID, sizes), pipeline.Array(pgtype.ByteaOID, results), by.xmin, by.transaction,
		},
		Row: func(v [][]byte) error {
			kept, err := pipeline.ReadInt8(v[0])
			if err == nil && kept != int64(n) {
				err = fmt.Errorf("%w: %d of %d results were kept", ErrNotClaimed, kept, n)
			}
			return err
		},
	}
}
