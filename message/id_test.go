package message

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
)

func identity(t testing.TB, maxBytes int, from ...string) *Identity {
	t.Helper()
	x, err := NewIdentity(from, maxBytes)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func headers(pairs ...string) []Header {
	var h []Header
	for i := 0; i < len(pairs); i += 2 {
		h = append(h, Header{pairs[i], []byte(pairs[i+1])})
	}
	return h
}

func TestIdentityOfEveryForm(t *testing.T) {
	m := &Message{
		Key:      []byte("k\x00\xff"),
		Value:    []byte(`{"id":"42","n":1.0,"b":true,"deep":{"list":[{"id":"x"}]},"esc":"\u00e9\n","big":12345678901234567890}`),
		Headers:  headers("message-id", "old", "message-id", "h-1", "Nats-Msg-Id", "n-1"),
		Position: Position{Lane{"main", "orders/3"}, 17},
	}
	for _, c := range []struct {
		from []string
		want string
	}{
		{[]string{"key"}, "k\x00\xff"},
		{[]string{"header:message-id"}, "h-1"},
		{[]string{"nats-msg-id"}, "n-1"},
		{[]string{"json:id"}, "42"},
		{[]string{"json:n"}, "1.0"},
		{[]string{"json:b"}, "true"},
		{[]string{"json:deep.list.0.id"}, "x"},
		{[]string{"json:esc"}, "é\n"},
		{[]string{"json:big"}, "12345678901234567890"},
		{[]string{"position"}, "3:inc,4:main,8:orders/3,2:17,"},
		{[]string{"key", "json:id"}, "3:k\x00\xff,2:42,"},
		{[]string{"json:id", "json:id"}, "2:42,2:42,"},
		{[]string{"header:message-id", "position"}, "3:h-1,29:3:inc,4:main,8:orders/3,2:17,,"},
	} {
		got, err := identity(t, 1000, c.from...).ID(m, "inc")
		if err != nil || got != c.want {
			t.Errorf("%v gives %q, %v, want %q", c.from, got, err, c.want)
		}
	}
}

func TestIdentityMissing(t *testing.T) {
	for _, c := range []struct {
		from string
		m    Message
	}{
		{"key", Message{}},
		{"key", Message{Key: []byte{}}},
		{"header:a", Message{Headers: headers("A", "x")}},
		{"header:a", Message{Headers: headers("a", "x", "a", "")}},
		{"header:a", Message{Headers: []Header{{Key: "a"}}}},
		{"nats-msg-id", Message{Headers: headers("nats-msg-id", "x")}},
		{"json:id", Message{}},
		{"json:id", Message{Value: []byte(`{"id":""}`)}},
		{"json:id", Message{Value: []byte(`{"id":null}`)}},
		{"json:id", Message{Value: []byte(`{"ID":"x"}`)}},
		{"json:id", Message{Value: []byte(`{"id":"x"`)}},
		{"json:id", Message{Value: []byte(`{"id":"x"} {"id":"y"}`)}},
		{"json:id", Message{Value: []byte(`"id"`)}},
		{"cloudevent", Message{}},
		{"cloudevent", Message{Value: []byte(`[]`)}},
		{"cloudevent", Message{Value: []byte(`{"id":"x"}`)}},
		{"cloudevent", Message{Value: []byte(`{"source":"x","id":""}`)}},
		{"cloudevent", Message{Value: []byte(`{"source":"x","id":"y"`)}},
		{"cloudevent", Message{Value: []byte(`{"source":"x","id":"y",}`)}},
		{"cloudevent", Message{Value: []byte(`{"source":"x","id":"y"} {}`)}},
		{"cloudevent", Message{Value: []byte(`{"source":"x","id":"y","data":` + strings.Repeat("[", MaxJSONDepth) + strings.Repeat("]", MaxJSONDepth) + `}`)}},
		{"cloudevent", Message{Value: []byte(`"{\"source\":\"x\",\"id\":\"y\"}"`)}},
		{"cloudevent", Message{Headers: headers("ce_id", "x")}},
		{"cloudevent", Message{Headers: headers("ce_id", "", "ce_source", "s"), Value: []byte(`{"id":"x","source":"y"}`)}},
		{"cloudevent", Message{Headers: headers("ce_id", "x", "ce-source", "s")}},
	} {
		id, err := identity(t, 100, c.from).ID(&c.m, "")
		if !errors.Is(err, ErrNoID) {
			t.Errorf("%s of %+v gives %q, %v, want ErrNoID", c.from, c.m, id, err)
		}
		// One missing part makes all of it missing.
		if id, err := identity(t, 100, "position", c.from).ID(&c.m, ""); !errors.Is(err, ErrNoID) {
			t.Errorf("position and %s of %+v give %q, %v, want ErrNoID", c.from, c.m, id, err)
		}
	}
}

func TestIdentityUnusable(t *testing.T) {
	long := strings.Repeat("x", 11)
	for _, c := range []struct {
		from []string
		m    Message
		want string
	}{
		{[]string{"key"}, Message{Key: []byte(long)}, "11 bytes are more than id.max_bytes allows (10)"},
		{[]string{"header:a"}, Message{Headers: headers("a", long)}, "11 bytes"},
		{[]string{"nats-msg-id"}, Message{Headers: headers("Nats-Msg-Id", long)}, "11 bytes"},
		{[]string{"json:id"}, Message{Value: []byte(`{"id":"` + long + `"}`)}, "bytes are more"},
		{[]string{"json:id"}, Message{Value: []byte(`{"id":{"a":1}}`)}, "an object or an array is no id"},
		{[]string{"json:id"}, Message{Value: []byte(`{"id":[]}`)}, "an object or an array is no id"},
		{[]string{"json:id"}, Message{Value: []byte(`{"id":"\ud83d"}`)}, "surrogate"},
		{[]string{"cloudevent"}, Message{Value: []byte(`{"id":{},"source":"s"}`)}, "no id"},
		{[]string{"cloudevent"}, Message{Value: []byte(`{"id":"a","source":["s"]}`)}, "an object or an array is no id"},
		{[]string{"cloudevent"}, Message{Value: []byte(`{"id":"abc","source":"def"}`)}, "unusable id in cloudevent: 12 bytes"},
		{[]string{"cloudevent"}, Message{Headers: headers("ce_id", long, "ce_source", "s")}, "bytes are more"},
		{[]string{"key", "key"}, Message{Key: []byte("abc")}, "unusable id in the joined places: 12 bytes"},
	} {
		id, err := identity(t, 10, c.from...).ID(&c.m, "")
		if err == nil || !strings.HasPrefix(err.Error(), "unusable id in ") || !strings.Contains(err.Error(), c.want) || errors.Is(err, ErrNoID) {
			t.Errorf("%v of %+v gives %q, %v, want an unusable id with %q", c.from, c.m, id, err, c.want)
		}
	}
	if id, err := identity(t, 10, "key").ID(&Message{Key: []byte(long[:10])}, ""); err != nil || len(id) != 10 {
		t.Errorf("an id of just id.max_bytes gives %q, %v", id, err)
	}
	if id, err := identity(t, 10, "key", "key").ID(&Message{Key: []byte("ab")}, ""); err != nil || len(id) != 10 {
		t.Errorf("joined places of just id.max_bytes give %q, %v", id, err)
	}
}

func TestCloudEvents(t *testing.T) {
	const want = "3:src,2:e1,"
	value := []byte(` {"specversion":"1.0","id":"e1","source":"src","data":{"id":"no"}}`)
	for name, m := range map[string]Message{
		"structured":                  {Value: value},
		"binary, Kafka":               {Headers: headers("ce_source", "src", "ce_id", "e1"), Value: []byte("anything")},
		"binary, NATS":                {Headers: headers("ce-source", "src", "ce-id", "e1")},
		"headers win over the value":  {Headers: headers("ce_source", "src", "ce_id", "e1"), Value: []byte(`{"id":"x","source":"y"}`)},
		"Kafka's win over NATS's":     {Headers: headers("ce-id", "x", "ce-source", "y", "ce_source", "src", "ce_id", "e1")},
		"the last of a header counts": {Headers: headers("ce_id", "x", "ce_source", "src", "ce_id", "e1")},
	} {
		if got, err := identity(t, 100, "cloudevent").ID(&m, ""); err != nil || got != want {
			t.Errorf("%s gives %q, %v, want %q", name, got, err, want)
		}
	}
	// An id is unique only together with its source.
	other := Message{Headers: headers("ce_source", "src2:e", "ce_id", "1")}
	if got, _ := identity(t, 100, "cloudevent").ID(&other, ""); got == want {
		t.Error("two sources give one identity")
	}
}

func TestJoinedPlacesStayApart(t *testing.T) {
	parts := []string{"a", "b", "ab", "1:a", "1:a,", "1:a,1:b,", ",", ":", "0:,", "\x00", "a,1:b"}
	seen := map[string]string{}
	for _, a := range parts {
		for _, b := range parts {
			m := Message{Headers: headers("a", a, "b", b)}
			id, err := identity(t, 1000, "header:a", "header:b").ID(&m, "")
			if err != nil {
				t.Fatal(err)
			}
			pair := fmt.Sprintf("%q + %q", a, b)
			if other, ok := seen[id]; ok {
				t.Errorf("%s and %s are one id: %q", pair, other, id)
			}
			seen[id] = pair
		}
	}
}

func TestPositionID(t *testing.T) {
	p := Position{Lane{"main", "orders/3"}, 17}
	ids := map[string]bool{PositionID("i", p): true}
	for _, other := range []string{
		PositionID("j", p), PositionID("", p), PositionID("i", Position{Lane{"mai", "norders/3"}, 17}),
		PositionID("i", Position{Lane{"main", "orders/31"}, 7}), PositionID("i", Position{p.Lane, 18}), PositionID("i", Position{p.Lane, -17}),
	} {
		if ids[other] {
			t.Errorf("two places share %q", other)
		}
		ids[other] = true
	}
}

func TestNewIdentityRefuses(t *testing.T) {
	for _, from := range [][]string{nil, {}, {"value"}, {"topic"}, {"time"}, {"now"}, {"id"}, {"lane"}, {"const:x"}, {"nope"}, {"key", "json:"}} {
		if _, err := NewIdentity(from, 10); err == nil {
			t.Errorf("%q is taken", from)
		}
	}
}

// ID is total and deterministic: any bytes give an id within the limit or one of
// two errors, twice the same, and the message stays as it is.
func FuzzIdentity(f *testing.F) {
	f.Add("json:id", "key", []byte("k"), []byte(`{"id":"x"}`), "h", []byte("v"), int64(1))
	f.Add("cloudevent", "position", []byte(nil), []byte(`{"id":"x","source":"y"}`), "ce_id", []byte("v"), int64(-1))
	f.Add("header:h", "", []byte("\xff"), []byte(`{"id":"\ud83d"}`), "h", []byte{}, int64(0))
	f.Add(`json:a\.b.0`, "nats-msg-id", []byte(""), []byte(`{"a.b":[[]]}`), "Nats-Msg-Id", []byte("n"), int64(9))
	f.Fuzz(func(t *testing.T, one, two string, key, value []byte, header string, headerValue []byte, offset int64) {
		const most = 64
		from := []string{one}
		if two != "" {
			from = append(from, two)
		}
		x, err := NewIdentity(from, most)
		if err != nil {
			return
		}
		m := Message{Key: key, Value: value, Headers: []Header{{header, headerValue}}, Position: Position{Lane{"s", "l"}, offset}}
		before := fmt.Sprintf("%#v", m)
		id, err := x.ID(&m, "inc")
		again, errAgain := x.ID(&m, "inc")
		if id != again || fmt.Sprint(err) != fmt.Sprint(errAgain) {
			t.Fatalf("it gives %q, %v and then %q, %v", id, err, again, errAgain)
		}
		if after := fmt.Sprintf("%#v", m); after != before {
			t.Fatalf("it changed the message from %s to %s", before, after)
		}
		switch {
		case err == nil && id == "":
			t.Error("an empty id without an error")
		case err == nil && len(id) > most && !strings.Contains(one, "position"):
			t.Errorf("an id of %d bytes", len(id))
		case err != nil && (id != "" || errors.Is(err, ErrNoID) == strings.HasPrefix(err.Error(), "unusable id in ")):
			t.Errorf("it gives %q and %v, which is not just one of no id and an unusable one", id, err)
		}
	})
}

// Two different pairs of parts never give one id.
func FuzzJoin(f *testing.F) {
	f.Add("a", "bc", "ab", "c")
	f.Add("1:a,", "b", "1:a", ",b")
	x, err := NewIdentity([]string{"header:a", "header:b"}, 1<<20)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, a, b, c, d string) {
		one, err1 := x.ID(&Message{Headers: headers("a", a, "b", b)}, "")
		two, err2 := x.ID(&Message{Headers: headers("a", c, "b", d)}, "")
		if err1 == nil && err2 == nil && (one == two) != (a == c && b == d) {
			t.Errorf("%q+%q gives %q, %q+%q gives %q", a, b, one, c, d, two)
		}
	})
}

