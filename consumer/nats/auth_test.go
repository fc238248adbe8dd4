package nats

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"
)

// reads proves that a source gets in.
func (r *rig) reads(change func(*Config)) {
	r.Helper()
	r.createStream(jetstream.StreamConfig{})
	r.publish(0, 10)
	w := r.start(change)
	r.wait(10)
	w.untilReady()
}

// refused proves that one doesn't, and that it says so and keeps trying.
func (r *rig) refused(change func(*Config)) {
	r.Helper()
	w := r.start(change)
	r.until("a warning", func() bool { return w.log.has("can't connect to NATS") })
	time.Sleep(1500 * time.Millisecond) // several tries
	if w.worker.Ready() == nil {
		r.Error("ready")
	}
	w.stop()
}

func TestUserAndPassword(t *testing.T) {
	t.Parallel()
	s := startServer(t, func(o *server.Options) { o.Username, o.Password = "worker", "secret" })
	url := func(user string) func(*Config) {
		return func(c *Config) {
			c.Servers = []string{fmt.Sprintf("nats://%s@127.0.0.1:%d", user, port(s))}
		}
	}
	r := rigOn(t, s, natsgo.UserInfo("worker", "secret"))
	r.reads(url("worker:secret"))
	r.refused(url("worker:wrong"))
}

func TestNkeySeedFile(t *testing.T) {
	t.Parallel()
	user, seed := keyPair(t, nkeys.CreateUser)
	file := write(t, seed)
	s := startServer(t, func(o *server.Options) { o.Nkeys = []*server.NkeyUser{{Nkey: public(t, user)}} })
	option, err := natsgo.NkeyOptionFromSeed(file)
	if err != nil {
		t.Fatal(err)
	}
	r := rigOn(t, s, option)
	r.reads(func(c *Config) { c.NkeySeedFile = file })
	_, other := keyPair(t, nkeys.CreateUser)
	r.refused(func(c *Config) { c.NkeySeedFile = write(t, other) })
}

func TestCredsFile(t *testing.T) {
	t.Parallel()
	operator, _ := keyPair(t, nkeys.CreateOperator)
	account, _ := keyPair(t, nkeys.CreateAccount)
	user, seed := keyPair(t, nkeys.CreateUser)
	claims := jwt.NewOperatorClaims(public(t, operator))
	resolver := &server.MemAccResolver{}
	accountClaims := jwt.NewAccountClaims(public(t, account))
	accountClaims.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: -1, DiskStorage: -1, Streams: -1, Consumer: -1}
	accountJWT, err := accountClaims.Encode(operator)
	if err != nil {
		t.Fatal(err)
	}
	if err := resolver.Store(public(t, account), accountJWT); err != nil {
		t.Fatal(err)
	}
	system, _ := keyPair(t, nkeys.CreateAccount)
	systemJWT, err := jwt.NewAccountClaims(public(t, system)).Encode(operator)
	if err != nil {
		t.Fatal(err)
	}
	if err := resolver.Store(public(t, system), systemJWT); err != nil {
		t.Fatal(err)
	}
	userJWT, err := jwt.NewUserClaims(public(t, user)).Encode(account)
	if err != nil {
		t.Fatal(err)
	}
	creds, err := jwt.FormatUserConfig(userJWT, seed)
	if err != nil {
		t.Fatal(err)
	}
	file := write(t, creds)
	s := startServer(t, func(o *server.Options) {
		o.TrustedOperators, o.AccountResolver, o.SystemAccount = []*jwt.OperatorClaims{claims}, resolver, public(t, system)
	})
	r := rigOn(t, s, natsgo.UserCredentials(file))
	r.reads(func(c *Config) { c.CredsFile = file })
	r.refused(nil)
}

func TestTLS(t *testing.T) {
	t.Parallel()
	certificate, pool := selfSigned(t)
	s := startServer(t, func(o *server.Options) {
		o.TLS, o.TLSConfig = true, &tls.Config{Certificates: []tls.Certificate{certificate}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
	})
	client := &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{certificate}}
	r := rigOn(t, s, natsgo.Secure(client))
	r.reads(func(c *Config) { c.TLS = client })
	r.refused(func(c *Config) { c.TLS = &tls.Config{} })
}

func selfSigned(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(parsed)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

func keyPair(t *testing.T, create func() (nkeys.KeyPair, error)) (nkeys.KeyPair, []byte) {
	t.Helper()
	pair, err := create()
	if err != nil {
		t.Fatal(err)
	}
	seed, err := pair.Seed()
	if err != nil {
		t.Fatal(err)
	}
	return pair, seed
}

func public(t *testing.T, pair nkeys.KeyPair) string {
	t.Helper()
	p, err := pair.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func write(t *testing.T, content []byte) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
