package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/dedupd/dedupd/sinks"
	_ "github.com/dedupd/dedupd/sinks/statement"
	_ "github.com/dedupd/dedupd/sinks/table"
)

type object = map[string]any

// schema describes a type: what the decoder accepts, variables included.
// defaults is a value of it with its defaults.
func schema(t *testing.T, defaults reflect.Value, tag reflect.StructTag, docs map[string]string) object {
	typ := defaults.Type()
	variable := object{"type": "string", "pattern": `\$\{`}
	text := object{"type": "string"}
	var s object
	switch typ {
	case reflect.TypeFor[Duration]():
		s = object{"anyOf": []any{object{"type": "string", "pattern": `^([0-9]+w)?([0-9]+d)?([0-9.]+(h|m|s|ms|us|µs|ns))*$`}, object{"const": 0}, variable}}
	case reflect.TypeFor[Size]():
		s = object{"anyOf": []any{object{"type": "integer", "minimum": 0}, object{"type": "string", "pattern": `^[0-9]+(\.[0-9]+)? ?([KMGT]i?B|kB|B)?$`}, variable}}
	case reflect.TypeFor[StringList](), reflect.TypeFor[Addresses]():
		s = object{"anyOf": []any{text, object{"type": "array", "items": text}}}
	case reflect.TypeFor[Secret]():
		s = text
	case reflect.TypeFor[Filter]():
		s = filterSchema()
	case reflect.TypeFor[Sinks]():
		kind := object{"type": []string{"object", "null"}}
		one := object{"anyOf": []any{
			object{"type": "object", "minProperties": 1, "maxProperties": 1, "properties": object{"filter": false}, "additionalProperties": kind},
			object{"type": "object", "minProperties": 2, "maxProperties": 2, "properties": object{"filter": filterSchema()}, "required": []string{"filter"}, "additionalProperties": kind},
		}}
		s = object{"anyOf": []any{one, object{"type": "array", "minItems": 1, "items": one}}}
	}
	if s == nil {
		switch typ.Kind() {
		case reflect.String:
			s = text
			if values := defaults.MethodByName("Values"); values.IsValid() {
				s = object{"anyOf": []any{object{"enum": values.Call(nil)[0].Interface()}, variable}}
			}
		case reflect.Bool:
			s = object{"anyOf": []any{object{"type": "boolean"}, variable}}
		case reflect.Int, reflect.Int64, reflect.Float64:
			number := object{"type": "integer"}
			if typ.Kind() == reflect.Float64 {
				number["type"] = "number"
			}
			for key, word := range map[string]string{"min": "minimum", "max": "maximum"} {
				if v, ok := tag.Lookup(key); ok {
					number[word] = json.Number(v)
				}
			}
			s = object{"anyOf": []any{number, variable}}
		case reflect.Pointer:
			value := reflect.New(typ.Elem())
			if x, ok := value.Interface().(defaulter); ok {
				x.setDefaults()
			}
			return schema(t, value.Elem(), tag, docs)
		case reflect.Slice:
			return object{"type": "array", "minItems": 1, "items": schema(t, reflect.New(typ.Elem()).Elem(), "", docs)}
		case reflect.Struct:
			return structSchema(t, defaults, docs)
		default:
			t.Fatalf("no schema for %s", typ)
		}
	}
	if tag.Get("required") == "" && !defaults.IsZero() {
		switch v := defaults.Interface().(type) {
		case fmt.Stringer:
			s["default"] = v.String()
		case StringList:
			s["default"] = v[0]
		default:
			s["default"] = v
		}
	}
	return s
}

// filterSchema describes a filter: what places must have.
func filterSchema() object {
	scalar := object{"type": []string{"string", "number", "boolean"}}
	values := object{"anyOf": []any{scalar, object{"type": "array", "minItems": 1, "items": scalar}}}
	not := object{"type": "object", "properties": object{"not": values}, "required": []string{"not"}, "additionalProperties": false}
	return object{"type": "object", "additionalProperties": object{"anyOf": []any{scalar, object{"type": "array", "minItems": 1, "items": scalar}, not}}}
}

