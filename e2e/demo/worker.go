package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/dedupd/dedupd/internal/child"
)

// scope is the worker's name, and that of its durable consumers.
const scope = "orders"

// configuration is what a user would write for this, and no more.
const configuration = `# dedupd's configuration in the demo.
scope: orders
sources:
  - name: shop
    nats: {servers: ["%[1]s"], stream: SHOP}
  - name: edge
    nats: {servers: ["%[1]s"], stream: EDGE}
database:
  url: "%[2]s"
id:
  from: header:message-id
sink:
  table:
    name: public.orders
    columns:
      id: id
      customer: json:customer
      cents: json:cents
      came_by: topic
      sent_at: time
http:
  listen: "%[3]s"
`

// worker is the real binary and its process, the current one or the last.
type worker struct {
	binary  string
	config  string // file
	log     string // file
	metrics string // address of its HTTP server

	process *child.Process
}

func newWorker(binary, folder, nats, postgres string) (*worker, error) {
	w := &worker{
		binary: binary,
		config: filepath.Join(folder, "dedupd.yaml"),
		log:    filepath.Join(folder, "dedupd.log"),
	}
	// The same port each time it starts, as a scraper would want.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	w.metrics = l.Addr().String()
	if err := l.Close(); err != nil {
		return nil, err
	}
	text := fmt.Sprintf(configuration, nats, postgres, w.metrics)
	return w, os.WriteFile(w.config, []byte(text), 0o600) // it holds a password
}

// start runs the worker until it is caught up, or for good if untilIdle is 0.
func (w *worker) start(untilIdle time.Duration) error {
	args := []string{"run", "-c", w.config}
	if untilIdle > 0 {
		args = append(args, "--until-idle", untilIdle.String())
	}
	log, err := os.OpenFile(w.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(w.binary, args...) // #nosec: the user names it
	cmd.Stdout, cmd.Stderr = log, log
	// A group of its own: Ctrl-C is for the demo, which decides what follows.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// kill -9 of the demo leaves no worker.
	if w.process, err = child.Start(cmd, syscall.SIGKILL); err != nil {
		return fmt.Errorf("start the worker: %w", err)
	}
	return nil
}

// kill is kill -9: the worker isn't asked, and can't tidy up.
func (w *worker) kill() { w.process.Kill() }

// stop asks the worker to drain, and returns how it ended.
func (w *worker) stop() error {
	if w.process == nil || w.process.Ended() {
		return nil
	}
	w.process.Signal(syscall.SIGTERM)
	if !w.process.Wait(25 * time.Second) {
		w.kill()
		return w.failed(errors.New("the worker didn't end within 25 s of SIGTERM"))
	}
	if err := w.process.Err(); err != nil {
		return w.failed(fmt.Errorf("the worker didn't drain after SIGTERM: %w", err))
	}
	return nil
}

// failed adds the end of the worker's log to an error.
func (w *worker) failed(err error) error {
	f, open := os.Open(w.log)
	if open != nil {
		return err
	}
	defer f.Close()
	const most = 4 << 10
	if info, e := f.Stat(); e == nil && info.Size() > most {
		_, _ = f.Seek(-most, io.SeekEnd)
	}
	text, _ := io.ReadAll(f)
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	lines = lines[max(0, len(lines)-15):]
	return fmt.Errorf("%w\nthe end of its log:\n  %s", err, strings.Join(lines, "\n  "))
}

// build makes the binary from this checkout, for a demo that was given none.
func build(ctx context.Context, folder string) (string, error) {
	binary := filepath.Join(folder, "dedupd")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", binary, "github.com/dedupd/dedupd/cmd/dedupd")
	if out, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		return "", fmt.Errorf("build dedupd: %w\n%s", err, out)
	}
	return binary, nil
}
