package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A mutant that the source has moved away from would only be found out when they
// are hunted.
func TestMutantsStillFit(t *testing.T) {
	for _, m := range mutants {
		for _, e := range m.edits {
			text, err := os.ReadFile(filepath.Join("../..", e.file))
			if err != nil {
				t.Error(err)
			} else if n := strings.Count(string(text), e.old); n != 1 {
				t.Errorf("%s: %s has this %d times: %s", m.name, e.file, n, e.old)
			}
		}
	}
}
