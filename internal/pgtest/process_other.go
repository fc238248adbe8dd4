//go:build unix && !linux

package pgtest

import (
	"errors"
	"syscall"
)

// Only Linux tells a child of its parent's death: elsewhere a test binary that
// is killed leaves its server behind.
func endWithParent(*syscall.SysProcAttr) {}

func killTree(p *process) error {
	_ = syscall.Kill(p.pid, syscall.SIGKILL)
	if !p.wait(stopTimeout) {
		return errors.New("kill postgres: it is still there")
	}
	return nil
}

func removeSharedMemory(string) {}
