package dedup_test

import (
	"context"
	"testing"
	"time"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
)

func (f *fixture) mark(producer string) (*dedup.Mark, []dedup.DeadLetterRef) {
	f.t.Helper()
	a, err := f.Store.FindMark(f.t.Context(), producer)
	if err != nil {
		f.t.Fatal(err)
	}
	return a.Mark, a.DeadLetters
}

func TestFindingAMark(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(l.numbered("a/1", "a/2.7", "b/5"))
	f.handle(other.numbered("a/2.8"))

	m, letters := f.mark("a")
	if m == nil || string(m.Producer) != "a" || m.Key != claimkey.Of("a").String() || *m.Source != "kafka" || *m.Lane != "orders/0" || m.Epoch != 2 || m.Number != 7 ||
		m.Position != 1 || m.AgeSeconds < 0 || m.AgeSeconds > 60 || time.Since(m.SeenAt) > time.Minute || len(letters) != 1 || letters[0].Class != "sequence" {
		t.Errorf("%+v, %v", m, letters)
	}
	if m, _ := f.mark(claimkey.Of("b").String()); m == nil || string(m.Producer) != "b" {
		t.Errorf("by its key: %+v", m)
	}
	if m, letters := f.mark("c"); m != nil || letters == nil {
		t.Errorf("%+v, %v", m, letters)
	}
	if _, err := f.Store.ForgetLane(t.Context(), "ann@host", "kafka", "orders/0", true); err != nil {
		t.Fatal(err)
	}
	if m, _ := f.mark("a"); m.Source != nil || m.Lane != nil || m.LaneNumber == 0 {
		t.Errorf("a forgotten lane: %+v", m)
	}
}

func TestListingMarks(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(l.numbered("a/1", "b/1"))
	f.handle(other.numbered("c/1"))
	f.exec(`UPDATE dedupd.sequences SET seen_at = seen_at - interval '1 hour' WHERE name = 'b'`)
	f.exec(`UPDATE dedupd.sequences SET seen_at = seen_at - interval '2 hours' WHERE name = 'a'`)
	f.exec(`INSERT INTO dedupd.scopes (scope) VALUES ('other')`)
	f.exec(`INSERT INTO dedupd.sequences SELECT o.id, producer, lane, 0, 9, 0, seen_at, 'x' FROM dedupd.sequences, dedupd.scopes o WHERE o.scope = 'other'`)
	for want, filter := range map[string]dedup.MarkFilter{
		"cba": {}, "ba": {Lane: "orders/0"}, "cb": {Limit: 2}, "": {Source: "nats"}, "c": {Source: "kafka", Lane: "orders/1", Limit: 2},
	} {
		marks, err := f.Store.Marks(t.Context(), filter)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, m := range marks {
			got += string(m.Producer)
		}
		if got != want {
			t.Errorf("%+v: %q, want %q", filter, got, want)
		}
	}
}

// A producer that is forgotten begins anew, on whatever lane.
func TestForgettingAMark(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapStop)
	l, other := f.acquire("kafka", "orders/0"), f.acquire("kafka", "orders/1")
	f.handle(l.numbered("a/7", "b/7"))
	f.exec(`INSERT INTO dedupd.scopes (scope) VALUES ('other')`)
	f.exec(`INSERT INTO dedupd.sequences SELECT o.id, producer, lane, 0, 9, 0, seen_at, name FROM dedupd.sequences, dedupd.scopes o WHERE o.scope = 'other'`)
	f.handle(l.numbered("a/1", "b/1")) // they have begun anew, without an epoch
	f.wantLanded("a/7", "b/7")
	gone, err := f.Store.ForgetMark(t.Context(), "ann@host", "a")
	if err != nil || gone == nil || gone.Number != 7 || *gone.Lane != "orders/0" {
		t.Fatalf("%+v, %v", gone, err)
	}
	line, detail := f.audited()
	if line != "test ann@host marks forget a" || detail["number"] != "7" || detail["epoch"] != "0" || detail["key"] != claimkey.Of("a").String() || detail["lane"] != "orders/0" {
		t.Errorf("audit: %s, %v", line, detail)
	}
	if again, err := f.Store.ForgetMark(t.Context(), "ann@host", "a"); err != nil || again != nil || f.audits() != 1 {
		t.Errorf("once more: %+v, %v, %d lines of audit", again, err, f.audits())
	}
	if n := f.rowCount(`SELECT count(*) FROM dedupd.sequences`); n != 3 {
		t.Errorf("%d marks are left, want b's and both of the other scope", n)
	}
	f.handle(other.numbered("a/1", "a/2"))
	f.handle(l.numbered("b/2"))
	f.wantLanded("a/7", "b/7", "a/1", "a/2")
	f.wantDead()
}

// Forgetting waits for the worker that has the mark, and forgets what it leaves. A worker
// that waits for the forgetting finds no mark.
func TestForgettingAMarkInUse(t *testing.T) {
	t.Parallel()
	f := bySequence(t, policy.SequenceGapAllow)
	l := f.acquire("kafka", "orders/0")
	f.handle(l.numbered("a/1"))
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), `UPDATE dedupd.sequences SET number = 5`); err != nil {
		t.Fatal(err)
	}
	type answer struct {
		gone *dedup.Mark
		err  error
	}
	forgot, handled := make(chan answer), make(chan error)
	go func() {
		gone, err := f.Store.ForgetMark(context.Background(), "ann@host", "a")
		forgot <- answer{gone, err}
	}()
	f.awaitLock()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a := <-forgot; a.err != nil || a.gone == nil || a.gone.Number != 5 {
		t.Errorf("%+v, %v", a.gone, a.err)
	}

	f.handle(l.numbered("a/5"))
	if tx, err = f.pool.Begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), `DELETE FROM dedupd.sequences`); err != nil {
		t.Fatal(err)
	}
	b := l.numbered("a/3")
	go func() { handled <- f.Handle(context.Background(), []lane.Batch{b}) }()
	f.awaitLock()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-handled; err != nil {
		t.Error(err)
	}
	f.wantLanded("a/1", "a/5", "a/3")
}
