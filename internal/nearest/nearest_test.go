package nearest

import "testing"

func TestName(t *testing.T) {
	names := []string{"batch", "columns", "database", "id", "URL", "x"}
	for wrong, want := range map[string]string{
		"bacth":    "batch", // two edits of five letters
		"colums":   "columns",
		"COLUMNS":  "columns",
		"url":      "URL",
		"urls":     "URL",
		"d":        "id",
		"y":        "", // not x: nothing speaks for it
		"dataroom": "", // four edits of eight letters
		"":         "",
	} {
		if got := Name(wrong, names); got != want {
			t.Errorf("Name(%q) = %q, want %q", wrong, got, want)
		}
	}
	if got := Name("bat", []string{"cat", "hat"}); got != "cat" {
		t.Errorf("of two as near ones %q, want the first", got)
	}
}
