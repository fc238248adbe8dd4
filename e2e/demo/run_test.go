package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// output is a screen that isn't a terminal, for tests.
type output struct {
	mu sync.Mutex
	bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.Buffer.Write(p)
}

func (o *output) text() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.String()
}

func (o *output) screen() *screen {
	return &screen{out: o, width: func() int { return 0 }, every: time.Second}
}

// script is a worker of our own making.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "dedupd")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// folderOf returns the folder that the demo said it works in.
func folderOf(t *testing.T, out string) string {
	t.Helper()
	m := regexp.MustCompile(`-c (\S+)/dedupd\.yaml`).FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("the demo doesn't say where its configuration is:\n%s", out)
	}
	return m[1]
}

func isGone(t *testing.T, folder string) {
	t.Helper()
	if _, err := os.Stat(folder); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", folder, err)
	}
}

func TestAWorkerThatFails(t *testing.T) {
	needServices(t)
	o, err := parse([]string{"-messages", "1000", "-dedupd", script(t, "echo no such luck >&2\nexit 3\n")})
	if err != nil {
		t.Fatal(err)
	}
	var out output
	err = run(t.Context(), o, out.screen())
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "no such luck") {
		t.Errorf("got %v, want the exit status and the log", err)
	}
	isGone(t, folderOf(t, out.text()))
}

func TestAWorkerThatDoesNothing(t *testing.T) {
	needServices(t)
	o, err := parse([]string{"-messages", "1000", "-rate", "0", "-timeout", "2s", "-dedupd", script(t, "exec sleep 60\n")})
	if err != nil {
		t.Fatal(err)
	}
	var out output
	began := time.Now()
	err = run(t.Context(), o, out.screen())
	if err == nil || !strings.Contains(err.Error(), "only 0 of 800 orders have landed") || time.Since(began) > 20*time.Second {
		t.Errorf("after %s: %v, want to be told that nothing landed", time.Since(began), err)
	}
	isGone(t, folderOf(t, out.text()))
}

// Ctrl-C in the middle stops the worker by SIGTERM and leaves nothing.
func TestInterrupt(t *testing.T) {
	needServices(t)
	told := filepath.Join(t.TempDir(), "told")
	o, err := parse([]string{"-dedupd", script(t, "echo $$ >"+told+"\ntrap 'echo drained >>"+told+"; exit 0' TERM\nwhile :; do sleep 0.05; done\n")})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var out output
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, o, out.screen()) }()
	deadline := time.Now().Add(60 * time.Second)
	for {
		if text, err := os.ReadFile(told); err == nil && len(text) > 0 {
			break
		}
		select {
		case err := <-ended:
			t.Fatal(err)
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatal("the worker wasn't started")
		}
	}
	cancel()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want that it was cancelled", err)
		}
	case <-time.After(15 * time.Second):
		t.Fatal("the demo doesn't end")
	}
	text, err := os.ReadFile(told)
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(text))
	if len(f) != 2 || f[1] != "drained" {
		t.Errorf("the worker told %q, want that it drained", f)
	}
	if pid, err := strconv.Atoi(f[0]); err != nil || syscall.Kill(pid, 0) == nil {
		t.Errorf("worker %s is still there", f[0])
	}
	isGone(t, folderOf(t, out.text()))
}

func TestLeftOverFoldersAreRemoved(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	inUse, release, err := newFolder()
	if err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(os.TempDir(), "dedupd-demo-left")
	if err := os.Mkdir(left, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(left, "lock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	other, releaseOther, err := newFolder()
	if err != nil {
		t.Fatal(err)
	}
	isGone(t, left)
	if _, err := os.Stat(inUse); err != nil {
		t.Errorf("a folder in use was removed: %v", err)
	}
	if err := errors.Join(release(), releaseOther()); err != nil {
		t.Error(err)
	}
	isGone(t, inUse)
	isGone(t, other)
}
