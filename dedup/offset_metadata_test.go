package dedup_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// lostLane is a lane whose row is gone, and what its next owner says of it.
type lostLane struct {
	*fixture
	acquire lane.Acquire
}

var offsetLane = message.Lane{Source: "kafka", Name: "orders/0"}

// begin acquires the lane, which begins at start unless something is known of it.
func (s *lostLane) begin(start int64) lane.Assignment {
	s.t.Helper()
	s.acquire.Start = start
	assigned, err := s.Store.Acquire(s.t.Context(), s.acquire)
	if err != nil {
		s.t.Fatal(err)
	}
	return assigned
}

func (s *lostLane) exec(sql string) {
	s.t.Helper()
	if _, err := s.pool.Exec(s.t.Context(), sql); err != nil {
		s.t.Fatal(err)
	}
}

func (s *lostLane) fail() {
	s.t.Helper()
	s.exec(`DELETE FROM dedupd.lanes`)
}

func (s *lostLane) forget() {
	s.t.Helper()
	if _, err := s.Store.ForgetLane(s.t.Context(), "somebody", offsetLane.Source, offsetLane.Name, true); err != nil {
		s.t.Fatal(err)
	}
}

func (s *lostLane) setPosition(position int64) {
	s.t.Helper()
	if _, err := s.Store.SetPosition(s.t.Context(), "somebody", offsetLane.Source, offsetLane.Name, position, true); err != nil {
		s.t.Fatal(err)
	}
}

// change edits the offset metadata.
func (s *lostLane) change(what, instead string) {
	s.t.Helper()
	changed := strings.Replace(s.acquire.OffsetMetadata, what, instead, 1)
	if changed == s.acquire.OffsetMetadata {
		s.t.Fatalf("no %s in %s", what, s.acquire.OffsetMetadata)
	}
	s.acquire.OffsetMetadata = changed
}

// wantBegin wants that the lane begins there, and that its row tells so afterwards.
func (s *lostLane) wantBegin(committed, next int64) {
	s.t.Helper()
	assigned := s.begin(committed)
	if assigned.Next != next || assigned.Rewound != (next < committed) {
		s.t.Errorf("began at %d, rewound: %t; want %d. The offset metadata: %s", assigned.Next, assigned.Rewound, next, s.acquire.OffsetMetadata)
	}
	s.acquire.OffsetMetadata, s.acquire.Committed = "", -1
	if again := s.begin(0); again.Next != next || !strings.Contains(again.OffsetMetadata, fmt.Sprintf(`"start":%d,`, next)) && assigned.OffsetMetadata != "" {
		s.t.Errorf("acquired again it goes on at %d, with %s", again.Next, again.OffsetMetadata)
	}
}

// A lane has no row, and the group an offset of ours. Whether everything in between is
// lost with the row depends on what became of the row and of the database.
func TestWhereALaneWithoutItsRowBegins(t *testing.T) {
	t.Parallel()
	const began, committed = 100, 140
	for name, c := range map[string]struct {
		do   func(s *lostLane)
		next int64
	}{
		"the database lost it": {do: (*lostLane).fail, next: began},
		"the database lost it, and the group has no offset metadata": {do: func(s *lostLane) {
			s.fail()
			s.acquire.OffsetMetadata = ""
		}, next: committed},
		"the database lost it, and the group has what another program wrote": {do: func(s *lostLane) {
			s.fail()
			s.acquire.OffsetMetadata = `{"began": 3}`
		}, next: committed},
		"the database lost it, and the offset metadata is broken": {do: func(s *lostLane) {
			s.fail()
			s.acquire.OffsetMetadata = s.acquire.OffsetMetadata[:len(s.acquire.OffsetMetadata)-1]
		}, next: committed},
		"the topic was created anew": {do: func(s *lostLane) {
			s.fail()
			s.acquire.LogID = "topic-2"
		}, next: committed},
		"the broker no longer reports the topic's id": {do: func(s *lostLane) {
			s.fail()
			s.acquire.LogID = ""
		}, next: began},
		"it was another scope's lane": {do: func(s *lostLane) {
			s.fail()
			s.change(`"scope":"test"`, `"scope":"tests"`)
		}, next: committed},
		"it was another source's lane": {do: func(s *lostLane) {
			s.fail()
			s.change(`"source":"kafka"`, `"source":"kafka-2"`)
		}, next: committed},
		"an operator forgot it": {do: (*lostLane).forget, next: committed},
		"an operator forgot it, and the group still has earlier metadata of it": {do: func(s *lostLane) {
			was := s.acquire.OffsetMetadata
			s.begin(began)
			s.acquire.OffsetMetadata = was
			s.forget()
		}, next: committed},
		"an operator forgot it, and a failover lost what came after": {do: func(s *lostLane) {
			s.forget()
			s.acquire.OffsetMetadata = s.begin(began + 10).OffsetMetadata
			s.fail()
		}, next: began + 10},
		"it was set back below where it began": {do: func(s *lostLane) {
			s.setPosition(7)
			s.acquire.Committed = -1
			s.acquire.OffsetMetadata = s.begin(began).OffsetMetadata
			s.acquire.Committed = committed
			s.fail()
		}, next: 7},
		"it was set forward": {do: func(s *lostLane) {
			s.setPosition(120)
			s.acquire.OffsetMetadata = s.begin(began).OffsetMetadata
			s.fail()
		}, next: began},
		"the group was reset below where it began": {do: func(s *lostLane) {
			s.exec(`UPDATE dedupd.lanes SET broker_position = 110, next_position = 110`)
			s.acquire.Committed, s.acquire.HonourReset, s.acquire.OffsetMetadata = 30, true, "" // by an operator
			s.acquire.OffsetMetadata = s.begin(began).OffsetMetadata
			s.acquire.Committed = committed
			s.fail()
		}, next: 30},
		"it was set to the beginning of a new topic": {do: func(s *lostLane) {
			s.setPosition(130)
			s.acquire.LogID = "topic-2"
			s.acquire.OffsetMetadata = s.begin(began).OffsetMetadata
			s.fail()
		}, next: 130},
		"it is from before offset metadata was written": {do: func(s *lostLane) {
			s.exec(`UPDATE dedupd.lanes SET start_position = NULL`)
			if s.acquire.OffsetMetadata = s.begin(began).OffsetMetadata; s.acquire.OffsetMetadata != "" {
				s.t.Errorf("offset metadata of a lane that has none: %s", s.acquire.OffsetMetadata)
			}
			s.fail()
		}, next: committed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &lostLane{newFixture(t), lane.Acquire{Lane: offsetLane, Ordered: true, LogID: "topic-1", Committed: -1}}
			s.acquire.OffsetMetadata = s.begin(began).OffsetMetadata
			s.acquire.Committed = committed
			c.do(s)
			s.wantBegin(committed, c.next)
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
