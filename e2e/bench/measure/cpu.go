// Package measure holds what the benchmarks have in common: the processor time
// of processes, medians, and reports in Markdown.
package measure

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// CPU is the processor time that processes have used so far. Unlike a rate it
// hardly depends on what else the machine does. It is read from /proc: elsewhere
// than on Linux it is 0.
type CPU = time.Duration

// CPUOf is the time of one process.
func CPUOf(pid int) CPU {
	used, _ := stat(fmt.Sprintf("/proc/%d/stat", pid))
	return used
}

// CPUOfChildren is the time of a process's children, such as the backends of a
// Postgres. Of those that have ended it knows nothing.
func CPUOfChildren(pid int) (used CPU) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0
	}
	for _, file := range files {
		if c, parent := stat(file); parent == pid {
			used += c
		}
	}
	return used
}

// stat reads a process's times, in hundredths of a second, and its parent.
func stat(file string) (used CPU, parent int) {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0, -1 // it has ended
	}
	// pid (name) state ppid …; the name may hold anything.
	fields := strings.Fields(string(data)[strings.LastIndexByte(string(data), ')')+1:])
	if len(fields) < 13 {
		return 0, -1
	}
	user, _ := strconv.ParseInt(fields[11], 10, 64)
	system, _ := strconv.ParseInt(fields[12], 10, 64)
	parent, err = strconv.Atoi(fields[1])
	if err != nil {
		parent = -1
	}
	return time.Duration(user+system) * time.Second / 100, parent
}

// PeakMemory is the most memory that a process has had resident, in bytes; 0
// where that isn't known.
func PeakMemory(pid int) int64 {
	text := firstLine(fmt.Sprintf("/proc/%d/status", pid), "VmHWM")
	kib, err := strconv.ParseInt(strings.TrimSuffix(text, " kB"), 10, 64)
	if err != nil {
		return 0
	}
	return kib << 10
}
