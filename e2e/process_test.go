package e2e

import (
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// process is a child that the kernel ends when this test binary ends.
type process struct {
	cmd     *exec.Cmd
	done    chan struct{}
	err     error     // valid once done is closed
	endedAt time.Time // valid once done is closed
}

// running are the children that have not ended: none of them may outlive the
// tests.
var running struct {
	sync.Mutex
	all map[*process]string
}

func startProcess(name string, cmd *exec.Cmd, stdout, stderr io.Writer) (*process, error) {
	p := &process{cmd: cmd, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	// A group of its own: Ctrl-C is for the tests, which then take down theirs.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	endWithParent(cmd.SysProcAttr)
	started := make(chan error)
	go func() {
		// The kernel takes the thread for the parent: it must outlive the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			running.Lock()
			if running.all == nil {
				running.all = map[*process]string{}
			}
			running.all[p] = name
			running.Unlock()
		}
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
		p.endedAt = time.Now()
		running.Lock()
		delete(running.all, p)
		running.Unlock()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// wait returns whether the process has ended within d.
func (p *process) wait(d time.Duration) bool {
	select {
	case <-p.done:
		return true
	case <-time.After(d):
		return false
	}
}

// kill is kill -9: the process isn't asked, and can't tidy up.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// code is the exit code, -1 after a signal.
func (p *process) code() int {
	<-p.done
	return p.cmd.ProcessState.ExitCode()
}

// stopAll ends what tests have left, and names it.
func stopAll() (left []string) {
	running.Lock()
	var all []*process
	for p, name := range running.all {
		all = append(all, p)
		left = append(left, fmt.Sprintf("%s (process %d)", name, p.pid()))
	}
	running.Unlock()
	for _, p := range all {
		p.kill()
	}
	return left
}
