package main

import (
	"bufio"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The keys of two implementations of dedupd's own are reproduced by a third.
func TestKeysAreTheGoldenOnes(t *testing.T) {
	file, err := os.Open(filepath.Join("..", "..", "dedup", "claimkey", "testdata", "keys.tsv"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	n := 0
	for ; lines.Scan(); n++ {
		idHex, want, _ := strings.Cut(lines.Text(), "\t")
		id, err := hex.DecodeString(idHex)
		if err != nil {
			t.Fatal(err)
		}
		k := keyOf(id)
		if got := hex.EncodeToString(k[:]); got != want {
			t.Errorf("key of %q: %s, want %s", id[:min(len(id), 40)], got, want)
		}
	}
	if err := lines.Err(); err != nil || n < 40 {
		t.Errorf("%d keys in the file, %v", n, err)
	}
}

func TestRawSum(t *testing.T) {
	h := func(pairs ...string) (all []header) {
		for i := 0; i < len(pairs); i += 2 {
			all = append(all, header{[]byte(pairs[i]), []byte(pairs[i+1])})
		}
		return all
	}
	b := func(s string) []byte { return []byte(s) }
	good := rawSum(b("t"), b("k"), b("v"), h("a", "1", "b", "2", "a", "3"))
	if rawSum(b("t"), b("k"), b("v"), h("b", "2", "a", "1", "a", "3")) != good {
		t.Error("the order among headers of different names counts")
	}
	for name, other := range map[string]checksum{
		"topic":       rawSum(b("T"), b("k"), b("v"), h("a", "1", "b", "2", "a", "3")),
		"no key":      rawSum(b("t"), nil, b("v"), h("a", "1", "b", "2", "a", "3")),
		"empty key":   rawSum(b("t"), b(""), b("v"), h("a", "1", "b", "2", "a", "3")),
		"moved bytes": rawSum(b("t"), b("kv"), b(""), h("a", "1", "b", "2", "a", "3")),
		"header":      rawSum(b("t"), b("k"), b("v"), h("a", "1", "b", "2")),
		"its order":   rawSum(b("t"), b("k"), b("v"), h("a", "3", "b", "2", "a", "1")),
	} {
		if other == good {
			t.Errorf("%s: the sum is the same", name)
		}
	}
	if rawSum(b("t"), nil, nil, nil) == rawSum(b("t"), nil, b(""), nil) {
		t.Error("a tombstone passes for an empty value")
	}
}
