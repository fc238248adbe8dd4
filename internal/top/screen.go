package top

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/generations"
	"github.com/dedupd/dedupd/internal/human"
)

// View is all that a screen shows.
type View struct {
	Frame *Frame
	Scope string
	// Window and MaxHold are how long claims are kept, at least and at most.
	Window, MaxHold time.Duration
	Sort            Sort
	// First is the index of the first lane on the screen.
	First        int
	Paused, Help bool
	// Away says why the database can't be read; empty: it can. AwayFor is for how long.
	Away    string
	AwayFor time.Duration
	// Colour allows emphasis; ASCII avoids all other characters.
	Colour, ASCII bool
	// Plain leaves out what only keys need.
	Plain bool
}

// Unlimited is a width or height that cuts off nothing.
const Unlimited = math.MaxInt32

// The styles of text: ANSI's numbers.
const (
	plain  = ""
	bold   = "1"
	faint  = "2"
	red    = "31"
	yellow = "33"
	green  = "32"
	title  = "1;4"
)

// piece is text in one style; a line is some of them.
type (
	piece struct{ text, style string }
	line  []piece
)

func one(style, format string, args ...any) line {
	return line{{clean(fmt.Sprintf(format, args...)), style}}
}

func (l line) and(style, format string, args ...any) line {
	return append(l, one(style, format, args...)...)
}

func (l line) width() (n int) {
	for _, p := range l {
		n += widthOf(p.text)
	}
	return n
}

// Render draws a screen: exactly height lines of at most width columns. If height is
// Unlimited, it draws as many lines as there are.
func Render(v View, width, height int) string {
	s := &screen{View: v, w: width, h: height}
	lines := s.lines()
	if height != Unlimited {
		for len(lines) < height {
			lines = append(lines, nil)
		}
		lines = lines[:height]
	}
	text := make([]string, len(lines))
	for i, l := range lines {
		text[i] = s.write(l)
	}
	return strings.Join(text, "\n")
}

// LaneRows is how many lanes a screen of that size has room for.
func LaneRows(v View, width, height int) int {
	s := &screen{View: v, w: width, h: height}
	if v.Help || v.Frame == nil {
		return 0
	}
	_, rows := s.divide()
	return rows
}

type screen struct {
	View
	w, h int
}

func (s *screen) write(l line) string {
	var b strings.Builder
	left := s.w
	for _, p := range l {
		text := cut(p.text, left, s.ellipsis())
		whole := text == p.text
		left -= widthOf(text)
		if p.style != plain && s.Colour && text != "" {
			text = "\x1b[" + p.style + "m" + text + "\x1b[0m"
		}
		b.WriteString(text)
		if !whole {
			break
		}
	}
	if s.Colour {
		return b.String()
	}
	return strings.TrimRight(b.String(), " ")
}

func (s *screen) ellipsis() string {
	if s.ASCII {
		return "~"
	}
	return "…"
}

func (s *screen) ramp() []rune {
	if s.ASCII {
		return []rune(" .:-=+*#")
	}
	return []rune(" ▁▂▃▄▅▆▇█")
}

func (s *screen) lines() []line {
	if s.Help {
		return s.help()
	}
	if s.Frame == nil {
		return []line{s.header(), s.status(), nil, one(faint, "reading the first sample")}
	}
	blocks, rows := s.divide()
	all := []line{}
	for _, b := range blocks {
		if b.lanes {
			all = append(all, s.laneTable(rows)...)
			continue
		}
		all = append(all, b.lines...)
	}
	return all
}

// block is a part of the screen.
type block struct {
	lines []line
	lanes bool // the table of lanes, which gets the remaining room
}

