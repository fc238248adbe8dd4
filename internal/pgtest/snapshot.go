package pgtest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Snapshot keeps a copy of the server's data, as a snapshot of its disk does: of
// the same cluster and timeline. The server is down for a moment; clients lose
// their connections. A later copy replaces an earlier one.
func (s *Server) Snapshot() error {
	return s.whileDown(func() error {
		if err := os.RemoveAll(s.snapshotFolder()); err != nil {
			return err
		}
		return copyFolder(s.dataFolder(), s.snapshotFolder(), s.account)
	})
}

// PutBack kills the server and starts it on the copy that Snapshot
// took: whatever was committed since is lost. The copy stays, and may be put back
// again.
func (s *Server) PutBack() error {
	return s.whileDown(func() error {
		if _, err := os.Stat(s.snapshotFolder()); err != nil {
			return fmt.Errorf("there is no snapshot to put back: %w", err)
		}
		if err := os.RemoveAll(s.dataFolder()); err != nil {
			return err
		}
		return copyFolder(s.snapshotFolder(), s.dataFolder(), s.account)
	})
}

func (s *Server) snapshotFolder() string { return filepath.Join(s.folder, "snapshot") }

// whileDown kills the server, does the work, and starts it again. A copy holds no
// pid of a server that is gone.
func (s *Server) whileDown(work func() error) error {
	if err := s.Kill(); err != nil {
		return err
	}
	s.mu.Lock()
	pidFile := filepath.Join(s.dataFolder(), "postmaster.pid")
	removeSharedMemory(pidFile)
	err := os.Remove(pidFile)
	if err == nil || errors.Is(err, os.ErrNotExist) {
		err = work()
	}
	s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("snapshot of postgres: %w", err)
	}
	return s.Restart()
}
