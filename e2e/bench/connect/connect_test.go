package connect

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestEnvelope(t *testing.T) {
	payload := `{"note": "a \"quoted\" ü"}`
	var got struct {
		Schema struct {
			Type   string
			Fields []struct{ Field, Type, Name string }
		}
		Payload struct{ ID, Payload string }
	}
	if err := json.Unmarshal(Envelope("some-id", []byte(payload)), &got); err != nil {
		t.Fatal(err)
	}
	if got.Payload.ID != "some-id" || got.Payload.Payload != payload {
		t.Errorf("got %+v", got.Payload)
	}
	if len(got.Schema.Fields) != 2 || got.Schema.Type != "struct" || got.Schema.Fields[0].Field != "id" || got.Schema.Fields[1].Field != "payload" {
		t.Errorf("got %+v", got.Schema)
	}
}

func TestProperties(t *testing.T) {
	got := properties{"b": `a\b ü`, "a": "x=y:z"}.String()
	if want := "a=x=y:z\nb=a\\u005cb\\u0020\\u00fc\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestMissingJarsAreNamed(t *testing.T) {
	_, err := Start(t.Context(), Options{Dir: t.TempDir(), Libs: t.TempDir(), Plugin: t.TempDir()})
	if err == nil || !strings.Contains(err.Error(), "pom.xml") {
		t.Errorf("got %v, want an error that names the pom.xml", err)
	}
}

func TestCheckTellsOfAFailedTask(t *testing.T) {
	var status string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, status) }))
	defer server.Close()
	p := Process{status: server.URL, tasks: 2}

	status = `{"name":"g","connector":{"state":"RUNNING"},"tasks":[{"id":0,"state":"RUNNING"},{"id":1,"state":"RUNNING"}]}`
	if err := p.Check(t.Context()); err != nil {
		t.Error(err)
	}
	status = `{"name":"g","connector":{"state":"RUNNING"},"tasks":[{"id":0,"state":"RUNNING"},{"id":1,"state":"FAILED","trace":"no such table"}]}`
	if err := p.Check(t.Context()); !errors.Is(err, errFailed) || !strings.Contains(err.Error(), "no such table") {
		t.Errorf("got %v, want the failed task's trace", err)
	}
	status = `{"name":"g","connector":{"state":"RUNNING"},"tasks":[{"id":0,"state":"RUNNING"}]}`
	if err := p.Check(t.Context()); err == nil {
		t.Error("a task that hasn't begun isn't missed")
	}
}
