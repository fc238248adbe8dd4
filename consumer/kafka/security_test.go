package kafka

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/plain"

	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/policy"
)

// All connections log in and encrypt: those of the group, and those that fetch.
func TestTLSAndSASL(t *testing.T) {
	t.Parallel()
	server, client := certificates(t)
	for _, mechanism := range []policy.Mechanism{policy.MechanismPlain, policy.MechanismScramSHA256, policy.MechanismScramSHA512} {
		t.Run(string(mechanism), func(t *testing.T) {
			cluster := fakeCluster(t, kfake.TLS(server), kfake.EnableSASL(),
				kfake.Superuser("PLAIN", "admin", "secret"),
				kfake.Superuser(strings.ToUpper(string(mechanism)), "dedupd", "swordfish"),
				kfake.SeedTopics(1, "orders"))
			c, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.DialTLSConfig(client),
				kgo.SASL(plain.Auth{User: "admin", Pass: "secret"}.AsMechanism()), kgo.DefaultProduceTopic("orders"))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if err := c.ProduceSync(t.Context(), kgo.StringRecord("one")).FirstErr(); err != nil {
				t.Fatal(err)
			}
			r := rigOn(t, kafkatest.At(cluster.ListenAddrs()[0]), "orders")
			r.start(func(c *Config) {
				c.TLS = client
				c.SASL = SASL{Mechanism: mechanism, Username: "dedupd", CurrentPassword: password("swordfish")}
			})
			r.untilNext(0, 1)
		})
	}
}

func TestWrongPasswordIsTold(t *testing.T) {
	t.Parallel()
	cluster := fakeCluster(t, kfake.EnableSASL(), kfake.Superuser("PLAIN", "dedupd", "swordfish"), kfake.SeedTopics(1, "orders"))
	r := rigOn(t, kafkatest.At(cluster.ListenAddrs()[0]), "orders")
	w := r.start(func(c *Config) {
		c.SASL = SASL{Mechanism: "plain", Username: "dedupd", CurrentPassword: password("wrong")}
	})
	r.until("the log tells", func() bool { return r.log.count("level=WARN") > 0 })
	if w.worker.Ready() == nil {
		t.Error("ready without a login")
	}
	if strings.Contains(r.log.String(), "wrong") {
		t.Error("the log holds the password")
	}
}

// A session timeout outside the broker's limits is refused for good.
func TestRefusedSessionTimeoutEndsTheProgram(t *testing.T) {
	t.Parallel()
	cluster := fakeCluster(t, kfake.GroupMaxSessionTimeout(3*time.Second), kfake.SeedTopics(1, "orders"))
	r := rigOn(t, kafkatest.At(cluster.ListenAddrs()[0]), "orders")
	w := r.start(nil)
	select {
	case err := <-w.done:
		if err == nil || !strings.Contains(err.Error(), "Session Timeout") {
			t.Errorf("ended with %v", err)
		}
	case <-r.ctx.Done():
		t.Fatal("goes on")
	}
}

// certificates makes a server's and a client's TLS configuration for 127.0.0.1.
func certificates(t *testing.T) (server, client *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, &tls.Config{RootCAs: roots}
}
