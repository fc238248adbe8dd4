// Package rig is what the programs and tests of e2e share: processes with their logs,
// and free addresses.
package rig

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/dedupd/dedupd/internal/child"
)

// Start starts a program that ends when this one does. Both its outputs are appended to
// the log, a file.
func Start(cmd *exec.Cmd, log string) (*child.Process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	// A group of its own: Ctrl-C is for this program, which decides what follows.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return child.Start(cmd, syscall.SIGKILL)
}

// Stop sends SIGTERM, and demands an end with code 0 within the grace. After it the
// process is killed.
func Stop(p *child.Process, grace time.Duration) error {
	p.Signal(syscall.SIGTERM)
	if !p.Wait(grace) {
		p.Kill()
		return fmt.Errorf("process %d is still there %s after SIGTERM", p.Pid(), grace)
	}
	if err := p.Err(); err != nil {
		return fmt.Errorf("process %d didn't end well after SIGTERM: %w", p.Pid(), err)
	}
	return nil
}

// Tail is the end of a log.
func Tail(log string) string {
	text, err := os.ReadFile(log)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-3000):])
}

// FreeAddresses finds host:port on this machine where nobody listens. Somebody may
// before they are used.
func FreeAddresses(n int) ([]string, error) {
	all := make([]string, n)
	for i := range all {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // all at the end, so that they differ
		all[i] = l.Addr().String()
	}
	return all, nil
}

// FreeAddress finds one.
func FreeAddress() (string, error) {
	all, err := FreeAddresses(1)
	if err != nil {
		return "", err
	}
	return all[0], nil
}
