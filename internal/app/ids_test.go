package app

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/dedupd/dedupd/sinks"
)

// TestAChangeOfWhereIDsComeFromIsTold starts workers of one scope that read ids from
// different places: the log says so once, doctor before and after.
func TestAChangeOfWhereIDsComeFromIsTold(t *testing.T) {
	t.Parallel()
	r := newRig(t, `{nats: {servers: "nats://127.0.0.1:1", stream: ORDERS}}`)
	first := r.text + `id: {from: "header:message-id"}`
	second := r.text + `id: {from: ["header:tenant", "header:message-id"]}`
	for _, c := range []struct {
		text   string
		starts bool // a worker, after doctor
		doctor string
		log    string
	}{
		{first, false, "", ""},
		{first, true, "", ""},
		{first, true, "", ""},
		{second, false, "workers of this scope have found ids at header:message-id", ""},
		{second, true, "workers of this scope have found ids at header:message-id", `before=header:message-id now="header:tenant header:message-id"`},
		{second, true, "id.from was header:message-id until", ""},
		{first, true, "workers of this scope have found ids at header:tenant header:message-id", `before="header:tenant header:message-id" now=header:message-id`},
	} {
		r.text = c.text
		cfg := r.parse(t)
		findings, err := Examine(t.Context(), cfg, &sinks.Default)
		if err != nil {
			t.Fatal(err)
		}
		told := ""
		for _, f := range findings {
			if f.Check == "ids" {
				told += f.Text
			}
		}
		if !strings.Contains(told, c.doctor) || c.doctor == "" && told != "" {
			t.Errorf("doctor tells %q, want %q", told, c.doctor)
		}
		if !c.starts {
			continue
		}
		var log bytes.Buffer
		if err := openSchema(t.Context(), cfg, r.store, slog.New(slog.NewTextHandler(&log, nil))); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(log.String(), c.log) || c.log == "" && strings.Contains(log.String(), "id.from") {
			t.Errorf("the log tells %q, want %q", log.String(), c.log)
		}
	}
}
