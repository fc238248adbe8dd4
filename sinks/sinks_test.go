package sinks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/dedupd/dedupd/message"
)

func TestPermanent(t *testing.T) {
	cause := errors.New("cause")
	for name, c := range map[string]struct {
		err   error
		index int
		ok    bool
	}{
		"nil":             {nil, -1, false},
		"plain":           {cause, -1, false},
		"Permanent":       {Permanent(cause), -1, true},
		"PermanentAt":     {PermanentAt(3, cause), 3, true},
		"wrapped":         {fmt.Errorf("write: %w", PermanentAt(3, cause)), 3, true},
		"of nil":          {Permanent(nil), -1, false},
		"joined":          {errors.Join(nil, PermanentAt(4, cause), PermanentAt(2, cause)), 4, true},
		"joined by chain": {errors.Join(cause, PermanentAt(5, cause)), 5, true},
		"a panic":         {Recovered("oh"), -1, true},
	} {
		if index, ok := AsPermanent(c.err); index != c.index || ok != c.ok {
			t.Errorf("%s: AsPermanent gives %d, %v, want %d, %v", name, index, ok, c.index, c.ok)
		}
	}
	if !errors.Is(PermanentAt(1, cause), cause) || !errors.Is(errors.Join(PermanentAt(0, errors.New("x")), PermanentAt(1, cause)), cause) {
		t.Error("the cause is hidden")
	}
}

func TestResults(t *testing.T) {
	b := NewBatch(make([]message.Message, 5))
	if _, ok := b.ResultOf(0); ok {
		t.Error("a result that nobody has given")
	}
	buf := []byte("one")
	b.Result(1, buf)
	copy(buf, "xxx") // it is the sink's again
	b.Result(2, []byte{})
	b.Result(3, make([]byte, MaxResult+1))
	b.Result(4, []byte("taken back"))
	b.Result(4, nil)
	for i, want := range []struct {
		r  Result
		ok bool
	}{{}, {Result{3, []byte("one")}, true}, {Result{0, []byte{}}, true}, {Result{MaxResult + 1, nil}, true}, {}} {
		if r, ok := b.ResultOf(i); ok != want.ok || r.Size != want.r.Size || (r.Bytes == nil) != (want.r.Bytes == nil) || string(r.Bytes) != string(want.r.Bytes) {
			t.Errorf("result %d: %+v, %v", i, r, ok)
		}
	}
}

func TestAllPermanent(t *testing.T) {
	a, b := errors.New("a"), errors.New("b")
	err := fmt.Errorf("write: %w", errors.Join(PermanentAt(1, a), PermanentAt(2, b), PermanentAt(1, b), Permanent(b)))
	all := AllPermanent(err)
	if len(all) != 2 || all[1] != a || all[2] != b {
		t.Errorf("AllPermanent gives %v", all)
	}
	for _, err := range []error{nil, a, Permanent(a), fmt.Errorf("x: %w", a)} {
		if all := AllPermanent(err); len(all) != 0 {
			t.Errorf("AllPermanent(%v) gives %v", err, all)
		}
	}
}

func TestHoldAt(t *testing.T) {
	cause := errors.New("cause")
	err := fmt.Errorf("write: %w", errors.Join(errors.New("x"), HoldAt(3, cause)))
	if index, why, ok := AsHold(err); index != 3 || why != cause || !ok || !errors.Is(err, cause) {
		t.Errorf("AsHold gives %d, %v, %v", index, why, ok)
	}
	for _, err := range []error{nil, cause, HoldAt(1, nil), PermanentAt(1, cause)} {
		if index, why, ok := AsHold(err); ok {
			t.Errorf("AsHold(%v) gives %d, %v", err, index, why)
		}
	}
	if _, ok := AsPermanent(err); ok {
		t.Error("a message that holds its lane is permanent")
	}
}

type nothing struct{}

func (nothing) Write(context.Context, Tx, *Batch) error { return nil }

func TestRegistry(t *testing.T) {
	var r Registry
	if _, err := r.New("a", nil); err == nil {
		t.Error("an empty registry makes a sink")
	}
	factory := func(decode func(any) error) (Sink, error) { return nothing{}, decode(nil) }
	r.Register("b", factory)
	r.Register("a", factory)
	if !slices.Equal(r.Kinds(), []string{"a", "b"}) {
		t.Errorf("the kinds are %v", r.Kinds())
	}
	broken := errors.New("line 3")
	if s, err := r.New("a", func(any) error { return broken }); s != (nothing{}) || !errors.Is(err, broken) {
		t.Errorf("New gives %v, %v", s, err)
	}
	if _, err := r.New("c", nil); err == nil || err.Error() != `unknown sink kind "c"; this binary has: a, b` {
		t.Errorf("an unknown kind gives %v", err)
	}
	for name, register := range map[string]func(){
		"twice":      func() { r.Register("a", factory) },
		"empty":      func() { r.Register("", factory) },
		"reserved":   func() { r.Register("filter", factory) },
		"no factory": func() { r.Register("d", nil) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("registering %s doesn't panic", name)
				}
			}()
			register()
		}()
	}
}
