package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// certificate writes a self-signed certificate and its key into dir.
func certificate(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: pkcs8}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

func TestTLSClient(t *testing.T) {
	if c, err := (&TLS{}).Client(); c != nil || err != nil {
		t.Fatalf("not enabled: %v, %v", c, err)
	}
	dir := t.TempDir()
	cert, key := certificate(t, dir)
	c, err := (&TLS{Enabled: true, CAFile: cert, CertFile: cert, KeyFile: key, ServerName: "x"}).Client()
	if err != nil {
		t.Fatal(err)
	}
	first, err := c.GetClientCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	certificate(t, dir) // renewed
	second, err := c.GetClientCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.ServerName != "x" || c.RootCAs == nil || string(first.Certificate[0]) == string(second.Certificate[0]) {
		t.Error("a renewed certificate is not used")
	}

	none := filepath.Join(dir, "none.pem")
	if err := os.WriteFile(none, []byte("no PEM"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = (&TLS{Enabled: true, CAFile: none, CertFile: none, KeyFile: key}).Client()
	if err == nil || !strings.Contains(err.Error(), "ca_file: ") || !strings.Contains(err.Error(), "cert_file: ") {
		t.Errorf("files that hold none: %v", err)
	}
}
