package nats_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer/consumertest"
	"github.com/dedupd/dedupd/consumer/nats"
)

// The rights that docs/operations.md asks for are enough, also after a failover of
// the database.
func TestRights(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## Rights at the brokers\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var allowed []string
	for _, subject := range regexp.MustCompile("`(\\$JS[^`]*)`").FindAllStringSubmatch(section, -1) {
		allowed = append(allowed, strings.NewReplacer("{stream}", "ORDERS", "{durable}", "dedupd").Replace(subject[1]))
	}
	if len(allowed) < 6 {
		t.Fatalf("the manual names %q", allowed)
	}
	worker := &server.User{Username: "worker", Password: "secret", Permissions: &server.Permissions{
		Publish:   &server.SubjectPermission{Allow: allowed},
		Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX.>"}},
	}}
	s := startServer(t, func(o *server.Options) {
		o.Users = []*server.User{{Username: "admin", Password: "secret"}, worker}
	})
	as := func(user string) string { return strings.Replace(s.ClientURL(), "://", "://"+user+":secret@", 1) }
	conn, err := natsgo.Connect(as("admin"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	createStream(t, js, jetstream.StreamConfig{})
	publish(t, js, 0, 1000)
	store := consumertest.NewStore()
	r := start(t, newSource(t, s, func(c *nats.Config) { c.Servers = []string{as("worker")} }), store)
	queue, sure := acknowledged(t, js, store)
	store.Rewind(queue, max(sure, 1401))
	publish(t, js, 1500, 100)
	wait(t, store, 1600)
	if !r.log.has("lacks commits") || r.log.has("ermissions") {
		t.Error("the log has no rewind, or a right that is missing")
	}
}
