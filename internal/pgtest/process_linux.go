package pgtest

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/dedupd/dedupd/internal/child"
)

// killTree kills a postmaster and its backends. Backends live in sessions of
// their own and survive their postmaster for a moment, time enough for a commit
// that nobody expects after the crash.
func killTree(p *child.Process) error {
	_ = syscall.Kill(p.Pid(), syscall.SIGSTOP) // it forks no more
	children := childrenOf(p.Pid())
	_ = syscall.Kill(p.Pid(), syscall.SIGKILL)
	for _, c := range children {
		_ = syscall.Kill(c, syscall.SIGKILL)
	}
	if !p.Wait(stopTimeout) {
		return errors.New("kill postgres: it is still there")
	}
	deadline := time.Now().Add(stopTimeout)
	for _, c := range children {
		for isAlive(c) {
			if time.Now().After(deadline) {
				return fmt.Errorf("kill postgres: its process %d is still there", c)
			}
			time.Sleep(time.Millisecond)
		}
	}
	return nil
}

// childrenOf lists the processes whose parent is pid.
func childrenOf(pid int) []int {
	var children []int
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, e := range entries {
		child, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if _, parent := status(child); parent == pid {
			children = append(children, child)
		}
	}
	return children
}

func isAlive(pid int) bool {
	state, _ := status(pid)
	return state != "" && state != "Z" && state != "X"
}

// status returns a process's state letter and its parent; empty if it is gone.
func status(pid int) (state string, parent int) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0
	}
	// The name, in brackets, may hold anything; the rest are plain words.
	f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(f) < 2 {
		return "", 0
	}
	parent, _ = strconv.Atoi(f[1])
	return f[0], parent
}

// removeSharedMemory frees the small System V segment that a killed postmaster
// leaves behind. There is a limit to how many a machine may have.
func removeSharedMemory(pidFile string) {
	text, err := os.ReadFile(pidFile)
	if err != nil {
		return
	}
	lines := strings.Split(string(text), "\n")
	if len(lines) < 7 {
		return
	}
	f := strings.Fields(lines[6]) // key and id
	if len(f) != 2 {
		return
	}
	if id, err := strconv.Atoi(f[1]); err == nil {
		const remove = 0 // IPC_RMID
		_, _, _ = syscall.Syscall(syscall.SYS_SHMCTL, uintptr(id), remove, 0)
	}
}