// divide gives each part its room: some rows to the lanes first, then to the most
// important parts. A short form replaces a long one that doesn't fit. It returns the
// parts from top to bottom, and how many lanes there is room for.
func (s *screen) divide() (blocks []block, rows int) {
	lanes := len(s.Frame.Sample.Lanes)
	head := []line{s.header()}
	if l := s.status(); l != nil {
		head = append(head, l)
	}
	foot := []line{}
	if !s.Plain {
		foot = append(foot, nil) // its place; the numbers of lanes aren't known yet
	}
	left := s.h - len(head) - len(foot) - 1 - max(1, min(lanes, 4)) // 1: the lanes' titles
	take := func(n int) bool {
		if n > left {
			return false
		}
		left -= n
		return true
	}
	rates := s.shortRates()
	room := take(len(rates))
	if !room {
		rates = nil
	}
	var facts, history, generations []line
	if f := s.facts(); take(len(f)) {
		facts = f
	}
	if r := s.rates(); room && s.w >= 46 && take(len(r)+1-len(rates)) {
		rates = slices.Concat(r, []line{nil})
	}
	if h := s.history(); !s.Plain && take(len(h)+1) {
		history = slices.Concat(h, []line{nil})
	}
	if len(facts) > 0 && take(1) {
		facts = append(facts, nil)
	}
	if g := s.generations(1); take(len(g) + 1) {
		more := s.moreGenerations(left - max(0, lanes-4))
		left -= more
		generations = append(s.generations(1+more), nil)
	}
	rows = max(1, min(lanes, 4)) + max(0, left)
	for _, part := range [][]line{head, rates, history, facts, generations} {
		blocks = append(blocks, block{lines: part})
	}
	blocks = append(blocks, block{lanes: true})
	if !s.Plain {
		blocks = append(blocks, s.bottom(blocks, rows))
	}
	return blocks, rows
}

// moreGenerations is how many generations beside the newest are listed, in at most
// so many lines.
func (s *screen) moreGenerations(room int) int {
	more := min(len(s.live()), 12) - 1
	if s.h == Unlimited {
		more = len(s.live())
	}
	return max(0, min(more, room))
}

// bottom is the footer, with the space that keeps it on the last line.
func (s *screen) bottom(blocks []block, rows int) block {
	used := 1 + min(rows, max(len(s.Frame.Sample.Lanes), 1))
	for _, b := range blocks {
		used += len(b.lines)
	}
	space := make([]line, 0)
	if s.h != Unlimited {
		space = make([]line, max(0, s.h-used-1))
	}
	return block{lines: append(space, s.footer(rows))}
}

func (s *screen) header() line {
	l := one(bold, "dedupd top").and(plain, "  scope ").and(bold, "%s", s.Scope)
	f := s.Frame
	if f == nil {
		return l
	}
	l = l.and(plain, "  %s", f.Sample.Now.UTC().Format("2006-01-02 15:04:05Z"))
	l = l.and(plain, "  owners %d  lanes %d", f.Owners(), len(f.Sample.Lanes))
	if n := f.Sample.Connections; n > 0 {
		l = l.and(plain, "  connections %d", n)
	}
	return l.and(faint, "  database %s", f.Sample.Database)
}

// status is a line for what isn't usual; nil: all is as usual.
func (s *screen) status() line {
	switch {
	case s.Away != "":
		return one(red, "THE DATABASE CAN'T BE READ for %s, trying again: %s", span(s.AwayFor), s.Away)
	case s.Paused:
		return one(yellow, "PAUSED: space goes on")
	}
	return nil
}

func (s *screen) shortRates() []line {
	f := s.Frame
	l := one(bold, "%s/s", number(f.Rates.Fetched)).and(plain, " fetched, ").and(bold, "%s/s", number(f.Rates.Applied)).and(plain, " applied")
	if shares := f.Rates.Shares(); shares != nil {
		l = l.and(plain, ", ").and(bold, "%s", percent(shares.Duplicates)).and(plain, " duplicates")
	}
	if bad := f.Rates.Conflicts + f.Rates.Dead; bad > 0 {
		l = l.and(red, ", %s/s conflicts, dead", number(bad))
	}
	return []line{l}
}

