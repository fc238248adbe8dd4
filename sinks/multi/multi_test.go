package multi

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

// probe is a sink that keeps the ids it was given, and does what a test says.
type probe struct {
	ids []string
	do  func(batch *sinks.Batch) error
}

func (p *probe) Write(_ context.Context, _ sinks.Tx, batch *sinks.Batch) error {
	for _, m := range batch.Messages() {
		p.ids = append(p.ids, m.ID)
	}
	if p.do == nil {
		return nil
	}
	return p.do(batch)
}

// prepared is one that is prepared.
type prepared struct {
	probe
	err error
}

func (p *prepared) Prepare(context.Context, sinks.Tx) error { return p.err }

// keyed lets messages pass that have one of the keys.
func keyed(t *testing.T, keys ...string) *message.Filter {
	t.Helper()
	f, err := message.NewFilter([]message.Condition{{Place: "key", Values: keys}})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// batch has a message for each text: its id, and its first letter as its key.
func batch(ids ...string) *sinks.Batch {
	messages := make([]message.Message, len(ids))
	for i, id := range ids {
		messages[i] = message.Message{ID: id, Key: []byte(id[:1])}
	}
	return sinks.NewBatch(messages)
}

func TestEachPartGetsWhatItWants(t *testing.T) {
	var a, b, c, all probe
	s := New(nil, Part{"a", &a, keyed(t, "a")}, Part{"b", &b, keyed(t, "b", "a")}, Part{"c", &c, keyed(t, "c")}, Part{"all", &all, nil})
	if err := s.Write(t.Context(), nil, batch("a1", "b1", "x1", "a2")); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ got, want []string }{
		"a": {a.ids, []string{"a1", "a2"}}, "b": {b.ids, []string{"a1", "b1", "a2"}}, "c": {c.ids, nil}, "all": {all.ids, []string{"a1", "b1", "x1", "a2"}},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s was given %v, want %v", name, c.got, c.want)
		}
	}
}

// A sink without filters is what it is: nothing stands before it.
func TestOneSinkIsItself(t *testing.T) {
	p := new(probe)
	if s := New(nil, Part{"a", p, nil}); s != sinks.Sink(p) {
		t.Errorf("it is a %T", s)
	}
}

func TestWants(t *testing.T) {
	for name, c := range map[string]struct {
		all   *message.Filter
		parts []*message.Filter
		want  string // the keys of a, b, c that are wanted
	}{
		"no filter":            {nil, []*message.Filter{nil, nil}, "abc"},
		"one's filter":         {nil, []*message.Filter{keyed(t, "a")}, "a"},
		"all's filter":         {keyed(t, "b"), []*message.Filter{nil}, "b"},
		"both":                 {keyed(t, "a", "b"), []*message.Filter{keyed(t, "b", "c")}, "b"},
		"any of the parts":     {nil, []*message.Filter{keyed(t, "a"), keyed(t, "c")}, "ac"},
		"a part takes all":     {nil, []*message.Filter{keyed(t, "a"), nil}, "abc"},
		"a part takes the all": {keyed(t, "c"), []*message.Filter{keyed(t, "a"), nil}, "c"},
	} {
		var parts []Part
		for _, f := range c.parts {
			parts = append(parts, Part{"p", new(probe), f})
		}
		s := New(c.all, parts...).(sinks.Selective)
		got := ""
		for _, key := range []string{"a", "b", "c"} {
			if ok, err := s.Wants(&message.Message{Key: []byte(key)}); err != nil {
				t.Error(err)
			} else if ok {
				got += key
			}
		}
		if got != c.want {
			t.Errorf("%s: %q is wanted, want %q", name, got, c.want)
		}
	}
}

