package cli

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// progress shows how far a long command has come: on a terminal one line that it
// redraws, else a new line every few seconds.
type progress struct {
	out      io.Writer
	unit     string // of the items
	terminal bool
	started  time.Time
	shown    time.Time

	total int64 // items, estimated; 0: not known
	input *meter
}

func newProgress(w io.Writer, unit string) *progress {
	now := time.Now()
	return &progress{out: w, unit: unit, terminal: isTerminal(w) && os.Getenv("TERM") != "dumb", started: now, shown: now}
}

// expect sets roughly how many items there are.
func (p *progress) expect(total int64) { p.total = total }

// measure measures progress by the share of a file that was read.
func (p *progress) measure(r io.Reader) io.Reader {
	p.input = &meter{Reader: r}
	if f, ok := r.(*os.File); ok {
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
			p.input.size = info.Size()
		}
	}
	return p.input
}

// meter counts bytes read.
type meter struct {
	io.Reader
	read, size int64
}

func (m *meter) Read(b []byte) (int, error) {
	n, err := m.Reader.Read(b)
	m.read += int64(n)
	return n, err
}

// share is how much is done, from 0 to 1; below 0: not known.
func (p *progress) share(done int64) float64 {
	switch {
	case p.input != nil && p.input.size > 0:
		return min(1, float64(p.input.read)/float64(p.input.size))
	case p.total > 0 && done <= p.total: // beyond it the estimate was wrong
		return float64(done) / float64(p.total)
	}
	return -1
}

func (p *progress) update(done int64) {
	every := 5 * time.Second
	if p.terminal {
		every = 100 * time.Millisecond
	}
	if time.Since(p.shown) < every {
		return
	}
	p.shown = time.Now()
	if p.terminal {
		fmt.Fprintf(p.out, "\r%s\x1b[K", p.line(done, time.Since(p.started)))
		return
	}
	fmt.Fprintln(p.out, p.line(done, time.Since(p.started)))
}

func (p *progress) line(done int64, elapsed time.Duration) string {
	text := fmt.Sprintf("%d %s, %.0f/s", done, p.unit, float64(done)/elapsed.Seconds())
	share := p.share(done)
	if share < 0 {
		return text
	}
	const width = 30
	full := int(width * share)
	if p.terminal {
		text = "[" + strings.Repeat("#", full) + strings.Repeat(".", width-full) + "] " + text
	}
	if left := elapsed.Seconds()/share - elapsed.Seconds(); share > 0.01 {
		return fmt.Sprintf("%s, %.0f %%, %s left", text, 100*share, age(&left))
	}
	return fmt.Sprintf("%s, %.0f %%", text, 100*share)
}

// end clears the terminal's line.
func (p *progress) end() {
	if p.terminal {
		fmt.Fprint(p.out, "\r\x1b[K")
	}
}
