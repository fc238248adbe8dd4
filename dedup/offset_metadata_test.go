package dedup_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// A lane has no row, and the group an offset of ours. Whether everything in between is
// lost with the row depends on what became of the row and of the database.
func TestWhereALaneWithoutItsRowBegins(t *testing.T) {
	t.Parallel()
	const began, committed = 100, 140
	l := message.Lane{Source: "kafka", Name: "orders/0"}
	type state struct {
		*fixture
		acquire lane.Acquire
	}
	begin := func(s *state, start int64) lane.Assignment {
		s.t.Helper()
		s.acquire.Start = start
		assigned, err := s.Store.Acquire(s.t.Context(), s.acquire)
		if err != nil {
			s.t.Fatal(err)
		}
		return assigned
	}
	exec := func(s *state, sql string) {
		s.t.Helper()
		if _, err := s.pool.Exec(s.t.Context(), sql); err != nil {
			s.t.Fatal(err)
		}
	}
	fail := func(s *state) {
		s.t.Helper()
		exec(s, `DELETE FROM dedupd.lanes`)
	}
	forget := func(s *state) {
		s.t.Helper()
		if _, err := s.Store.ForgetLane(s.t.Context(), "somebody", l.Source, l.Name, true); err != nil {
			s.t.Fatal(err)
		}
	}
	change := func(s *state, what, instead string) {
		s.t.Helper()
		changed := strings.Replace(s.acquire.OffsetMetadata, what, instead, 1)
		if changed == s.acquire.OffsetMetadata {
			s.t.Fatalf("no %s in %s", what, s.acquire.OffsetMetadata)
		}
		s.acquire.OffsetMetadata = changed
	}
	for name, c := range map[string]struct {
		do   func(s *state)
		next int64
	}{
		"the database lost it": {fail, began},
		"the database lost it, and the group has no offset metadata": {func(s *state) {
			fail(s)
			s.acquire.OffsetMetadata = ""
		}, committed},
		"the database lost it, and the group has what another program wrote": {func(s *state) {
			fail(s)
			s.acquire.OffsetMetadata = `{"began": 3}`
		}, committed},
		"the database lost it, and the offset metadata is broken": {func(s *state) {
			fail(s)
			s.acquire.OffsetMetadata = s.acquire.OffsetMetadata[:len(s.acquire.OffsetMetadata)-1]
		}, committed},
		"the topic was created anew": {func(s *state) {
			fail(s)
			s.acquire.LogID = "topic-2"
		}, committed},
		"the broker no longer reports the topic's id": {func(s *state) {
			fail(s)
			s.acquire.LogID = ""
		}, began},
		"it was another scope's lane": {func(s *state) {
			fail(s)
			change(s, `"scope":"test"`, `"scope":"tests"`)
		}, committed},
		"it was another source's lane": {func(s *state) {
			fail(s)
			change(s, `"source":"kafka"`, `"source":"kafka-2"`)
		}, committed},
		"an operator forgot it": {forget, committed},
		"an operator forgot it, and the group still has earlier metadata of it": {func(s *state) {
			was := s.acquire.OffsetMetadata
			begin(s, began)
			s.acquire.OffsetMetadata = was
			forget(s)
		}, committed},
		"an operator forgot it, and a failover lost what came after": {func(s *state) {
			forget(s)
			s.acquire.OffsetMetadata = begin(s, began+10).OffsetMetadata
			fail(s)
		}, began + 10},
		"it was set back below where it began": {func(s *state) {
			if _, err := s.Store.SetPosition(s.t.Context(), "somebody", l.Source, l.Name, 7); err != nil {
				s.t.Fatal(err)
			}
			s.acquire.Committed = -1
			s.acquire.OffsetMetadata = begin(s, began).OffsetMetadata
			s.acquire.Committed = committed
			fail(s)
		}, 7},
		"it was set forward": {func(s *state) {
			if _, err := s.Store.SetPosition(s.t.Context(), "somebody", l.Source, l.Name, 120); err != nil {
				s.t.Fatal(err)
			}
			s.acquire.OffsetMetadata = begin(s, began).OffsetMetadata
			fail(s)
		}, began},
		"the group was reset below where it began": {func(s *state) {
			exec(s, `UPDATE dedupd.lanes SET broker_position = 110, next_position = 110`)
			s.acquire.Committed, s.acquire.HonourReset, s.acquire.OffsetMetadata = 30, true, "" // by an operator
			s.acquire.OffsetMetadata = begin(s, began).OffsetMetadata
			s.acquire.Committed = committed
			fail(s)
		}, 30},
		"it was set to the beginning of a new topic": {func(s *state) {
			if _, err := s.Store.SetPosition(s.t.Context(), "somebody", l.Source, l.Name, 130); err != nil {
				s.t.Fatal(err)
			}
			s.acquire.LogID = "topic-2"
			s.acquire.OffsetMetadata = begin(s, began).OffsetMetadata
			fail(s)
		}, 130},
		"it is from before offset metadata was written": {func(s *state) {
			exec(s, `UPDATE dedupd.lanes SET start_position = NULL`)
			if s.acquire.OffsetMetadata = begin(s, began).OffsetMetadata; s.acquire.OffsetMetadata != "" {
				s.t.Errorf("offset metadata of a lane that has none: %s", s.acquire.OffsetMetadata)
			}
			fail(s)
		}, committed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &state{newFixture(t), lane.Acquire{Lane: l, Ordered: true, LogID: "topic-1", Committed: -1}}
			s.acquire.OffsetMetadata = begin(s, began).OffsetMetadata
			s.acquire.Committed = committed
			c.do(s)
			assigned := begin(s, committed)
			if assigned.Next != c.next || assigned.Rewound != (c.next < committed) {
				t.Errorf("began at %d, rewound: %t; want %d. The offset metadata: %s", assigned.Next, assigned.Rewound, c.next, s.acquire.OffsetMetadata)
			}
			// Both are in the row.
			s.acquire.OffsetMetadata, s.acquire.Committed = "", -1
			if again := begin(s, 0); again.Next != c.next || !strings.Contains(again.OffsetMetadata, fmt.Sprintf(`"start":%d,`, c.next)) && assigned.OffsetMetadata != "" {
				t.Errorf("acquired again it goes on at %d, with %s", again.Next, again.OffsetMetadata)
			}
		})
	}
}

