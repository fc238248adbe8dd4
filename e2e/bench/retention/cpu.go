package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cpu is the processor time that was used: by the workers, which are this
// process, and by Postgres. Unlike a rate it hardly depends on what else the
// machine does.
type cpu struct{ workers, postgres time.Duration }

func (c cpu) since(before cpu) cpu {
	return cpu{c.workers - before.workers, c.postgres - before.postgres}
}

func (c cpu) total() time.Duration { return c.workers + c.postgres }

// used reads the clocks of this process and of the server's processes. Those of
// a backend that has ended are missing; none ends during a run.
func (b *bench) used() (c cpu) {
	var r syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &r) == nil {
		c.workers = time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return c
	}
	server := strconv.Itoa(b.server.Pid())
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		// pid (name) state ppid …; the name may hold anything.
		fields := strings.Fields(string(data)[strings.LastIndexByte(string(data), ')')+1:])
		if len(fields) > 12 && fields[1] == server {
			user, _ := strconv.ParseInt(fields[11], 10, 64)
			system, _ := strconv.ParseInt(fields[12], 10, 64)
			c.postgres += time.Duration(user+system) * time.Second / 100
		}
	}
	return c
}

// each is the time a message took, in microseconds.
func (c cpu) each(messages int) (workers, postgres float64) {
	return float64(c.workers.Microseconds()) / float64(messages), float64(c.postgres.Microseconds()) / float64(messages)
}

func micros(v float64) string { return fmt.Sprintf("%.1f µs", v) }
