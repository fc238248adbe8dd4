package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/dedupd/dedupd/e2e/rig"
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
	var err error
	if w.metrics, err = rig.FreeAddress(); err != nil {
		return nil, err
	}
	text := fmt.Sprintf(configuration, nats, postgres, w.metrics)
	return w, os.WriteFile(w.config, []byte(text), 0o600) // it holds a password
}

// start runs the worker until it is caught up, or for good if untilIdle is 0.
func (w *worker) start(untilIdle time.Duration) (err error) {
	args := []string{"run", "-c", w.config}
	if untilIdle > 0 {
		args = append(args, "--until-idle", untilIdle.String())
	}
	cmd := exec.Command(w.binary, args...) // #nosec: the user names it
	if w.process, err = rig.Start(cmd, w.log); err != nil {
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
	if err := rig.Stop(w.process, 25*time.Second); err != nil {
		return w.failed(fmt.Errorf("the worker: %w", err))
	}
	return nil
}

// failed adds the end of the worker's log to an error.
func (w *worker) failed(err error) error {
	lines := strings.Split(strings.TrimSpace(rig.Tail(w.log)), "\n")
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
