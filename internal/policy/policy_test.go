package policy_test

import (
	"testing"

	"github.com/dedupd/dedupd/internal/policy"
)

type colour string

func (colour) Values() []string { return policy.Values[colour]("", "red", "blue") }

func TestCheck(t *testing.T) {
	for _, c := range []colour{"", "red", "blue"} {
		if err := policy.Check(c); err != nil {
			t.Errorf("%q: %v", c, err)
		}
	}
	const want = `"green" is not one of red, blue`
	if err := policy.Check(colour("green")); err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}
