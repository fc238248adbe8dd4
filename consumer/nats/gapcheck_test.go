package nats

import (
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

// What a check finds, by what the last one saw.
func TestGapCheck(t *testing.T) {
	t.Parallel()
	type seen struct {
		first, last uint64
		delivered   uint64 // sequence
		count       uint64 // deliveries
		pending     uint64
		again       int64
	}
	for name, c := range map[string]struct {
		filter      string
		before, now seen
		want        gap
	}{
		"nothing is discarded":                   {before: seen{1, 100, 50, 50, 50, 0}, now: seen{1, 120, 80, 80, 40, 0}},
		"discarded behind the reader":            {before: seen{1, 100, 50, 50, 50, 0}, now: seen{51, 120, 80, 80, 40, 0}},
		"discarded before it was read":           {before: seen{1, 100, 50, 50, 50, 0}, now: seen{71, 120, 50, 50, 50, 0}, want: gap{51, 71, 20}},
		"and the reader went on behind":          {before: seen{1, 100, 50, 50, 50, 0}, now: seen{71, 120, 90, 70, 30, 0}, want: gap{51, 71, 20}},
		"read, then discarded":                   {before: seen{1, 100, 50, 50, 50, 0}, now: seen{71, 120, 90, 90, 30, 0}},
		"some came again":                        {before: seen{1, 100, 50, 50, 50, 0}, now: seen{71, 120, 90, 80, 30, 10}, want: gap{51, 71, 20}},
		"all of it, and nothing came":            {before: seen{1, 100, 50, 50, 50, 0}, now: seen{201, 200, 50, 50, 0, 0}, want: gap{51, 201, 150}},
		"a small stream that is read in time":    {before: seen{1, 100, 100, 100, 0, 0}, now: seen{5001, 5100, 5100, 5100, 0, 0}},
		"a small stream, and one message isn't":  {before: seen{1, 100, 100, 100, 0, 0}, now: seen{5001, 5100, 5100, 5099, 0, 0}, want: gap{101, 5001, 1}},
		"filter: nothing was waiting":            {filter: "a", before: seen{1, 100, 50, 5, 0, 0}, now: seen{101, 300, 50, 5, 0, 0}},
		"filter: what waited is gone":            {filter: "a", before: seen{1, 100, 50, 5, 10, 0}, now: seen{101, 100, 50, 5, 0, 0}, want: gap{51, 101, 10}},
		"filter: some of what waited may be":     {filter: "a", before: seen{1, 100, 50, 5, 10, 0}, now: seen{71, 120, 50, 5, 10, 0}, want: gap{51, 71, 10}},
		"filter: what waited was delivered":      {filter: "a", before: seen{1, 100, 50, 5, 10, 0}, now: seen{71, 120, 100, 15, 3, 0}},
		"filter: what waited waits, none arrive": {filter: "a", before: seen{1, 100, 50, 5, 10, 0}, now: seen{71, 100, 50, 5, 10, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			stream := func(s seen) *jetstream.StreamInfo {
				return &jetstream.StreamInfo{
					Config: jetstream.StreamConfig{Subjects: []string{"a", "b"}},
					State:  jetstream.StreamState{FirstSeq: s.first, LastSeq: s.last, Msgs: s.last - s.first + 1},
				}
			}
			info := func(s seen) *jetstream.ConsumerInfo {
				return &jetstream.ConsumerInfo{
					Config:    jetstream.ConsumerConfig{FilterSubject: c.filter},
					Delivered: jetstream.SequenceInfo{Consumer: s.count, Stream: s.delivered}, NumPending: s.pending,
				}
			}
			g := newGaps(stream(c.before), info(c.before))
			g.redelivered.Store(c.now.again)
			if got := g.check(&stream(c.now).State, info(c.now)); got != c.want {
				t.Errorf("found %+v, want %+v", got, c.want)
			}
			// It isn't found a second time.
			if got := g.check(&stream(c.now).State, info(c.now)); !got.empty() {
				t.Errorf("found %+v again", got)
			}
		})
	}
}
