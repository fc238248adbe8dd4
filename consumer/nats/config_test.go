package nats

import (
	"strings"
	"testing"
	"time"
)

func TestNewTellsAllProblems(t *testing.T) {
	t.Parallel()
	_, err := New(Config{
		Servers: []string{"nats://user:secret@", "host:4222"}, Stream: "a.b", Subjects: []string{"ok.>", "a..b", ""},
		Mode: "push", Start: "middle", AckWait: -time.Second, CredsFile: "a", NkeySeedFile: "b",
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"name is empty", "servers[0]", "servers[1]", "stream:", "durable:", "subjects[1]", "subjects[2]", "mode:", "start:", "negative", "exclude",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("nothing about %q in %v", want, err)
		}
	}
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("the password is in %v", err)
	}
	good := Config{Name: "edge", Servers: []string{"nats://h:4222"}, Stream: "ORDERS", Durable: "orders"}
	if s, err := New(good); err != nil || s.Name() != "edge" {
		t.Errorf("%v", err)
	}
	good.Mode = "lanes"
	if _, err := New(good); err == nil || !strings.Contains(err.Error(), "not available yet") {
		t.Errorf("mode lanes: %v", err)
	}
}