// rates is the table of what happened to messages.
func (s *screen) rates() []line {
	f := s.Frame
	shares, total := f.Rates.Shares(), f.Totals.Shares()
	row := func(style, name string, of func(c Counts) float64) line {
		now, avg, share, all := "-", "-", "-", "-"
		if f.Interval > 0 {
			now, avg = number(of(f.Rates))+"/s", number(of(f.Smooth))+"/s"
		}
		if shares != nil {
			share = percent(of(*shares))
		}
		if total != nil {
			all = percent(of(*total))
		}
		return one(style, "%-13s%9s %9s %9s %9s %9s", name, now, avg, share, whole(int64(of(f.Totals))), all)
	}
	alarm := func(n float64) string {
		if n > 0 {
			return red
		}
		return plain
	}
	lines := []line{
		one(title, "%-13s%9s %9s %9s %9s %9s", "MESSAGES", "NOW", "AVERAGE", "SHARE", "IN ALL", "SHARE"),
		row(bold, "fetched", func(c Counts) float64 { return c.Fetched }),
		row(plain, "applied", func(c Counts) float64 { return c.Applied }),
	}
	// Most sinks write all that they are given.
	if t := f.Totals; t.AlreadyPresent+t.Stale+t.Rejected > 0 {
		lines = append(lines,
			row(faint, " written", func(c Counts) float64 { return c.Written }),
			row(faint, " present", func(c Counts) float64 { return c.AlreadyPresent }),
			row(faint, " stale", func(c Counts) float64 { return c.Stale }),
			row(faint, " rejected", func(c Counts) float64 { return c.Rejected }))
	}
	lines = append(lines,
		row(plain, "duplicates", func(c Counts) float64 { return c.Duplicates }),
		row(faint, " redelivered", func(c Counts) float64 { return c.Redelivered }),
		row(faint, " resent", func(c Counts) float64 { return c.Resent }),
		row(faint, " cross source", func(c Counts) float64 { return c.CrossSource }),
		row(alarm(f.Rates.Conflicts), "conflicts", func(c Counts) float64 { return c.Conflicts }),
		row(alarm(f.Rates.Dead), "dead", func(c Counts) float64 { return c.Dead }),
	)
	if f.Totals.Filtered > 0 { // only where there are filters
		lines = append(lines, row(plain, "filtered", func(c Counts) float64 { return c.Filtered }))
	}
	return lines
}

// history draws two lines.
func (s *screen) history() []line {
	n := min(s.w-30, remembered)
	if n < 8 {
		return nil
	}
	fetched, duplicates := make([]float64, 0, n), make([]float64, 0, n)
	most, share := 0.0, 0.0
	for _, p := range s.Frame.History[max(0, len(s.Frame.History)-n):] {
		fetched, duplicates = append(fetched, p.Fetched), append(duplicates, p.Duplicates)
		most, share = max(most, p.Fetched), max(share, p.Duplicates)
	}
	return []line{
		one(plain, "%-11s", "fetched").and(green, "%s", spark(fetched, n, s.ramp(), most)).and(faint, "  most %s/s", number(most)),
		one(plain, "%-11s", "duplicates").and(yellow, "%s", spark(duplicates, n, s.ramp(), share)).and(faint, "  most %s", percent(share)),
	}
}

// facts are what a scope has only one of, in as few lines as possible.
func (s *screen) facts() []line {
	f := s.Frame
	var parts []piece
	add := func(style, format string, args ...any) {
		parts = append(parts, piece{clean(fmt.Sprintf(format, args...)), style})
	}
	if lag := f.Lag(); lag != nil {
		add(plain, "lag %s", whole(*lag))
	} else {
		add(plain, "lag not known")
	}
	switch n := f.Sample.DeadLetters; {
	case n > dedup.MostDeadLetters:
		add(red, "dead letters more than %d", dedup.MostDeadLetters)
	case n > 0:
		add(red, "dead letters %d", n)
	default:
		add(plain, "dead letters 0")
	}
	for _, g := range s.live() {
		if g.Missing {
			add(red, "GENERATION %d HAS LOST ITS TABLE", g.Number)
		}
	}
	if t := f.Sample.Stream; t != nil {
		add(plain, "stream clock %s behind", span(max(0, f.Sample.Now.Sub(*t))))
	} else {
		add(yellow, "stream clock not known")
	}
	add(s.windowUsed())
	claims, size := int64(0), int64(0)
	for _, g := range s.live() {
		claims, size = claims+g.Claims, size+g.Bytes
	}
	add(plain, "generations %d: %s claims, %s", len(s.live()), whole(claims), human.Bytes(size))
	lines, at := []line{nil}, 0
	for _, p := range parts {
		if n := len(lines[at]); n > 0 && lines[at].width()+3+widthOf(p.text) > s.w {
			lines, at = append(lines, nil), at+1
		} else if n > 0 {
			lines[at] = lines[at].and(faint, "   ")
		}
		lines[at] = append(lines[at], p)
	}
	return lines
}

