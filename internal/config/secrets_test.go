package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

func TestSecretFiles(t *testing.T) {
	dir := t.TempDir()
	dsn, password := filepath.Join(dir, "dsn"), filepath.Join(dir, "password")
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(dsn, "postgres://h/one\n")
	write(password, " pass \r\n")
	c := parse(t, fmt.Sprintf(`
scope: orders
sources: [{kafka: {brokers: "b:1", topics: orders, sasl: {mechanism: plain, username: u, password_file: %q}}}]
database: {url_file: %q}
sink: {probe: {name: x}}
`, password, dsn))
	if got := c.Database.URL.Reveal(); got != "postgres://h/one" {
		t.Errorf("url %q", got)
	}
	if got, err := c.Sources[0].Kafka.SASL.CurrentPassword(); got != " pass " || err != nil {
		t.Errorf("password %q, %v", got, err)
	}
	write(dsn, "postgres://h/two")
	if got, err := c.Database.Connection(); got != "postgres://h/two" || err != nil {
		t.Errorf("after a change: %q, %v", got, err)
	}
	// A secret that can't be read now is an error, and no empty secret.
	write(password, "\n")
	if got, err := c.Sources[0].Kafka.SASL.CurrentPassword(); err == nil || !strings.Contains(err.Error(), password+" is empty") {
		t.Errorf("an empty file gives %q, %v", got, err)
	}
	if err := os.Rename(dsn, dsn+".gone"); err != nil {
		t.Fatal(err)
	}
	if got, err := c.Database.Connection(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is gone gives %q, %v", got, err)
	}
	var out strings.Builder
	if err := c.Print(&out); err != nil || strings.Contains(out.String(), "pass ") || strings.Contains(out.String(), "//h/") {
		t.Errorf("print shows a secret: %v\n%s", err, out.String())
	}
}

// TestNoTextOfASecret tries every usual way to format a value.
func TestNoTextOfASecret(t *testing.T) {
	type holder struct {
		S Secret
		P *Secret
	}
	s := Secret("hunter2")
	h := holder{s, &s}
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	logger.Info("x", "secret", s, "holder", h, "pointer", &s)
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "secret", s, "holder", h)
	asJSON, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	asYAML, err := yaml.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	c := parse(t, small, "DEDUPD_DATABASE_URL=postgres://u:hunter2@h/db")
	var printed strings.Builder
	if err := c.Print(&printed); err != nil {
		t.Fatal(err)
	}
	texts := []string{s.String(), s.GoString(), log.String(), string(asJSON), string(asYAML), printed.String(), fmt.Sprint(c.Database), fmt.Errorf("x: %w, %v", errors.New("y"), s).Error()}
	for _, verb := range []string{"%s", "%v", "%+v", "%#v", "%q", "%x", "%X", "%d", "%10s", "%t"} {
		texts = append(texts, fmt.Sprintf(verb, s), fmt.Sprintf(verb, h), fmt.Sprintf(verb, []Secret{s}))
	}
	for _, text := range texts {
		if strings.Contains(text, "hunter2") || strings.Contains(strings.ToLower(text), fmt.Sprintf("%x", "hunter2")) {
			t.Errorf("shown: %s", text)
		}
	}
	// Wrong ones are not shown either.
	_, _, err = Parse("f.yaml", []byte(small), Options{Environ: []string{"DEDUPD_DATABASE_URL=postgres://u:hunter2@h:port/db"}})
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("the error of a bad URL: %v", err)
	}
}

func TestRedactURL(t *testing.T) {
	for in, want := range map[string]string{
		"nats://h:4222": "nats://h:4222", "nats://u:p@h:4222": "nats://[redacted]@h:4222", "nats://token@h": "nats://[redacted]@h",
		"nats://u:p@ss@h": "nats://[redacted]@h", "u:p@h": "[redacted]@h", "nats://u:%zz@h": "nats://[redacted]@h",
	} {
		if got := redactURL(in); got != want {
			t.Errorf("%s is shown as %s", in, got)
		}
	}
}
