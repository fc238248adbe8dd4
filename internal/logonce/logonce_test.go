package logonce

import (
	"errors"
	"fmt"
	"testing"
)

func TestProblem(t *testing.T) {
	var p Problem
	if p.End() {
		t.Error("a problem ends that never began")
	}
	away, full := errors.New("away"), errors.New("full")
	for i, step := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{away, true},
		{errors.New("away"), false}, // another error of the same text
		{full, true},
		{away, false}, // of two servers, say, each with a problem of its own
		{nil, false},
		{away, true},
	} {
		if got := p.IsNew(step.err); got != step.want {
			t.Errorf("step %d: %v is new: %t, want %t", i, step.err, got, step.want)
		}
	}
	if !p.End() || p.End() {
		t.Error("a problem doesn't end once")
	}
	if !p.IsNew(away) {
		t.Error("a problem that comes back isn't new")
	}
	for i := range 10 * mostTexts {
		p.IsNew(fmt.Errorf("away since %d", i))
	}
	if len(p.texts) > mostTexts {
		t.Errorf("%d texts are kept", len(p.texts))
	}
}
