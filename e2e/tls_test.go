package e2e

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/pgtest"
)

// secured is a real server that demands TLS and a client's certificate, and what
// else a worker needs.
type secured struct {
	check   string // doctor's name for it
	address string
	db      *database
	// present has the server show a certificate, and believe that authority of
	// clients, from now on; connections that were open before have ended.
	present func(shows identity, believes *authority)
	// config is a worker's configuration; without a certificate of its own where
	// that isn't to be shown.
	config func(w wallet, shows bool) string
	send   func(n int)
}

// securely runs a test against each kind of server.
func securely(t *testing.T, test func(t *testing.T, s *secured, ours *authority)) {
	for name, start := range map[string]func(*testing.T, *authority) *secured{"Postgres": securePostgres, "Kafka": secureKafka, "NATS": secureNATS} {
		t.Run(name, func(t *testing.T) {
			needServices(t)
			ours := newAuthority(t, "ours")
			test(t, start(t, ours), ours)
		})
	}
}

func securePostgres(t *testing.T, ours *authority) *secured {
	pg, err := pgtest.StartServer(pgtest.Options{Fsync: true})
	if err != nil {
		t.Fatal("Postgres: ", err, postgresAdvice)
	}
	t.Cleanup(func() {
		if err := pg.Stop(); err != nil {
			t.Error(err)
		}
	})
	s := &secured{check: "database", db: createDatabase(t, pg, "secure")}
	s.db.exec(ordersTable)
	st := newStream(t, "PLAIN")
	u, err := url.Parse(s.db.url)
	if err != nil {
		t.Fatal(err)
	}
	s.address = u.Host
	s.present = func(shows identity, believes *authority) {
		t.Helper()
		if err := pg.Encrypt(t.Context(), pgtest.TLS{Certificate: shows.cert, Key: shows.key, ClientCA: believes.pem}); err != nil {
			t.Fatal(err)
		}
		s.db.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_ssl WHERE ssl`)
	}
	s.present(ours.issue(), ours)
	s.config = func(w wallet, shows bool) string {
		values := url.Values{"sslmode": {"verify-full"}, "sslrootcert": {w.ca}}
		if shows {
			values.Set("sslcert", w.cert)
			values.Set("sslkey", w.key)
		}
		u.RawQuery = values.Encode()
		return fmt.Sprintf("scope: secure\nsources:\n  - nats: {servers: [%q], stream: PLAIN}\ndatabase: {url: %q}\n%s", st.url, u, ordersSink)
	}
	s.send = func(n int) { st.publish(send{n: int32(n)}.id(), send{n: int32(n)}.body()) }
	return s
}

// tlsKeys is a source's part of the configuration.
func tlsKeys(w wallet, shows bool) string {
	keys := fmt.Sprintf("enabled: true, ca_file: %q", w.ca)
	if shows {
		keys += fmt.Sprintf(", cert_file: %q, key_file: %q", w.cert, w.key)
	}
	return "{" + keys + "}"
}

func secureKafka(t *testing.T, ours *authority) *secured {
	dir := t.TempDir()
	files := &kafkatest.TLS{Identity: filepath.Join(dir, "identity.pem"), Clients: filepath.Join(dir, "clients.pem")}
	install := func(shows identity, believes *authority) {
		put(t, files.Identity, shows.key, shows.cert)
		put(t, files.Clients, believes.pem)
	}
	install(ours.issue(), ours)
	brokers, err := kafkatest.StartCluster(filepath.Join(dir, "broker"), kafkatest.Options{TLS: files})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := brokers[0].Kill(); err != nil {
			t.Error(err)
		}
	})
	s := &secured{check: "source", address: brokers[0].Encrypted(), db: newDatabase(t)}
	s.db.exec(ordersTable)
	tp := createTopic(t, brokers[0], "secure", 1)
	s.present = func(shows identity, believes *authority) {
		t.Helper()
		install(shows, believes)
		if err := brokers[0].Stop(); err != nil {
			t.Fatal(err)
		}
		if err := brokers[0].Restart(); err != nil {
			t.Fatal(err)
		}
	}
	s.config = func(w wallet, shows bool) string {
		return fmt.Sprintf("scope: secure\nsources:\n  - kafka: {brokers: [%q], topics: [secure], tls: %s}\ndatabase:\n  url: %q\n%s", s.address, tlsKeys(w, shows), s.db.url, ordersSink)
	}
	s.send = func(n int) {
		t.Helper()
		if err := tp.produce(record(send{n: int32(n)})); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func secureNATS(t *testing.T, ours *authority) *secured {
	var current atomic.Pointer[tls.Config]
	var producer tls.Certificate
	install := func(shows identity, believes *authority) {
		current.Store(&tls.Config{Certificates: []tls.Certificate{shows.pair(t)}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: believes.pool()})
		producer = believes.issue().pair(t)
	}
	st := &stream{t: t, name: "SECURE", options: server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true,
		TLS: true, TLSTimeout: 10,
		TLSConfig: &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return current.Load(), nil }},
	}}
	install(ours.issue(), ours)
	st.startServer()
	t.Cleanup(st.stopServer)
	// as has a producer do something, by a connection of its own.
	as := func(do func(jetstream.JetStream) error) {
		t.Helper()
		conn, err := natsgo.Connect(st.url, natsgo.Secure(&tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{producer}}))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		js, err := jetstream.New(conn)
		if err == nil {
			err = do(js)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	as(func(js jetstream.JetStream) error {
		_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: st.name, Subjects: []string{st.name + ".>"}})
		return err
	})
	s := &secured{check: "source", db: newDatabase(t), address: strings.TrimPrefix(strings.TrimPrefix(st.url, "nats://"), "tls://")}
	s.db.exec(ordersTable)
	s.present = func(shows identity, believes *authority) {
		t.Helper()
		install(shows, believes)
		st.stopServer()
		st.startServer()
	}
	s.config = func(w wallet, shows bool) string {
		return fmt.Sprintf("scope: secure\nsources:\n  - nats: {servers: [\"nats://%s\"], stream: SECURE, tls: %s}\ndatabase:\n  url: %q\n%s", s.address, tlsKeys(w, shows), s.db.url, ordersSink)
	}
	s.send = func(n int) {
		t.Helper()
		as(func(js jetstream.JetStream) error {
			_, err := js.PublishMsg(t.Context(), st.message(0, send{n: int32(n)}.id(), send{n: int32(n)}.body()))
			return err
		})
	}
	return s
}

// examine runs doctor, and wants a finding about the server: all is well there, or
// an error that tells its address and the words.
func (s *secured) examine(t *testing.T, config string, code int, words ...string) {
	t.Helper()
	config = configFile(t, config)
	r := command(t, nil, "doctor", "-c", config, "-o", "json")
	if code == 0 { // the coordinator of a broker that has just started may not be there yet
		await(t, "doctor finds all well", 60*time.Second, func() error {
			if r = command(t, nil, "doctor", "-c", config, "-o", "json"); r.code != 0 {
				return fmt.Errorf("exit code %d: %s", r.code, r.stdout)
			}
			return nil
		})
	}
	var all []finding
	if err := json.Unmarshal([]byte(r.stdout), &all); err != nil {
		t.Fatalf("%v\n%s%s", err, r.stdout, r.stderr)
	}
	level := "error"
	if code == 0 {
		level = "ok"
	} else {
		words = append(words, s.address)
	}
	said := slices.ContainsFunc(all, func(f finding) bool {
		return f.Check == s.check && f.Level == level && !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(f.Text, w) })
	})
	// Without a schema, which a worker makes, there are warnings.
	if r.code != code || !said {
		t.Errorf("doctor: exit code %d, want %d, and an %s of %s with %q among\n%s", r.code, code, level, s.check, words, r.stdout)
	}
}

// refuses wants a worker that doesn't get in: without the database it ends, with
// the code that says so; a broker is waited for.
func (s *secured) refuses(t *testing.T, config string, words ...string) {
	t.Helper()
	words = append(words, s.address)
	w := newWorker(t, "worker", configFile(t, config))
	w.start()
	await(t, "the log tells", 20*time.Second, func() error {
		for _, word := range words {
			if !strings.Contains(w.logText(), word) {
				return fmt.Errorf("nothing of %q", word)
			}
		}
		return nil
	})
	if s.check == "database" {
		if !w.Wait(30 * time.Second) {
			t.Fatal("it goes on without a database")
		}
		if w.Code() != 3 {
			t.Errorf("exit code %d, want 3", w.Code())
		}
		return
	}
	w.probe("/readyz", 503, 10*time.Second)
	w.probe("/livez", 200, 10*time.Second)
	w.drain(20 * time.Second)
}

// Whatever is wrong with a certificate keeps a worker out, and both the log and
// doctor tell what it is and of which server; nothing of it is accepted in silence.
func TestTLSIsRefused(t *testing.T) {
	securely(t, func(t *testing.T, s *secured, ours *authority) {
		theirs := newAuthority(t, "theirs")
		good, sound := newWallet(t, ours.pem, ours.issue()), ours.issue()
		s.examine(t, s.config(good, true), 0)
		for _, c := range []struct {
			name     string
			server   *identity // nil: it has a sound one
			w        wallet
			stranger bool // who shows no certificate
			words    string
		}{
			{name: "wrong authority", w: newWallet(t, theirs.pem, ours.issue()), words: "certificate signed by unknown authority"},
			{name: "no client certificate", w: good, stranger: true, words: "client"},
			{name: "a client's certificate of a wrong authority", w: newWallet(t, ours.pem, theirs.issue()), words: "certificate"},
			{name: "a client's certificate that has expired", w: newWallet(t, ours.pem, ours.issue(expired)), words: "certificate"},
			{name: "expired", server: new(ours.issue(expired)), w: good, words: "certificate has expired"},
			{name: "wrong host", server: new(ours.issue(elsewhere)), w: good, words: "certificate is valid for 127.0.0.2, not 127.0.0.1"},
		} {
			t.Run(c.name, func(t *testing.T) {
				if c.server != nil {
					s.present(*c.server, ours)
					defer s.present(sound, ours)
				}
				config := s.config(c.w, !c.stranger)
				s.examine(t, config, 3, c.words)
				s.refuses(t, config, c.words)
			})
		}
		s.examine(t, s.config(good, true), 0)
	})
}

// Kubernetes replaces the files of a secret while a worker runs: it comes in again
// by what they hold then, also when the authority is another, without a restart.
func TestCertificatesAreRenewed(t *testing.T) {
	securely(t, func(t *testing.T, s *secured, ours *authority) {
		files := newWallet(t, ours.pem, ours.issue())
		w := newWorker(t, "worker", configFile(t, s.config(files, true)))
		w.start()
		s.send(0)
		awaitBooks(s.db, "secure", 1)
		w.probe("/readyz", 200, 20*time.Second)

		// The worker's certificate runs out, and so does the authority.
		next := newAuthority(t, "next")
		s.present(next.issue(), next)
		w.probe("/readyz", 503, 60*time.Second)
		await(t, "the log tells why", 30*time.Second, func() error {
			if text := w.logText(); !strings.Contains(text, "unknown authority") {
				return fmt.Errorf("nothing of it")
			}
			return nil
		})
		files.renew(t, next.pem, next.issue())
		w.probe("/readyz", 200, 60*time.Second)
		s.send(1)
		awaitBooks(s.db, "secure", 2)

		// A certificate alone.
		files.renew(t, next.pem, next.issue())
		s.present(next.issue(), next)
		s.send(2)
		awaitBooks(s.db, "secure", 3)
		w.drain(30 * time.Second)
	})
}
