package policy_test

import (
	"testing"

	"github.com/dedupd/dedupd/internal/policy"
)

type colour string

func (colour) Values() []colour                   { return []colour{"", "red", "blue"} }
func (c *colour) UnmarshalText(text []byte) error { return policy.Unmarshal(c, text) }

func TestUnmarshal(t *testing.T) {
	c := colour("red")
	const want = `"green" is not one of red, blue`
	if err := c.UnmarshalText([]byte("green")); err == nil || err.Error() != want || c != "red" {
		t.Errorf("%q, error %v, want red and %s", c, err, want)
	}
	if err := c.UnmarshalText([]byte("blue")); err != nil || c != "blue" {
		t.Errorf("%q, %v", c, err)
	}
	if err := c.UnmarshalText(nil); err != nil || c != "" {
		t.Errorf("%q, %v", c, err)
	}
}
