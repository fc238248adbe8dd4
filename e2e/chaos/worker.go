package main

import (
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dedupd/dedupd/e2e/rig"
	"github.com/dedupd/dedupd/internal/child"
	"github.com/dedupd/dedupd/internal/pgrelay"
)

const (
	scope      = "chaos"
	sourceName = "main"
)

// configuration is a worker's. All that isn't here, nor in the run's shape, is as users have
// it.
const configuration = `scope: ` + scope + `
sources:
  - name: ` + sourceName + `
    %s
database: {url_file: %q}
batch: {max_messages: 500}
http: {listen: "127.0.0.1:0"}
%s%s`

// worker is one place in the fleet: the process that runs there now, or did last.
type worker struct {
	name    string
	binary  string
	config  string // file
	log     string // file, of all its processes
	address string // file with the database's URL
	url     *url.URL
	relay   *pgrelay.Relay

	mu      sync.Mutex
	process *child.Process // nil: none, by our own hand
}

// running is the worker's process; nil: there is none.
func (w *worker) running() *child.Process {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.process
}

// gone tells that a process has ended by our hand.
func (w *worker) gone(p *child.Process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.process == p {
		w.process = nil
	}
}

// newWorker doesn't start it yet. Its way to the database leads through a relay.
func (r *run) newWorker(name string) (*worker, error) {
	u, err := url.Parse(r.url())
	if err != nil {
		return nil, err
	}
	file := func(suffix string) string { return filepath.Join(r.folder, name+suffix) }
	w := &worker{name: name, binary: r.binary, config: file(".yaml"), log: file(".log"), address: file(".url"), url: u}
	if w.relay, err = pgrelay.Listen(u.Host); err != nil {
		return nil, err
	}
	u.Host = w.relay.Addr()
	q := u.Query()
	q.Set("application_name", name)
	u.RawQuery = q.Encode()
	if err := os.WriteFile(w.config, fmt.Appendf(nil, configuration, r.broker.Source(), w.address, r.shape.Worker, r.fault.config), 0o600); err != nil {
		return nil, err
	}
	return w, w.login(u.User)
}

// login has the worker log in to the database as somebody, from its next
// connection on.
func (w *worker) login(who *url.Userinfo) error {
	w.url.User = who
	// In one step: a worker may read it at any moment.
	if err := os.WriteFile(w.address+".new", []byte(w.url.String()), 0o600); err != nil {
		return err
	}
	return os.Rename(w.address+".new", w.address)
}

func (w *worker) start() error {
	cmd := exec.Command(w.binary, "run", "-c", w.config)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME")}
	p, err := rig.Start(cmd, w.log)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.process = p
	return nil
}

// kill is kill -9.
func (w *worker) kill() {
	if p := w.running(); p != nil {
		p.Kill()
		w.gone(p)
	}
}

func (w *worker) signal(s syscall.Signal) {
	if p := w.running(); p != nil {
		p.Signal(s)
	}
}

// drainLimit is the configuration's default for transactions in hand, with what
// leaving the group and a busy machine may take.
const drainLimit = 25 * time.Second

// terminate is SIGTERM, and demands an end with code 0.
func (w *worker) terminate() error {
	w.signal(syscall.SIGTERM)
	return w.mustEnd()
}

func (w *worker) mustEnd() error {
	p := w.running()
	if p == nil {
		return fmt.Errorf("%s is dead already", w.name)
	}
	defer w.gone(p)
	if !p.Wait(drainLimit) {
		p.Kill()
		return fmt.Errorf("%s is still there %s after SIGTERM", w.name, drainLimit)
	}
	if code := p.Code(); code != 0 {
		return fmt.Errorf("%s: exit code %d after SIGTERM, want 0; it said:\n%s", w.name, code, rig.Tail(w.log))
	}
	return nil
}

// alive is an error when the worker has ended by itself.
func (w *worker) alive() error {
	if p := w.running(); p != nil && p.Ended() {
		return fmt.Errorf("%s has ended by itself, with code %d; it said:\n%s", w.name, p.Code(), rig.Tail(w.log))
	}
	return nil
}

func (w *worker) text() string {
	b, err := os.ReadFile(w.log)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// says waits until the worker's log has a line that fits, from a place in it.
func (w *worker) says(pattern string, from int, within time.Duration) error {
	re := regexp.MustCompile(pattern)
	for end := time.Now().Add(within); ; time.Sleep(20 * time.Millisecond) {
		if text := w.text(); re.MatchString(text[min(from, len(text)):]) {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s didn't say %q within %s", w.name, pattern, within)
		}
	}
}

// isReady reports whether the worker's current process is past its start.
func (w *worker) isReady(from int) bool {
	text := w.text()
	return strings.Contains(text[min(from, len(text)):], "msg=consuming")
}
