package top

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/generations"
)

var update = flag.Bool("update", false, "write the golden screens anew")

var noon = time.Date(2026, 3, 4, 12, 0, 0, 0, time.UTC)

// fixture is a scope of that many lanes after some intervals of work, with all
// kinds of lanes.
func fixture(lanes, intervals int) *Frame {
	var t Tracker
	var f *Frame
	done := int64(0)
	for n := range intervals + 1 {
		done += int64(200 + 60*(n*n%7))
		now := noon.Add(time.Duration(n) * time.Second)
		stream := now.Add(-90 * time.Second)
		s := dedup.Sample{
			Now: now, Stream: &stream, Database: "app", Connections: 8, DeadLetters: 3, LatestDuplicate: new(int64(3600)),
		}
		for i := range lanes {
			work := done * int64(4+i) / 4
			l := dedup.SampledLane{Ordered: true, Books: dedup.Books{
				Source: "kafka", Lane: fmt.Sprintf("orders/%d", i), Owner: fmt.Sprintf("dedupd-7d9f8b6c5-%05d/1", i%3),
				Fetched: 50_000_000 + work*10, Redelivered: work / 10, Resent: 9_000_000 + work*2, Conflicts: 2, Dead: 1 + int64(n/4),
				NextPosition: 50_000_000 + work*10, Lag: new(int64(1000 * i)), StreamTime: new(now.Add(-time.Duration(i) * 3 * time.Second)), UpdatedAt: now,
			}}
			switch i {
			case 1: // nothing to read
				l.Fetched, l.Resent, l.Redelivered, l.Dead = 40, 10, 0, 0
				l.Conflicts, l.NextPosition, l.Lag = 0, 40, new(int64(0))
			case 2: // stands still
				l.Fetched, l.Resent, l.Redelivered, l.Dead, l.Conflicts = 1000, 0, 0, 0, 0
				l.NextPosition, l.Lag, l.UpdatedAt = 1000, new(int64(12_345_678)), noon.Add(-time.Hour)
			case 3:
				l.Lane, l.Acquisitions, l.Lag, l.StreamTime = "eine sehr lange Spur namens 注文/3", 4, nil, nil
			}
			l.Duplicates = l.Redelivered + l.Resent + l.CrossSource
			l.Applied = l.Fetched - l.Duplicates - l.Conflicts - l.Dead
			s.Lanes = append(s.Lanes, l)
		}
		for g := range 6 {
			opened := noon.Add(-time.Duration(6-g) * 6 * time.Hour)
			gen := generations.Generation{Number: g + 1, State: "sealed", OpenedAt: &opened, SealedAt: new(opened.Add(6 * time.Hour)), Claims: 12_000_000, Exact: true, Bytes: 1400 << 20, FilterBytes: 27 << 20, FilterComplete: true}
			if g == 5 {
				gen.State, gen.SealedAt, gen.Exact, gen.FilterBytes, gen.Claims = "open", nil, false, 0, 4321
			}
			s.Generations = append(s.Generations, gen)
		}
		f = t.Next(s)
	}
	return f
}

func view(f *Frame) View {
	return View{Frame: f, Scope: "orders", Window: 24 * time.Hour, MaxHold: 4 * 7 * 24 * time.Hour}
}

var escapes = regexp.MustCompile("\x1b\\[[0-9;]*m")

// TestScreens compares screens with golden files, and each with its size.
func TestScreens(t *testing.T) {
	full := view(fixture(6, 40))
	many := view(fixture(60, 40))
	for _, c := range []struct {
		name          string
		view          View
		width, height int
	}{
		{"usual", full, 80, 24},
		{"large", full, 120, 40},
		{"tiny", full, 40, 10},
		{"report", full, 100, 30},
		{"many", func() View { v := many; v.First = 55; v.Sort = SortName; return v }(), 100, 30},
		{"away", func() View {
			v := full
			v.Away, v.AwayFor = "read the scope: connection refused", 12*time.Second
			return v
		}(), 80, 24},
		{"ascii", func() View { v := full; v.ASCII = true; return v }(), 80, 24},
		{"help", func() View { v := full; v.Help = true; return v }(), 80, 24},
		{"paused", func() View { v := full; v.Paused, v.Sort = true, SortRate; return v }(), 80, 16},
		{"first", view(fixture(2, 0)), 80, 24},
		{"nothing", View{Scope: "orders"}, 80, 5},
		{"no lanes", view(fixture(0, 1)), 80, 20},
		{"plain", func() View { v := full; v.Plain, v.Sort = true, SortName; return v }(), Unlimited, Unlimited},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := Render(c.view, c.width, c.height) + "\n"
			file := filepath.Join("testdata", strings.ReplaceAll(c.name, " ", "-")+".txt")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
				t.Errorf("-want +got (-update writes it anew):\n%s", diff)
			}
		})
	}
}

