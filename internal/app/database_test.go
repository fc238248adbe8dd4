package app

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/config"
)

func TestRemoteDatabasesMustShowWhoTheyAre(t *testing.T) {
	t.Setenv("PGSSLMODE", "")
	for _, c := range []struct {
		address        string
		verified, warn bool
	}{
		{"postgres://localhost/app", false, false},
		{"postgres://127.0.0.1,[::1]/app", false, false},
		{"host=/run/postgresql dbname=app", false, false},
		{"postgres://db.example/app", true, false},
		{"postgres://db.example/app?application_name=x", true, false},
		{"postgres://localhost,db.example/app", true, false},
		{"host=db.example dbname=app", true, false},
		{"postgres://db.example/app?sslmode=verify-full", true, false},
		{"postgres://db.example/app?sslmode=require", false, true},
		{"postgres://db.example/app?sslmode=disable", false, true},
	} {
		var log bytes.Buffer
		pc, err := parseAddress(c.address, slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil {
			t.Fatalf("%s: %v", c.address, err)
		}
		t1 := pc.ConnConfig.TLSConfig
		if verified := t1 != nil && !t1.InsecureSkipVerify && t1.ServerName != ""; verified != c.verified {
			t.Errorf("%s: verified %v, want %v", c.address, verified, c.verified)
		}
		if warned := strings.Contains(log.String(), "verify-full"); warned != c.warn {
			t.Errorf("%s: warned %v, want %v", c.address, warned, c.warn)
		}
	}
}

// A Secret may be replaced while workers run: each new connection reads its files.
func TestEachConnectionReadsItsSecretsAnew(t *testing.T) {
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	renewFiles := func(serial int64, password string) {
		t.Helper()
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(serial), NotAfter: time.Now().Add(time.Hour)}
		certificate, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
		if err != nil {
			t.Fatal(err)
		}
		private, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		address := "postgres://worker:" + password + "@db-0.example,db-1.example/app?sslcert=" + file("cert") + "&sslkey=" + file("key")
		if err := errors.Join(
			os.WriteFile(file("cert"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}), 0o600),
			os.WriteFile(file("key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600),
			os.WriteFile(file("url"), []byte(address), 0o600),
		); err != nil {
			t.Fatal(err)
		}
	}
	renewFiles(1, "old")
	pc, err := poolConfig(&config.Config{Database: config.Database{URLFile: file("url"), Pooler: "none"}}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if pc.ConnConfig.OnNotice == nil {
		t.Error("a commit's warning isn't heard")
	}
	renewFiles(2, "new")
	c := pc.ConnConfig.Copy()
	if err := pc.BeforeConnect(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if c.Password != "new" || len(c.Fallbacks) != 1 {
		t.Errorf("password %q, %d more servers", c.Password, len(c.Fallbacks))
	}
	for _, server := range []struct {
		host string
		tls  *tls.Config
	}{{c.Host, c.TLSConfig}, {c.Fallbacks[0].Host, c.Fallbacks[0].TLSConfig}} {
		leaf, err := x509.ParseCertificate(server.tls.Certificates[0].Certificate[0])
		if err != nil || leaf.SerialNumber.Int64() != 2 {
			t.Errorf("%s gets certificate %v, %v", server.host, leaf.SerialNumber, err)
		}
		if server.tls.InsecureSkipVerify || server.tls.ServerName != server.host {
			t.Errorf("%s isn't verified any more: %+v", server.host, server.tls)
		}
	}
}

// If a server hangs up right after the handshake, the error suggests a certificate.
func TestAHangUpIsExplained(t *testing.T) {
	reset := &net.OpError{Op: "write", Net: "tcp", Err: os.NewSyscallError("write", syscall.ECONNRESET)}
	config, err := pgconn.ParseConfig("postgres://app@127.0.0.1:1/app?sslmode=require")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		tls  bool
		err  error
		want bool
	}{{true, reset, true}, {false, reset, false}, {true, context.DeadlineExceeded, false}} {
		config := config.Copy()
		if !c.tls {
			config.TLSConfig = nil
		}
		config.DialFunc = func(context.Context, string, string) (net.Conn, error) { return nil, c.err }
		_, err := pgconn.ConnectConfig(t.Context(), config)
		if got := strings.Contains(explainHangUp(err).Error(), "sslcert"); got != c.want {
			t.Errorf("tls %t, %v: explained %t: %v", c.tls, c.err, got, err)
		}
	}
}
