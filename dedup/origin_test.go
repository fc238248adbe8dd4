package dedup_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/dedupd/dedupd/message"
)

// A lane has no row, and the group an offset of ours. It depends on what became of
// the row, and of the database, whether all between is lost with it.
func TestWhereALaneWithoutItsRowBegins(t *testing.T) {
	t.Parallel()
	const began, committed = 100, 140
	lane := message.Lane{Source: "kafka", Name: "orders/0"}
	type state struct {
		*fixture
		take message.Take
	}
	begin := func(s *state, start int64) message.Taken {
		s.t.Helper()
		s.take.Start = start
		taken, err := s.Store.Take(s.t.Context(), s.take)
		if err != nil {
			s.t.Fatal(err)
		}
		return taken
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
		if _, err := s.Store.ForgetLane(s.t.Context(), "somebody", lane.Source, lane.Name, true); err != nil {
			s.t.Fatal(err)
		}
	}
	origin := func(s *state, what, instead string) {
		s.t.Helper()
		changed := strings.Replace(s.take.Origin, what, instead, 1)
		if changed == s.take.Origin {
			s.t.Fatalf("no %s in %s", what, s.take.Origin)
		}
		s.take.Origin = changed
	}
	for name, c := range map[string]struct {
		do   func(s *state)
		next int64
	}{
		"the database lost it": {fail, began},
		"the database lost it, and the group has no origin": {func(s *state) {
			fail(s)
			s.take.Origin = ""
		}, committed},
		"the database lost it, and the group has what another program wrote": {func(s *state) {
			fail(s)
			s.take.Origin = `{"began": 3}`
		}, committed},
		"the database lost it, and the origin is broken": {func(s *state) {
			fail(s)
			s.take.Origin = s.take.Origin[:len(s.take.Origin)-1]
		}, committed},
		"the topic was created anew": {func(s *state) {
			fail(s)
			s.take.Incarnation = "topic-2"
		}, committed},
		"the broker no longer tells the topic's id": {func(s *state) {
			fail(s)
			s.take.Incarnation = ""
		}, began},
		"it was another scope's lane": {func(s *state) {
			fail(s)
			origin(s, `"scope":"test"`, `"scope":"tests"`)
		}, committed},
		"it was another source's lane": {func(s *state) {
			fail(s)
			origin(s, `"source":"kafka"`, `"source":"kafka-2"`)
		}, committed},
		"an operator let it go": {forget, committed},
		"an operator let it go, and the group still has an earlier word of it": {func(s *state) {
			was := s.take.Origin
			begin(s, began)
			s.take.Origin = was
			forget(s)
		}, committed},
		"an operator let it go, and a failover lost what came after": {func(s *state) {
			forget(s)
			s.take.Origin = begin(s, began+10).Origin
			fail(s)
		}, began + 10},
		"it was set back below where it began": {func(s *state) {
			if _, err := s.Store.SetPosition(s.t.Context(), "somebody", lane.Source, lane.Name, 7); err != nil {
				s.t.Fatal(err)
			}
			s.take.Committed = -1
			s.take.Origin = begin(s, began).Origin
			s.take.Committed = committed
			fail(s)
		}, 7},
		"it was set forward": {func(s *state) {
			if _, err := s.Store.SetPosition(s.t.Context(), "somebody", lane.Source, lane.Name, 120); err != nil {
				s.t.Fatal(err)
			}
			s.take.Origin = begin(s, began).Origin
			fail(s)
		}, began},
		"the group was reset below where it began": {func(s *state) {
			exec(s, `UPDATE dedupd.lanes SET broker_position = 110, next_position = 110`)
			s.take.Committed, s.take.HonourReset, s.take.Origin = 30, true, "" // by hand
			s.take.Origin = begin(s, began).Origin
			s.take.Committed = committed
			fail(s)
		}, 30},
		"it was set to the beginning of a new topic": {func(s *state) {
			if _, err := s.Store.SetPosition(s.t.Context(), "somebody", lane.Source, lane.Name, 130); err != nil {
				s.t.Fatal(err)
			}
			s.take.Incarnation = "topic-2"
			s.take.Origin = begin(s, began).Origin
			fail(s)
		}, 130},
		"it is of before origins were noted": {func(s *state) {
			exec(s, `UPDATE dedupd.lanes SET began = NULL`)
			if s.take.Origin = begin(s, began).Origin; s.take.Origin != "" {
				s.t.Errorf("an origin of a lane that has none: %s", s.take.Origin)
			}
			fail(s)
		}, committed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &state{newFixture(t), message.Take{Lane: lane, Ordered: true, Incarnation: "topic-1", Committed: -1}}
			s.take.Origin = begin(s, began).Origin
			s.take.Committed = committed
			c.do(s)
			taken := begin(s, committed)
			if taken.Next != c.next || taken.Rewound != (c.next < committed) {
				t.Errorf("began at %d, rewound: %t; want %d. The origin: %s", taken.Next, taken.Rewound, c.next, s.take.Origin)
			}
			// Both are in the row.
			s.take.Origin, s.take.Committed = "", -1
			if again := begin(s, 0); again.Next != c.next || !strings.Contains(again.Origin, fmt.Sprintf(`"began":%d,`, c.next)) && taken.Origin != "" {
				t.Errorf("taken again it goes on at %d, with %s", again.Next, again.Origin)
			}
		})
	}
}

// A partition is added if a lane of its topic was first taken when there was none of
// that number.
func TestWhereAnAddedPartitionBegins(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const first, end = 5, 50
	take := func(source, topic string, number, of int, committed, added int64) int64 {
		t.Helper()
		start := int64(end)
		if committed >= 0 {
			start = committed
		}
		taken, err := f.Store.Take(t.Context(), message.Take{
			Lane: message.Lane{Source: source, Name: fmt.Sprint(topic, "/", number)}, Ordered: true, Committed: committed, Start: start,
			Partition: &message.Partition{Topic: topic, Number: number, Of: of, Added: added},
		})
		if err != nil {
			t.Fatal(err)
		}
		return taken.Next
	}
	want := func(what string, got, want int64) {
		t.Helper()
		if got != want {
			t.Errorf("%s begins at %d, want %d", what, got, want)
		}
	}
	for _, number := range []int{2, 0, 1} {
		want("a partition of a topic that is first read", take("kafka", "orders", number, 4, -1, first), end)
	}
	want("a partition that was added", take("kafka", "orders", 4, 6, -1, first), first)
	want("the last of the first", take("kafka", "orders", 3, 6, -1, first), end)
	want("one more that was added", take("kafka", "orders", 5, 6, -1, first), first)
	want("an added one that the group has an offset of", take("kafka", "orders", 6, 9, 33, first), 33)
	want("an added one that isn't to be told from others", take("kafka", "orders", 7, 9, -1, -1), end)
	want("another topic", take("kafka", "orders-2", 8, 9, -1, first), end)
	want("another source", take("kafka-2", "orders", 8, 9, -1, first), end)
	if _, err := f.pool.Exec(t.Context(), `UPDATE dedupd.lanes SET partitions = NULL`); err != nil {
		t.Fatal(err)
	}
	want("a partition beside lanes of before", take("kafka", "orders", 8, 9, -1, first), end)
	take("kafka", "orders", 0, 9, -1, first)
	want("one that is added after they were taken", take("kafka", "orders", 9, 10, -1, first), first)
}
