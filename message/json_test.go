package message

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestValidJSONDepth(t *testing.T) {
	nest := func(open, inner, end string, n int) string {
		return strings.Repeat(open, n) + inner + strings.Repeat(end, n)
	}
	for name, c := range map[string]struct {
		doc string
		ok  bool
	}{
		"arrays at the limit":         {nest("[", "1", "]", MaxJSONDepth), true},
		"arrays beyond it":            {nest("[", "1", "]", MaxJSONDepth+1), false},
		"objects at the limit":        {nest(`{"a":`, "1", "}", MaxJSONDepth), true},
		"objects beyond it":           {nest(`{"a":`, "1", "}", MaxJSONDepth+1), false},
		"many brackets, side by side": {"[" + strings.Repeat("[],", 5000) + "{}]", true},
		"objects side by side":        {"[" + strings.Repeat("{},", 5000) + "[]]", true},
		"nested side by side":         {"[" + strings.Repeat(`[{"a":[{}]}],`, 5000) + "[]]", true},
		"at the limit after siblings": {"[" + strings.Repeat(`[],{},`, 5000) + nest("[", "1", "]", MaxJSONDepth-1) + "]", true},
		"beyond it after siblings":    {"[" + strings.Repeat(`[],{},`, 5000) + nest("[", "1", "]", MaxJSONDepth) + "]", false},
		"brackets in strings":         {`["` + strings.Repeat(`[{\"`, 5000) + `"]`, true},
		"after an escaped backslash":  {`["\\",` + nest("[", "1", "]", MaxJSONDepth) + "]", false},
		"no JSON":                     {"{", false},
		"empty":                       {"", false},
		"scalar":                      {" 1 ", true},
	} {
		if err := ValidJSON([]byte(c.doc)); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Within the limit of depth, ValidJSON agrees with encoding/json.
func FuzzValidJSON(f *testing.F) {
	for _, s := range []string{`{"a":[1,2.5e3,"x\u00e9",null]}`, `{"a":1,}`, "01", `"\x"`, "nul", "[1 2]", "\"\t\"", "-", "1e", "{\"a\":1}x"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		if tooDeep(doc) {
			return
		}
		if got, want := ValidJSON(doc) == nil, json.Valid(doc); got != want {
			t.Errorf("ValidJSON(%q) is %v, encoding/json says %v", doc, got, want)
		}
	})
}
