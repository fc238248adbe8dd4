package e2e

import (
	"fmt"
	"io"
	"maps"
	"os/exec"
	"sync"
	"syscall"

	"github.com/dedupd/dedupd/internal/child"
)

// running are the children that may not have ended: none of them may outlive the
// tests.
var running struct {
	sync.Mutex
	all map[*child.Process]string
}

func startProcess(name string, cmd *exec.Cmd, stdout, stderr io.Writer) (*child.Process, error) {
	cmd.Stdout, cmd.Stderr = stdout, stderr
	// A group of its own: Ctrl-C is for the tests, which then take down theirs.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p, err := child.Start(cmd, syscall.SIGKILL)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	running.Lock()
	defer running.Unlock()
	if running.all == nil {
		running.all = map[*child.Process]string{}
	}
	maps.DeleteFunc(running.all, func(p *child.Process, _ string) bool { return p.Ended() })
	running.all[p] = name
	return p, nil
}

// stopAll ends what tests have left, and names it.
func stopAll() (left []string) {
	running.Lock()
	defer running.Unlock()
	for p, name := range running.all {
		if !p.Ended() {
			left = append(left, fmt.Sprintf("%s (process %d)", name, p.Pid()))
			p.Kill()
		}
	}
	return left
}
