package e2e

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// send is one message to be produced: a copy of what the n-th id stands for, and
// the partition it goes to.
type send struct {
	n         int32
	partition int32
}

func (s send) id() string { return fmt.Sprintf("order-%07d", s.n) }

// body is the same bytes for all copies of an id, so that none is a conflict.
func (s send) body() []byte {
	return fmt.Appendf(nil, `{"n":%d,"customer":"customer-%d","note":"what the %d-th order is about, at some length"}`, s.n, s.n*31%997, s.n)
}

// newPlan draws messages of which a share are duplicates: ones that come again
// within the same fetch, ones that come again long after, and ones that go to two
// partitions at the same moment, where two workers race for the id.
func newPlan(rng *rand.Rand, messages, duplicates int, partitions int32) (plan []send, ids int) {
	plan = make([]send, 0, messages)
	again := func(n int32) {
		s := send{n, n % partitions}
		if rng.IntN(4) == 0 {
			s.partition = rng.Int32N(partitions)
		}
		plan = append(plan, s)
		duplicates--
	}
	for len(plan) < messages {
		n := int32(ids)
		left := messages - len(plan)
		switch kind := rng.IntN(3); {
		case ids == 0 || rng.IntN(left) >= duplicates:
			plan = append(plan, send{n, n % partitions})
			ids++
		case kind == 0:
			again(max(0, n-1-rng.Int32N(20)))
		case kind == 1 || left < 2 || partitions < 2 || left-1 < duplicates:
			again(rng.Int32N(n))
		default:
			plan = append(plan, send{n, n % partitions}, send{n, (n + 1 + rng.Int32N(partitions-1)) % partitions})
			ids++
			duplicates--
		}
	}
	return plan, ids
}

func TestPlan(t *testing.T) {
	rng := dice(t)
	for _, partitions := range []int32{1, 4} {
		const messages, duplicates = 20_000, 4000
		plan, ids := newPlan(rng, messages, duplicates, partitions)
		seen := map[int32]bool{}
		elsewhere := 0
		for _, s := range plan {
			if seen[s.n] && s.partition != s.n%partitions {
				elsewhere++
			}
			seen[s.n] = true
		}
		if len(plan) != messages || ids != messages-duplicates || len(seen) != ids {
			t.Errorf("%d partitions: %d messages of %d ids, and of %d as it says; want %d of %d", partitions, len(plan), len(seen), ids, messages, messages-duplicates)
		}
		if partitions > 1 && elsewhere < duplicates/4 {
			t.Errorf("only %d of %d duplicates are on another partition than the first copy", elsewhere, duplicates)
		}
	}
}