// A partition counts as added if a lane of its topic was first acquired when the topic
// lacked that number.
func TestWhereAnAddedPartitionBegins(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const first, end = 5, 50
	acquire := func(source, topic string, number, of int, committed, added int64) int64 {
		t.Helper()
		start := int64(end)
		if committed >= 0 {
			start = committed
		}
		assigned, err := f.Store.Acquire(t.Context(), lane.Acquire{
			Lane: message.Lane{Source: source, Name: fmt.Sprint(topic, "/", number)}, Ordered: true, Committed: committed, Start: start,
			Partition: &lane.Partition{Topic: topic, Number: number, Of: of, Added: added},
		})
		if err != nil {
			t.Fatal(err)
		}
		return assigned.Next
	}
	want := func(what string, got, want int64) {
		t.Helper()
		if got != want {
			t.Errorf("%s begins at %d, want %d", what, got, want)
		}
	}
	for _, number := range []int{2, 0, 1} {
		want("a partition of a topic that is first read", acquire("kafka", "orders", number, 4, -1, first), end)
	}
	want("a partition that was added", acquire("kafka", "orders", 4, 6, -1, first), first)
	want("the last of the first", acquire("kafka", "orders", 3, 6, -1, first), end)
	want("one more that was added", acquire("kafka", "orders", 5, 6, -1, first), first)
	want("an added one that the group has an offset of", acquire("kafka", "orders", 6, 9, 33, first), 33)
	want("an added one that can't be told from others", acquire("kafka", "orders", 7, 9, -1, -1), end)
	want("another topic", acquire("kafka", "orders-2", 8, 9, -1, first), end)
	want("another source", acquire("kafka-2", "orders", 8, 9, -1, first), end)
	if _, err := f.pool.Exec(t.Context(), `UPDATE dedupd.lanes SET partitions = NULL`); err != nil {
		t.Fatal(err)
	}
	want("a partition beside lanes of before", acquire("kafka", "orders", 8, 9, -1, first), end)
	acquire("kafka", "orders", 0, 9, -1, first)
	want("one that is added after they were acquired", acquire("kafka", "orders", 9, 10, -1, first), first)
}