func structSchema(t *testing.T, v reflect.Value, docs map[string]string) object {
	properties, required := object{}, []string{}
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, ok := f.Tag.Lookup("yaml")
		if !ok {
			continue
		}
		if name == pipelinesKey {
			continue
		}
		p := schema(t, v.Field(i), f.Tag, docs)
		doc := docs[v.Type().Name()+"."+f.Name]
		if doc == "" {
			t.Errorf("%s.%s has no comment", v.Type(), f.Name)
		}
		p["description"] = doc
		properties[name] = p
		if f.Tag.Get("required") != "" {
			required = append(required, name)
		}
	}
	s := object{"type": "object", "properties": properties, "additionalProperties": false}
	if len(required) > 0 {
		s["required"] = required
	}
	if v.Type() == reflect.TypeFor[Config]() {
		properties[pipelinesKey] = object{"type": "array", "minItems": 1, "items": pipelineSchema(t, s), "description": docs["Config.Pipelines"]}
		delete(s, "required")
		s["anyOf"] = []any{object{"required": required}, object{"required": []string{pipelinesKey}}}
	}
	if v.Type() == reflect.TypeFor[Source]() {
		s["oneOf"] = []any{object{"required": []string{"kafka"}}, object{"required": []string{"nats"}}}
	}
	return s
}

// pipelineSchema describes a pipeline: a whole file but for what stands above it.
func pipelineSchema(t *testing.T, whole object) object {
	text, err := json.Marshal(whole)
	if err != nil {
		t.Fatal(err)
	}
	var s object
	if err := json.Unmarshal(text, &s); err != nil {
		t.Fatal(err)
	}
	for _, key := range sharedKeys {
		properties, name := s["properties"].(object), key
		if first, second, ok := strings.Cut(key, "."); ok {
			properties, name = properties[first].(object)["properties"].(object), second
		}
		delete(properties, name)
	}
	s["required"] = []string{"scope"}
	return s
}

// comments are the fields' comments in config.go, by Type.Field.
func comments(t *testing.T) map[string]string {
	file, err := parser.ParseFile(token.NewFileSet(), "config.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	docs := make(map[string]string)
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, ok := n.(*ast.TypeSpec); ok {
			if s, ok := spec.Type.(*ast.StructType); ok {
				for _, f := range s.Fields.List {
					docs[spec.Name.Name+"."+f.Names[0].Name] = strings.Join(strings.Fields(f.Doc.Text()), " ")
				}
			}
		}
		return true
	})
	return docs
}

