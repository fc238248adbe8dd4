package pgtest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// cacheFolder makes a folder of our own in the temporary folder, or in the
// system's if the account that runs Postgres can't reach ours.
func cacheFolder(name string) (string, error) {
	parent := os.TempDir()
	if ownAccount().switched && !isReachable(parent) {
		parent = "/tmp"
	}
	folder := filepath.Join(parent, name)
	if err := os.Mkdir(folder, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	// Its name can be foreseen: somebody else may have been faster.
	info, err := os.Lstat(folder)
	if err != nil {
		return "", err
	}
	if s, ok := info.Sys().(*syscall.Stat_t); !ok || !info.IsDir() || int(s.Uid) != os.Geteuid() {
		return "", fmt.Errorf("%s isn't a folder of ours: remove it, or set TMPDIR", folder)
	}
	return folder, os.Chmod(folder, 0o755) // #nosec: others may look, not write
}

// isReachable reports whether every account may pass through the folder.
func isReachable(folder string) bool {
	for {
		info, err := os.Stat(folder)
		if err != nil || info.Mode()&0o001 == 0 {
			return false
		}
		parent := filepath.Dir(folder)
		if parent == folder {
			return true
		}
		folder = parent
	}
}

// lockFile takes a lock that ends when the file is closed, or the process ends.
// Without wait it fails if somebody holds it.
func lockFile(path string, wait bool) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	how := syscall.LOCK_EX
	if !wait {
		how |= syscall.LOCK_NB
	}
	for {
		err = syscall.Flock(int(f.Fd()), how)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// openToAll lets every account read a tree, whatever our umask is.
func openToAll(root string) error {
	return filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.Type()&fs.ModeSymlink != 0 {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		mode := info.Mode().Perm() | 0o444
		if e.IsDir() || mode&0o100 != 0 {
			mode |= 0o111
		}
		return os.Chmod(path, mode)
	})
}

// copyFolder copies a tree of folders and plain files and gives it to the
// account.
func copyFolder(from, to string, a account) error {
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		if e.IsDir() {
			if err := os.Mkdir(target, 0o700); err != nil {
				return err
			}
		} else if err := copyFile(path, target); err != nil {
			return err
		}
		return a.own(target)
	})
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
