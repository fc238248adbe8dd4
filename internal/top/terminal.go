package top

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/wait"
)

// Sampler reads a sample. Its context ends when it takes too long.
type Sampler func(ctx context.Context) (dedup.Sample, error)

// sampleTimeout bounds one sample, the making of a connection included.
const sampleTimeout = 5 * time.Second

// Once makes a frame of two samples that are an interval apart.
func Once(ctx context.Context, sample Sampler, interval time.Duration) (*Frame, error) {
	var t Tracker
	first, err := read(ctx, sample)
	if err != nil {
		return nil, err
	}
	t.Next(first)
	if !wait.For(ctx, interval) {
		return nil, context.Cause(ctx)
	}
	second, err := read(ctx, sample)
	if err != nil {
		return nil, err
	}
	return t.Next(second), nil
}

// Each shows a frame for each interval until the context ends or show fails. If a
// sample can't be read, it calls failed and tries again in the next interval.
func Each(ctx context.Context, sample Sampler, interval time.Duration, show func(*Frame) error, failed func(error)) error {
	var t Tracker
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		s, err := read(ctx, sample)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			failed(err)
		default:
			if f := t.Next(s); f.Interval > 0 {
				if err := show(f); err != nil {
					return err
				}
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
	}
}

func read(ctx context.Context, sample Sampler) (dedup.Sample, error) {
	ctx, cancel := context.WithTimeout(ctx, sampleTimeout)
	defer cancel()
	return sample(ctx)
}

// IsTerminal reports whether out can show a screen and in can send keys.
func IsTerminal(in, out *os.File) bool {
	return term.IsTerminal(int(in.Fd())) && term.IsTerminal(int(out.Fd())) && os.Getenv("TERM") != "dumb" // #nosec G115: a file descriptor is small
}

const (
	// enterScreen switches to the alternate screen, without a cursor and without
	// wrapping; leaveScreen switches back.
	enterScreen = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
	leaveScreen = "\x1b[?7h\x1b[?25h\x1b[?1049l"
)

// terminal is a terminal that leave restores.
type terminal struct {
	in, out *os.File
	before  *term.State
}

func (t *terminal) enter() (err error) {
	if t.before, err = term.MakeRaw(int(t.in.Fd())); err != nil { // #nosec G115
		return fmt.Errorf("read single keys: %w", err)
	}
	_, err = io.WriteString(t.out, enterScreen)
	return err
}

// leave may be called more than once.
func (t *terminal) leave() {
	if t.before == nil {
		return
	}
	_, _ = io.WriteString(t.out, leaveScreen)
	_ = term.Restore(int(t.in.Fd()), t.before) // #nosec G115
	t.before = nil
}

func (t *terminal) size() (width, height int) {
	width, height, err := term.GetSize(int(t.out.Fd())) // #nosec G115
	if err != nil || width <= 0 || height <= 0 {
		return 80, 24
	}
	return width, height
}

// reading is the result of a sample.
type reading struct {
	sample dedup.Sample
	err    error
	at     time.Time
}

// Live shows samples on a terminal.
type Live struct {
	In, Out  *os.File
	Sample   Sampler
	Interval time.Duration
}

// Run shows the scope until somebody quits or a signal ends it. It restores the
// terminal, even after a panic. Only the terminal itself makes it fail: while the
// database can't be read, the last screen stays and says so.
func (l Live) Run(ctx context.Context, v View) error {
	s := &session{terminal: terminal{in: l.In, out: l.Out}, view: v, read: time.Now()}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, os.Interrupt, syscall.SIGHUP)
	defer signal.Stop(ended)
	resized, resumed := make(chan os.Signal, 1), make(chan os.Signal, 1)
	notifyTerminal(resized, resumed)
	defer signal.Stop(resized)
	defer signal.Stop(resumed)
	if err := s.enter(); err != nil {
		return err
	}
	// A panic becomes an error, when the terminal can show it.
	defer s.leave()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	panicked := make(chan error, 2)
	readings, keys := make(chan reading), make(chan key)
	guard(panicked, func() { sampleAll(ctx, l.Sample, l.Interval, readings) })
	guard(panicked, func() { readKeys(ctx, l.In, keys) })
	for {
		if err := s.draw(s.view); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case err := <-panicked:
			return err
		case <-ended:
			return nil
		case <-resized:
		case <-resumed:
			s.leave()
			if err := s.enter(); err != nil {
				return err
			}
		case r := <-readings:
			s.sampled(r)
		case k, open := <-keys:
			if !open || s.press(k) { // not open: the terminal is gone
				return nil
			}
		}
	}
}

// guard runs f beside the caller and sends its panic as an error.
func guard(panicked chan<- error, f func()) {
	go func() {
		defer func() {
			if p := recover(); p != nil {
				panicked <- fmt.Errorf("panic: %v\n%s", p, debug.Stack())
			}
		}()
		f()
	}()
}

// session is what Run shows, and where.
type session struct {
	terminal
	view    View
	tracker Tracker
	latest  *Frame
	read    time.Time // of the last sample
}

func (s *session) sampled(r reading) {
	if r.err != nil {
		s.view.Away, s.view.AwayFor = oneLine(r.err), r.at.Sub(s.read)
		return
	}
	s.read, s.view.Away = r.at, ""
	s.latest = s.tracker.Next(r.sample)
	if !s.view.Paused {
		s.view.Frame = s.latest
	}
}

// press applies a key, and returns whether to quit.
func (s *session) press(k key) (quit bool) {
	if k == keyStop {
		s.leave()
		suspend()
		return false
	}
	width, height := s.size()
	if s.view.press(k, LaneRows(s.view, width, height)) {
		return true
	}
	if !s.view.Paused && s.latest != nil {
		s.view.Frame = s.latest
	}
	return false
}

// oneLine puts an error on one line: that of a connection has a line per address.
func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

func (t *terminal) draw(v View) error {
	if t.before == nil {
		return nil // suspended
	}
	width, height := t.size()
	var b strings.Builder
	b.WriteString("\x1b[?2026h\x1b[H") // at once, if the terminal can
	for i, l := range strings.Split(Render(v, width, height), "\n") {
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(l + "\x1b[K")
	}
	b.WriteString("\x1b[J\x1b[?2026l")
	_, err := io.WriteString(t.out, b.String())
	return err
}

func sampleAll(ctx context.Context, sample Sampler, interval time.Duration, to chan<- reading) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		s, err := read(ctx, sample)
		select {
		case to <- reading{s, err, time.Now()}:
		case <-ctx.Done():
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

func readKeys(ctx context.Context, in io.Reader, to chan<- key) {
	defer close(to)
	buffer, rest := make([]byte, 256), ""
	for {
		n, err := in.Read(buffer)
		var keys []key
		keys, rest = parseKeys(rest + string(buffer[:n]))
		for _, k := range keys {
			select {
			case to <- k:
			case <-ctx.Done():
				return
			}
		}
		if err != nil && !errors.Is(err, syscall.EINTR) && !errors.Is(err, syscall.EAGAIN) {
			return
		}
	}
}
