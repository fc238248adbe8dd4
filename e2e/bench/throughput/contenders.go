package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/e2e/bench/connect"
	"github.com/dedupd/dedupd/e2e/bench/measure"
	"github.com/dedupd/dedupd/e2e/rig"
	"github.com/dedupd/dedupd/internal/child"
)

// contender is one way to land a topic in a table.
type contender struct {
	name string
	// share of the messages that it gets: a slow one would take the whole day.
	share float64
	// columns of the sink's table; plainColumns if empty.
	columns string
	// sql makes what it needs beside the sink's table.
	sql string
	// check is a condition on what it must leave, where not every message is a row of the
	// sink's table. Its progress is then read in dedupd's books.
	check     string
	enveloped bool // it needs a schema in each message
	processes int  // of them, in one group; 0: one
	// command starts it; the process reads the topic from its beginning until
	// it is told to stop.
	command func(b *bench, r *landing) (*exec.Cmd, error)
}

// landing is one run of one contender.
type landing struct {
	topic topic
	group string
	url   string    // of a database of its own
	conn  *pgx.Conn // the benchmark's own
	// folder is for its files.
	folder    string
	processes processes // those that were launched
}

// plainColumns have no index: whatever the sink does more would hide what landing
// costs.
const plainColumns = `id uuid NOT NULL, payload jsonb NOT NULL`

const claimsTable = `CREATE TABLE claims (id uuid PRIMARY KEY)`

var contenders = []contender{
	{name: "dedupd", share: 1, command: dedupd("id: id, payload: value")},
	{name: "by hand, batches of 1,000, 4 readers", share: 1, sql: claimsTable, command: peer("byhand-batched", "-readers", "4", "-batch", "1000")},
	{name: "Kafka Connect, Debezium's JDBC sink, 4 tasks: upserts, no claims", share: 1, columns: connect.Columns, enveloped: true, command: debezium},
	{name: "by hand, a transaction a message, 4 readers, commits each second", share: 0.1, sql: claimsTable, command: peer("byhand", "-readers", "4", "-commit-interval", "1s")},
	{name: "by hand, a transaction and a commit a message, 4 readers", share: 0.01, sql: claimsTable, command: peer("byhand", "-readers", "4")},
	{name: "Watermill, claim in the transaction", share: 0.1, sql: claimsTable, command: peer("watermill", "-subscribers", "4")},
}

// dedupd is the release binary as a user would run it: claims, fingerprints,
// positions, books and metrics, with the defaults. The sink's table gets these
// columns.
func dedupd(columns string) func(b *bench, r *landing) (*exec.Cmd, error) {
	return dedupdWith("{}", "columns: {"+columns+"}")
}

// dedupdWith has these keys under dedup and sink.table.
func dedupdWith(dedup, table string) func(b *bench, r *landing) (*exec.Cmd, error) {
	return dedupdTo(dedup, "table:\n    name: public.rows\n    "+table)
}

// dedupdTo has any sink.
func dedupdTo(dedup, sink string) func(b *bench, r *landing) (*exec.Cmd, error) {
	return func(b *bench, r *landing) (*exec.Cmd, error) {
		source := fmt.Sprintf("kafka: {brokers: [%q], topics: [%s], group: %s}", b.broker.Addr(), r.topic.name(), r.group)
		if r.topic.nats {
			source = fmt.Sprintf("nats: {servers: %q, stream: %s, subjects: [%s], durable: %s}", b.nats.ClientURL(), r.topic.name(), r.topic.name(), r.group)
		}
		text := fmt.Sprintf(`
scope: bench
sources:
  - %s
database: {url: %q}
id: {from: "header:id"}
dedup: %s
sink:
  %s
http: {listen: "127.0.0.1:0"}
`, source, r.url, dedup, sink)
		// A file of its own for each process: another may be reading its.
		file, err := os.CreateTemp(r.folder, "dedupd-*.yaml")
		if err != nil {
			return nil, err
		}
		_, err = file.WriteString(text)
		if err := errors.Join(err, file.Close()); err != nil {
			return nil, err
		}
		return exec.Command(b.dedupd, "run", "-c", file.Name()), nil
	}
}

