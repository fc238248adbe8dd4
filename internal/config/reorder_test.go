package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/sinks"
)

// A queue has no order, and the message that comes last wins an upsert.
func TestUpsertFromAQueue(t *testing.T) {
	t.Parallel()
	const (
		nats   = "  - nats: {servers: ['nats://localhost:4222'], stream: S}\n"
		kafka  = "  - kafka: {brokers: ['localhost:9092'], topics: [t]}\n"
		upsert = "    mode: upsert\n    key: [id]\n"
	)
	for name, c := range map[string]struct {
		sources, table string
		want           bool
	}{
		"queue":              {nats, upsert, false},
		"beside a topic":     {kafka + nats, upsert, false},
		"accepted":           {nats, upsert + "    accept_reordering: true\n", true},
		"topic":              {kafka, upsert, true},
		"insert":             {nats, "    mode: insert\n", true},
		"nothing but a key":  {nats, upsert + "    columns: {id: id}\n", true},
		"insert with a key ": {nats, "    key: [id]\n", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "c.yaml")
			columns := ""
			if !strings.Contains(c.table, "columns") {
				columns = "    columns: {id: id, payload: value}\n"
			}
			text := "scope: s\nsources:\n" + c.sources + "database: {url: 'postgres://localhost/app'}\nid: {from: header:id}\nsink:\n  table:\n    name: public.t\n" + c.table + columns
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			_, _, err := config.Load(file, config.Options{Sinks: &sinks.Default})
			if c.want && err != nil || !c.want && (err == nil || !strings.Contains(err.Error(), "sink.table.mode") || !strings.Contains(err.Error(), "accept_reordering: true")) {
				t.Errorf("%v\n%s", err, text)
			}
		})
	}
}

// By a strategy without claims the id is the position, or the producer's number, unless the
// configuration says where it is. A row's history would know no copy by it.
func TestAHistoryNeedsIDs(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"dedup: {strategy: position}\n":                        "c.yaml:10:5: sink.table.history: rows know copies by their ids",
		"dedup: {strategy: sequence}\n":                        "c.yaml:10:5: sink.table.history: rows know copies by their ids",
		"dedup: {strategy: claim}\n":                           "",
		"dedup: {strategy: position}\nid: {from: header:id}\n": "",
	} {
		file := filepath.Join(t.TempDir(), "c.yaml")
		whole := `scope: s
sources: [{kafka: {brokers: ['localhost:9092'], topics: [t]}}]
database: {url: 'postgres://localhost/app'}
sink:
  table:
    name: public.t
    mode: upsert
    key: [id]
    absent: null
    history: {column: last, size: 5}
    columns: {id: id, payload: value}
` + text
		if err := os.WriteFile(file, []byte(whole), 0o600); err != nil {
			t.Fatal(err)
		}
		_, _, err := config.Load(file, config.Options{Sinks: &sinks.Default})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
