// Package connect runs the peer that users of Kafka would take for this job:
// Kafka Connect in standalone mode with Debezium's JDBC sink, as a child process
// and in the fastest configuration that leaves each id once in the table. It is
// for the benchmark only and knows nothing of dedupd.
package connect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/dedupd/dedupd/e2e/rig"
	"github.com/dedupd/dedupd/internal/child"
)

const stopTimeout = 30 * time.Second

// Options of one run. All of them are needed.
type Options struct {
	// Dir is for the configuration and for the log, connect.log. It is made if
	// it is absent.
	Dir string
	// Brokers are host:port, with commas between several.
	Brokers string
	// Topic is read from its beginning. Its values are made by Envelope.
	Topic string
	// Group is the consumer group, and the connector's name: a new one for each
	// run.
	Group string
	// Tasks is the number of consumers: the topic's partitions for the most speed.
	Tasks int

	PostgresHost             string
	Port                     int
	Database, User, Password string
	// Table is there already, with Columns; with a schema's name before it or
	// without.
	Table string

	// Libs is the folder of Connect's jars, and Plugin the one into which
	// Debezium's archive was unpacked (pom.xml).
	Libs, Plugin string
}

// Process is a running Connect. It ends with this process, however that ends.
type Process struct {
	child  *child.Process
	status string // URL of the connector's state
	tasks  int
}

// Command writes the configuration and returns the command that runs Connect
// with it.
func Command(o Options) (*exec.Cmd, error) {
	cmd, _, err := o.command()
	return cmd, err
}

// Start starts Connect and waits, until the context ends, for the connector and
// all its tasks to run. By then they may have written rows already.
func Start(ctx context.Context, o Options) (*Process, error) {
	cmd, rest, err := o.command()
	if err != nil {
		return nil, err
	}
	log := o.file("connect.log")
	p := &Process{status: "http://" + rest + "/connectors/" + o.Group + "/status", tasks: o.Tasks}
	if p.child, err = rig.Start(cmd, log); err != nil {
		return nil, err
	}
	if err := p.await(ctx); err != nil {
		p.child.Kill()
		return nil, fmt.Errorf("start Kafka Connect: %w (log: %s)", err, log)
	}
	return p, nil
}

// Pid of the Java process, also after its end.
func (p *Process) Pid() int { return p.child.Pid() }

// Check returns nil while all tasks run. A task that met an error stays failed
// while the process lives on.
func (p *Process) Check(ctx context.Context) error {
	running, err := p.running(ctx)
	if err == nil && running < p.tasks {
		err = fmt.Errorf("%d of %d tasks run", running, p.tasks)
	}
	return err
}

// Stop ends it in an orderly way, or after 30 s in any way. Stopping it again
// does nothing.
func (p *Process) Stop() {
	p.child.Signal(syscall.SIGTERM)
	if !p.child.Wait(stopTimeout) {
		p.child.Kill()
	}
}

func (p *Process) await(ctx context.Context) error {
	for {
		running, err := p.running(ctx)
		switch {
		case errors.Is(err, errFailed), err == nil && running == p.tasks:
			return err
		}
		select {
		case <-p.child.Done():
			return fmt.Errorf("it ended: %w", p.child.Err())
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

var (
	errFailed = errors.New("connect failed")
	client    = http.Client{Timeout: 5 * time.Second}
)

// running is the number of tasks that run. It returns errFailed if the connector
// or a task has failed, which is final; other errors may pass.
func (p *Process) running(ctx context.Context) (n int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.status, http.NoBody)
	if err != nil {
		return 0, err
	}
	res, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("the connector's status: %s", res.Status)
	}
	type state struct{ State, Trace string }
	var s struct {
		Connector state
		Tasks     []state
	}
	if err := json.NewDecoder(res.Body).Decode(&s); err != nil {
		return 0, fmt.Errorf("the connector's status: %w", err)
	}
	for _, task := range append(s.Tasks, s.Connector) {
		if task.State == "FAILED" {
			return 0, fmt.Errorf("%w: %s", errFailed, task.Trace)
		}
	}
	for _, task := range s.Tasks {
		if task.State == "RUNNING" {
			n++
		}
	}
	return n, nil
}

// command is the command, and the address of Connect's REST interface.
func (o *Options) command() (cmd *exec.Cmd, rest string, err error) {
	for _, jars := range []string{filepath.Join(o.Libs, "connect-runtime-*.jar"), filepath.Join(o.Plugin, "*", "debezium-connector-jdbc-*.jar")} {
		if found, _ := filepath.Glob(jars); len(found) == 0 {
			return nil, "", fmt.Errorf("no %s: they come with Maven and e2e/bench/connect/pom.xml", jars)
		}
	}
	if rest, err = rig.FreeAddress(); err != nil {
		return nil, "", err
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, "", err
	}
	for name, p := range map[string]properties{"worker.properties": o.worker(rest), "connector.properties": o.connector()} {
		if err := os.WriteFile(o.file(name), []byte(p.String()), 0o600); err != nil {
			return nil, "", err
		}
	}
	// The parallel collector spends a sixth less on a message than the default one.
	return exec.Command("java", "-Xms1g", "-Xmx1g", "-XX:+UseParallelGC", "-Dorg.apache.logging.log4j.level=INFO", "-cp", filepath.Join(o.Libs, "*"),
		"org.apache.kafka.connect.cli.ConnectStandalone", o.file("worker.properties"), o.file("connector.properties")), rest, nil
}

func (o *Options) file(name string) string { return filepath.Join(o.Dir, name) }