func peer(name string, args ...string) func(b *bench, r *landing) (*exec.Cmd, error) {
	return func(b *bench, r *landing) (*exec.Cmd, error) {
		brokers := b.broker.Addr()
		if r.topic.nats {
			brokers = b.nats.ClientURL()
		}
		return exec.Command(b.peers, append([]string{name, "-brokers", brokers, "-topic", r.topic.name(), "-group", r.group, "-postgres", r.url}, args...)...), nil
	}
}

func debezium(b *bench, r *landing) (*exec.Cmd, error) {
	postgres, err := pgx.ParseConfig(r.url)
	if err != nil {
		return nil, err
	}
	return connect.Command(connect.Options{
		Dir: r.folder, Brokers: b.broker.Addr(), Topic: r.topic.name(), Group: r.group, Tasks: int(r.topic.partitions),
		PostgresHost: postgres.Host, Port: int(postgres.Port), Database: postgres.Database, User: postgres.User, Password: postgres.Password,
		Table: "rows", Libs: b.connectLibs, Plugin: b.connectPlugin,
	})
}

// launch starts the contender's processes; what they print goes to a file.
func (c *contender) launch(b *bench, r *landing) (processes, error) {
	for range max(c.processes, 1) {
		cmd, err := c.command(b, r)
		if err != nil {
			return nil, err
		}
		p, err := rig.Start(cmd, r.log())
		if err != nil {
			return nil, err
		}
		r.processes = append(r.processes, p)
	}
	return r.processes, nil
}

// processes are those of one contender.
type processes []*child.Process

// stop signals all of them and waits for their end.
func (all processes) stop(s syscall.Signal) (err error) {
	for _, p := range all {
		p.Signal(s)
	}
	for _, p := range all {
		if !p.Wait(30 * time.Second) {
			p.Kill()
			err = errors.New("a process did not end when it was told to")
		}
	}
	return err
}

func (all processes) ended() bool {
	return slices.ContainsFunc(all, func(p *child.Process) bool { return p.Ended() })
}

func (all processes) cpu() (used measure.CPU) {
	for _, p := range all {
		used += measure.CPUOf(p.Pid())
	}
	return used
}

// memory is the largest of their peaks.
func (all processes) memory() (bytes int64) {
	for _, p := range all {
		bytes = max(bytes, measure.PeakMemory(p.Pid()))
	}
	return bytes
}

// log is the file of what a contender printed.
func (r *landing) log() string { return filepath.Join(r.folder, "log") }

// prepare fills the topic, if it isn't there yet, and makes the landing's
// database with the sink's table.
func (b *bench) prepare(ctx context.Context, c *contender, t topic) (r *landing, err error) {
	if err := b.fill(ctx, t); err != nil {
		return nil, err
	}
	b.runCount++
	r = &landing{topic: t, group: fmt.Sprint("bench-", b.runCount), folder: filepath.Join(b.folder, fmt.Sprint(b.runCount))}
	name := fmt.Sprint("bench_", b.runCount)
	r.url = b.server.URL(name)
	if err := os.Mkdir(r.folder, 0o700); err != nil {
		return nil, err
	}
	if err := b.exec(ctx, "postgres", "CREATE DATABASE "+name); err != nil {
		return nil, err
	}
	if err := b.exec(ctx, name, "CREATE TABLE rows ("+cmp.Or(c.columns, plainColumns)+")", c.sql); err != nil {
		return nil, err
	}
	r.conn, err = pgx.Connect(ctx, r.url)
	return r, err
}

// end kills what still runs and drops the database.
func (r *landing) end(ctx context.Context, b *bench) error {
	ctx = context.WithoutCancel(ctx)
	err := r.processes.stop(syscall.SIGKILL)
	return errors.Join(err, r.conn.Close(ctx), b.exec(ctx, "postgres", "DROP DATABASE "+r.conn.Config().Database+" WITH (FORCE)"))
}
