package top

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
)

// Sort is what lanes are sorted by, most urgent first.
type Sort int

// The columns that lanes may be sorted by.
const (
	SortLag Sort = iota
	SortRate
	SortBehind
	SortName
	sorts
)

func (s Sort) String() string { return [...]string{"lag", "rate", "behind", "name"}[s] }

func (s Sort) next(step int) Sort { return (s + Sort(step) + sorts) % sorts }

// order is the lanes' sequence on the screen, as indexes.
func (s *screen) order() []int {
	f := s.Frame
	all := make([]int, len(f.Sample.Lanes))
	for i := range all {
		all[i] = i
	}
	lag := func(i int) int64 {
		if l := f.Sample.Lanes[i].Lag; l != nil {
			return *l
		}
		return -1
	}
	slices.SortStableFunc(all, func(a, b int) int {
		switch s.Sort {
		case SortLag:
			return cmp.Compare(lag(b), lag(a))
		case SortRate:
			return cmp.Compare(f.LaneRates[b], f.LaneRates[a])
		case SortBehind:
			return cmp.Compare(f.Behind(b), f.Behind(a))
		}
		return 0 // as the sample has them
	})
	return all
}

// clamp keeps the last lane at the screen's end or below.
func (s *screen) clamp(rows int) int {
	return max(0, min(s.First, len(s.Frame.Sample.Lanes)-rows))
}

// laneColumn is a column of the table of lanes.
type laneColumn struct {
	title string
	right bool
	sort  Sort // the order that marks its title; sorts: none
	cells []string
	width int
	// rank says which columns are left out first: the highest.
	rank int
	// least is how narrow it may become; 0: it stays as it is.
	least int
	front bool // cut from the front
}

// laneTable is the table of lanes: titles and at most so many rows.
func (s *screen) laneTable(rows int) []line {
	f := s.Frame
	if len(f.Sample.Lanes) == 0 {
		return []line{one(title, "SOURCE  LANE"), one(faint, "no lanes yet: no worker has acquired one")}
	}
	order := s.order()
	columns := s.laneColumns(order)
	columns = s.fit(columns)
	mark := "▾"
	if s.ASCII {
		mark = "v"
	}
	var titles strings.Builder
	for i, c := range columns {
		if i > 0 {
			titles.WriteString("  ")
		}
		text := c.title
		if c.sort == s.Sort && !s.Plain {
			text += mark
		}
		titles.WriteString(pad(text, c.width, c.right))
	}
	lines := []line{one(title, "%s", titles.String())}
	first := s.clamp(rows)
	for at := first; at < min(first+rows, len(order)); at++ {
		var l line
		state := f.State(order[at])
		for i, c := range columns {
			if i > 0 {
				l = l.and(plain, "  ")
			}
			style := plain
			if c.title == "STATE" {
				style = map[string]string{StateStandStill: red, StateQuarantined: yellow, StateNoNews: yellow, StateReads: green}[state]
			}
			text := c.cells[at]
			if c.front {
				text = cutFront(text, c.width, s.ellipsis())
			} else {
				text = cut(text, c.width, s.ellipsis())
			}
			l = append(l, piece{pad(text, c.width, c.right), style})
		}
		lines = append(lines, l)
	}
	return lines
}

func (s *screen) laneColumns(order []int) []laneColumn {
	f := s.Frame
	columns := []laneColumn{
		{title: "SOURCE", sort: sorts, rank: 5},
		{title: "LANE", sort: SortName, least: 8, front: true},
		{title: "STATE", sort: sorts, rank: 2, width: len(StateStandStill)},
		{title: "RATE", right: true, sort: SortRate, rank: 1, width: 8},
		{title: "LAG", right: true, sort: SortLag, width: 6},
		{title: "BEHIND", right: true, sort: SortBehind, rank: 3, width: 7},
		{title: "DUP", right: true, sort: sorts, rank: 4, width: 7},
		{title: "POSITION", right: true, sort: sorts, rank: 6, width: 8},
		{title: "OWNER", sort: sorts, rank: 7, least: 10, front: true},
	}
	for _, i := range order {
		l := &f.Sample.Lanes[i]
		duplicates, rate := "-", "-"
		if l.Fetched > 0 {
			duplicates = percent(float64(l.Duplicates) / float64(l.Fetched))
		}
		if f.Interval > 0 {
			rate = number(f.LaneRates[i]) + "/s"
		}
		position := whole(l.NextPosition)
		if s.w == Unlimited || l.NextPosition < 100_000_000 {
			position = strconv.FormatInt(l.NextPosition, 10)
		}
		for c, cell := range []string{
			l.Source, l.Lane, f.State(i), rate, known(l.Lag), span(f.Behind(i)), duplicates, position, l.Owner,
		} {
			columns[c].cells = append(columns[c].cells, clean(cell))
		}
	}
	for i := range columns {
		c := &columns[i]
		title := widthOf(c.title)
		if c.sort != sorts && !s.Plain {
			title++ // the mark
		}
		c.width = max(c.width, title)
		for _, cell := range c.cells {
			c.width = max(c.width, widthOf(cell))
		}
	}
	return columns
}

// fit narrows columns where possible, and leaves out the least important ones, until
// the table is no wider than the screen.
func (s *screen) fit(columns []laneColumn) []laneColumn {
	for {
		total, worst, narrow := -2, 0, -1
		for i, c := range columns {
			total += c.width + 2
			if c.rank > columns[worst].rank {
				worst = i
			}
		}
		over := total - s.w
		if over <= 0 {
			return columns
		}
		for i, c := range columns {
			if c.least > 0 && c.width > c.least && (narrow < 0 || c.rank > columns[narrow].rank) {
				narrow = i
			}
		}
		switch {
		case narrow >= 0:
			columns[narrow].width = max(columns[narrow].least, columns[narrow].width-over)
		case columns[worst].rank > 0:
			columns = slices.Delete(columns, worst, worst+1)
		default:
			return columns // two columns that don't fit are cut off
		}
	}
}
