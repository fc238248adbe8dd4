package config

import (
	"testing"
	"time"
)

func TestDuration(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"1h30m": 90 * time.Minute, "7d": 168 * time.Hour, "4w": 28 * 24 * time.Hour, "1w2d3h": (9*24 + 3) * time.Hour,
		"90s": 90 * time.Second, "1.5h": 90 * time.Minute, "0": 0, "250ms": 250 * time.Millisecond,
	} {
		d, err := ParseDuration(text)
		if err != nil || time.Duration(d) != want {
			t.Errorf("%s is %s, %v", text, d, err)
		}
		if again, err := ParseDuration(d.String()); again != d || err != nil {
			t.Errorf("%s prints as %s, which reads as %s, %v", text, d, again, err)
		}
	}
	for _, text := range []string{"", "7", "-1h", "+1h", "1x", "d", "1d2w", "1 d", "99999w", "1e3s", "9999999d"} {
		if d, err := ParseDuration(text); err == nil {
			t.Errorf("%q is taken for %s", text, d)
		}
	}
}

func TestSize(t *testing.T) {
	for text, want := range map[string]Size{"8MiB": 8 << 20, "64KiB": 64 << 10, "1GB": 1e9, "1.5KiB": 1536, "17": 17, "0": 0, "2 GiB": 2 << 30, "1kB": 1000} {
		s, err := ParseSize(text)
		if err != nil || s != want {
			t.Errorf("%s is %d, %v", text, s, err)
		}
		if again, err := ParseSize(s.String()); again != s || err != nil {
			t.Errorf("%s prints as %s", text, s)
		}
	}
	for _, text := range []string{"", "-1", "1.5", "1mib", "8M", "1e3", "MiB", "99999999TiB"} {
		if s, err := ParseSize(text); err == nil {
			t.Errorf("%q is taken for %s", text, s)
		}
	}
}

func TestSubjects(t *testing.T) {
	for s, want := range map[string]bool{
		"orders": true, "orders.>": true, "orders.*.new": true, ">": true, "": false, "a..b": false, "a.": false, "a b": false, "a>": false, ">.a": false, "a*": false,
	} {
		if isSubject(s) != want {
			t.Errorf("%q is a subject: %t", s, !want)
		}
	}
}
