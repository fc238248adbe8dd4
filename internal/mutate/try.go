package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// memory bounds a test process's address space: a loop that a change made endless
// may also be one that collects.
const memory = 16 << 30

// try runs the tests once for each change that they reach, and returns the changes
// that none of them notices.
func (b *built) try(ctx context.Context, o options) ([]*mutant, error) {
	reached := filepath.Join(b.folder, "reached")
	if err := os.WriteFile(reached, nil, 0o600); err != nil {
		return nil, err
	}
	begun := time.Now()
	if said, err := b.tests(ctx, o, 10*time.Minute, "MUTATE_REACHED="+reached); err != nil {
		return nil, fmt.Errorf("its tests fail without a change: %w\n%s", err, said)
	}
	limit := o.limit
	if limit == 0 {
		limit = 5*time.Since(begun) + 10*time.Second
	}
	text, err := os.ReadFile(reached)
	if err != nil {
		return nil, err
	}
	covered := map[int]bool{}
	for _, line := range strings.Fields(string(text)) {
		id, err := strconv.Atoi(line)
		if err != nil {
			return nil, err
		}
		covered[id] = true
	}
	var mu sync.Mutex
	var missed []*mutant
	var all sync.WaitGroup
	slots := make(chan struct{}, max(1, o.jobs))
	for _, m := range b.mutants {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			if ctx.Err() != nil {
				return
			}
			if covered[m.id] {
				if _, err := b.tests(ctx, o, limit, "MUTATE_ID="+strconv.Itoa(m.id)); err != nil {
					return
				}
			} else {
				m.what += " (no test comes here)"
			}
			mu.Lock()
			defer mu.Unlock()
			missed = append(missed, m)
		})
	}
	all.Wait()
	slices.SortFunc(missed, func(x, y *mutant) int { return x.id - y.id })
	return missed, ctx.Err()
}

// tests runs the binary where go test would.
func (b *built) tests(ctx context.Context, o options, limit time.Duration, env ...string) (said string, err error) {
	args := []string{"-test.failfast", "-test.timeout=" + limit.String(), "-test.run=" + o.run}
	if o.short {
		args = append(args, "-test.short")
	}
	ctx, cancel := context.WithTimeout(ctx, limit+10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", append([]string{"-c", fmt.Sprintf(`ulimit -v %d && exec "$0" "$@"`, memory>>10), b.binary}, args...)...)
	cmd.Dir = b.pkg.Dir
	cmd.Env = append(os.Environ(), env...)
	// A change may leave processes behind: they go with their group.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	if cmd.Process != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // the tests have passed, and something still held their output
	}
	return out.String(), err
}