// windowUsed says how much of the window the oldest duplicate of two days needs. Ages
// are counted in steps: it shows that step's upper end.
func (s *screen) windowUsed() (style, text string) {
	latest := s.Frame.Sample.LatestDuplicate
	switch {
	case latest == nil:
		return plain, fmt.Sprintf("window %s, no ages of duplicates yet", span(s.Window))
	case *latest >= int64(s.Window/time.Second):
		return red, fmt.Sprintf("window %s, and duplicates came as late or later", span(s.Window))
	}
	used := time.Duration(*latest) * time.Second
	style = plain
	if used > s.Window/2 {
		style = yellow
	}
	return style, fmt.Sprintf("window %s, duplicates came within %s", span(s.Window), span(used))
}

// live are the generations to show, newest first.
func (s *screen) live() (all []generations.Generation) {
	g := s.Frame.Sample.Generations
	for i := len(g) - 1; i >= 0; i-- {
		if g[i].State != "next" {
			all = append(all, g[i])
		}
	}
	return all
}

// generations is the table of the newest n.
func (s *screen) generations(n int) []line {
	all := s.live()
	lines := []line{one(title, "%-10s %-9s %9s %10s %10s %8s %9s", "GENERATION", "STATE", "CLAIMS", "BYTES", "FILTER", "AGE", "GOES IN")}
	for _, g := range all[:min(n, len(all))] {
		age := time.Duration(-1)
		if g.OpenedAt != nil {
			age = max(0, s.Frame.Sample.Now.Sub(*g.OpenedAt))
		}
		count := whole(g.Claims)
		if !g.Exact {
			count = "~" + count
		}
		filter := "-"
		if g.FilterBytes > 0 {
			filter = human.Bytes(g.FilterBytes)
		}
		state, style := g.State, plain
		if g.Missing {
			state, style = "MISSING", red
		}
		lines = append(lines, one(style, "%10d %-9s %9s %10s %10s %8s %9s", g.Number, state, count, human.Bytes(g.Bytes), filter, span(age), s.goes(g)))
	}
	return lines
}

// goes says when a sealed generation is dropped at the earliest: when the stream
// clock has passed its end by the window.
func (s *screen) goes(g generations.Generation) string {
	if g.State != "sealed" || g.SealedAt == nil {
		return "-"
	}
	now := s.Frame.Sample.Now
	left := g.SealedAt.Add(s.Window).Sub(now)
	if left > 0 {
		return span(left)
	}
	if t := s.Frame.Sample.Stream; t != nil && g.SealedAt.Add(s.Window).Before(*t) || g.SealedAt.Add(s.MaxHold).Before(now) {
		return "now"
	}
	return "held"
}

func (s *screen) footer(rows int) line {
	n := len(s.Frame.Sample.Lanes)
	l := one(faint, "q quit  s sort: %s  space pause  ? help", s.Sort)
	if rows < n {
		first := s.clamp(rows)
		l = l.and(faint, "  lanes %d-%d of %d", first+1, first+rows, n)
	}
	return l
}

func (s *screen) help() []line {
	lines := []line{one(bold, "dedupd top"), nil}
	for _, row := range [][2]string{
		{"q, ctrl-c", "quit"},
		{"s, S", "sort by the next of lag, rate, behind, name"},
		{"up, down, page up, page down", "scroll the lanes; home and end; k and j"},
		{"space", "pause, and go on"},
		{"? or escape", "this, and back"},
	} {
		lines = append(lines, one(plain, "  %-30s%s", row[0], row[1]))
	}
	lines = append(lines, nil)
	for _, text := range []string{
		"Everything is read from the database: what all workers have committed.",
		"NOW is of the last interval, AVERAGE of about ten seconds.",
		"LAG is what the broker held behind a lane's last batch, as its worker saw it.",
		"BEHIND is how far the lane's clock, its messages' time, is behind the database.",
		"stands still: it has something to read, and has not moved for half a minute.",
		"  If it is held, its worker's log and /readyz say why.",
		"no news: it was caught up, and no worker has said so for a minute.",
		"quarantined: its messages may have ended workers, and are applied one by one.",
		"GOES IN is when a sealed generation goes at the earliest. held: it should be",
		"  gone, and a lane that is behind keeps it.",
	} {
		lines = append(lines, one(plain, "%s", text))
	}
	return lines
}
