package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// screen is where the demo tells what happens: a panel that is drawn again and
// again on a terminal, else a plain line about once a second. It may be used by
// several goroutines.
type screen struct {
	colours
	out   io.Writer
	width func() int // 0: not a terminal
	every time.Duration

	mu    sync.Mutex
	lines int  // of the panel that stands there
	open  bool // the line that stands there has no end yet
	shown time.Time
	past  []snapshot // of the last second or two, for the rates
}

func newScreen(f *os.File, getenv func(string) string) *screen {
	s := &screen{out: f, every: 100 * time.Millisecond}
	s.width = func() int {
		size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ) // #nosec: a file descriptor is small
		if err != nil || getenv("TERM") == "dumb" {
			return 0
		}
		if size.Col == 0 { // a terminal that doesn't know
			return 80
		}
		return int(size.Col)
	}
	if s.width() == 0 {
		s.every = time.Second
		return s
	}
	s.colours = getenv("NO_COLOR") == ""
	return s
}

// say writes a line that stays.
func (s *screen) say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leave()
	fmt.Fprintf(s.out, format+"\n", args...)
}

// show draws a snapshot where the last one stood, unless that was just now.
func (s *screen) show(now snapshot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draw(now)
}

// last draws the snapshot that stays.
func (s *screen) last(now snapshot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shown = time.Time{}
	s.draw(now)
	s.leave()
}

func (s *screen) draw(now snapshot) {
	s.past = append(s.past, now)
	for len(s.past) > 2 && now.elapsed-s.past[1].elapsed > time.Second {
		s.past = s.past[1:]
	}
	if before := s.past[0]; now.elapsed > before.elapsed {
		span := (now.elapsed - before.elapsed).Seconds()
		now.sending = float64(now.sent-before.sent) / span
		now.rate = float64(now.books.Fetched-before.books.Fetched) / span
	}
	if time.Since(s.shown) < s.every {
		return
	}
	s.shown = time.Now()
	width := s.width()
	if width == 0 {
		fmt.Fprintln(s.out, now.line())
		return
	}
	var b strings.Builder
	if s.lines > 0 {
		fmt.Fprintf(&b, "\x1b[%dA\r", s.lines)
	} else {
		b.WriteString("\x1b[?25l") // no cursor while it is drawn
	}
	lines := now.panel(width, s.colours)
	for _, line := range lines {
		b.WriteString(cut(line, width-1) + "\x1b[K\n")
	}
	s.lines = len(lines)
	_, _ = io.WriteString(s.out, b.String())
}

// done leaves the panel as it stands; what is said next comes below.
func (s *screen) done() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leave()
}

func (s *screen) leave() {
	if s.lines > 0 {
		s.lines = 0
		_, _ = io.WriteString(s.out, "\x1b[?25h")
	}
	if s.open {
		s.open = false
		fmt.Fprintln(s.out)
	}
}

// download returns what to call as bytes of something arrive.
func (s *screen) download(what string) func(done, total int64) {
	var last time.Time
	complete := false
	return func(done, total int64) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if complete {
			return
		}
		complete = done == total
		if !complete && time.Since(last) < s.every {
			return
		}
		last = time.Now()
		of := ""
		if total > 0 {
			of = fmt.Sprintf(" of %.1f", float64(total)/(1<<20))
		}
		text := fmt.Sprintf("downloading %s, this once: %.1f%s MiB", what, float64(done)/(1<<20), of)
		if complete {
			text += "; unpacking …"
		}
		width := s.width()
		if width == 0 {
			fmt.Fprintln(s.out, text)
			return
		}
		s.open = true
		fmt.Fprintf(s.out, "\r%s\x1b[K", cut(text, width-1))
	}
}

// cut shortens a line to that many columns; colour codes take none.
func cut(line string, columns int) string {
	var b strings.Builder
	for i := 0; i < len(line); {
		if strings.HasPrefix(line[i:], "\x1b[") {
			end := strings.IndexByte(line[i:], 'm')
			if end < 0 {
				break
			}
			b.WriteString(line[i : i+end+1])
			i += end + 1
			continue
		}
		r, size := utf8.DecodeRuneInString(line[i:])
		i += size
		if columns <= 0 {
			continue // what is left may still hold the code that ends a colour
		}
		columns--
		b.WriteRune(r)
	}
	return b.String()
}
