package config

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/dedupd/dedupd/internal/policy"
)

func TestDecodeForSinks(t *testing.T) {
	type Inner struct {
		A int `yaml:"a"`
	}
	var got struct {
		Inner   `yaml:",inline"`
		Any     any
		List    []Inner       `yaml:"list"`
		Ordered yaml.MapSlice `yaml:"ordered"`
		Wait    *Duration     `yaml:"wait"`
		Keep    string        `yaml:"keep"`
		Share   float32       `yaml:"share"`
	}
	got.Keep = "kept"
	c, _, _ := Parse("f.yaml", []byte(`
sink:
  x: {a: 1, any: [1, "1", true, 1.5, {b: null}], list: [{a: 2}], ordered: {z: 1, a: [header:x]}, wait: 2d, keep: , share: 0.5}
`), Options{})
	if err := c.Sink[0].Decode(&got); err != nil {
		t.Fatal(err)
	}
	if got.A != 1 || got.List[0].A != 2 || *got.Wait != 2*day || got.Keep != "kept" || got.Share != 0.5 {
		t.Errorf("%+v", got)
	}
	if want := []any{int64(1), "1", true, 1.5, map[string]any{"b": nil}}; !reflect.DeepEqual(got.Any, want) {
		t.Errorf("any: %#v", got.Any)
	}
	if want := (yaml.MapSlice{{Key: "z", Value: int64(1)}, {Key: "a", Value: []any{"header:x"}}}); !reflect.DeepEqual(got.Ordered, want) {
		t.Errorf("ordered: %#v", got.Ordered)
	}
	var wrong struct {
		Z int `yaml:"z"`
	}
	var problems Problems
	if err := c.Sink[0].Decode(&wrong); !errors.As(err, &problems) || len(problems) != 7 || problems[0].Key != "sink.x.a" || problems[0].Line != 3 {
		t.Errorf("unknown keys: %v", err)
	}
}

// A colon within a key in braces separates only before a space, as YAML has it.
func TestKeysInBraces(t *testing.T) {
	for text, want := range map[string]any{
		"{json:type: [a, b:c], header:x: absent, z: json:id}":                                   map[string]any{"json:type": []any{"a", "b:c"}, "header:x": "absent", "z": "json:id"},
		"{json:n: 7, json:flag: true, json:q: 'x: y', json:r: 'é, {', \"s:t\": u, json:é: 'ü'}": map[string]any{"json:n": int64(7), "json:flag": true, "json:q": "x: y", "json:r": "é, {", "s:t": "u", "json:é": "ü"},
		"{json:a.b: {not: [x]}, c: {d:e:f: g}}":                                                 map[string]any{"json:a.b": map[string]any{"not": []any{"x"}}, "c": map[string]any{"d:e:f": "g"}},
		"{\n  json:type: x,\n  \"q\":2, 'r':3, s: t}":                                           map[string]any{"json:type": "x", "q": int64(2), "r": int64(3), "s": "t"},
		"[header:x, {json:y: z}, a]":                                                            []any{"header:x", map[string]any{"json:y": "z"}, "a"},
	} {
		b := &builder{lookup: func(string) (string, bool) { return "", false }}
		root := b.parse([]byte("k: " + text))
		if len(b.problems) > 0 || root == nil {
			t.Errorf("%s: %v", text, b.problems)
			continue
		}
		if got := plain(root).(map[string]any)["k"]; !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\n got %#v\nwant %#v", text, got, want)
		}
	}
}

// null may be the name of a policy. Nothing is nothing, and printing keeps the difference.
func TestAPolicyCalledNull(t *testing.T) {
	for text, want := range map[string]policy.Absent{"null": policy.AbsentNull, `"null"`: policy.AbsentNull, "": "", "~": "", "keep": policy.AbsentKeep} {
		c, _, _ := Parse("f.yaml", []byte("sink:\n  x: {absent: "+text+", name: "+text+"}\n"), Options{})
		for range 2 {
			var got struct {
				Absent policy.Absent `yaml:"absent"`
				Name   string        `yaml:"name"`
			}
			if err := c.Sink[0].Decode(&got); err != nil || got.Absent != want || text == "null" && got.Name != "" {
				t.Errorf("absent: %s is %+v, %v", text, got, err)
			}
			var b strings.Builder
			if err := c.Print(&b); err != nil {
				t.Fatal(err)
			}
			c, _, _ = Parse("f.yaml", []byte(b.String()), Options{})
		}
	}
}
