package test

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

	"sigs.k8s.io/yaml"

	_ "github.com/dedupd/dedupd/examples/customsink/balance"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/sinks"
	_ "github.com/dedupd/dedupd/sinks/statement"
	_ "github.com/dedupd/dedupd/sinks/table"
)

// read reads a ConfigMap's configuration as a worker in that pod does: with its
// environment, and with files where the pod has Secrets mounted.
func read(t *testing.T, r *release, name string, p pod) *config.Config {
	t.Helper()
	var text string
	for _, o := range r.kind("ConfigMap") {
		if o.name == name {
			text, _ = at(o.fields, "data", "dedupd.yaml").(string)
		}
	}
	if text == "" {
		t.Fatalf("%s: there is no ConfigMap %s", p.of, name)
	}

	// The pod's folders are ours for the time of the test.
	const mount = "/etc/dedupd/secrets"
	dir := t.TempDir()
	certificate, key := pair(t)
	for _, v := range p.Spec.Volumes {
		if v.Projected == nil {
			continue
		}
		for _, source := range v.Projected.Sources {
			for _, item := range source.Secret.Items {
				content := "secret\n"
				switch filepath.Base(item.Path) {
				case "url":
					content = "postgres://orders@db/orders\n"
				case "ca", "cert":
					content = certificate
				case "key":
					content = key
				}
				path := filepath.Join(dir, item.Path)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	var environ []string
	for _, e := range p.Spec.Containers[0].Env {
		value := strings.ReplaceAll(e.Value, mount, dir)
		if e.ValueFrom != nil {
			value = "user"
		}
		environ = append(environ, e.Name+"="+value)
	}
	c, warnings, err := config.Parse("dedupd.yaml", []byte(strings.ReplaceAll(text, mount, dir)), config.Options{Environ: environ, Sinks: &sinks.Default})
	if err != nil || len(warnings) > 0 {
		t.Fatalf("%s: %v %v\n%s", p.of, err, warnings, text)
	}
	return c
}

// pair is a certificate and its key.
func pair(t *testing.T) (certificate, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}))
}

// Every pod of every example reads a configuration that dedupd takes.
func TestConfigurationsAreDedupds(t *testing.T) {
	examples(t, func(t *testing.T, name string, r *release) {
		for _, p := range pods(t, r) {
			for _, v := range p.Spec.Volumes {
				if v.ConfigMap == nil || name == "existing-configmap" {
					continue
				}
				c := read(t, r, v.ConfigMap.Name, p)
				if c.Log.Format != "json" || c.HTTP.Listen != ":9464" {
					t.Errorf("%s: log.format %s, http.listen %s", p.of, c.Log.Format, c.HTTP.Listen)
				}
				if url, err := c.Database.Connection(); err != nil || url != "postgres://orders@db/orders" {
					t.Errorf("%s: the database's URL is read as %q, %v", p.of, url, err)
				}
				if want := strings.HasPrefix(name, "migrate-"); c.Database.Migrate == want {
					t.Errorf("%s: database.migrate is %v", p.of, c.Database.Migrate)
				}
			}
		}
	})
}

// Secrets are where the configuration looks for them.
func TestSecretsAreFiles(t *testing.T) {
	r := mustRender(t, example(t, "kafka-secrets"))
	p := pods(t, r)[0]
	k := read(t, r, "orders-dedupd", p).Sources[0].Kafka
	if password, err := k.SASL.CurrentPassword(); err != nil || password != "secret" || k.SASL.Username != "user" {
		t.Errorf("user %q, password %q, %v", k.SASL.Username, password, err)
	}
	if tls, err := k.TLS.Client(); err != nil || tls == nil || tls.RootCAs == nil || tls.GetClientCertificate == nil {
		t.Errorf("TLS %v, %v", tls, err)
	}
	variables := env(p.Spec.Containers[0])
	for name, path := range map[string]string{"PGSSLROOTCERT": "ca", "PGSSLCERT": "cert", "PGSSLKEY": "key"} {
		if variables[name] != "/etc/dedupd/secrets/database/"+path {
			t.Errorf("%s is %q", name, variables[name])
		}
	}

	r = mustRender(t, example(t, "pipelines"))
	for scope, c := range map[string]int{"orders": 0, "order_search": 1, "payments": 2} {
		k := read(t, r, "orders-dedupd", pods(t, r)[0]).Pipelines[c].Sources[0].Kafka
		if password, err := k.SASL.CurrentPassword(); err != nil || password != "secret" || k.SASL.Username != "user" || !k.TLS.Enabled {
			t.Errorf("%s: user %q, password %q, %v, TLS %v", scope, k.SASL.Username, password, err, k.TLS.Enabled)
		}
	}

	r = mustRender(t, example(t, "nats-secrets"))
	n := read(t, r, "orders-dedupd", pods(t, r)[0]).Sources[0].NATS
	if text, err := os.ReadFile(n.CredsFile); err != nil || string(text) != "secret\n" || !n.TLS.Enabled {
		t.Errorf("credentials %q, %v, TLS %v", text, err, n.TLS.Enabled)
	}
	// No secret is anywhere but in its Secret.
	for _, o := range r.objects {
		if o.kind == "Secret" {
			t.Errorf("the chart makes %s", o)
		}
	}
}

// What the user writes goes before what the chart fills in; numbers stay whole.
func TestConfigurationIsTheUsers(t *testing.T) {
	r := mustRender(t, example(t, "kafka-secrets"), `
config:
  log: {format: text, level: debug}
  retention: {generation_max_claims: 20000000}
  sources:
    - name: main
      kafka:
        brokers: kafka:9093
        topics: orders
        tls: {enabled: true, ca_file: ""}
        sasl: {mechanism: plain, username: me}
`)
	var text string
	for _, o := range r.kind("ConfigMap") {
		text, _ = at(o.fields, "data", "dedupd.yaml").(string)
	}
	var c map[string]any
	if err := yaml.UnmarshalStrict([]byte(text), &c); err != nil {
		t.Fatal(err)
	}
	if at(c, "log", "format") != "text" || at(c, "log", "level") != "debug" || !strings.Contains(text, "generation_max_claims: 20000000") ||
		!strings.Contains(text, "username: me") || !strings.Contains(text, "ca_file: /etc/dedupd/secrets/sources/main/ca") {
		t.Errorf("the configuration is\n%s", text)
	}
}

// The chart's defaults leave room for dedupd's: the memory that it plans with,
// and the time that it takes to leave.
func TestDefaultsFitDedupds(t *testing.T) {
	c := config.Default()
	limit := pods(t, mustRender(t, example(t, "kafka")))[0].Spec.Containers[0].Resources.Limits.Memory().Value()
	if need := int64(c.Batch.InflightBytes) + int64(c.Retention.FilterMemory) + 64<<20; limit*9/10 < need {
		t.Errorf("the memory limit of %d is too small for %d", limit, need)
	}
	if c.Shutdown.Drain.String() != "15s" || c.Database.MaxConnections != 4 || c.Retention.Window.String() != "7d" ||
		c.Batch.InflightBytes.String() != "128MiB" || c.Retention.FilterMemory.String() != "256MiB" {
		t.Error("a default that the templates repeat has changed: correct templates/_helpers.tpl and templates/NOTES.txt")
	}
}
