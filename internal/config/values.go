package config

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Duration is a time.Duration that the file writes as 1h30m, 7d or 4w. A day has 24
// hours. It is never negative.
type Duration time.Duration

var longUnits = regexp.MustCompile(`^(?:([0-9]{1,5})w)?(?:([0-9]{1,6})d)?(.*)$`)

// ParseDuration reads 1h30m, 7d, 4w, 1d12h.
func ParseDuration(s string) (Duration, error) {
	bad := fmt.Errorf("%q is no duration; write it like 90s, 1h30m, 7d or 4w", s)
	m := longUnits.FindStringSubmatch(s)
	if m == nil || s == "" || strings.ContainsAny(s, "+-") {
		return 0, bad
	}
	weeks, _ := strconv.ParseInt("0"+m[1], 10, 64)
	days, _ := strconv.ParseInt("0"+m[2], 10, 64)
	days += 7 * weeks
	var rest time.Duration
	if m[3] != "" {
		var err error
		if rest, err = time.ParseDuration(m[3]); err != nil {
			return 0, bad
		}
	}
	if days > int64((math.MaxInt64-rest)/(24*time.Hour)) {
		return 0, fmt.Errorf("%q is too long a time; the longest is 292 years", s)
	}
	return Duration(days)*day + Duration(rest), nil
}

func (d *Duration) UnmarshalText(text []byte) (err error) {
	*d, err = ParseDuration(string(text))
	return err
}

// String is the shortest of ParseDuration's forms, in days and below.
func (d Duration) String() string {
	if d <= 0 {
		return "0s"
	}
	var b strings.Builder
	if n := d / day; n > 0 {
		fmt.Fprintf(&b, "%dd", n)
	}
	if rest := time.Duration(d % day); rest > 0 {
		s := rest.String()
		if strings.HasSuffix(s, "m0s") {
			s = strings.TrimSuffix(s, "0s")
		}
		if strings.HasSuffix(s, "h0m") {
			s = strings.TrimSuffix(s, "0m")
		}
		b.WriteString(s)
	}
	return b.String()
}

func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// Size is a number of bytes, which the file writes as 8MiB, 64KiB, 1GB or a plain
// number.
type Size int64

var sizePattern = regexp.MustCompile(`^([0-9]{1,19}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)$`)

var sizeUnits = map[string]float64{
	"": 1, "B": 1,
	"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
	"KB": 1e3, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
}

// ParseSize reads 8MiB, 1.5GiB, 1GB (10⁹) or a plain number of bytes.
func ParseSize(s string) (Size, error) {
	m := sizePattern.FindStringSubmatch(s)
	if m == nil {
		return 0, fmt.Errorf("%q is no size; write it like 64KiB, 8MiB or 1GB", s)
	}
	unit, ok := sizeUnits[m[2]]
	if !ok {
		return 0, fmt.Errorf("%q has the unknown unit %q; use B, KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB, TB (powers of 1000)", s, m[2])
	}
	n, err := strconv.ParseFloat(m[1], 64)
	n *= unit
	if err != nil || n > 1<<53 {
		return 0, fmt.Errorf("%q is too large", s)
	}
	if n != math.Trunc(n) {
		return 0, fmt.Errorf("%q is no whole number of bytes", s)
	}
	return Size(n), nil
}

func (s *Size) UnmarshalText(text []byte) (err error) {
	*s, err = ParseSize(string(text))
	return err
}

// String is exact: the largest power-of-1024 unit that leaves a whole number.
func (s Size) String() string {
	for _, unit := range []string{"TiB", "GiB", "MiB", "KiB"} {
		if n := Size(sizeUnits[unit]); s >= n && s%n == 0 {
			return strconv.FormatInt(int64(s/n), 10) + unit
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

const redacted = "[redacted]"

// Secret is text that no log, error or print shows: every usual way to format it
// gives "[redacted]". Only Reveal returns it.
type Secret string

// Reveal returns the text itself, for the connection that needs it and nothing else.
func (s Secret) Reveal() string { return string(s) }

func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return redacted
}

func (s Secret) GoString() string { return strconv.Quote(s.String()) }

// Format covers every verb: %x of a plain string type would show the text.
func (s Secret) Format(f fmt.State, verb rune) {
	text := s.String()
	if verb == 'q' || verb == 'v' && f.Flag('#') {
		text = strconv.Quote(text)
	}
	_, _ = f.Write([]byte(text))
}

func (s Secret) LogValue() slog.Value          { return slog.StringValue(s.String()) }
func (s Secret) MarshalText() ([]byte, error)  { return []byte(s.String()), nil }
func (s Secret) MarshalJSON() ([]byte, error)  { return json.Marshal(s.String()) }
func (s Secret) MarshalYAML() (any, error)     { return s.String(), nil }
func (s *Secret) UnmarshalText(b []byte) error { *s = Secret(b); return nil }

// StringList is a list that the file may write as a single value.
type StringList []string

func (l *StringList) decodeNode(d *decoder, n *node, path string) {
	*l = d.texts(n, path)
}

// Addresses are servers: a list, or one text with commas, so that one environment
// variable can name several.
type Addresses []string

func (a *Addresses) decodeNode(d *decoder, n *node, path string) {
	*a = nil
	for _, text := range d.texts(n, path) {
		for _, part := range strings.Split(text, ",") {
			if part = strings.TrimSpace(part); part != "" {
				*a = append(*a, part)
			}
		}
	}
}

// redactURL hides the user part of a URL: the name may be a token.
func redactURL(s string) string {
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok {
		scheme, rest = "", s
	} else {
		scheme += "://"
	}
	// Up to the last @: a password may contain one that should be %40.
	if i := strings.LastIndexByte(rest, '@'); i >= 0 {
		return scheme + redacted + rest[i:]
	}
	return s
}
