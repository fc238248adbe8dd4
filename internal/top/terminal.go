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

// Once makes a frame of two samples, an interval apart.
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

// Each gives a frame for each interval until the context ends or show fails. What
// can't be read is told to failed, and tried again with the next interval.
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

// IsTerminal tells whether a screen can be drawn on out, and keys be read from in.
func IsTerminal(in, out *os.File) bool {
	return term.IsTerminal(int(in.Fd())) && term.IsTerminal(int(out.Fd())) && os.Getenv("TERM") != "dumb" // #nosec G115: a file descriptor is small
}

const (
	// enterScreen takes the other screen, without a cursor and without wrapping;
	// leaveScreen gives back what was there.
	enterScreen = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
	leaveScreen = "\x1b[?7h\x1b[?25h\x1b[?1049l"
)

// terminal is one that has to be given back as it was.
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

// leave may be called again.
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

// reading is what came of a sample.
type reading struct {
	sample dedup.Sample
	err    error
	at     time.Time
}

// Run shows the scope on a terminal until somebody quits, or a signal ends it. The
// terminal is as it was afterwards, also when it panics. Only the terminal itself
// is a reason for an error: while the database can't be read, the last screen stays
// and says so.
func Run(ctx context.Context, in, out *os.File, sample Sampler, interval time.Duration, v View) (err error) {
	t := &terminal{in: in, out: out}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, os.Interrupt, syscall.SIGHUP)
	defer signal.Stop(ended)
	resized, resumed := make(chan os.Signal, 1), make(chan os.Signal, 1)
	notifyTerminal(resized, resumed)
	defer signal.Stop(resized)
	defer signal.Stop(resumed)
	if err := t.enter(); err != nil {
		return err
	}
	// A panic goes on as one, when the terminal can show it.
	defer t.leave()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	panicked := make(chan error, 2)
	guard := func(f func()) {
		go func() {
			defer func() {
				if p := recover(); p != nil {
					panicked <- fmt.Errorf("panic: %v\n%s", p, debug.Stack())
				}
			}()
			f()
		}()
	}
	readings, keys := make(chan reading), make(chan key)
	guard(func() { sampleAll(ctx, sample, interval, readings) })
	guard(func() { readKeys(ctx, in, keys) })

	var tracker Tracker
	var latest *Frame
	good := time.Now()
	for {
		if err := t.draw(v); err != nil {
			return err
		}
		width, height := t.size()
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case err := <-panicked:
			return err
		case <-ended:
			return nil
		case <-resized:
		case <-resumed:
			t.leave()
			if err := t.enter(); err != nil {
				return err
			}
		case r := <-readings:
			if r.err != nil {
				v.Away, v.AwayFor = oneLine(r.err), r.at.Sub(good)
				break
			}
			good, v.Away = r.at, ""
			latest = tracker.Next(r.sample)
			if !v.Paused {
				v.Frame = latest
			}
		case k, open := <-keys:
			switch {
			case !open: // the terminal is gone
				return nil
			case k == keyStop:
				t.leave()
				suspend()
			case v.press(k, LaneRows(v, width, height)):
				return nil
			case !v.Paused && latest != nil:
				v.Frame = latest
			}
		}
	}
}

// oneLine is an error in one line: of a connection it has one for each address.
func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

func (t *terminal) draw(v View) error {
	if t.before == nil {
		return nil // suspended
	}
	width, height := t.size()
	var b strings.Builder
	b.WriteString("\x1b[?2026h\x1b[H") // at once, where the terminal knows how
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
