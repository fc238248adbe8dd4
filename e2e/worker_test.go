package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dedupd/dedupd/internal/child"
)

// worker is one place in a fleet: the process that runs there now, or did last.
type worker struct {
	t      *testing.T
	name   string
	config string // file
	env    []string
	args   []string // beyond run -c FILE
	binary string   // empty: dedupd
	// mayRetry: others may be in the way of its transactions.
	mayRetry bool

	*child.Process
	log *os.File // of all its processes
	// from is where the log of the current process begins.
	from int64
}

// databaseURL finds the line of a configuration that leads to a database, as a
// key of its own or within braces.
var databaseURL = regexp.MustCompile(`(?m)(database:(?:\n( +)| \{)url: )"(postgres://[^"]+)"( *$|})`)

// configFile writes a configuration and returns its file. With
// DEDUPD_TEST_PGBOUNCER the way to the database leads through one, unless its
// certificates are what is tried.
func configFile(t *testing.T, text string) string {
	t.Helper()
	if os.Getenv(bouncerEnv) != "" {
		text = databaseURL.ReplaceAllStringFunc(text, func(line string) string {
			m := databaseURL.FindStringSubmatch(line)
			if strings.Contains(m[3], "sslrootcert=") {
				return line // what is tried there is the way to the server itself
			}
			separator := "\n" + m[2]
			if m[4] == "}" {
				separator = ", "
			}
			return fmt.Sprintf("%s%q%spooler: pgbouncer_transaction%s", m[1], bounced(t, m[3]), separator, m[4])
		})
	}
	file := filepath.Join(t.TempDir(), "dedupd.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// environment is what a container would have: nothing of ours, and a port for
// the probes that nobody else has.
func environment(more ...string) []string {
	return append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "DEDUPD_HTTP_LISTEN=127.0.0.1:0"}, more...)
}

// newWorker doesn't start it yet. Whatever runs of it when the test ends is
// killed; of a failed test the ends of the logs are shown.
func newWorker(t *testing.T, name, config string, env ...string) *worker {
	t.Helper()
	w := &worker{t: t, name: name, config: config, env: environment(env...)}
	var err error
	if w.log, err = os.Create(filepath.Join(t.TempDir(), name+".log")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if w.Process != nil && !w.Ended() {
			w.Kill()
		}
		w.judgeLog()
		if t.Failed() {
			text := w.wholeLog()
			t.Logf("the log of %s:\n%s", name, text[max(0, len(text)-6000):])
		}
		_ = w.log.Close()
	})
	return w
}

// start runs the worker, and doesn't wait for anything.
func (w *worker) start() {
	w.t.Helper()
	end, err := w.log.Seek(0, io.SeekEnd)
	if err != nil {
		w.t.Fatal(err)
	}
	w.from = end
	binary := w.binary
	if binary == "" {
		binary = dedupd(w.t)
	}
	cmd := exec.Command(binary, append([]string{"run", "-c", w.config}, w.args...)...)
	cmd.Env = w.env
	if w.Process, err = startProcess(w.name, cmd, w.log, w.log); err != nil {
		w.t.Fatal(err)
	}
}

// drain sends SIGTERM and demands an end with code 0 within the drain's time.
// It returns how long it took.
func (w *worker) drain(within time.Duration) time.Duration {
	w.t.Helper()
	began := time.Now()
	w.Signal(syscall.SIGTERM)
	w.mustEnd(within)
	return time.Since(began)
}

// mustEnd waits for the end of a worker that was told to drain.
func (w *worker) mustEnd(within time.Duration) {
	w.t.Helper()
	if !w.Wait(within) {
		w.t.Fatalf("%s: still there %s after SIGTERM", w.name, within)
	}
	if code := w.Code(); code != 0 {
		w.t.Fatalf("%s: exit code %d after SIGTERM, want 0", w.name, code)
	}
}

// logText is the log of the current process.
func (w *worker) logText() string { return w.wholeLog()[w.from:] }

func (w *worker) wholeLog() string {
	text, err := os.ReadFile(w.log.Name())
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// broken are signs of bugs, whatever else came of a run: a panic, a race, the
// processor's own complaint, and SQL errors that a claim transaction must see to itself.
var broken = regexp.MustCompile(`(?m)^.*(panic:|fatal error:|DATA RACE|bug:|SQLSTATE (40P01|40001|42P01)).*$`)

var retried = regexp.MustCompile(`(?m)^.*msg="transaction failed, trying again".*SQLSTATE (40P01|40001).*$`)

func (w *worker) judgeLog() {
	text := w.wholeLog()
	if w.mayRetry {
		text = retried.ReplaceAllString(text, "")
	}
	if line := broken.FindString(text); line != "" {
		w.t.Errorf("%s has logged: %s", w.name, line)
	}
}

var listening = regexp.MustCompile(`\bhttp=(127\.0\.0\.1:\d+)`)

// address of the worker's HTTP server, once it has told.
func (w *worker) address() string {
	w.t.Helper()
	var address string
	await(w.t, w.name+" tells its address", 20*time.Second, func() error {
		if w.Ended() {
			w.t.Fatalf("%s has ended with code %d: %s", w.name, w.Code(), w.logText())
		}
		if m := listening.FindStringSubmatch(w.logText()); m != nil {
			address = m[1]
			return nil
		}
		return fmt.Errorf("its log has no line with http=")
	})
	return address
}

// get asks the worker's HTTP server, and gives status 0 when there is none.
func (w *worker) get(path string) (status int, body string) {
	w.t.Helper()
	client := http.Client{Timeout: 10 * time.Second}
	res, err := client.Get("http://" + w.address() + path)
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, err.Error()
	}
	return res.StatusCode, string(text)
}

// probe demands an answer of a probe, and returns how long it took to come.
func (w *worker) probe(path string, want int, within time.Duration) time.Duration {
	w.t.Helper()
	return await(w.t, fmt.Sprintf("%s: %s answers %d", w.name, path, want), within, func() error {
		if status, body := w.get(path); status != want {
			return fmt.Errorf("it answers %d: %s", status, strings.TrimSpace(body))
		}
		return nil
	})
}

// result is what a command has said.
type result struct {
	code           int
	stdout, stderr string
}

// command runs a command of the binary to its end.
func command(t *testing.T, env []string, args ...string) result {
	t.Helper()
	cmd := exec.Command(dedupd(t), args...)
	cmd.Env = environment(env...)
	var stdout, stderr bytes.Buffer
	p, err := startProcess("dedupd "+strings.Join(args, " "), cmd, &stdout, &stderr)
	if err != nil {
		t.Fatal(err)
	}
	if !p.Wait(90 * time.Second) {
		p.Kill()
		t.Fatalf("dedupd %s: not done after 90 s: %s", strings.Join(args, " "), stderr.String())
	}
	return result{p.Code(), stdout.String(), stderr.String()}
}

// query runs a command that answers in JSON.
func query(t *testing.T, env []string, into any, args ...string) {
	t.Helper()
	r := command(t, env, append(args, "--output", "json")...)
	if r.code != 0 {
		t.Fatalf("dedupd %s: exit code %d: %s", strings.Join(args, " "), r.code, r.stderr)
	}
	if err := json.Unmarshal([]byte(r.stdout), into); err != nil {
		t.Fatalf("dedupd %s: %v:\n%s", strings.Join(args, " "), err, r.stdout)
	}
}
