// Package policy has the policies that a configuration chooses and other packages
// follow. Each is a text of a type of its own.
package policy

import (
	"fmt"
	"slices"
	"strings"
)

// Policy is a text that must be one of its Values, which are all that its type has.
type Policy interface{ Values() []string }

// Values makes the texts of a type's constants.
func Values[P ~string](all ...P) []string {
	texts := make([]string, len(all))
	for i, p := range all {
		texts[i] = string(p)
	}
	return texts
}

// Check refuses a text that its type doesn't list.
func Check(p Policy) error {
	text, allowed := fmt.Sprint(p), p.Values()
	if slices.Contains(allowed, text) {
		return nil
	}
	allowed = slices.DeleteFunc(allowed, func(s string) bool { return s == "" })
	return fmt.Errorf("%q is not one of %s", text, strings.Join(allowed, ", "))
}
