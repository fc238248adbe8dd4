package pgtest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"
)

func start(t *testing.T, o Options) *Server {
	t.Helper()
	if testing.Short() {
		t.Skip("needs Postgres")
	}
	s, err := StartServer(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func query(t *testing.T, url, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	var answer string
	if err := conn.QueryRow(t.Context(), sql).Scan(&answer); err != nil && !errors.Is(err, pgx.ErrNoRows) {
		t.Fatal(err)
	}
	return answer
}

func TestServerSettings(t *testing.T) {
	s := start(t, Options{Fsync: true, Settings: map[string]string{"max_connections": "17"}})
	url := s.URL("postgres")
	for setting, want := range map[string]string{
		"fsync": "on", "full_page_writes": "on", "max_connections": "17",
		"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "TimeZone": "UTC",
	} {
		if got := query(t, url, "SHOW "+setting); got != want {
			t.Errorf("%s is %q, want %q", setting, got, want)
		}
	}
	if _, err := pgx.Connect(t.Context(), strings.Replace(url, s.binaries.password, "guessed", 1)); err == nil {
		t.Error("any password lets one in")
	}
}

// What was committed is there after Kill, what wasn't is not, and nothing of
// the killed server goes on working.
func TestKillAndRestart(t *testing.T) {
	s := start(t, Options{})
	url := s.URL("postgres")
	query(t, url, "SELECT pg_backend_pid()::text")
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	for _, sql := range []string{
		"CREATE TABLE kept (x int)", "INSERT INTO kept VALUES (1)", "BEGIN", "INSERT INTO kept VALUES (2)",
	} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	first := s.Pid()
	children := childrenOf(first)
	if len(children) < 3 {
		t.Fatalf("postmaster %d has children %v; did it start at all?", first, children)
	}
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if s.Pid() != 0 {
		t.Error("Pid isn't 0 after Kill")
	}
	for _, pid := range append(children, first) {
		if isAlive(pid) {
			t.Errorf("process %d is alive after Kill", pid)
		}
	}
	if err := conn.Ping(t.Context()); err == nil {
		t.Error("a connection outlived Kill")
	}
	for range 2 { // after a crash, and while it runs
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
		if got := query(t, url, "SELECT string_agg(x::text, ',') FROM kept"); got != "1" {
			t.Errorf("after Restart the table holds %q, want 1", got)
		}
	}
	if s.Pid() == first || s.Pid() == 0 {
		t.Errorf("pid %d after Restart", s.Pid())
	}
}

func TestStopLeavesNothing(t *testing.T) {
	for _, kill := range []bool{false, true} {
		s := start(t, Options{})
		folder, pid := s.folder, s.Pid()
		segment := sharedMemory(t, s)
		if kill {
			if err := s.Kill(); err != nil {
				t.Fatal(err)
			}
		}
		for range 2 {
			if err := s.Stop(); err != nil {
				t.Fatal(err)
			}
		}
		if isAlive(pid) {
			t.Error("the server is alive")
		}
		if _, err := os.Stat(folder); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("its folder is there: %v", err)
		}
		if table, _ := os.ReadFile("/proc/sysvipc/shm"); strings.Contains(string(table), segment) {
			t.Errorf("killed %t: its shared memory is there", kill)
		}
		if s.Restart() == nil || s.Kill() == nil {
			t.Error("a stopped server was started or killed")
		}
	}
}

// sharedMemory returns what names the server's segment in the kernel's table.
func sharedMemory(t *testing.T, s *Server) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(s.dataFolder(), "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(strings.Split(string(text), "\n")[6])
	segment := fmt.Sprintf("%10s %10s", f[0], f[1])
	if table, _ := os.ReadFile("/proc/sysvipc/shm"); !strings.Contains(string(table), segment) {
		t.Fatalf("segment %q isn't in the kernel's table:\n%s", segment, table)
	}
	return segment
}

// served is what the helper process tells of its server.
type served struct {
	Pid    int
	UID    int // of the server's process
	URL    string
	Folder string
}

// helper is another process with a server, which it leaves to its fate.
func helper() {
	s, err := StartServer(Options{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	info, err := os.Stat(s.dataFolder())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	uid := int(info.Sys().(*syscall.Stat_t).Uid)
	_ = json.NewEncoder(os.Stdout).Encode(served{Pid: s.Pid(), UID: uid, URL: s.URL("postgres"), Folder: s.folder})
	_, _ = io.Copy(io.Discard, os.Stdin) // until the parent ends, or kills us
	if os.Getenv("PGTEST_HELPER") == "panic" {
		panic("as asked")
	}
	os.Exit(0)
}

// serve starts the helper, as the given uid if that isn't -1. The returned
// function ends it, by SIGKILL or by itself, and waits.
func serve(t *testing.T, how string, uid int) (served, func(kill bool)) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs Postgres")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "PGTEST_HELPER="+how)
	if uid >= 0 {
		// Where the go tool builds test binaries nobody else may look.
		folder, err := os.MkdirTemp("", "pgtest-helper-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(folder) })
		copied := filepath.Join(folder, "helper")
		if err := errors.Join(copyFile(exe, copied), os.Chmod(copied, 0o755), os.Chmod(folder, 0o755)); err != nil {
			t.Fatal(err)
		}
		cmd.Path, cmd.Args, cmd.Dir = copied, []string{copied}, "/"
		cmd.Env = append(cmd.Env, "HOME=/nonexistent")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	end := func(kill bool) {
		if ended {
			return
		}
		ended = true
		if kill {
			_ = cmd.Process.Kill()
		}
		_ = stdin.Close()
		_ = cmd.Wait()
	}
	t.Cleanup(func() { end(true) })
	var s served
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &s)
	}
	if err != nil {
		end(false)
		t.Fatalf("helper: %v\n%s", err, stderr.String())
	}
	return s, end
}

func TestServerEndsWithItsProcess(t *testing.T) {
	for _, how := range []string{"kill -9", "panic", "exit"} {
		t.Run(how, func(t *testing.T) {
			s, end := serve(t, how, -1)
			query(t, s.URL, "SELECT 'there'")
			all := append(childrenOf(s.Pid), s.Pid)
			end(how == "kill -9")
			deadline := time.Now().Add(10 * time.Second)
			for _, pid := range all {
				for isAlive(pid) {
					if time.Now().After(deadline) {
						t.Fatalf("process %d of Postgres outlives the one that started it", pid)
					}
					time.Sleep(5 * time.Millisecond)
				}
			}
			// The next one to start clears up behind it.
			start(t, Options{})
			if _, err := os.Stat(s.Folder); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("its folder is still there: %v", err)
			}
		})
	}
}

func TestRunsAsRootAndAsOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		s, _ := serve(t, "user", -1)
		if s.UID != os.Geteuid() {
			t.Errorf("Postgres runs as uid %d, want our own, %d", s.UID, os.Geteuid())
		}
		return
	}
	for name, uid := range map[string]int{"root": -1, "user": nobody} {
		t.Run(name, func(t *testing.T) {
			s, _ := serve(t, name, uid)
			if s.UID != nobody {
				t.Errorf("Postgres runs as uid %d, want %d", s.UID, nobody)
			}
			query(t, s.URL, "SELECT 'there'")
		})
	}
}