func TestSchemaIsTheStruct(t *testing.T) {
	s := schema(t, reflect.ValueOf(Default()).Elem(), "", comments(t))
	s["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	s["title"] = "dedupd"
	want, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	want = append(want, '\n')
	if *update {
		if err := os.WriteFile("schema.json", want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(Schema, want) {
		t.Error("schema.json is not that of the struct; run go test ./internal/config -run Schema -update")
	}
}

func compiled(t *testing.T) *jsonschema.Schema {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("schema.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// validate checks a file against the schema, like an editor.
func validate(t *testing.T, s *jsonschema.Schema, text []byte) error {
	// Variables stay as an editor sees them.
	b := &builder{lookup: func(name string) (string, bool) { return "${" + name + "}", true }}
	root := b.parse(text)
	asJSON, err := json.Marshal(plain(root))
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(asJSON))
	if err != nil {
		t.Fatal(err)
	}
	return s.Validate(doc)
}

func TestSchemaRefuses(t *testing.T) {
	s := compiled(t)
	for _, file := range []string{"bad-unknown-keys", "bad-types", "bad-required", "bad-enums", "bad-two-sinks", "bad-ranges"} {
		text, err := os.ReadFile("testdata/" + file + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		if validate(t, s, text) == nil {
			t.Errorf("%s passes", file)
		}
	}
	text, err := os.ReadFile("testdata/ok-whole.yaml")
	if err != nil {
		t.Fatal(err)
	}
	// Underscores in numbers are ours, not YAML's.
	if err := validate(t, s, bytes.ReplaceAll(text, []byte("1_000_000"), []byte("1000000"))); err != nil {
		t.Error(err)
	}
}

const samples = "../../configs/"

func sampleEnvironment(t *testing.T) []string {
	dir := t.TempDir()
	for file, text := range map[string]string{"password": "secret\n", "url": "postgres://u:p@h/db\n"} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return []string{
		"DATABASE_URL=postgres://localhost/app",
		"KAFKA_PASSWORD_FILE=" + filepath.Join(dir, "password"), "DATABASE_URL_FILE=" + filepath.Join(dir, "url"),
	}
}

// TestSamples loads each sample with the command's sinks and checks it against the
// schema.
func TestSamples(t *testing.T) {
	files, err := filepath.Glob(samples + "*.yaml")
	if err != nil || len(files) < 5 {
		t.Fatalf("samples: %v, %v", files, err)
	}
	s := compiled(t)
	environment := sampleEnvironment(t)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.HasPrefix(text, []byte("# yaml-language-server: $schema=../internal/config/schema.json\n")) {
				t.Error("the first line must tell editors the schema")
			}
			if err := validate(t, s, text); err != nil {
				t.Error(err)
			}
			c, _, err := Parse(filepath.Base(file), text, Options{Environ: environment, Sinks: &sinks.Default})
			if err != nil {
				t.Fatal(err)
			}
			roundTrip(t, c)
		})
	}
}

// TestDefaultsFile checks that configs/dedupd.yaml has all keys, with their defaults.
func TestDefaultsFile(t *testing.T) {
	text, err := os.ReadFile(samples + "dedupd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c, _, err := Parse("dedupd.yaml", text, Options{})
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.Scope = c.Scope
	want.Sources = []Source{{Name: "kafka", Kafka: new(Kafka)}, {Name: "nats", NATS: new(NATS)}}
	k, n := want.Sources[0].Kafka, want.Sources[1].NATS
	k.setDefaults()
	n.setDefaults()
	k.Group, n.Durable = want.Scope, want.Scope
	want.Batch.MaxInflatedBytes = want.Batch.InflightBytes
	k.Brokers, k.Topics = c.Sources[0].Kafka.Brokers, c.Sources[0].Kafka.Topics
	n.Servers, n.Stream, n.Subjects = c.Sources[1].NATS.Servers, c.Sources[1].NATS.Stream, StringList{}
	got := *c
	got.Sink, got.file, got.places = nil, "", nil
	if !reflect.DeepEqual(&got, want) {
		t.Errorf("the file says\n%+v\nthe defaults are\n%+v", got, *want)
	}
	var missing []string
	everyKey(reflect.ValueOf(c).Elem(), "", func(path string) {
		if c.places[path].line == 0 {
			missing = append(missing, path)
		}
	})
	missing = slices.DeleteFunc(missing, func(p string) bool { return p == "sources[0].nats" || p == "sources[1].kafka" })
	if len(missing) > 0 {
		t.Errorf("not in the file: %v", missing)
	}
}

func everyKey(v reflect.Value, path string, visit func(path string)) {
	for i := range v.NumField() {
		name, ok := v.Type().Field(i).Tag.Lookup("yaml")
		if !ok {
			continue
		}
		at, f := join(path, name), v.Field(i)
		if at == pipelinesKey {
			continue // instead of all the others
		}
		visit(at)
		if f.Kind() == reflect.Pointer && !f.IsNil() {
			f = f.Elem()
		}
		switch {
		case f.Kind() == reflect.Struct:
			everyKey(f, at, visit)
		case f.Kind() == reflect.Slice && f.Type().Elem().Kind() == reflect.Struct:
			for j := range f.Len() {
				everyKey(f.Index(j), index(at, j), visit)
			}
		}
	}
}
