package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// disk is a small one in memory, which can be filled.
type disk struct{ folder string }

// newDisk mounts it, which takes root.
func newDisk(bytes int64) (*disk, error) {
	folder, err := os.MkdirTemp("", "dedupd-disk-")
	if err != nil {
		return nil, err
	}
	out, err := exec.Command("mount", "-t", "tmpfs", "-o", fmt.Sprintf("size=%d,mode=0755", bytes), "dedupd-chaos", folder).CombinedOutput()
	if err != nil {
		_ = os.Remove(folder)
		return nil, fmt.Errorf("mount a small disk, for which the rig must be root: %w: %s", err, out)
	}
	return &disk{folder}, nil
}

func (d *disk) filler() string { return filepath.Join(d.folder, "filler") }

// fill leaves no room.
func (d *disk) fill() error {
	f, err := os.OpenFile(d.filler(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	zeros := make([]byte, 64<<10)
	for size := len(zeros); size > 0; {
		if _, err := f.Write(zeros[:size]); errors.Is(err, syscall.ENOSPC) {
			size /= 2
		} else if err != nil {
			return err
		}
	}
	return nil
}

// free makes room again.
func (d *disk) free() error { return os.Remove(d.filler()) }

func (d *disk) close() error {
	if out, err := exec.Command("umount", "--lazy", d.folder).CombinedOutput(); err != nil {
		return fmt.Errorf("unmount %s: %w: %s", d.folder, err, out)
	}
	return os.Remove(d.folder)
}
