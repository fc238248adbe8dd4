package dedup

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/message"
)

// keysDigest pins testdata/keys.tsv: lines may be added, which changes it; an
// edited line makes every claim under that key unknown.
const keysDigest = "bccada4cca03d0566bac40b6f28807017ef2125020b4f0c4eadccc86813166fa"

func TestKeysAreFrozen(t *testing.T) {
	t.Parallel()
	file, err := os.ReadFile("testdata/keys.tsv")
	if err != nil {
		t.Fatal(err)
	}
	if sum := sha256.Sum256(file); hex.EncodeToString(sum[:]) != keysDigest {
		t.Errorf("keys.tsv has changed (%x): only add to it, and pin the new digest", sum)
	}
	for line := range strings.Lines(string(file)) {
		id, want, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		raw, err := hex.DecodeString(id)
		if err != nil {
			t.Fatal(err)
		}
		key := KeyOf(string(raw))
		if got := hex.EncodeToString(key[:]); got != want {
			t.Errorf("key of %.40q is %s, want %s", raw, got, want)
		}
	}
}

func TestKeysKeepIDsApart(t *testing.T) {
	t.Parallel()
	if KeyOf("a") == positionKey("a") {
		t.Error("an id can pass for a place")
	}
	// A ULID in lower case may be another alphabet's id.
	if KeyOf("01ARZ3NDEKTSV4RRFFQ69G5FAV") == KeyOf("01arz3ndektsv4rrffq69g5fav") {
		t.Error("ids that differ in case have one key")
	}
	// A UUID is one in any case.
	if KeyOf("550e8400-e29b-41d4-a716-446655440000") != KeyOf("550E8400-E29B-41D4-A716-446655440000") {
		t.Error("a UUID in capitals is another one")
	}
	if got := KeyOf("550E8400-E29B-41D4-A716-446655440000").String(); got != "550e8400-e29b-41d4-a716-446655440000" {
		t.Errorf("a UUID's key reads %s", got)
	}
}

// What only looks like a UUID keeps the bytes of none: it would have another's key.
func TestHyphensOfAUUID(t *testing.T) {
	t.Parallel()
	const uuid = "550e8400-e29b-41d4-a716-446655440000"
	for _, at := range []int{8, 13, 18, 23} {
		for _, c := range []string{"X", "_", " ", "0"} {
			id := uuid[:at] + c + uuid[at+1:]
			if KeyOf(id) != hashKey(namespaceID, id) {
				t.Errorf("%s has the key of a UUID, %s", id, KeyOf(id))
			}
		}
	}
	for _, id := range []string{uuid + "0", uuid[:35], "550e8400e29b41d4a716446655440000", "0" + uuid[:8] + "-" + uuid[9:35]} {
		if KeyOf(id) != hashKey(namespaceID, id) {
			t.Errorf("%s has the key of a UUID, %s", id, KeyOf(id))
		}
	}
}

func FuzzKeyOf(f *testing.F) {
	f.Add("550e8400-e29b-41d4-a716-446655440000", "01ARZ3NDEKTSV4RRFFQ69G5FAV")
	f.Add("a", "ab")
	f.Fuzz(func(t *testing.T, a, b string) {
		if KeyOf(a) != KeyOf(a) {
			t.Fatalf("%q has two keys", a)
		}
		if a != b && KeyOf(a) == KeyOf(b) && !(len(a) == 36 && strings.EqualFold(a, b)) {
			t.Fatalf("%q and %q have one key", a, b)
		}
	})
}

func TestFingerprints(t *testing.T) {
	t.Parallel()
	value := func(v string) *message.Message { return &message.Message{Value: []byte(v)} }
	whole, err := NewFingerprint([]string{"value"})
	if err != nil {
		t.Fatal(err)
	}
	if whole.of(value("a")) != whole.of(value("a")) || whole.of(value("a")) == whole.of(value("b")) {
		t.Error("value: equal payloads differ, or different ones don't")
	}
	if whole.of(&message.Message{}) == whole.of(value("")) {
		t.Error("a tombstone equals an empty value")
	}
	paths, err := NewFingerprint([]string{"json:a", "json:b"})
	if err != nil {
		t.Fatal(err)
	}
	if paths.of(value(`{"a":1,"b":2,"sent":1}`)) != paths.of(value(`{"sent":2,"b":2,"a":1}`)) {
		t.Error("json: what isn't named counts")
	}
	if paths.of(value(`{"a":1,"b":2}`)) == paths.of(value(`{"a":1,"b":3}`)) {
		t.Error("json: what is named doesn't count")
	}
	if _, err := NewFingerprint([]string{"none", "json:a"}); err == nil {
		t.Error("none was taken beside a path")
	}
	if paths.of(value(`{"a":1,"b":23}`)) == paths.of(value(`{"a":12,"b":3}`)) {
		t.Error("json: the places run into one another")
	}
	for _, bad := range [][]string{{"key"}, {"value", "none"}, {"value", "json:a"}, {"json:"}} {
		if _, err := NewFingerprint(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func TestArraysOnTheWire(t *testing.T) {
	t.Parallel()
	if got := array(pgtype.ByteaOID, [][]byte{{1}, nil, {}}); !bytes.Equal(got, []byte{
		0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 17, 0, 0, 0, 3, 0, 0, 0, 1,
		0, 0, 0, 1, 1, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0,
	}) {
		t.Errorf("bytea[]: % x", got)
	}
	if got := array(pgtype.ByteaOID, nil); !bytes.Equal(got, []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 17}) {
		t.Errorf("empty array: % x", got)
	}
}

func BenchmarkKeyOf(b *testing.B) {
	for name, id := range map[string]string{"uuid": "550e8400-e29b-41d4-a716-446655440000", "text": strings.Repeat("x", 40)} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				KeyOf(id)
			}
		})
	}
}
