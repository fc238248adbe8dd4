package config

import (
	"errors"
	"reflect"
	"testing"

	"github.com/goccy/go-yaml"
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
	if err := c.Sink.Decode(&got); err != nil {
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
	if err := c.Sink.Decode(&wrong); !errors.As(err, &problems) || len(problems) != 7 || problems[0].Key != "sink.x.a" || problems[0].Line != 3 {
		t.Errorf("unknown keys: %v", err)
	}
}
