// Package kafkatest starts real Apache Kafka brokers for tests: KRaft nodes, run from
// the Maven jars as direct child processes, so that signals and kill -9 hit
// the broker itself. It knows nothing of dedupd and is no part of the product.
//
// A test takes the broker that its test binary shares with Run; a test that
// stops or kills its broker starts one of its own with Start.
package kafkatest

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
	startTimeout = 2 * time.Minute // 3 s on an idle machine; CI machines are not idle
	stopTimeout  = 20 * time.Second
	// A fixed cluster id: a random one would need one more run of a Java tool.
	clusterID = "ZGVkdXBkLXRlc3Qta2Fma2"
)

// Broker is one running broker. Its methods may not be called concurrently,
// except Addr, Relayed and CreateTopic.
type Broker struct {
	addr string
	// relayed is what the broker advertises to those who come by the relay.
	relayed   string
	secured   string
	encrypted string // where it speaks TLS; empty: nowhere
	dir       string // empty: not ours to start or stop
	java      string
	libs      string
	proc      *child.Process
}

// Options of a cluster.
type Options struct {
	// Nodes, 1 unless set, are brokers and controllers at once. Where there are
	// three, a topic has three replicas, two of which must be in sync.
	Nodes int
	// Relay, unless nil, is told of a second address where each node listens, and
	// returns the one that it advertises there: that of a relay in front of it.
	Relay func(addr string) (string, error)
	// Logins are users and their passwords. If there are any, each node listens at
	// another address for those who log in (SASL/PLAIN, not encrypted), and users have
	// no rights but what ACLs give them. Who comes by the first address may do all.
	Logins map[string]string
	// Settings are the broker's own, by name, and come before those of this package.
	Settings map[string]string
	// TLS, unless nil, is for one more address where each node listens, and speaks
	// TLS alone.
	TLS *TLS
}

// TLS names files, which are read when the broker starts: they may be replaced
// before a restart.
type TLS struct {
	// Identity is a PEM file with the broker's key and its certificate; Clients one
	// with the authorities of clients, each of which must have a certificate.
	Identity, Clients string
}

// Start formats dir, which must be empty or absent, and starts a broker on
// 127.0.0.1 and a free port. It returns when the broker answers. The broker dies
// with this process, however that ends.
func Start(dir string) (*Broker, error) {
	brokers, err := StartCluster(dir, Options{})
	if err != nil {
		return nil, err
	}
	return brokers[0], nil
}

// StartCluster is Start for the nodes of a cluster, each with a folder of its own
// in dir.
func StartCluster(dir string, o Options) ([]*Broker, error) {
	java, libs, err := findKafka()
	if err != nil {
		return nil, err
	}
	o.Nodes = max(o.Nodes, 1)
	// A free port may be taken by somebody else before the broker has it.
	for attempt := 0; ; attempt++ {
		brokers := make([]*Broker, o.Nodes)
		for i := range brokers {
			brokers[i] = &Broker{dir: filepath.Join(dir, fmt.Sprint("node-", i+1)), java: java, libs: libs}
		}
		err := create(brokers, o)
		if err == nil {
			err = start(brokers...)
		}
		if err == nil {
			return brokers, nil
		}
		if attempt == 2 {
			return nil, fmt.Errorf("start kafka in %s: %w", dir, err)
		}
		for _, b := range brokers {
			if err := errors.Join(b.Kill(), os.RemoveAll(filepath.Join(b.dir, "data"))); err != nil {
				return nil, err
			}
		}
	}
}

// At is a broker that runs already, such as a fake one: its topics and groups can
// be managed, but it can't be stopped or started.
func At(addr string) *Broker { return &Broker{addr: addr} }

// Addr is the broker's host:port.
func (b *Broker) Addr() string { return b.addr }

// Relayed is host:port of the relay in front of the broker; empty: there is none.
func (b *Broker) Relayed() string { return b.relayed }

// Secured is host:port for those who log in; empty: nobody can.
func (b *Broker) Secured() string { return b.secured }

// Encrypted is host:port where the broker speaks TLS; empty: nowhere.
func (b *Broker) Encrypted() string { return b.encrypted }

// Stop ends the broker in an orderly way, or after 20 s in any way. Stopping a
// stopped broker does nothing.
func (b *Broker) Stop() error { return b.end(syscall.SIGTERM) }

// Kill ends the broker with SIGKILL.
func (b *Broker) Kill() error { return b.end(syscall.SIGKILL) }

// Restart starts a stopped or killed broker again, on the same port and data.
func (b *Broker) Restart() error { return start(b) }