func TestAnUnknownVersionSaysSo(t *testing.T) {
	if testing.Short() {
		t.Skip("needs the network")
	}
	before := goleak.IgnoreCurrent()
	_, err := StartServer(Options{Version: "18.999"})
	if err := goleak.Find(before); err != nil {
		t.Errorf("the attempt to fetch it left behind: %v", err)
	}
	if err == nil || !strings.Contains(err.Error(), "18.999") {
		t.Errorf("got %v, want an error that names the version", err)
	}
	_ = os.RemoveAll(filepath.Join(os.TempDir(), fmt.Sprintf("dedupd-postgres-18.999-%d", os.Geteuid())))
}

// TestInstalledPrograms starts a server by the programs of a folder, as of an
// installed Postgres.
func TestInstalledPrograms(t *testing.T) {
	fetched := start(t, Options{})
	s := start(t, Options{Bin: fetched.binaries.bin})
	if got := query(t, s.URL("postgres"), "SHOW server_version"); got != s.Version() || got != fetched.Version() {
		t.Errorf("server %s calls itself %s, the other one %s", got, s.Version(), fetched.Version())
	}
	if s.binaries.folder == fetched.binaries.folder {
		t.Error("its data come from another's folder")
	}
	if _, err := StartServer(Options{Bin: t.TempDir()}); err == nil || !strings.Contains(err.Error(), "postgres --version") {
		t.Errorf("an empty folder: %v", err)
	}
}

// An older copy of the data lacks what came after it, and is of the same history.
func TestSnapshotIsPutBack(t *testing.T) {
	s := start(t, Options{})
	url := s.URL("postgres")
	history := func() string {
		return query(t, url, "SELECT system_identifier || '/' || timeline_id FROM pg_control_system(), pg_control_checkpoint()")
	}
	query(t, url, "CREATE TABLE kept (x int)")
	query(t, url, "INSERT INTO kept VALUES (1)")
	before := history()
	if err := s.Snapshot(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		query(t, url, "INSERT INTO kept VALUES (2)")
		if err := s.PutBack(); err != nil {
			t.Fatal(err)
		}
		if got := query(t, url, "SELECT string_agg(x::text, ' ') FROM kept"); got != "1" {
			t.Errorf("the copy holds %q", got)
		}
	}
	if got := history(); got != before {
		t.Errorf("the copy is of %s, not of %s", got, before)
	}
}
