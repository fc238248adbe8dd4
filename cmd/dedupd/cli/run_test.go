package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/internal/natstest"
	"github.com/dedupd/dedupd/internal/pgtest"
)

// rig is a broker, a database, and a configuration that joins them.
type rig struct {
	config string
	db     *pgx.Conn
	js     jetstream.JetStream
}

func newRig(t *testing.T) *rig {
	t.Helper()
	broker, js := natstest.Start(t)
	url := pgtest.New(t).URL
	db, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close(context.Background()) })
	if _, err := db.Exec(t.Context(), `CREATE TABLE public.orders (id text PRIMARY KEY, payload text)`); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "orders.yaml")
	text := fmt.Sprintf(`
scope: orders
sources: [{nats: {servers: %q, stream: ORDERS}}]
database: {url: %q}
sink: {table: {name: public.orders, columns: {id: id, payload: value}}}
http: {listen: "127.0.0.1:0"}
shutdown: {drain: 1m}
`, broker, url)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return &rig{file, db, js}
}

// publish sends messages with these ids.
func (r *rig) publish(t *testing.T, ids ...string) {
	t.Helper()
	for _, id := range ids {
		m := &nats.Msg{Subject: "orders", Data: []byte("payload of " + id), Header: nats.Header{"message-id": {id}}}
		if _, err := r.js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
}

// start runs the command; output collects both of its streams.
func start(t *testing.T, args ...string) (*exec.Cmd, *output) {
	t.Helper()
	cmd, out := exec.Command("dedupd", args...), new(output)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd, out
}

type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

func (o *output) await(t *testing.T, text string) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !strings.Contains(o.String(), text); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no %q in\n%s", text, o)
		}
	}
}

// exitOf waits for a command's end and gives its exit code.
func exitOf(t *testing.T, cmd *exec.Cmd, out *output) int {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return cmd.ProcessState.ExitCode()
	case <-time.After(40 * time.Second):
		t.Fatalf("still running:\n%s", out)
		return 0
	}
}

func (r *rig) rows(t *testing.T) (n int) {
	t.Helper()
	if err := r.db.QueryRow(t.Context(), `SELECT count(*) FROM public.orders`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestRunUntilIdle(t *testing.T) {
	r := newRig(t)
	for i := range 50 {
		r.publish(t, fmt.Sprintf("id-%d", i), fmt.Sprintf("id-%d", i/2))
	}
	cmd, out := start(t, "run", "-c", r.config, "--until-idle", "500ms")
	if code := exitOf(t, cmd, out); code != 0 {
		t.Fatalf("exit code %d\n%s", code, out)
	}
	if !regexp.MustCompile(`(?m)^100 messages in [0-9.]+m?s, [0-9]+ msg/s$`).MatchString(out.String()) {
		t.Errorf("no rate in\n%s", out)
	}
	if n := r.rows(t); n != 50 {
		t.Errorf("%d rows, want 50", n)
	}
	cmd, out = start(t, "stats", "-c", r.config, "--output", "json")
	if code := exitOf(t, cmd, out); code != 0 || !strings.Contains(out.String(), `"duplicates": 0.5,`) {
		t.Errorf("exit code %d\n%s", code, out)
	}
}

func TestSignalsDrain(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			r := newRig(t)
			cmd, out := start(t, "run", "-c", r.config)
			out.await(t, "msg=consuming")
			r.publish(t, "a")
			for r.rows(t) == 0 {
				time.Sleep(10 * time.Millisecond)
			}
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if code := exitOf(t, cmd, out); code != 0 {
				t.Errorf("exit code %d\n%s", code, out)
			}
		})
	}
}

// TestSecondSignal has an in-flight transaction that can't end, because its table is
// locked: the first signal waits for it, the second doesn't.
func TestSecondSignal(t *testing.T) {
	r := newRig(t)
	tx, err := r.db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cmd, out := start(t, "run", "-c", r.config)
	out.await(t, "msg=consuming")
	if _, err := tx.Exec(t.Context(), `LOCK TABLE public.orders`); err != nil {
		t.Fatal(err)
	}
	r.publish(t, "a")
	for waiting := false; !waiting; time.Sleep(10 * time.Millisecond) {
		if err := tx.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)`).Scan(&waiting); err != nil {
			t.Fatal(err)
		}
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond)
	if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Fatalf("the first signal ended it: %v\n%s", err, out)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := exitOf(t, cmd, out); code != 128+int(syscall.SIGTERM) {
		t.Errorf("exit code %d\n%s", code, out)
	}
	if !strings.Contains(out.String(), "a second signal (terminated): ending at once") {
		t.Errorf("no word about it:\n%s", out)
	}
}

// TestRunRefuses gives run databases that it must refuse.
func TestRunRefuses(t *testing.T) {
	r := newRig(t)
	t.Setenv("DEDUPD_LOG_LEVEL", "error")
	if _, err := r.db.Exec(t.Context(), `DROP TABLE public.orders`); err != nil {
		t.Fatal(err)
	}
	cmd, out := start(t, "run", "-c", r.config)
	if code := exitOf(t, cmd, out); code != 3 || !strings.Contains(out.String(), "orders") || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("without the sink's table: exit code %d\n%s", code, out)
	}
	text, err := os.ReadFile(r.config)
	if err != nil {
		t.Fatal(err)
	}
	other := r.config + "2"
	if err := os.WriteFile(other, append(text, "\ndead_letters: {window: 0}\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd, out = start(t, "run", "-c", other)
	if code := exitOf(t, cmd, out); code != 2 {
		t.Errorf("with a bad configuration: exit code %d\n%s", code, out)
	}
	cmd, out = start(t, "run", "-c", r.config, "--until-idle", "-1s")
	if code := exitOf(t, cmd, out); code != 2 {
		t.Errorf("with a bad flag: exit code %d\n%s", code, out)
	}
}
