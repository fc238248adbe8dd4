package main

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
)

// newFolder makes the folder for all that the demo writes, and what removes it.
// It also removes those of demos that were killed: one that is at work holds the
// lock in its folder.
func newFolder() (folder string, release func() error, err error) {
	const prefix = "dedupd-demo-"
	old, err := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*"))
	if err != nil {
		return "", nil, err
	}
	for _, left := range old {
		// One without a lock may be about to get it: leave it alone.
		if lock, err := os.OpenFile(filepath.Join(left, "lock"), os.O_RDWR, 0); err == nil {
			if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
				_ = os.RemoveAll(left) // if it isn't ours, it stays
			}
			_ = lock.Close()
		}
	}
	if folder, err = os.MkdirTemp("", prefix); err != nil {
		return "", nil, err
	}
	// Under a name that nobody looks for until it is locked.
	temporary := filepath.Join(folder, "unlocked")
	lock, err := os.OpenFile(temporary, os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		if err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err == nil {
			err = os.Rename(temporary, filepath.Join(folder, "lock"))
		}
	}
	release = func() error { return errors.Join(os.RemoveAll(folder), lock.Close()) }
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(folder))
	}
	return folder, release, nil
}
