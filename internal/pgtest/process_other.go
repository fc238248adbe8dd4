//go:build unix && !linux

package pgtest

import (
	"errors"
	"syscall"

	"github.com/dedupd/dedupd/internal/child"
)

func killTree(p *child.Process) error {
	_ = syscall.Kill(p.Pid(), syscall.SIGKILL)
	if !p.Wait(stopTimeout) {
		return errors.New("kill postgres: it is still there")
	}
	return nil
}

func removeSharedMemory(string) {}
