package message

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/tidwall/gjson"
)

func mustField(t testing.TB, s string) Field {
	t.Helper()
	f, err := ParseField(s)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestParseFieldReadsAllForms(t *testing.T) {
	for s, want := range map[string]Field{
		"id":             {Kind: FieldID},
		"key":            {Kind: FieldKey},
		"value":          {Kind: FieldValue},
		"topic":          {Kind: FieldTopic},
		"lane":           {Kind: FieldLane},
		"position":       {Kind: FieldPosition},
		"time":           {Kind: FieldTime},
		"now":            {Kind: FieldNow},
		"cloudevent":     {Kind: FieldCloudEvent},
		"nats-msg-id":    {Kind: FieldNATSMsgID},
		"header:a:b":     {Kind: FieldHeader, Name: "a:b"},
		"header: x ":     {Kind: FieldHeader, Name: " x "},
		"const:":         {Kind: FieldConst},
		"const:json:a.b": {Kind: FieldConst, Name: "json:a.b"},
		"json:a.b":       {Kind: FieldJSON, Name: "a.b", path: "a.b"},
	} {
		got, err := ParseField(s)
		if err != nil || got != want {
			t.Errorf("ParseField(%q) = %#v, %v, want %#v", s, got, err, want)
		}
		if got.String() != s {
			t.Errorf("ParseField(%q).String() = %q", s, got)
		}
	}
	if s := (Field{}).String(); s != "" {
		t.Errorf("the zero Field is %q", s)
	}
}

func TestParseFieldSaysWhatIsWrong(t *testing.T) {
	for s, want := range map[string]string{
		"":              "is no place in a message",
		"ID":            "is no place in a message",
		"vlaue":         "use one of id, key",
		"header":        "is no place in a message",
		"header:":       "lacks the header's name",
		"jsn:a":         `unknown prefix "jsn"`,
		":a":            `unknown prefix ""`,
		"json:":         "the JSON path is empty",
		"json:.a":       "empty part",
		"json:a.":       "empty part",
		"json:a..b":     "empty part",
		"json:.":        "empty part",
		`json:a\`:       "ends in a backslash",
		"json:\xff":     "not valid UTF-8",
		"json:a.\xc3.b": "not valid UTF-8",
	} {
		if _, err := ParseField(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ParseField(%q): the error is %v, want something with %q", s, err, want)
		}
	}
}

func TestJSONPaths(t *testing.T) {
	const doc = `{"a":{"b":1,"b.c":2,"":9,"*":3},"list":[{"id":"x"},{"id":"y"}],"0":"zero","a b":4,"a\\b":5,"ü🎈":6,
		"@this":7,"#":8,"a|b":10,"?x":11,"!":12,"~true":13,"..":14,"twice":1,"twice":2,"list2":{"1":"key"},
		"{":15,"[":16,"\"q\"":17,"@pretty:{\"a\":1}":18,"a#":19,"%":20,"null":null,"e\u0073c":21,"<":22,"$":23}`
	for path, want := range map[string]string{
		"a.b":             "1",
		`a.b\.c`:          "2",
		`a.\*`:            "3",
		"a.*":             "3",
		"list.1.id":       `"y"`,
		"list.2.id":       "",
		"list.-1.id":      "",
		"list.id":         "",
		"list.#":          "",
		"list.#.id":       "",
		"list2.1":         `"key"`,
		"0":               `"zero"`,
		"a b":             "4",
		`a\\b`:            "5",
		"ü🎈":              "6",
		"@this":           "7",
		"#":               "8",
		"a|b":             "10",
		"?x":              "11",
		"!":               "12",
		"~true":           "13",
		`\.\.`:            "14",
		"twice":           "1",
		"{":               "15",
		"[":               "16",
		`"q"`:             "17",
		`@pretty:{"a":1}`: "18",
		"a#":              "19",
		"%":               "20",
		"null":            "null",
		"esc":             "21",
		"<":               "22",
		"$":               "23",
		"a?":              "",
		"*":               "",
		"a|@this":         "",
		"@valid":          "",
		"A.b":             "",
		"a.b.c":           "",
		`list.#(id="x")`:  "",
		"{a,b}":           "",
		"[0,a]":           "",
		"!1":              "",
	} {
		f := mustField(t, "json:"+path)
		if got := f.JSON([]byte(doc)).Raw; got != want {
			t.Errorf("%s leads to %q, want %q", path, got, want)
		}
		if f.Name != path {
			t.Errorf("%s becomes %s", path, f.Name)
		}
	}
}

// A path leads to what encoding/json finds by the same steps.
func FuzzJSONPath(f *testing.F) {
	for _, key := range []string{"a", "a.b", "*", "@this", "#", "a|b", `\`, `"`, "ü", "", "0", "\x01", "!x", "{a}", "?", "~", "a:b/c", "\u2028", "%", "(", "==", "../"} {
		f.Add(key, key+"x", "v")
	}
	f.Fuzz(func(t *testing.T, key, inner, value string) {
		if key == "" || inner == "" || !utf8.ValidString(key) || !utf8.ValidString(inner) || !utf8.ValidString(value) {
			return
		}
		doc, err := json.Marshal(map[string]any{"other": 1, key: map[string]any{inner: value, inner + "!": "wrong"}})
		if err != nil {
			t.Skip()
		}
		escape := strings.NewReplacer(`\`, `\\`, ".", `\.`).Replace
		field, err := ParseField("json:" + escape(key) + "." + escape(inner))
		if err != nil {
			t.Fatalf("the path to %q, %q is refused: %v", key, inner, err)
		}
		got, err := JSONText(field.JSON(doc))
		if err != nil || got != value {
			t.Errorf("in %s the path %q leads to %q (%v), want %q", doc, field.path, got, err, value)
		}
	})
}

// Whatever stands in a path, compiling and following it ends, and gives the same twice.
func FuzzCompilePath(f *testing.F) {
	for _, s := range []string{"a.b", `a\.b`, "*", "@reverse", "#.x", `a\`, "..", "list.#(id=1)#", "a|b", "!true", "{x,y}"} {
		f.Add(s, `{"a":{"b":[1,2,{"x":null}]},"list":[1]}`)
	}
	f.Fuzz(func(t *testing.T, path, doc string) {
		field, err := ParseField("json:" + path)
		if err != nil || !gjson.Valid(doc) {
			return
		}
		one, two := field.JSON([]byte(doc)), field.JSON([]byte(doc))
		if one.Raw != two.Raw || one.Type != two.Type {
			t.Errorf("%q in %q gives %q and %q", path, doc, one.Raw, two.Raw)
		}
		// One place: what is found is a part of the document, as it stands there.
		if one.Exists() && !strings.Contains(doc, one.Raw) {
			t.Errorf("%q in %q gives %q, which doesn't stand in it", path, doc, one.Raw)
		}
	})
}

func TestJSONText(t *testing.T) {
	for raw, want := range map[string]string{
		`"a"`:                   "a",
		`""`:                    "",
		`"a\"b\\c\/\b\f\n\r\t"`: "a\"b\\c/\b\f\n\r\t",
		`"\u00e9"`:              "é",
		`"\uD83C\uDF88"`:        "🎈",
		`"🎈"`:                   "🎈",
		`"\u0000"`:              "\x00",
		`"\ufffd"`:              "\ufffd",
		`"\ud7ff"`:              "\ud7ff", // the last before the surrogates
		`"\ue000"`:              "\ue000", // the first behind them
		`"\ud800\udc00"`:        "\U00010000",
		`"\ud800\udfff"`:        "\U000103ff",
		`"\udbff\udc00"`:        "\U0010fc00",
		`"\udbff\udfff"`:        "\U0010ffff",
		`"\\ud83d"`:             `\ud83d`,
		`"\\\\ud83d"`:           `\\ud83d`,
		`1.50`:                  "1.50",
		`-0`:                    "-0",
		`1E400`:                 "1E400",
		`9007199254740993`:      "9007199254740993",
		`true`:                  "true",
		`false`:                 "false",
		`{"a" : [1]}`:           `{"a" : [1]}`,
	} {
		if got, err := JSONText(gjson.Parse(raw)); err != nil || got != want {
			t.Errorf("JSONText(%s) = %q, %v, want %q", raw, got, err, want)
		}
	}
	for _, raw := range []string{
		`"\ud83c"`, `"\udf88"`, `"\udf88\ud83c"`, `"\ud83cx\udf88"`, `"\ud83c\ud83c\udf88"`, `"\ud83c\udf88\udf88"`,
		`"\ud800"`, `"\udbff"`, `"\udc00"`, `"\udfff"`, `"\ud800\ud7ff"`, `"\udbff\ue000"`, `"\ud7ff\udc00"`, `"\ue000\udfff"`, `"\udbff\udbff"`,
		`"\uD83C\n"`, `"\ud83c\\udf88"`, `"x\ud83c\u0041"`, `"\\\ud83c"`,
	} {
		if got, err := JSONText(gjson.Parse(raw)); err == nil {
			t.Errorf("JSONText(%s) = %q, want an error: half a surrogate pair is no text", raw, got)
		}
	}
}

// JSONText loses nothing: what it takes, another decoder reads alike, and the
// text goes back to the same string.
func FuzzJSONText(f *testing.F) {
	for _, s := range []string{`"a"`, `"\ud83c\udf88"`, `"\ud83c"`, `"\u0000"`, `"\\ud83c"`, "\"\xff\""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		r := gjson.Parse(raw)
		if !gjson.Valid(raw) || !utf8.ValidString(raw) || r.Type != gjson.String {
			return
		}
		var want string
		if err := json.Unmarshal([]byte(raw), &want); err != nil {
			return
		}
		got, err := JSONText(r)
		lossy := strings.Count(want, "\ufffd") != strings.Count(raw, "\ufffd")+strings.Count(strings.ToLower(raw), `\ufffd`)
		switch {
		case err != nil && !lossy:
			t.Errorf("JSONText(%s) refuses %q: %v", raw, want, err)
		case err == nil && got != want:
			t.Errorf("JSONText(%s) = %q, want %q", raw, got, want)
		}
	})
}

func ExampleField() {
	f, _ := ParseField(`json:order.items.0.sku\.eu`)
	r := f.JSON([]byte(`{"order": {"items": [{"sku.eu": "A-1"}]}}`))
	text, _ := JSONText(r)
	fmt.Println(f, "is", text)
	// Output: json:order.items.0.sku\.eu is A-1
}
