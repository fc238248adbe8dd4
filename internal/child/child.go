// Package child starts processes that end when this one does, even by kill -9
// or a test's time-out. It is for test support and the demo: nothing in the
// product imports it.
package child

import (
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// Process is a child that was started. Its methods may be called by several
// goroutines.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // valid once done is closed
}

// Start starts the command and waits for it in the background. When this process
// is gone, the kernel sends the child the death signal; only Linux does so,
// elsewhere a child outlives a parent that is killed.
func Start(cmd *exec.Cmd, deathSignal syscall.Signal) (*Process, error) {
	endWithParent(cmd, deathSignal)
	p := &Process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The kernel takes the thread that starts the child for its parent: it has
		// to stay as long as the child does.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// Pid of the process, also after its end.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Ended returns whether the process has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Err is how the process ended; nil while it runs or when it ended well.
func (p *Process) Err() error {
	if p.Ended() {
		return p.err
	}
	return nil
}

// Wait returns whether the process has ended within d.
func (p *Process) Wait(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-p.done:
		return true
	case <-t.C:
		return false
	}
}

// Code waits for the end and returns the exit code, -1 after a signal.
func (p *Process) Code() int {
	<-p.done
	return p.cmd.ProcessState.ExitCode()
}

// Signal sends a signal, which a process that has ended doesn't get.
func (p *Process) Signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// Kill is kill -9, and waits for the end: the process isn't asked, and can't
// tidy up.
func (p *Process) Kill() {
	p.Signal(syscall.SIGKILL)
	<-p.done
}
