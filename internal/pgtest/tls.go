package pgtest

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// TLS is what a server needs to encrypt, in PEM form.
type TLS struct {
	Certificate, Key []byte
	// ClientCA are the authorities of clients, each of which must then have a
	// certificate; nil: none is asked for.
	ClientCA []byte
}

// Encrypt gives the server a certificate, or another one than it had, and returns
// when it shows that to new connections. Those that are open stay as they are, and
// so do the ones that don't ask for TLS.
func (s *Server) Encrypt(ctx context.Context, t TLS) error {
	first, _ := pem.Decode(t.Certificate)
	if first == nil {
		return errors.New("encrypt postgres: the certificate is not in PEM form")
	}
	settings := "ssl = on\nssl_cert_file = 'tls.crt'\nssl_key_file = 'tls.key'\n"
	access := "hostssl all all 127.0.0.1/32 scram-sha-256"
	if t.ClientCA != nil {
		settings += "ssl_ca_file = 'tls.ca'\n"
		access += " clientcert=verify-ca"
	}
	for _, file := range []struct{ name, text string }{
		{"tls.crt", string(t.Certificate)},
		{"tls.key", string(t.Key)},
		{"tls.ca", string(t.ClientCA)},
		{"postgresql.auto.conf", settings},
		{"pg_hba.conf", access + "\nhostnossl all all 127.0.0.1/32 scram-sha-256\n"},
	} {
		path := filepath.Join(s.dataFolder(), file.name)
		if err := errors.Join(s.account.write(path+".new", file.text), os.Rename(path+".new", path)); err != nil {
			return fmt.Errorf("encrypt postgres: %w", err)
		}
	}
	if err := syscall.Kill(s.Pid(), syscall.SIGHUP); err != nil {
		return fmt.Errorf("encrypt postgres: %w", err)
	}
	for deadline := time.Now().Add(startTimeout); ; time.Sleep(10 * time.Millisecond) {
		shown, err := s.certificate(ctx)
		switch {
		case slices.Equal(shown, first.Bytes):
			return nil
		case time.Now().After(deadline):
			return fmt.Errorf("encrypt postgres: it shows another certificate (%w); its log is %s", err, s.LogFile())
		}
	}
}

// certificate is the one that a connection is shown now.
func (s *Server) certificate(ctx context.Context) (shown []byte, err error) {
	config, err := pgx.ParseConfig(s.URL("postgres"))
	if err != nil {
		return nil, err
	}
	config.TLSConfig = &tls.Config{InsecureSkipVerify: true, VerifyConnection: func(c tls.ConnectionState) error {
		shown = c.PeerCertificates[0].Raw
		return nil
	}}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err == nil {
		err = conn.Close(ctx)
	}
	return shown, err
}
