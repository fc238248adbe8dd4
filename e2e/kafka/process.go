package kafka

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// process is a child process that dies with us.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error         // how it ended; valid once done is closed
}

// start starts a program with both outputs appended to a file.
func start(out, name string, args ...string) (*process, error) {
	f, err := os.OpenFile(out, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p := &process{cmd: exec.Command(name, args...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = f, f
	p.cmd.SysProcAttr = dieWithParent()

	started := make(chan error)
	go func() {
		// The kernel's "parent" in the parent-death signal is the thread that
		// started the child: it must live as long as the child does.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// end signals the process and waits for its end; after the grace it is killed.
// How it ended doesn't matter.
func (p *process) end(sig syscall.Signal, grace time.Duration) error {
	_ = p.cmd.Process.Signal(sig) // it may have ended by itself
	select {
	case <-p.done:
		return nil
	case <-time.After(grace):
	}
	_ = p.cmd.Process.Kill()
	select {
	case <-p.done:
		return nil
	case <-time.After(grace):
		return fmt.Errorf("process %d does not end", p.cmd.Process.Pid)
	}
}
