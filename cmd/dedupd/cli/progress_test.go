package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestProgressLine(t *testing.T) {
	for _, c := range []struct {
		progress progress
		want     string
	}{
		{progress{unit: "ids"}, "500 ids, 100/s"},
		{progress{unit: "ids", terminal: true}, "500 ids, 100/s"},
		{progress{unit: "ids", total: 1000}, "500 ids, 100/s, 50 %, 5s left"},
		{progress{unit: "ids", total: 1000, terminal: true}, "[###############...............] 500 ids, 100/s, 50 %, 5s left"},
		{progress{unit: "ids", total: 499}, "500 ids, 100/s"},         // the estimate was wrong
		{progress{unit: "ids", total: 50_000}, "500 ids, 100/s, 1 %"}, // too early to tell
		{progress{unit: "ids", input: &meter{read: 50, size: 100}}, "500 ids, 100/s, 50 %, 5s left"},
		{progress{unit: "ids", input: &meter{read: 50}}, "500 ids, 100/s"}, // a pipe
	} {
		if got := c.progress.line(500, 5*time.Second); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

// TestProgressKeepsQuiet writes a line only every few seconds, and no control
// characters where there is no terminal.
func TestProgressKeepsQuiet(t *testing.T) {
	var b bytes.Buffer
	p := newProgress(&b, "ids")
	p.update(1)
	if b.Len() > 0 {
		t.Errorf("at once: %q", b.String())
	}
	p.started = p.started.Add(-10 * time.Second)
	p.shown = p.shown.Add(-6 * time.Second)
	p.update(1000)
	p.update(1001)
	p.end()
	if !regexp.MustCompile(`^1000 ids, (100|99)/s\n$`).MatchString(b.String()) {
		t.Errorf("%q", b.String())
	}
	b.Reset()
	p.terminal, p.shown = true, time.Now().Add(-time.Second)
	p.update(1002)
	p.update(1003)
	p.end()
	if !regexp.MustCompile(`^\r1002 ids, [0-9]+/s\x1b\[K\r\x1b\[K$`).MatchString(b.String()) {
		t.Errorf("%q", b.String())
	}
}

func TestProgressOfAFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "ids")
	if err := os.WriteFile(name, []byte("a\nb\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	p := newProgress(new(bytes.Buffer), "ids")
	r := p.measure(f)
	if p.share(0) != 0 {
		t.Errorf("%f at the start", p.share(0))
	}
	if _, err := r.Read(make([]byte, 3)); err != nil || p.share(1) != 0.75 {
		t.Errorf("%f of 3 bytes of 4, %v", p.share(1), err)
	}
}

func TestAge(t *testing.T) {
	for seconds, want := range map[float64]string{0: "0s", 59.9: "59s", 60: "1m00s", 3599: "59m59s", 3600: "1h00m", 90_000: "1d01h", 864_000: "10d00h"} {
		if got := age(&seconds); got != want {
			t.Errorf("%f: %s, want %s", seconds, got, want)
		}
	}
	if got := age(nil); got != "-" {
		t.Errorf("%q", got)
	}
}

func TestLinesOfIDs(t *testing.T) {
	long := strings.Repeat("x", 70_000)
	for in, want := range map[string][]string{
		"":                          nil,
		"a":                         {"a"},
		"a\nb\n":                    {"a", "b"},
		"\ufeffa\r\nb\r\n\ufeffc":   {"a", "b", "\ufeffc"},
		"a\n\nb":                    {"a", "", "b"},
		"\r\n":                      {""},
		" a \n\x00\xff\n":           {" a ", "\x00\xff"},
		long + "\r\n" + long:        {long, long},
		"a\n" + long + "xxx" + "\n": {"a", "line 2 is longer than an id may be, id.max_bytes: 70000"},
	} {
		var got []string
		for id, err := range lines(strings.NewReader(in), len(long)) {
			if err != nil {
				id = err.Error()
			}
			got = append(got, id)
		}
		if strings.Join(got, "|") != strings.Join(want, "|") || len(got) != len(want) {
			t.Errorf("%.20q: %.60q", in, got)
		}
	}
}