// TestEverySizeFits renders all sizes of a terminal: no line too many or too long, and
// the same text with colour and without.
func TestEverySizeFits(t *testing.T) {
	for _, lanes := range []int{0, 6, 30} {
		v := view(fixture(lanes, 3))
		for width := 1; width <= 130; width += 9 {
			for height := 1; height <= 50; height += 2 {
				for _, help := range []bool{false, true} {
					v.Help, v.Colour = help, false
					text := Render(v, width, height)
					all := strings.Split(text, "\n")
					if len(all) != height {
						t.Fatalf("%d lanes on %d x %d: %d lines", lanes, width, height, len(all))
					}
					for _, l := range all {
						if n := widthOf(l); n > width {
							t.Fatalf("%d lanes on %d x %d: %d columns: %s", lanes, width, height, n, l)
						}
					}
					v.Colour = true
					colourful := strings.Split(escapes.ReplaceAllString(Render(v, width, height), ""), "\n")
					for i := range colourful {
						colourful[i] = strings.TrimRight(colourful[i], " ")
					}
					if got := strings.Join(colourful, "\n"); got != text {
						t.Fatalf("%d x %d: colour changes the text:\n%s", width, height, cmp.Diff(text, got))
					}
				}
			}
		}
	}
}

func TestRates(t *testing.T) {
	var tracker Tracker
	sample := func(at time.Duration, books ...dedup.Books) *Frame {
		s := dedup.Sample{Now: noon.Add(at)}
		for _, b := range books {
			b.Source = "kafka"
			s.Lanes = append(s.Lanes, dedup.SampledLane{Books: b})
		}
		return tracker.Next(s)
	}
	f := sample(0, dedup.Books{Lane: "a", Fetched: 1000, Applied: 900, Duplicates: 100, Resent: 100})
	if f.Interval != 0 || f.Rates != (Counts{}) || f.Totals.Fetched != 1000 || f.Totals.Shares().Duplicates != 0.1 {
		t.Errorf("the first: %+v", f)
	}
	f = sample(2*time.Second, dedup.Books{Lane: "a", Fetched: 1200, Applied: 1000, Duplicates: 200, Resent: 200})
	if f.Interval != 2*time.Second || f.Rates != (Counts{Fetched: 100, Applied: 50, Duplicates: 50, Resent: 50}) || f.Smooth != f.Rates {
		t.Errorf("the second: %+v", f)
	}
	if f.Rates.Shares().Duplicates != 0.5 || f.LaneRates[0] != 100 || len(f.History) != 1 || f.History[0] != (Point{100, 0.5}) {
		t.Errorf("the second: %+v", f)
	}
	// A new lane counts from its beginning, one whose books went back not at all.
	f = sample(3*time.Second, dedup.Books{Lane: "a", Fetched: 10, Applied: 10}, dedup.Books{Lane: "b", Fetched: 30, Applied: 30})
	if f.Rates != (Counts{Fetched: 30, Applied: 30}) || f.LaneRates[0] != 0 || f.LaneRates[1] != 30 {
		t.Errorf("lanes that come and go: %+v", f)
	}
	if s := f.Smooth.Fetched; s >= 100 || s <= 30 {
		t.Errorf("smoothed %f, want between the two", s)
	}
	// A replay takes a dead letter out of the books.
	sample(4*time.Second, dedup.Books{Lane: "a", Fetched: 20, Applied: 15, Dead: 5})
	f = sample(5*time.Second, dedup.Books{Lane: "a", Fetched: 20, Applied: 20})
	if f.Rates != (Counts{Applied: 5}) {
		t.Errorf("a replay: %+v", f.Rates)
	}
	// The database's clock goes back, as with another server.
	f = sample(0, dedup.Books{Lane: "a", Fetched: 30, Applied: 30})
	if f.Interval != 0 || f.Rates != (Counts{}) {
		t.Errorf("a clock that went back: %+v", f)
	}
	for i := range 2 * remembered {
		f = sample(time.Duration(i+1)*time.Second, dedup.Books{Lane: "a", Fetched: 30 + int64(i), Applied: 30 + int64(i)})
	}
	if len(f.History) != remembered {
		t.Errorf("%d points of history", len(f.History))
	}
}

