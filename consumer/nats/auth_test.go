package nats_test

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

	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/consumer/nats"
)

// reads proves that a source gets in: js is the producer's own way.
func reads(t *testing.T, js jetstream.JetStream, source *nats.Source) {
	t.Helper()
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 10)
	store := consumertest.NewStore()
	r := start(t, source, store)
	wait(t, store, 10)
	r.ready()
}

// refused proves that one doesn't, and that it says so and keeps trying.
func refused(t *testing.T, source *nats.Source) {
	t.Helper()
	r := start(t, source, consumertest.NewStore())
	eventually(t, "a warning", func() bool { return r.log.has("can't connect to NATS") })
	time.Sleep(1500 * time.Millisecond) // several tries
	if r.Ready() == nil {
		t.Error("ready")
	}
	r.stop()
}

func TestUserAndPassword(t *testing.T) {
	t.Parallel()
	s := startServer(t, func(o *server.Options) { o.Username, o.Password = "worker", "secret" })
	url := func(user string) func(*nats.Config) {
		return func(c *nats.Config) {
			c.Servers = []string{fmt.Sprintf("nats://%s@127.0.0.1:%d", user, port(s))}
		}
	}
	reads(t, connect(t, s, natsgo.UserInfo("worker", "secret")), newSource(t, s, url("worker:secret")))
	refused(t, newSource(t, s, url("worker:wrong")))
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
	reads(t, connect(t, s, option), newSource(t, s, func(c *nats.Config) { c.NkeySeedFile = file }))
	_, other := keyPair(t, nkeys.CreateUser)
	refused(t, newSource(t, s, func(c *nats.Config) { c.NkeySeedFile = write(t, other) }))
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
	reads(t, connect(t, s, natsgo.UserCredentials(file)), newSource(t, s, func(c *nats.Config) { c.CredsFile = file }))
	refused(t, newSource(t, s))
}

func TestTLS(t *testing.T) {
	t.Parallel()
	certificate, pool := selfSigned(t)
	s := startServer(t, func(o *server.Options) {
		o.TLS, o.TLSConfig = true, &tls.Config{Certificates: []tls.Certificate{certificate}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
	})
	client := &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{certificate}}
	reads(t, connect(t, s, natsgo.Secure(client)), newSource(t, s, func(c *nats.Config) { c.TLS = client }))
	refused(t, newSource(t, s, func(c *nats.Config) { c.TLS = &tls.Config{} }))
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
