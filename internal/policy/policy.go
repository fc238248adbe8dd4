// Package policy holds what the configuration's policies share. A policy is a
// text of a type of its own, and that type lists the values it allows.
package policy

import (
	"fmt"
	"slices"
	"strings"
)

// Policy is a text that must be one of its type's Values.
type Policy[P any] interface {
	~string
	Values() []P
}

// Check refuses a value that its type doesn't list.
func Check[P Policy[P]](value P) error {
	allowed := value.Values()
	if slices.Contains(allowed, value) {
		return nil
	}
	names := make([]string, 0, len(allowed))
	for _, a := range allowed {
		if a != "" {
			names = append(names, string(a))
		}
	}
	return fmt.Errorf("%q is not one of %s", string(value), strings.Join(names, ", "))
}

// Unmarshal is the UnmarshalText of every policy. It leaves the policy as it is
// where the text is none of its values.
func Unmarshal[P Policy[P]](to *P, text []byte) error {
	value := P(text)
	if err := Check(value); err != nil {
		return err
	}
	*to = value
	return nil
}
