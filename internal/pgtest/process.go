package pgtest

import (
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// account is who runs Postgres.
type account struct {
	uid, gid int
	switched bool // it isn't our own account
}

// nobody is the uid and gid that stand for "no one in particular" on Linux.
const nobody = 65534

func ownAccount() account {
	if os.Geteuid() == 0 {
		return account{uid: nobody, gid: nobody, switched: true}
	}
	return account{uid: os.Geteuid(), gid: os.Getegid()}
}

// own gives a file to the account.
func (a account) own(path string) error {
	if !a.switched {
		return nil
	}
	return os.Lchown(path, a.uid, a.gid)
}

func (a account) attributes() *syscall.SysProcAttr {
	// A group of its own: Ctrl-C in a terminal is for the program that started
	// the server, which may still need it.
	attr := &syscall.SysProcAttr{Setpgid: true}
	if a.switched {
		attr.Credential = &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
	}
	return attr
}

func environment() []string {
	return []string{"PATH=/usr/local/bin:/usr/bin:/bin", "LC_ALL=C", "TZ=UTC"}
}

// process is a child that ends when this process does.
type process struct {
	pid  int
	done chan struct{}
	err  error // valid once done is closed
}

func startProcess(program string, args []string, log *os.File, a account) (*process, error) {
	cmd := exec.Command(program, args...)
	cmd.Dir = "/"
	cmd.Env = environment()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = a.attributes()
	endWithParent(cmd.SysProcAttr)
	p := &process{done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The kernel sends the signal when the parent's thread ends, not its
		// process: this thread has to stay as long as the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			p.pid = cmd.Process.Pid
		}
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// result is how the process ended; nil while it runs or when it ended well.
func (p *process) result() error {
	if p.ended() {
		return p.err
	}
	return nil
}

// wait returns whether the process has ended within d.
func (p *process) wait(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-p.done:
		return true
	case <-t.C:
		return false
	}
}
