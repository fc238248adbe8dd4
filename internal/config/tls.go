package config

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
)

// Client is a client's configuration; nil: no encryption. It reads the client's
// certificate again at each handshake, because certificates are renewed while the
// program runs. The authorities are those of now: see Authorities.
func (t *TLS) Client() (*tls.Config, error) {
	if !t.Enabled {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.ServerName}
	var errs []error
	pool, err := t.Authorities()
	if err != nil {
		errs = append(errs, err)
	}
	c.RootCAs = pool
	if t.CertFile != "" && t.KeyFile != "" {
		load := func() (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
			return &pair, err
		}
		if _, err := load(); err != nil {
			errs = append(errs, fmt.Errorf("cert_file: %w", err))
		}
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return c, nil
}

// Authorities reads the authorities that may sign a server's certificate; nil: the
// system's. Call it at each handshake: they, too, change while the program runs.
func (t *TLS) Authorities() (*x509.CertPool, error) {
	if t.CAFile == "" {
		return nil, nil
	}
	text, err := os.ReadFile(t.CAFile)
	if err != nil {
		return nil, fmt.Errorf("ca_file: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("ca_file: %s holds no certificate in PEM form", t.CAFile)
	}
	return pool, nil
}
