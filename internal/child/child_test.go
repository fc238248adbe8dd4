//go:build unix

package child

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const roleEnv = "CHILD_TEST_ROLE"

// The test binary plays parent and child too.
func TestMain(m *testing.M) {
	switch os.Getenv(roleEnv) {
	case "parent":
		cmd := role("child")
		cmd.Stdin, cmd.Stdout = os.Stdin, os.Stdout
		p, err := Start(cmd, syscall.SIGKILL)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(p.Pid())
		os.Exit(p.Code())
	case "child":
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(7)
	}
	os.Exit(m.Run())
}

func role(name string) *exec.Cmd {
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), roleEnv+"="+name)
	cmd.Stderr = os.Stderr
	return cmd
}

func TestKillOfTheParentLeavesNoChild(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux tells a child of its parent's death")
	}
	parent := role("parent")
	stdin, err := parent.StdinPipe() // while it is open nothing else ends the child
	if err != nil {
		t.Fatal(err)
	}
	// Both write to this pipe, so that it ends when both are gone.
	out, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	_ = out.SetReadDeadline(time.Now().Add(20 * time.Second))
	parent.Stdout = w
	err = parent.Start()
	_ = w.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = stdin.Close()
		_ = parent.Wait()
	}()
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal("the parent says: ", line)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Fatalf("the child is gone before its parent: %v", err)
	}
	_ = parent.Process.Kill()
	if _, err := lines.ReadString('\n'); !errors.Is(err, io.EOF) {
		t.Errorf("child %d outlives its parent: %v", pid, err)
	}
}

func TestHowAChildEnds(t *testing.T) {
	begin := func() (*Process, io.Closer) {
		cmd := role("child")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		p, err := Start(cmd, syscall.SIGKILL)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Kill)
		if group, err := syscall.Getpgid(p.Pid()); err != nil || group != p.Pid() {
			t.Errorf("the child is in group %d (%v), want its own: the given attributes are lost", group, err)
		}
		if p.Ended() || p.Wait(time.Millisecond) || p.Err() != nil {
			t.Error("it is told to have ended while it runs")
		}
		return p, stdin
	}
	ended := func(p *Process, code int) {
		t.Helper()
		if !p.Wait(20 * time.Second) {
			t.Fatal("it doesn't end")
		}
		<-p.Done()
		var exit *exec.ExitError
		if !p.Ended() || !errors.As(p.Err(), &exit) || p.Code() != code {
			t.Errorf("ended %t with %v, code %d, want %d", p.Ended(), p.Err(), p.Code(), code)
		}
		p.Signal(syscall.SIGTERM) // to nobody
	}

	p, stdin := begin()
	_ = stdin.Close()
	ended(p, 7)

	p, _ = begin()
	p.Signal(syscall.SIGTERM)
	ended(p, -1)

	p, _ = begin()
	p.Kill()
	ended(p, -1)

	if _, err := Start(exec.Command("/nowhere/to/be/found"), syscall.SIGKILL); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a program that isn't there: %v", err)
	}
}
