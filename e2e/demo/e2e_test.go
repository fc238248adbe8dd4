package main

import (
	"regexp"
	"strings"
	"testing"
)

// The demo as it is shown, in small: the real binary, killed twice.
func TestDemo(t *testing.T) {
	needServices(t)
	o, err := parse([]string{"-messages", "5000", "-rate", "2000", "-kills", "2"})
	if err != nil {
		t.Fatal(err)
	}
	var out output
	if err := run(t.Context(), o, out.screen()); err != nil {
		t.Fatalf("%v\n%s", err, out.text())
	}
	text := out.text()
	for _, want := range []string{
		`OK\. Every order landed exactly once, and the books balance`,
		`\n +4,000  rows landed, with 4,000 different ids`,
		`kill 2, with`,
		`\n  all +\d+,\d\d\d +4,000 .* 0 +0\n`, // at least 5,000 fetched, no conflicts, none dead
	} {
		if !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("the demo doesn't say %q", want)
		}
	}
	if strings.Contains(text, "\x1b") {
		t.Error("control codes where there is no terminal")
	}
	isGone(t, folderOf(t, text))
	if t.Failed() {
		t.Log(text)
	}
}