// start starts brokers, and returns when all answer: one alone of three would
// wait for the others.
func start(brokers ...*Broker) error {
	for _, b := range brokers {
		if err := b.launch(); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for _, b := range brokers {
		if err := b.await(ctx); err != nil {
			_ = b.Kill()
			return fmt.Errorf("%w\n%s", err, tail(b.log()))
		}
	}
	return nil
}

func (b *Broker) launch() (err error) {
	if b.dir == "" {
		return errNotOurs
	}
	if b.proc != nil {
		return errors.New("kafka is running")
	}
	b.proc, err = launch(b.log(), b.java, b.args("kafka.Kafka", b.config())...)
	return err
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

// create writes the configurations for fresh ports and formats the data folders.
func create(brokers []*Broker, o Options) error {
	const each = 5
	ports, err := freePorts(each * len(brokers))
	if err != nil {
		return err
	}
	var voters []string
	for i := range brokers {
		voters = append(voters, fmt.Sprintf("%d@127.0.0.1:%d", i+1, ports[each*i+1]))
	}
	for i, b := range brokers {
		if err := os.MkdirAll(b.dir, 0o755); err != nil {
			return err
		}
		n := node{
			id: i + 1, nodes: len(brokers), voters: strings.Join(voters, ","), data: filepath.Join(b.dir, "data"),
			client: address(ports[each*i]), controller: address(ports[each*i+1]),
			logins: o.Logins, settings: o.Settings,
		}
		b.addr = n.client
		if o.Relay != nil {
			n.relayed = address(ports[each*i+2])
			if n.advertised, err = o.Relay(n.relayed); err != nil {
				return err
			}
			b.relayed = n.advertised
		}
		if len(o.Logins) > 0 {
			n.secured = address(ports[each*i+3])
			b.secured = n.secured
		}
		if o.TLS != nil {
			b.encrypted = address(ports[each*i+4])
			n.encrypted, n.tls = b.encrypted, o.TLS
		}
		if err := os.WriteFile(b.config(), []byte(n.properties()), 0o644); err != nil {
			return err
		}
		if err := b.format(); err != nil {
			return err
		}
	}
	return nil
}

func (b *Broker) format() error {
	out := filepath.Join(b.dir, "format.log")
	proc, err := launch(out, b.java, b.args("kafka.tools.StorageTool", "format", "-t", clusterID, "-c", b.config())...)
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

func (b *Broker) log() string { return filepath.Join(b.dir, "broker.log") }

func (b *Broker) config() string { return filepath.Join(b.dir, "server.properties") }

func (b *Broker) args(class string, args ...string) []string {
	return append([]string{"-Xmx512m", "-XX:+UseSerialGC", "-cp", filepath.Join(b.libs, "*"), class}, args...)
}

// node is what a broker's configuration tells of it.
type node struct {
	id, nodes          int
	voters, data       string
	client, controller string // addresses where it listens
	relayed            string // the same for those who come by a relay; empty: there is none
	advertised         string // the relay's
	secured            string // for those who log in; empty: nobody does
	logins, settings   map[string]string
	encrypted          string // where it speaks TLS; empty: nowhere
	tls                *TLS
}

// properties keep every wait that exists for large clusters short.
func (n *node) properties() string {
	listeners, advertised, protocols := "PLAINTEXT://"+n.client, "PLAINTEXT://"+n.client, "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT"
	if n.relayed != "" {
		listeners += ",RELAYED://" + n.relayed
		advertised += ",RELAYED://" + n.advertised
		protocols += ",RELAYED:PLAINTEXT"
	}
	if n.secured != "" {
		listeners += ",SECURED://" + n.secured
		advertised += ",SECURED://" + n.secured
		protocols += ",SECURED:SASL_PLAINTEXT"
	}
	var keys []string
	if n.tls != nil {
		listeners += ",ENCRYPTED://" + n.encrypted
		advertised += ",ENCRYPTED://" + n.encrypted
		protocols += ",ENCRYPTED:SSL"
		const prefix = "listener.name.encrypted.ssl."
		keys = []string{
			prefix + "keystore.type=PEM", prefix + "keystore.location=" + n.tls.Identity,
			prefix + "truststore.type=PEM", prefix + "truststore.location=" + n.tls.Clients, prefix + "client.auth=required",
		}
	}
	inSync := n.nodes/2 + 1
	lines := append([]string{
		"process.roles=broker,controller",
		fmt.Sprintf("node.id=%d", n.id),
		"controller.quorum.voters=" + n.voters,
		"listeners=" + listeners + ",CONTROLLER://" + n.controller,
		"advertised.listeners=" + advertised,
		"inter.broker.listener.name=PLAINTEXT",
		"controller.listener.names=CONTROLLER",
		"listener.security.protocol.map=" + protocols,
		"log.dirs=" + n.data,
		"auto.create.topics.enable=false",
		fmt.Sprintf("default.replication.factor=%d", n.nodes),
		fmt.Sprintf("min.insync.replicas=%d", inSync),
		fmt.Sprintf("offsets.topic.replication.factor=%d", n.nodes),
		"offsets.topic.num.partitions=4",
		fmt.Sprintf("transaction.state.log.replication.factor=%d", n.nodes),
		fmt.Sprintf("transaction.state.log.min.isr=%d", inSync),
		"transaction.state.log.num.partitions=4",
		fmt.Sprintf("share.coordinator.state.topic.replication.factor=%d", n.nodes),
		fmt.Sprintf("share.coordinator.state.topic.min.isr=%d", inSync),
		"share.coordinator.state.topic.num.partitions=1",
		"group.initial.rebalance.delay.ms=0",
		"group.min.session.timeout.ms=1000",
		// Compaction and retention within seconds, for tests of gaps.
		"log.initial.task.delay.ms=500",
		"log.cleaner.backoff.ms=200",
		"log.retention.check.interval.ms=1000",
		"log.segment.delete.delay.ms=1000",
	}, keys...)
	if n.secured != "" {
		lines = append(lines,
			"sasl.enabled.mechanisms=PLAIN",
			"listener.name.secured.plain.sasl.jaas.config="+n.jaas(),
			"authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
			"super.users=User:ANONYMOUS")
	}
	for name, value := range n.settings {
		lines = append(lines, name+"="+value) // of two, the last counts
	}
	return strings.Join(append(lines, ""), "\n")
}

func (n *node) jaas() string {
	text := "org.apache.kafka.common.security.plain.PlainLoginModule required"
	for user, password := range n.logins {
		text += fmt.Sprintf(" user_%s=%q", user, password)
	}
	return text + ";"
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

func address(port int) string { return fmt.Sprint("127.0.0.1:", port) }

func tail(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-4000):])
}