// A JSON document of millions of levels must not take the process with it.
func TestIdentityOfAPit(t *testing.T) {
	for _, open := range []string{"[", `{"id":`} {
		m := Message{Value: []byte(strings.Repeat(open, 8<<20/len(open)))}
		if _, err := identity(t, 100, "json:id").ID(&m, ""); !errors.Is(err, ErrNoID) {
			t.Errorf("the error is %v", err)
		}
	}
	valid, _ := json.Marshal("x")
	if _, err := identity(t, 100, "json:id").ID(&Message{Value: valid}, ""); !errors.Is(err, ErrNoID) {
		t.Errorf("a document that is a string gives %v", err)
	}
}

func TestHeader(t *testing.T) {
	m := Message{Headers: []Header{{"a", []byte("1")}, {"b", nil}, {"a", []byte("2")}}}
	if v, ok := m.Header("a"); !ok || string(v) != "2" {
		t.Errorf("the last a is %q, %v", v, ok)
	}
	if v, ok := m.Header("b"); !ok || v != nil {
		t.Errorf("b is %q, %v", v, ok)
	}
	if _, ok := m.Header("A"); ok {
		t.Error("A is found, though only a is there")
	}
}

func TestLaneOrder(t *testing.T) {
	lanes := []Lane{{"a", "b"}, {"a", "c"}, {"b", "a"}}
	for i, l := range lanes {
		for j, o := range lanes {
			if c := l.Compare(o); (c < 0) != (i < j) || (c == 0) != (i == j) {
				t.Errorf("%v.Compare(%v) = %d", l, o, c)
			}
		}
	}
}
