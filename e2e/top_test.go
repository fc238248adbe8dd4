package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dedupd/dedupd/internal/pgtest"
)

// tmux is a terminal that a test can look at, on a server of its own.
type tmux struct {
	t      *testing.T
	socket string
}

// newTerminal runs a shell in a terminal of that size.
func newTerminal(t *testing.T, width, height int) *tmux {
	t.Helper()
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Fatal("tmux is needed, for a terminal that can be looked at: apt-get install tmux")
	}
	term := &tmux{t: t, socket: filepath.Join(t.TempDir(), "tmux")}
	t.Cleanup(func() {
		_ = exec.Command("tmux", "-S", term.socket, "kill-server").Run()
	})
	term.tmux("-f", "/dev/null", "-u", "new-session", "-d", "-x", fmt.Sprint(width), "-y", fmt.Sprint(height),
		"env", "LC_ALL=C.UTF-8", "PS1=prompt>", "ENV=", "sh")
	// Whatever a client's size, the window's is what the test sets.
	term.tmux("set-option", "-g", "window-size", "manual")
	return term
}

func (m *tmux) tmux(args ...string) string {
	m.t.Helper()
	cmd := exec.Command("tmux", append([]string{"-S", m.socket}, args...)...)
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "TERM=xterm-256color")
	out, err := cmd.CombinedOutput()
	if err != nil {
		m.t.Fatalf("tmux %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func (m *tmux) screen() string { return m.tmux("capture-pane", "-p") }

// press sends keys by tmux's names for them.
func (m *tmux) press(keys ...string) { m.tmux(append([]string{"send-keys"}, keys...)...) }

// run types a line.
func (m *tmux) run(line string) {
	m.tmux("send-keys", "-l", line)
	m.press("Enter")
}

// shows waits for a screen on which each pattern is found, and returns it.
func (m *tmux) shows(what string, patterns ...string) (screen string) {
	m.t.Helper()
	await(m.t, what, 2*time.Minute, func() error {
		screen = m.screen()
		for _, p := range patterns {
			if !regexp.MustCompile("(?m)" + p).MatchString(screen) {
				return fmt.Errorf("no %q on\n%s", p, screen)
			}
		}
		return nil
	})
	return screen
}

// mode is a terminal's setting as the shell there has it.
func (m *tmux) cursor() string {
	return strings.TrimSpace(m.tmux("display-message", "-p", "#{cursor_flag} #{alternate_on} #{wrap_flag}"))
}

// restored demands a terminal as it was: it echoes, its cursor is visible, and the
// other screen is gone.
func (m *tmux) restored(after string) {
	m.t.Helper()
	// What is typed before the shell is back in front goes to whoever leaves.
	await(m.t, "the shell is back after "+after, time.Minute, func() error {
		if front := strings.TrimSpace(m.tmux("display-message", "-p", "#{pane_current_command}")); front != "sh" {
			return fmt.Errorf("%s is in front", front)
		}
		return nil
	})
	m.run("stty -a | tr ';' '\\n' | grep -c ' echo .*' ; echo done-" + after)
	screen := m.shows("a prompt after "+after, "^done-"+after+"$")
	if !strings.Contains(screen, "echo done-"+after) {
		m.t.Errorf("after %s nothing is echoed:\n%s", after, screen)
	}
	if c := m.cursor(); c != "1 0 1" {
		m.t.Errorf("after %s: cursor, other screen, wrapping are %s", after, c)
	}
}

var percentage = regexp.MustCompile(`(?m)^duplicates .* ([0-9.]+) %`)

// topRig is a terminal, and a worker at work that top shows there.
type topRig struct {
	*tmux
	server *pgtest.Server
	worker *worker
	binary string
	config string
	// endLoad ends what is published, and has to be called.
	endLoad func()
}

func newTopRig(t *testing.T) *topRig {
	t.Helper()
	server, err := pgtest.StartServer(pgtest.Options{Fsync: true})
	if err != nil {
		t.Fatal("Postgres: ", err, postgresAdvice)
	}
	t.Cleanup(func() { _ = server.Stop() })
	db := createDatabase(t, server, "e2e_top")
	db.exec(ordersTable)
	st := newStream(t, "TOP")
	config := configFile(t, fmt.Sprintf("scope: e2e-top\nsources:\n  - nats: {servers: [%q], stream: TOP}\ndatabase:\n  url: %q\n%s", st.url, db.url, ordersSink))
	w := newWorker(t, "worker", config)
	w.start()
	w.probe("/readyz", 200, time.Minute)
	return &topRig{tmux: newTerminal(t, 100, 30), server: server, worker: w, binary: dedupd(t), config: config, endLoad: st.produceOn()}
}

// produceOn publishes until it is ended. A third are copies.
func (st *stream) produceOn() (end func()) {
	st.t.Helper()
	plan, _ := newPlan(dice(st.t), 300_000, 100_000, 4)
	produced := make(chan error, 1)
	quit := make(chan struct{})
	go func() {
		for len(plan) > 0 {
			select {
			case <-quit:
				produced <- nil
				return
			default:
			}
			n := min(200, len(plan))
			if err := st.publishAll(plan[:n], func() int { return 10_000 }); err != nil {
				produced <- err
				return
			}
			plan = plan[n:]
			time.Sleep(50 * time.Millisecond)
		}
		produced <- nil
	}()
	return func() {
		close(quit)
		if err := <-produced; err != nil {
			st.t.Error("publish: ", err)
		}
	}
}

// What people see of a worker at work: on a terminal, with its keys, in other
// sizes, while the database is away; and how they leave.
func TestTop(t *testing.T) {
	needServices(t)
	m := newTopRig(t)
	defer m.endLoad()
	m.shows("a shell", "prompt>")
	m.run(m.binary + " top -c " + m.config + " --interval 250ms")
	m.showsWork()
	m.hearsKeys()
	m.fitsSizes()
	m.survivesTheDatabase()
	m.isSuspended()
	m.press("q")
	m.restored("quit")
	m.leaves("ctrl-c", func(int) { m.press("C-c") })
	m.leaves("SIGTERM", func(pid int) { _ = syscall.Kill(pid, syscall.SIGTERM) })
	m.run("clear; NO_COLOR=1 " + m.binary + " top -c " + m.config)
	m.shows("without colour", `^dedupd top  scope`)
	if colours := m.tmux.tmux("capture-pane", "-p", "-e"); strings.Contains(colours, "\x1b[") {
		t.Errorf("NO_COLOR, but:\n%q", colours)
	}
	m.press("q")
	m.restored("no-colour")
	m.servesScripts()
	m.worker.drain(time.Minute)
}

func (m *topRig) showsWork() {
	m.t.Helper()
	screen := m.shows("a worker at work",
		`^dedupd top  scope e2e-top  .*  owners 1  lanes 1`,
		`^fetched +[1-9][0-9.]*k?/s `, `^duplicates +[1-9][0-9.]*k?/s `, ` resent +[1-9]`,
		`^nats +queue +reads +[1-9]`, `^ +1 open `, `[▁▂▃▄▅▆▇█]`, `^q quit`)
	m.t.Logf("100 x 30:\n%s", screen)
	if c := m.cursor(); c != "0 1 0" {
		m.t.Errorf("cursor, other screen, wrapping are %s", c)
	}
	share := 0.0
	if f := percentage.FindStringSubmatch(m.shows("a share", `^duplicates +\S+/s +\S+/s +[0-9.]+ %`)); f != nil {
		share, _ = strconv.ParseFloat(f[1], 64)
	}
	if share <= 0 || share > 100 {
		m.t.Errorf("%.1f %% are duplicates", share)
	}
}

func (m *topRig) hearsKeys() {
	m.t.Helper()
	m.press("s")
	m.shows("another order", `s sort: rate`, `RATE▾`)
	m.press("?")
	m.shows("help", `^ +q, ctrl-c +quit`)
	m.press("Escape")
	m.shows("no help", `^fetched`)
	m.press("Space")
	screen := m.shows("a stand-still", "PAUSED")
	time.Sleep(time.Second)
	if again := m.screen(); again != screen {
		m.t.Errorf("paused, but it goes on:\n%s\n%s", screen, again)
	}
	m.press("Space")
	await(m.t, "it goes on", 2*time.Minute, func() error {
		if s := m.screen(); strings.Contains(s, "PAUSED") || s == screen {
			return fmt.Errorf("it doesn't")
		}
		return nil
	})
}

func (m *topRig) fitsSizes() {
	m.t.Helper()
	for _, size := range []struct{ width, height int }{{60, 14}, {40, 10}, {140, 45}, {80, 24}} {
		m.tmux.tmux("resize-window", "-x", fmt.Sprint(size.width), "-y", fmt.Sprint(size.height))
		await(m.t, fmt.Sprintf("a screen of %d x %d", size.width, size.height), 2*time.Minute, func() error {
			screen := m.screen()
			lines := strings.Split(strings.TrimSuffix(screen, "\n"), "\n")
			if len(lines) != size.height || !strings.HasPrefix(lines[0], "dedupd top") || !strings.HasPrefix(lines[size.height-1], "q quit") {
				return fmt.Errorf("%d lines:\n%s", len(lines), screen)
			}
			return nil
		})
	}
}

// survivesTheDatabase has the database go, and come back.
func (m *topRig) survivesTheDatabase() {
	m.t.Helper()
	if err := m.server.Kill(); err != nil {
		m.t.Fatal(err)
	}
	m.shows("the database is away", `^THE DATABASE CAN'T BE READ for [1-9]\d*s, trying again: `, `^fetched`)
	if err := m.server.Restart(); err != nil {
		m.t.Fatal(err)
	}
	await(m.t, "the database is back", 2*time.Minute, func() error {
		if s := m.screen(); strings.Contains(s, "CAN'T BE READ") || !regexp.MustCompile(`(?m)^fetched +[1-9]`).MatchString(s) {
			return fmt.Errorf("not on\n%s", s)
		}
		return nil
	})
}

func (m *topRig) isSuspended() {
	m.t.Helper()
	m.press("C-z")
	m.restored("a-stop")
	m.run("fg")
	m.shows("it is back", `^dedupd top  scope`, `^q quit`)
	if c := m.cursor(); c != "0 1 0" {
		m.t.Errorf("back: cursor, other screen, wrapping are %s", c)
	}
}

// leaves starts top and ends it in another way.
func (m *topRig) leaves(name string, leave func(pid int)) {
	m.t.Helper()
	pidfile := filepath.Join(m.t.TempDir(), "pid")
	m.run("clear; sh -c 'echo $$ >" + pidfile + "; exec " + m.binary + " top -c " + m.config + "'")
	m.shows("it again", `^dedupd top  scope`)
	text, err := os.ReadFile(pidfile)
	if err != nil {
		m.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		m.t.Fatal(err)
	}
	leave(pid)
	m.restored(name)
}

// servesScripts reads top's JSON, once and as a stream.
func (m *topRig) servesScripts() {
	m.t.Helper()
	var one struct {
		Scope string
		Lanes []struct{ State string }
	}
	query(m.t, nil, &one, "top", "-c", m.config, "--once", "--interval", "300ms")
	if one.Scope != "e2e-top" || len(one.Lanes) != 1 {
		m.t.Errorf("%+v", one)
	}
	stream := exec.Command(m.binary, "top", "-c", m.config, "--output", "json", "--interval", "100ms")
	stream.Env = environment()
	out, err := stream.StdoutPipe()
	if err != nil {
		m.t.Fatal(err)
	}
	if err := stream.Start(); err != nil {
		m.t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for n := range 3 {
		if !lines.Scan() || json.Unmarshal(lines.Bytes(), &one) != nil || one.Scope != "e2e-top" {
			m.t.Errorf("line %d: %s", n, lines.Text())
		}
	}
	_ = stream.Process.Signal(syscall.SIGTERM)
	for lines.Scan() {
	}
	if err := stream.Wait(); err != nil {
		m.t.Errorf("a stream of JSON that was ended: %v", err)
	}
}
