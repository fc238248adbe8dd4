package config

import (
	"strings"

	"github.com/dedupd/dedupd/internal/nearest"
)

// suggest names the nearest key, or all there are.
func suggest(key string, known []string) string {
	if name := nearest.Name(key, known); name != "" {
		return "did you mean " + name + "?"
	}
	return "known here: " + strings.Join(known, ", ")
}
