// Package kafka starts a real Apache Kafka broker for tests: one KRaft node, run
// from the Maven jars as a direct child process, so that signals and kill -9 hit
// the broker itself. It knows nothing of dedupd and is no part of the product.
//
// A test takes the broker that its test binary shares with Run; a test that
// stops or kills its broker starts one of its own with Start.
package kafka

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/internal/child"
)

// AddrEnv names the environment variable with the host:port of a broker to use
// instead of starting one.
const AddrEnv = "DEDUPD_TEST_KAFKA"

const (
	startTimeout = 60 * time.Second // 3 s on an idle machine; CI machines are not idle
	stopTimeout  = 20 * time.Second
	// A fixed cluster id: a random one would need one more run of a Java tool.
	clusterID = "ZGVkdXBkLXRlc3Qta2Fma2"
)

// Broker is one running broker. Its methods may not be called concurrently,
// except Addr and CreateTopic.
type Broker struct {
	addr string
	dir  string // empty: not ours to start or stop
	java string
	libs string
	proc *child.Process
}

// Start formats dir, which must be empty or absent, and starts a broker on
// 127.0.0.1 and a free port. It returns when the broker answers. The broker dies
// with this process, however that ends.
func Start(dir string) (*Broker, error) {
	java, libs, err := findKafka()
	if err != nil {
		return nil, err
	}
	b := &Broker{dir: dir, java: java, libs: libs}
	// A free port may be taken by somebody else before the broker has it.
	for attempt := 0; ; attempt++ {
		err := b.create()
		if err == nil {
			err = b.Restart()
		}
		if err == nil {
			return b, nil
		}
		if attempt == 2 {
			return nil, fmt.Errorf("start kafka in %s: %w", dir, err)
		}
		if err := os.RemoveAll(filepath.Join(dir, "data")); err != nil {
			return nil, err
		}
	}
}

// At is a broker that runs already, such as a fake one: its topics and groups can
// be managed, but it can't be stopped or started.
func At(addr string) *Broker { return &Broker{addr: addr} }

// Addr is the broker's host:port.
func (b *Broker) Addr() string { return b.addr }

// Stop ends the broker in an orderly way, or after 20 s in any way. Stopping a
// stopped broker does nothing.
func (b *Broker) Stop() error { return b.end(syscall.SIGTERM) }

// Kill ends the broker with SIGKILL.
func (b *Broker) Kill() error { return b.end(syscall.SIGKILL) }

// Restart starts a stopped or killed broker again, on the same port and data.
func (b *Broker) Restart() error {
	if b.dir == "" {
		return errNotOurs
	}
	if b.proc != nil {
		return errors.New("kafka is running")
	}
	out := filepath.Join(b.dir, "broker.log")
	proc, err := start(out, b.java, b.args("kafka.Kafka", b.config())...)
	if err != nil {
		return err
	}
	b.proc = proc
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := b.await(ctx); err != nil {
		_ = b.Kill()
		return fmt.Errorf("%w\n%s", err, tail(out))
	}
	return nil
}

var errNotOurs = errors.New("the broker is not ours to start or stop: unset " + AddrEnv + " to run this test")

func (b *Broker) end(sig syscall.Signal) error {
	if b.dir == "" {
		return errNotOurs
	}
	if b.proc == nil {
		return nil
	}
	err := end(b.proc, sig, stopTimeout)
	b.proc = nil
	return err
}

// create writes the configuration for fresh ports and formats the data folder.
func (b *Broker) create() error {
	if err := os.MkdirAll(b.dir, 0o755); err != nil {
		return err
	}
	ports, err := freePorts(2)
	if err != nil {
		return err
	}
	b.addr = fmt.Sprintf("127.0.0.1:%d", ports[0])
	if err := os.WriteFile(b.config(), []byte(b.properties(ports[0], ports[1])), 0o644); err != nil {
		return err
	}
	out := filepath.Join(b.dir, "format.log")
	proc, err := start(out, b.java, b.args("kafka.tools.StorageTool", "format", "-t", clusterID, "-c", b.config())...)
	if err != nil {
		return err
	}
	if !proc.Wait(startTimeout) {
		_ = end(proc, syscall.SIGKILL, stopTimeout)
		return errors.New("formatting took too long")
	}
	if err := proc.Err(); err != nil {
		return fmt.Errorf("format: %w\n%s", err, tail(out))
	}
	return nil
}

func (b *Broker) config() string { return filepath.Join(b.dir, "server.properties") }

func (b *Broker) args(class string, args ...string) []string {
	return append([]string{"-Xmx512m", "-XX:+UseSerialGC", "-cp", filepath.Join(b.libs, "*"), class}, args...)
}

// properties keep everything on one node, and every wait that exists for large
// clusters short.
func (b *Broker) properties(client, controller int) string {
	return strings.Join([]string{
		"process.roles=broker,controller",
		"node.id=1",
		fmt.Sprintf("controller.quorum.voters=1@127.0.0.1:%d", controller),
		fmt.Sprintf("listeners=PLAINTEXT://127.0.0.1:%d,CONTROLLER://127.0.0.1:%d", client, controller),
		fmt.Sprintf("advertised.listeners=PLAINTEXT://127.0.0.1:%d", client),
		"controller.listener.names=CONTROLLER",
		"listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
		"log.dirs=" + filepath.Join(b.dir, "data"),
		"auto.create.topics.enable=false",
		"default.replication.factor=1",
		"min.insync.replicas=1",
		"offsets.topic.replication.factor=1",
		"offsets.topic.num.partitions=4",
		"transaction.state.log.replication.factor=1",
		"transaction.state.log.min.isr=1",
		"transaction.state.log.num.partitions=4",
		"share.coordinator.state.topic.replication.factor=1",
		"share.coordinator.state.topic.min.isr=1",
		"share.coordinator.state.topic.num.partitions=1",
		"group.initial.rebalance.delay.ms=0",
		"group.min.session.timeout.ms=1000",
		// Compaction and retention within seconds, for tests of gaps.
		"log.initial.task.delay.ms=500",
		"log.cleaner.backoff.ms=200",
		"log.retention.check.interval.ms=1000",
		"log.segment.delete.delay.ms=1000",
		"",
	}, "\n")
}

// await waits for a metadata reply: an open port says nothing yet.
func (b *Broker) await(ctx context.Context) error {
	for {
		err := b.ping(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-b.proc.Done():
			return fmt.Errorf("kafka ended at its start: %w", b.proc.Err())
		case <-ctx.Done():
			return fmt.Errorf("kafka does not answer: %w", err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (b *Broker) ping(ctx context.Context) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(b.addr), kgo.RequestRetries(0))
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return serves(ctx, client)
}

func freePorts(n int) ([]int, error) {
	ports := make([]int, n)
	for i := range ports {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // all at the end, so that they differ
		ports[i] = l.Addr().(*net.TCPAddr).Port
	}
	return ports, nil
}

func tail(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-4000):])
}
