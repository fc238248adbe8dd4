package cli

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/message"
	"github.com/dedupd/dedupd/sinks"
)

var createTable = regexp.MustCompile(`(?ms)^#   CREATE TABLE .*?\);$`)

// sample is a sink of configs/, made the way the command makes it, in a database with
// the table that the file's comment creates.
func sample(t *testing.T, file string) (sinks.Sink, *pgx.Conn) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("host=localhost"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, _, err := config.Parse(file, text, config.Options{Environ: []string{
		"DATABASE_URL=postgres://localhost/app", "DATABASE_URL_FILE=" + secret, "KAFKA_PASSWORD_FILE=" + secret,
	}})
	if err != nil {
		t.Fatal(err)
	}
	sink, err := c.NewSink(&sinks.Default)
	if err != nil {
		t.Fatal(err)
	}
	statement := createTable.FindString(string(text))
	if statement == "" {
		t.Fatal("no CREATE TABLE in the comment")
	}
	conn, err := pgx.Connect(t.Context(), pgtest.New(t).URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	if _, err := conn.Exec(t.Context(), strings.ReplaceAll(statement, "\n#", "\n")[1:]); err != nil {
		t.Fatal(err)
	}
	return sink, conn
}

// TestSamplesFitTheirTables checks each sample's sink against the table beside it.
func TestSamplesFitTheirTables(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a database")
	}
	files, err := filepath.Glob("../../../configs/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no samples: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			sink, conn := sample(t, file)
			tx, err := conn.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := sink.(sinks.Preparer).Prepare(t.Context(), tx); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestGitHubWebhooksSample(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a database")
	}
	sink, conn := sample(t, "../../../configs/github-webhooks.yaml")
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := sink.(sinks.Preparer).Prepare(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	delivery := func(id, event, payload string) message.Message {
		return message.Message{
			ID: id, Topic: "github-webhooks", Value: []byte(payload), Time: at,
			Headers: []message.Header{{Key: "X-GitHub-Delivery", Value: []byte(id)}, {Key: "X-GitHub-Event", Value: []byte(event)}},
		}
	}
	err = sink.Write(t.Context(), tx, sinks.NewBatch([]message.Message{
		delivery("72d3162e-cc78-11e3-81ab-4c9367dc0958", "pull_request",
			`{"action": "opened", "repository": {"full_name": "octo/hello"}, "sender": {"login": "octocat"}}`),
		delivery("82d3162e-cc78-11e3-81ab-4c9367dc0958", "ping", `{"zen": "Keep it logically awesome."}`),
	}))
	if err != nil {
		t.Fatal(err)
	}
	rows, err := tx.Query(t.Context(), `SELECT concat_ws(' ', delivery, event, coalesce(action, '-'), coalesce(repository, '-'), coalesce(sender, '-'),
		coalesce(payload->>'zen', '-'), received_at AT TIME ZONE 'UTC') FROM public.github_events ORDER BY delivery`)
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"72d3162e-cc78-11e3-81ab-4c9367dc0958 pull_request opened octo/hello octocat - 2026-01-02 03:04:05",
		"82d3162e-cc78-11e3-81ab-4c9367dc0958 ping - - - Keep it logically awesome. 2026-01-02 03:04:05",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
