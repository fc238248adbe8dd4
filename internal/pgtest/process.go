package pgtest

import (
	"os"
	"os/exec"
	"syscall"

	"github.com/dedupd/dedupd/internal/child"
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

// startProcess starts a program of Postgres that ends when this process does: by
// SIGQUIT, at which Postgres ends at once and frees its shared memory.
func startProcess(program string, args []string, log *os.File, a account) (*child.Process, error) {
	cmd := exec.Command(program, args...)
	cmd.Dir = "/"
	cmd.Env = environment()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = a.attributes()
	return child.Start(cmd, syscall.SIGQUIT)
}
