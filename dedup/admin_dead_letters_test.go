package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

func TestDiscard(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.batch("a\x00\xff=check", "", "c=check"))
	deadLetters := f.deadLetters()
	told := 0
	gone, err := f.Store.DiscardDeadLetters(t.Context(), "ann@host", []int64{deadLetters[0].ID, 999}, func(done int) { told = done })
	if err != nil || !slices.Equal(gone, []int64{deadLetters[0].ID}) || told != 2 {
		t.Errorf("discarded %v, told %d, %v", gone, told, err)
	}
	f.wantDead("no_id@1", "poison@2")
	line, detail := f.audited()
	if line != fmt.Sprintf("test ann@host dlq discard dead letter %d", deadLetters[0].ID) || detail["class"] != "poison" || detail["message_id"] != "a␀\ufffd" ||
		detail["claim_key"] != deadLetters[0].ClaimKey || detail["position"] != 0.0 || detail["source"] != "kafka" || len(detail) != 6 {
		t.Errorf("audit: %s, %v", line, detail)
	}
	// Its claim stays, and the books as well: it had no effect.
	f.mend()
	f.handle(l.batch("a\x00\xff=check"))
	f.wantBooks(l, books{resent: 1, dead: 3, next: 4})
	if r := f.replay(deadLetters[0].ID); r.Outcome != dedup.ReplayGone {
		t.Errorf("%+v", r)
	}

	end := f.replayHeld(deadLetters[2].ID)
	done := make(chan []int64, 1)
	go func() {
		gone, err := attach(t, f.db).Store.DiscardDeadLetters(context.Background(), "bob", []int64{deadLetters[2].ID}, nil)
		if err != nil {
			t.Error(err)
		}
		done <- gone
	}()
	f.awaitLock()
	end()
	if gone := <-done; len(gone) > 0 {
		t.Errorf("discarded %v, which was applied", gone)
	}
	f.wantLanded("c")
}

// TestOtherScopesDeadLettersAreNotTouched, whatever number is given.
func TestOtherScopesDeadLettersAreNotTouched(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.handle(f.acquire("kafka", "orders/0").batch("a=check"))
	id := f.deadLetters()[0].ID
	store := newStore(t, f.pool, "dedupd", "other")
	if _, err := store.Schema().Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.mend()
	mine := f.Store
	f.Store = store
	if r := f.replay(id); r.Outcome != dedup.ReplayGone {
		t.Errorf("%+v", r)
	}
	if gone, err := store.DiscardDeadLetters(t.Context(), "ann@host", []int64{id}, nil); err != nil || len(gone) > 0 {
		t.Errorf("discarded %v, %v", gone, err)
	}
	f.Store = mine
	f.wantDead("poison@0")
	f.wantLanded()
}

func TestDeadLetterFilters(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l, other := f.acquire("kafka", "orders/0"), f.acquire("nats", "orders/0")
	f.handle(l.batch("a=check", "", "b=1", "b=2"))
	f.passTime(48 * time.Hour)
	f.handle(other.batch("c=check", ""))
	f.sink.fail = func(*message.Message) error { return sinks.Permanent(errors.New("50 % off")) }
	f.handle(l.batch("d"))
	f.sink.fail = nil
	middle := time.Now().Add(24 * time.Hour)
	for name, c := range map[string]struct {
		filter dedup.DeadLetterFilter
		want   string
	}{
		"all":                   {dedup.DeadLetterFilter{}, "1 2 3 4 5 6"},
		"ids":                   {dedup.DeadLetterFilter{IDs: []int64{3, 1, 99}}, "1 3"},
		"class":                 {dedup.DeadLetterFilter{Classes: []string{"no_id"}}, "2 5"},
		"classes":               {dedup.DeadLetterFilter{Classes: []string{"no_id", "conflict"}}, "2 3 5"},
		"source":                {dedup.DeadLetterFilter{Source: "nats"}, "4 5"},
		"lane":                  {dedup.DeadLetterFilter{Lane: "orders/0"}, "1 2 3 4 5 6"},
		"lane of nobody":        {dedup.DeadLetterFilter{Lane: "orders"}, ""},
		"sqlstate":              {dedup.DeadLetterFilter{SQLState: "23514"}, "1 4"},
		"class of sqlstate":     {dedup.DeadLetterFilter{SQLState: "23"}, "1 4"},
		"other sqlstate":        {dedup.DeadLetterFilter{SQLState: "3514"}, ""},
		"reason":                {dedup.DeadLetterFilter{Reason: "0 % o"}, "6"},
		"since":                 {dedup.DeadLetterFilter{Since: dedup.Moment{Ago: time.Hour}}, "4 5 6"},
		"until":                 {dedup.DeadLetterFilter{Until: dedup.Moment{Ago: time.Hour}}, "1 2 3"},
		"since a time":          {dedup.DeadLetterFilter{Since: dedup.Moment{At: middle}}, "4 5 6"},
		"until a time":          {dedup.DeadLetterFilter{Until: dedup.Moment{At: middle}}, "1 2 3"},
		"between":               {dedup.DeadLetterFilter{Since: dedup.Moment{Ago: 96 * time.Hour}, Until: dedup.Moment{At: middle}}, "1 2 3"},
		"limit":                 {dedup.DeadLetterFilter{Limit: 2}, "1 2"},
		"before":                {dedup.DeadLetterFilter{Before: 3}, "1 2"},
		"all of them":           {dedup.DeadLetterFilter{IDs: []int64{1, 4, 5}, Classes: []string{"poison"}, Source: "nats", SQLState: "2"}, "4"},
		"nobody's":              {dedup.DeadLetterFilter{Classes: []string{"x"}}, ""},
		"an empty list is none": {dedup.DeadLetterFilter{IDs: []int64{}, Limit: 1}, ""},
	} {
		found, err := f.Store.DeadLetterIDs(t.Context(), c.filter)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := strings.Trim(fmt.Sprint(found), "[]"); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
		listed, err := f.Store.DeadLetters(t.Context(), c.filter)
		if err != nil || len(listed) != len(found) {
			t.Errorf("%s: %d are listed, %d found, %v", name, len(listed), len(found), err)
		}
	}
	newest, err := f.Store.DeadLetters(t.Context(), dedup.DeadLetterFilter{Limit: 2})
	if err != nil || newest[0].ID != 6 || newest[1].ID != 5 {
		t.Errorf("the newest: %v, %v", newest, err)
	}
}
