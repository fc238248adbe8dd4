package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// The forms of output.
const (
	outputTable = "table"
	outputJSON  = "json"
)

// writeJSON writes a value for programs: indented, one document. An empty list
// is [].
func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// column is a column of a table; numbers are aligned right.
type column struct {
	title string
	right bool
}

func left(title string) column  { return column{title, false} }
func right(title string) column { return column{title, true} }

// table is output for people: aligned columns with titles.
type table struct {
	columns []column
	rows    [][]string
}

func (t *table) add(cells ...any) {
	row := make([]string, len(t.columns))
	for i := range row {
		row[i] = oneLine(fmt.Sprint(cells[i]))
	}
	t.rows = append(t.rows, row)
}

func (t *table) write(w io.Writer) error {
	widths := make([]int, len(t.columns))
	titles := make([]string, len(t.columns))
	for i, c := range t.columns {
		titles[i] = c.title
		widths[i] = utf8.RuneCountInString(c.title)
		for _, row := range t.rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
	}
	var b strings.Builder
	line := func(cells []string, before, after string) {
		var l strings.Builder
		for i, cell := range cells {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if i > 0 {
				l.WriteString("  ")
			}
			if t.columns[i].right {
				l.WriteString(pad + cell)
			} else {
				l.WriteString(cell + pad)
			}
		}
		b.WriteString(before + strings.TrimRight(l.String(), " ") + after + "\n")
	}
	if colourful(w) {
		line(titles, "\x1b[1m", "\x1b[0m")
	} else {
		line(titles, "", "")
	}
	for _, row := range t.rows {
		line(row, "", "")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// colourful reports whether emphasis is allowed: on a terminal whose user didn't
// forbid it.
func colourful(w io.Writer) bool {
	return isTerminal(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// oneLine makes any text fit a cell: what a message contains must neither break the
// table nor control the terminal.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
}

// shorten cuts a text to n characters and marks the cut.
func shorten(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// timestamp formats a time in UTC, to the second; "-": there is none.
func timestamp(t *time.Time) string {
	if t == nil || t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}
