package top

import (
	"fmt"
	"math"
	"strings"
	"time"
	"unicode"

	"golang.org/x/text/width"
)

// columnsOf is how many columns of a terminal a character needs.
func columnsOf(r rune) int {
	if r < 0x300 {
		return 1 // Latin, which nearly all of it is
	}
	if unicode.In(r, unicode.Mn, unicode.Me) {
		return 0 // it stands on the one before
	}
	switch width.LookupRune(r).Kind() {
	case width.EastAsianWide, width.EastAsianFullwidth:
		return 2
	}
	return 1
}

func widthOf(s string) (n int) {
	for _, r := range s {
		n += columnsOf(r)
	}
	return n
}

// clean replaces everything that could control the terminal.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
}

// cut shortens a text to n columns and marks the cut.
func cut(s string, n int, end string) string {
	if widthOf(s) <= n {
		return s
	}
	n -= widthOf(end)
	if n < 0 {
		return ""
	}
	var b strings.Builder
	for _, r := range s {
		if n -= columnsOf(r); n < 0 {
			break
		}
		b.WriteRune(r)
	}
	return b.String() + end
}

// cutFront shortens from the front: names differ at their end.
func cutFront(s string, n int, begin string) string {
	if widthOf(s) <= n {
		return s
	}
	n -= widthOf(begin)
	if n < 0 {
		return ""
	}
	all := []rune(s)
	i := len(all)
	for i > 0 && n >= columnsOf(all[i-1]) {
		i--
		n -= columnsOf(all[i])
	}
	for i < len(all) && columnsOf(all[i]) == 0 {
		i++ // a mark without what it stood on
	}
	return begin + string(all[i:])
}

func pad(s string, n int, right bool) string {
	space := strings.Repeat(" ", max(0, n-widthOf(s)))
	if right {
		return space + s
	}
	return s + space
}

// number formats a number for people, in powers of 1000 and three digits.
func number(f float64) string {
	for _, unit := range []string{"", "k", "M", "G", "T"} {
		switch {
		case unit == "" && f == 0:
			return "0"
		case unit == "" && f < 9.95:
			return fmt.Sprintf("%.1f", f)
		case unit != "" && f < 99.95:
			return fmt.Sprintf("%.1f%s", f, unit)
		case f < 999.5:
			return fmt.Sprintf("%.0f%s", f, unit)
		}
		f /= 1000
	}
	return "many"
}

// whole formats a count for people, exact while that is short.
func whole(n int64) string {
	if n < 100_000 {
		return fmt.Sprint(n)
	}
	return number(float64(n))
}

func known(n *int64) string {
	if n == nil {
		return "-"
	}
	return whole(*n)
}

// span formats a time for people, in its two largest units.
func span(d time.Duration) string {
	if d < 0 {
		return "-"
	}
	units := []struct {
		size time.Duration
		name string
	}{{24 * time.Hour, "d"}, {time.Hour, "h"}, {time.Minute, "m"}, {time.Second, "s"}}
	for i, u := range units {
		if d < u.size && u.size > time.Second {
			continue
		}
		text := fmt.Sprintf("%d%s", d/u.size, u.name)
		if i+1 < len(units) {
			if rest := d % u.size / units[i+1].size; rest > 0 {
				text += fmt.Sprintf("%d%s", rest, units[i+1].name)
			}
		}
		return text
	}
	return "0s"
}

func percent(share float64) string {
	if share > 0 && share < 0.0005 {
		return "<0.1 %"
	}
	return fmt.Sprintf("%.1f %%", 100*share)
}

// spark draws values as a line of n columns, the newest at its right, from 0 to the
// largest.
func spark(values []float64, n int, ramp []rune, largest float64) string {
	values = values[max(0, len(values)-n):]
	var b strings.Builder
	b.WriteString(strings.Repeat(" ", n-len(values)))
	for _, v := range values {
		i := 0
		if largest > 0 && v > 0 {
			// The lowest step means nothing at all: a little looks different from none.
			i = 1 + int(math.Min(float64(len(ramp)-2), v/largest*float64(len(ramp)-1)))
		}
		b.WriteRune(ramp[min(i, len(ramp)-1)])
	}
	return b.String()
}
