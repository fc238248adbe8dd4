package app

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/dedupd/dedupd/sinks"
)

// change is one configuration of a scope, and what is told of it.
type change struct {
	text   string
	starts bool // a worker, after doctor
	doctor string
	log    string
}

// tellsOf starts workers of one scope with one configuration after the other: the log says
// once what has changed, doctor before and after.
func (r *rig) tellsOf(t *testing.T, check, key string, changes []change) {
	t.Helper()
	base := r.text
	for _, c := range changes {
		r.text = base + c.text
		cfg := r.parse(t)
		d := &doctor{cfg: cfg}
		d.database(t.Context(), r.store, &sinks.Default)
		told := ""
		for _, f := range d.findings {
			if f.Check == check {
				told += f.Text
			}
		}
		if !strings.Contains(told, c.doctor) || c.doctor == "" && told != "" {
			t.Errorf("%s: doctor tells %q, want %q", c.text, told, c.doctor)
		}
		if !c.starts {
			continue
		}
		var log bytes.Buffer
		if err := openSchema(t.Context(), cfg, r.store, slog.New(slog.NewTextHandler(&log, nil))); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(log.String(), c.log) || c.log == "" && strings.Contains(log.String(), key) {
			t.Errorf("%s: the log tells %q, want %q", c.text, log.String(), c.log)
		}
	}
}

const nowhere = `{kafka: {brokers: "127.0.0.1:1", topics: [orders]}}`

func TestAChangeOfWhereIDsComeFromIsTold(t *testing.T) {
	t.Parallel()
	const first, second = `id: {from: "header:message-id"}`, `id: {from: ["header:tenant", "header:message-id"]}`
	newRig(t, nowhere).tellsOf(t, "ids", "id.from", []change{
		{first, false, "", ""},
		{first, true, "", ""},
		{first, true, "", ""},
		{second, false, "have run with header:message-id: with this configuration, a copy of a message that was applied before has another id and is applied again", ""},
		{second, true, "have run with header:message-id", `before=header:message-id now="header:tenant header:message-id"`},
		{second, true, "id.from was header:message-id until", ""},
		// Under another strategy, ids tell nothing.
		{"dedup: {strategy: position}", true, "", ""},
		{second, true, "id.from was header:message-id until", ""},
		{first, true, "have run with header:tenant header:message-id", `before="header:tenant header:message-id" now=header:message-id`},
	})
}

func TestAChangeOfTheStrategyIsTold(t *testing.T) {
	t.Parallel()
	const claim, position, byClient, byTenant = "", "dedup: {strategy: position}", "dedup: {strategy: sequence}", `dedup: {strategy: sequence, sequence: {producer: "header:tenant"}}`
	newRig(t, nowhere).tellsOf(t, "strategy", "dedup.strategy", []change{
		{claim, true, "", ""},
		{claim, true, "", ""},
		{position, false, "dedup.strategy is position, but workers of this scope have run with claim: with this configuration, nothing recognises a copy", ""},
		{position, true, "have run with claim", "dedup.strategy has changed: nothing recognises a copy"},
		{position, true, "dedup.strategy was claim until", ""},
		{byClient, true, "have run with position", "dedup.strategy has changed: producers' marks are empty, or where this strategy left them"},
		{byTenant, true, "have run with sequence of header:client-id by header:client-seq", `now="sequence of header:tenant by header:client-seq"`},
		{claim, true, "messages that were applied by strategy sequence", "have no claims, and a copy of one is applied again; dedupd claims import"},
		{claim, true, "dedup.strategy was sequence of header:tenant by header:client-seq until", ""},
	})
}