func TestWhetherItIsWantedCantBeTold(t *testing.T) {
	f, err := message.NewFilter([]message.Condition{{Place: "json:type", Values: []string{"x"}}})
	if err != nil {
		t.Fatal(err)
	}
	s := New(nil, Part{"sink[0].table", new(probe), keyed(t, "a")}, Part{"sink[1].table", new(probe), f}).(sinks.Selective)
	for value, want := range map[string]string{"{": "not valid JSON", `{"type": "\ud800"}`: "sink[1].table: "} {
		// Even though the first part wants it.
		if ok, err := s.Wants(&message.Message{Key: []byte("a"), Value: []byte(value)}); ok || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v", value, ok, err)
		}
	}
	if ok, err := s.Wants(&message.Message{Key: []byte("a")}); !ok || err != nil {
		t.Errorf("a tombstone: %v, %v", ok, err)
	}
}

func TestErrorsNameThePart(t *testing.T) {
	cause := errors.New("refused")
	var second probe
	s := New(nil, Part{"sink[0].a", new(probe), nil}, Part{"sink[1].b", &second, keyed(t, "b")})
	ids := []string{"a0", "b1", "a2", "b3", "b4"}

	second.do = func(*sinks.Batch) error {
		return errors.Join(sinks.PermanentAt(0, cause), fmt.Errorf("wrapped: %w", sinks.PermanentAt(2, cause)), sinks.PermanentAt(7, cause))
	}
	err := s.Write(t.Context(), nil, batch(ids...))
	if all := sinks.AllPermanent(err); len(all) != 2 || all[1] == nil || all[4] == nil {
		t.Errorf("bad are %v, want 1 and 4", all)
	} else if !errors.Is(all[4], cause) || !strings.HasPrefix(all[4].Error(), "sink[1].b: ") {
		t.Errorf("the reason is %v", all[4])
	}

	for name, do := range map[string]func(*sinks.Batch) error{
		"permanent":                         func(*sinks.Batch) error { return sinks.Permanent(cause) },
		"a panic":                           func(*sinks.Batch) error { panic("oh") },
		"an index beyond what it was given": func(*sinks.Batch) error { return sinks.PermanentAt(3, cause) },
	} {
		second.do = do
		err = s.Write(t.Context(), nil, batch(ids...))
		if at, ok := sinks.AsPermanent(err); at != -1 || !ok || !strings.Contains(err.Error(), "sink[1].b: ") {
			t.Errorf("%s: %d, %v, %v", name, at, ok, err)
		}
	}

	second.do = func(*sinks.Batch) error { return fmt.Errorf("wrapped: %w", sinks.HoldAt(1, cause)) }
	err = s.Write(t.Context(), nil, batch(ids...))
	if at, why, ok := sinks.AsHold(err); at != 3 || !ok || !errors.Is(why, cause) || why.Error() != "sink[1].b: refused" {
		t.Errorf("a hold: %d, %v, %v", at, why, ok)
	}
	second.do = func(*sinks.Batch) error { return sinks.HoldAt(3, cause) }
	if _, _, ok := sinks.AsHold(s.Write(t.Context(), nil, batch(ids...))); ok {
		t.Error("a hold of a message that it wasn't given holds another's lane")
	}

	second.do = func(*sinks.Batch) error { return cause }
	err = s.Write(t.Context(), nil, batch(ids...))
	if _, ok := sinks.AsPermanent(err); ok || !errors.Is(err, cause) || err.Error() != "sink[1].b: refused" {
		t.Errorf("another error: %v", err)
	}
}

// A part that fails ends the write: the transaction is rolled back.
func TestNothingIsWrittenAfterAnError(t *testing.T) {
	var last probe
	s := New(nil, Part{"a", &probe{do: func(*sinks.Batch) error { return errors.New("no") }}, nil}, Part{"b", &last, nil})
	if err := s.Write(t.Context(), nil, batch("a")); err == nil || len(last.ids) != 0 {
		t.Errorf("%v, and the next was given %v", err, last.ids)
	}
}

