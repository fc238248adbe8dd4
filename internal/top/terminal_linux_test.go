package top

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dedupd/dedupd/dedup"
)

// pty makes a terminal of 80 x 24: what is written to user is typed, and what the
// program shows is read from it.
func pty(t *testing.T) (user, program *os.File) {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	user = os.NewFile(uintptr(fd), "ptmx")
	t.Cleanup(func() { user.Close() })
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if program, err = os.OpenFile(fmt.Sprint("/dev/pts/", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { program.Close() })
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80}); err != nil {
		t.Fatal(err)
	}
	return user, program
}

// TestTheTerminalIsGivenBack ends in every possible way.
func TestTheTerminalIsGivenBack(t *testing.T) {
	broken := func(context.Context) (dedup.Sample, error) { panic("ouch") }
	works := func(context.Context) (dedup.Sample, error) { return fixture(3, 1).Sample, nil }
	for name, c := range map[string]struct {
		sample Sampler
		leave  func(user *os.File, cancel func())
		want   string // of the error
	}{
		"q":         {works, func(user *os.File, _ func()) { _, _ = user.WriteString("q") }, ""},
		"ctrl-c":    {works, func(user *os.File, _ func()) { _, _ = user.WriteString("\x03") }, ""},
		"a signal":  {works, func(*os.File, func()) { _ = syscall.Kill(os.Getpid(), syscall.SIGTERM) }, ""},
		"a context": {works, func(_ *os.File, cancel func()) { cancel() }, context.Canceled.Error()},
		"a panic":   {broken, func(*os.File, func()) {}, "ouch"},
	} {
		t.Run(name, func(t *testing.T) {
			user, program := pty(t)
			before, err := unix.IoctlGetTermios(int(program.Fd()), unix.TCGETS)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			go func() {
				ended <- Live{In: program, Out: program, Sample: c.sample, Interval: 10 * time.Millisecond}.Run(ctx, view(nil))
			}()
			shown := make(chan string, 1)
			go func() {
				var all strings.Builder
				left := false
				buffer := make([]byte, 4096)
				for {
					n, err := user.Read(buffer)
					all.Write(buffer[:n])
					if !left && (strings.Contains(all.String(), "orders/2") || c.want == "ouch") {
						left = true
						c.leave(user, cancel)
					}
					if err != nil || strings.Contains(all.String(), leaveScreen) {
						shown <- all.String()
						return
					}
				}
			}()
			select {
			case err = <-ended:
			case <-time.After(time.Minute):
				t.Fatal("it doesn't end")
			}
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if text := <-shown; !strings.HasPrefix(text, enterScreen) || !strings.HasSuffix(text, leaveScreen) {
				t.Errorf("what was shown: %q", text)
			}
			after, err := unix.IoctlGetTermios(int(program.Fd()), unix.TCGETS)
			if err != nil || *after != *before {
				t.Errorf("%v; the terminal was %+v and is %+v", err, before, after)
			}
		})
	}
}

func TestOnceAndEach(t *testing.T) {
	n := 0
	sample := func(context.Context) (dedup.Sample, error) {
		n++
		if n == 3 {
			return dedup.Sample{}, errors.New("away")
		}
		return dedup.Sample{Now: noon.Add(time.Duration(n) * time.Second)}, nil
	}
	f, err := Once(t.Context(), sample, time.Millisecond)
	if err != nil || f.Interval != time.Second {
		t.Fatalf("%+v, %v", f, err)
	}
	if _, err := Once(t.Context(), sample, time.Millisecond); err == nil {
		t.Error("what can't be read passes for read")
	}
	frames, failures := 0, 0
	n = 0
	stop := errors.New("enough")
	err = Each(t.Context(), sample, time.Millisecond, func(f *Frame) error {
		if frames++; frames == 3 {
			return stop
		}
		return nil
	}, func(error) { failures++ })
	if !errors.Is(err, stop) || frames != 3 || failures != 1 {
		t.Errorf("%v after %d frames and %d failures", err, frames, failures)
	}
}