func TestStates(t *testing.T) {
	ago := func(d time.Duration) *time.Time { return new(noon.Add(-d)) }
	for _, c := range []struct {
		want         string
		lag          *int64
		rate         float64
		moved        time.Duration // ago
		stream       *time.Time
		acquisitions int
		quarantined  int
	}{
		{want: StateReads, lag: new(int64(5)), rate: 1, moved: time.Hour, stream: ago(time.Hour)},
		{want: StateReads, lag: new(int64(5)), moved: 10 * time.Second, stream: ago(time.Hour)},
		{want: StateStandStill, lag: new(int64(5)), moved: time.Minute, stream: ago(0)},
		{want: StateStandStill, moved: time.Minute},
		{want: StateCaughtUp, lag: new(int64(0)), moved: time.Hour, stream: ago(20 * time.Second)},
		{want: StateCaughtUp, lag: new(int64(0)), moved: 10 * time.Second, stream: ago(time.Hour)}, // it has just read old messages
		{want: StateNoNews, lag: new(int64(0)), moved: time.Hour, stream: ago(2 * time.Minute)},
		{want: StateQuarantined, lag: new(int64(5)), rate: 1, stream: ago(0), acquisitions: 3},
		{want: StateQuarantined, lag: new(int64(0)), stream: ago(0), quarantined: 1},
	} {
		f := Frame{Sample: dedup.Sample{Now: noon, Lanes: []dedup.SampledLane{{
			Books: dedup.Books{Lag: c.lag, StreamTime: c.stream, UpdatedAt: noon.Add(-c.moved)}, Acquisitions: c.acquisitions, Quarantined: c.quarantined,
		}}}, LaneRates: []float64{c.rate}}
		if got := f.State(0); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

func TestKeys(t *testing.T) {
	for _, c := range []struct {
		sent string
		want []key
		rest string
	}{
		{"q", []key{"q"}, ""},
		{"\x03", []key{keyBreak}, ""},
		{"\x1b", []key{keyEscape}, ""},
		{"\x1b[A\x1b[B\x1b[5~\x1b[6~", []key{keyUp, keyDown, keyPageUp, keyPageDn}, ""},
		{"\x1bOA\x1bOH\x1bOF", []key{keyUp, keyHome, keyEnd}, ""},
		{"\x1b[1;5Cq", []key{"q"}, ""}, // ctrl and an arrow mean nothing
		{"s\x1b[", []key{"s"}, "\x1b["},
		{"\x1b[1;", nil, "\x1b[1;"},
		{"\x1bq", []key{keyEscape, "q"}, ""},
		{"ä", []key{key("ä"[:1]), key("ä"[1:])}, ""},
	} {
		got, rest := parseKeys(c.sent)
		if diff := cmp.Diff(c.want, got); diff != "" || rest != c.rest {
			t.Errorf("%q: %s, rest %q", c.sent, diff, rest)
		}
	}
	v := view(fixture(20, 1))
	press := func(keys ...key) {
		for _, k := range keys {
			if v.press(k, 5) {
				t.Errorf("%s quits", k)
			}
		}
	}
	press(keyUp)
	if v.First != 0 {
		t.Errorf("above the first lane: %d", v.First)
	}
	press(keyDown, keyPageDn, "j", "k")
	if v.First != 6 {
		t.Errorf("down, and a page: %d", v.First)
	}
	press(keyEnd, keyDown)
	if v.First != 15 {
		t.Errorf("the end: %d", v.First)
	}
	press("s")
	if v.Sort != SortRate || v.First != 0 {
		t.Errorf("%s from %d", v.Sort, v.First)
	}
	press("S", "S", " ", "?")
	if v.Sort != SortName || !v.Paused || !v.Help {
		t.Errorf("%+v", v)
	}
	press(keyEscape)
	if v.Help || !v.press("q", 5) || !v.press(keyBreak, 5) {
		t.Error("no way out")
	}
}

func TestText(t *testing.T) {
	for f, want := range map[float64]string{
		0: "0", 0.25: "0.2", 9.94: "9.9", 9.96: "10", 12: "12", 999.4: "999", 999.6: "1.0k", 12_345: "12.3k", 99_960: "100k", 123_456: "123k", 1.5e6: "1.5M", 2e15: "2000T",
	} {
		if got := number(f); got != want && !(f > 1e15 && got == "many") {
			t.Errorf("number(%v) = %s, want %s", f, got, want)
		}
	}
	for d, want := range map[time.Duration]string{
		-1: "-", 0: "0s", 1500 * time.Millisecond: "1s", time.Minute: "1m", 3661 * time.Second: "1h1m", 25 * time.Hour: "1d1h", 7 * 24 * time.Hour: "7d",
	} {
		if got := span(d); got != want {
			t.Errorf("span(%d) = %s, want %s", d, got, want)
		}
	}
	if w := widthOf("a注e\u0301"); w != 4 {
		t.Errorf("width %d, want 4", w)
	}
	for _, c := range []struct{ got, want string }{
		{cut("abcdef", 4, "…"), "abc…"},
		{cut("注文注文", 4, "…"), "注…"},
		{cut("abc", 0, "…"), ""},
		{cutFront("orders/12345", 6, "…"), "…12345"},
		{cutFront("注文注文", 4, "…"), "…文"},
		{clean("a\x1b[2J\nb\u200b"), "a [2J b "},
		{spark([]float64{0, 0.1, 4, 8}, 5, []rune(" .:#"), 8), "  .:#"},
		{spark(nil, 3, []rune(" #"), 0), "   "},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
	if w := widthOf(Render(View{Scope: strings.Repeat("x", 300)}, 40, 1)); w != 40 {
		t.Errorf("a header of %d columns", w)
	}
}