func TestOutcomesOfSeveral(t *testing.T) {
	says := func(by map[string]sinks.Outcome) *probe {
		return &probe{do: func(batch *sinks.Batch) error {
			for i, m := range batch.Messages() {
				if o, ok := by[m.ID]; ok {
					batch.Outcome(i, o)
				}
			}
			return nil
		}}
	}
	first := says(map[string]sinks.Outcome{"a": sinks.Stale, "b": sinks.Stale, "c": sinks.Rejected, "d": sinks.Stale})
	second := says(map[string]sinks.Outcome{"a": sinks.Rejected, "b": sinks.Written, "e": sinks.AlreadyPresent})
	s := New(nil, Part{"first", first, keyed(t, "a", "b", "c", "d")}, Part{"second", second, keyed(t, "a", "b", "d", "e")})
	x := batch("a", "b", "c", "d", "e")
	if err := s.Write(t.Context(), nil, x); err != nil {
		t.Fatal(err)
	}
	// Written if one wrote it, else what the first that had it says.
	want := []sinks.Outcome{sinks.Stale, sinks.Written, sinks.Rejected, sinks.Written, sinks.AlreadyPresent}
	for i, want := range want {
		if got := x.OutcomeOf(i); got != want {
			t.Errorf("message %d: outcome %d, want %d", i, got, want)
		}
	}
}

func TestPrepareAsksEachPart(t *testing.T) {
	if _, ok := New(nil, Part{"a", new(probe), nil}, Part{"b", new(probe), nil}).(sinks.Preparer); ok {
		t.Error("nobody has to be prepared")
	}
	broken := errors.New("no table")
	for name, c := range map[string]struct {
		parts []Part
		want  string
	}{
		"all is well":      {[]Part{{"a", new(probe), nil}, {"b", new(prepared), nil}}, ""},
		"the second isn't": {[]Part{{"a", new(prepared), nil}, {"b", &prepared{err: broken}, nil}}, "b: no table"},
		"one alone":        {[]Part{{"a", &prepared{err: broken}, keyed(t, "a")}}, "no table"},
	} {
		err := New(nil, c.parts...).(sinks.Preparer).Prepare(t.Context(), nil)
		if got := fmt.Sprint(err); err == nil && c.want != "" || err != nil && got != c.want {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// A message's result is that of the first part that gives one, also where it is too large to
// be kept.
func TestResultsOfSeveral(t *testing.T) {
	gives := func(text string, ids ...string) *probe {
		return &probe{do: func(batch *sinks.Batch) error {
			for i, m := range batch.Messages() {
				if slices.Contains(ids, m.ID) {
					batch.Result(i, []byte(text))
				}
			}
			return nil
		}}
	}
	large := strings.Repeat("x", sinks.MaxResult+1)
	s := New(nil, Part{"first", gives("first", "a", "b"), keyed(t, "b", "c")}, Part{"second", gives("second", "a", "b", "d"), keyed(t, "a", "b", "d")},
		Part{"third", gives(large, "a", "e"), nil})
	x := batch("a", "b", "c", "d", "e")
	if err := s.Write(t.Context(), nil, x); err != nil {
		t.Fatal(err)
	}
	var got []string
	for i := range x.Messages() {
		r, ok := x.ResultOf(i)
		got = append(got, fmt.Sprintf("%v %s %d", ok, r.Bytes, r.Size))
	}
	if want := []string{"true second 6", "true first 5", "false  0", "true second 6", "true  65537"}; !slices.Equal(got, want) {
		t.Errorf("results %q, want %q", got, want)
	}
}

// undoing is a sink in which an older message undoes newer ones.
type undoing struct{ probe }

func (*undoing) Overwrites(*message.Message) error { return errors.New("it is old") }

// Only the parts that want a message say what it would write over.
func TestOverwritesOfThoseThatWantIt(t *testing.T) {
	var harmless probe
	var a, b undoing
	s := New(nil, Part{"all", &harmless, nil}, Part{"a", &a, keyed(t, "a", "both")}, Part{"b", &b, keyed(t, "b", "both")}).(sinks.ReplaySensitive)
	for key, want := range map[string]string{"c": "", "a": "a: it is old", "b": "b: it is old", "both": "a: it is old\nb: it is old"} {
		got := ""
		if err := s.Overwrites(&message.Message{Key: []byte(key)}); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", key, got, want)
		}
	}
}
