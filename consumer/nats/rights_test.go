package nats

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
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
	r := rigOn(t, s, natsgo.UserInfo("admin", "secret"))
	r.createStream(jetstream.StreamConfig{})
	r.publish(0, 1000)
	w := r.start(func(c *Config) { c.Servers = []string{strings.Replace(s.ClientURL(), "://", "://worker:secret@", 1)} })
	sure := r.acknowledge()
	r.store.Rewind(edgeQueue, max(sure, 1401))
	r.publish(1500, 100)
	r.wait(1600)
	if !w.log.has("lacks commits") || w.log.has("ermissions") {
		t.Error("the log has no rewind, or a right that is missing")
	}
}
