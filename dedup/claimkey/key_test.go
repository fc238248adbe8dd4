package claimkey

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"strings"
	"testing"
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
		key := Of(string(raw))
		if got := hex.EncodeToString(key[:]); got != want {
			t.Errorf("key of %.40q is %s, want %s", raw, got, want)
		}
	}
}

func TestKeysKeepIDsApart(t *testing.T) {
	t.Parallel()
	if Of("a") == OfPlace("a") {
		t.Error("an id can pass for a place")
	}
	// A ULID in lower case may be another alphabet's id.
	if Of("01ARZ3NDEKTSV4RRFFQ69G5FAV") == Of("01arz3ndektsv4rrffq69g5fav") {
		t.Error("ids that differ in case have one key")
	}
	// A UUID is one in any case.
	if Of("550e8400-e29b-41d4-a716-446655440000") != Of("550E8400-E29B-41D4-A716-446655440000") {
		t.Error("a UUID in capitals is another one")
	}
	if got := Of("550E8400-E29B-41D4-A716-446655440000").String(); got != "550e8400-e29b-41d4-a716-446655440000" {
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
			if Of(id) != hashKey(namespaceID, id) {
				t.Errorf("%s has the key of a UUID, %s", id, Of(id))
			}
		}
	}
	for _, id := range []string{uuid + "0", uuid[:35], "550e8400e29b41d4a716446655440000", "0" + uuid[:8] + "-" + uuid[9:35]} {
		if Of(id) != hashKey(namespaceID, id) {
			t.Errorf("%s has the key of a UUID, %s", id, Of(id))
		}
	}
}

func FuzzKeyOf(f *testing.F) {
	f.Add("550e8400-e29b-41d4-a716-446655440000", "01ARZ3NDEKTSV4RRFFQ69G5FAV")
	f.Add("a", "ab")
	f.Fuzz(func(t *testing.T, a, b string) {
		if Of(a) != Of(a) {
			t.Fatalf("%q has two keys", a)
		}
		if a != b && Of(a) == Of(b) && !(len(a) == 36 && strings.EqualFold(a, b)) {
			t.Fatalf("%q and %q have one key", a, b)
		}
	})
}

func BenchmarkKeyOf(b *testing.B) {
	for name, id := range map[string]string{"uuid": "550e8400-e29b-41d4-a716-446655440000", "text": strings.Repeat("x", 40)} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				Of(id)
			}
		})
	}
}
