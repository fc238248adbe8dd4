package claimkey

import (
	"testing"

	"github.com/dedupd/dedupd/message"
)

func TestFingerprints(t *testing.T) {
	t.Parallel()
	value := func(v string) *message.Message { return &message.Message{Value: []byte(v)} }
	whole, err := NewFingerprint([]string{"value"})
	if err != nil {
		t.Fatal(err)
	}
	if whole.Of(value("a")) != whole.Of(value("a")) || whole.Of(value("a")) == whole.Of(value("b")) {
		t.Error("value: equal payloads differ, or different ones don't")
	}
	if whole.Of(&message.Message{}) == whole.Of(value("")) {
		t.Error("a tombstone equals an empty value")
	}
	paths, err := NewFingerprint([]string{"json:a", "json:b"})
	if err != nil {
		t.Fatal(err)
	}
	if paths.Of(value(`{"a":1,"b":2,"sent":1}`)) != paths.Of(value(`{"sent":2,"b":2,"a":1}`)) {
		t.Error("json: what isn't named counts")
	}
	if paths.Of(value(`{"a":1,"b":2}`)) == paths.Of(value(`{"a":1,"b":3}`)) {
		t.Error("json: what is named doesn't count")
	}
	if _, err := NewFingerprint([]string{"none", "json:a"}); err == nil {
		t.Error("none was taken beside a path")
	}
	if paths.Of(value(`{"a":1,"b":23}`)) == paths.Of(value(`{"a":12,"b":3}`)) {
		t.Error("json: the places run into one another")
	}
	for _, bad := range [][]string{{"key"}, {"value", "none"}, {"value", "json:a"}, {"json:"}} {
		if _, err := NewFingerprint(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}
