package kafkatest

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/dedupd/dedupd/internal/child"
)

// launch starts a program that dies with us, with both outputs appended to a file.
func launch(out, name string, args ...string) (*child.Process, error) {
	f, err := os.OpenFile(out, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = f, f
	return child.Start(cmd, syscall.SIGKILL)
}

// end signals the process and waits for its end; after the grace it is killed.
// How it ended doesn't matter.
func end(p *child.Process, sig syscall.Signal, grace time.Duration) error {
	p.Signal(sig) // it may have ended by itself
	if p.Wait(grace) {
		return nil
	}
	p.Signal(syscall.SIGKILL)
	if p.Wait(grace) {
		return nil
	}
	return fmt.Errorf("process %d does not end", p.Pid())
}
