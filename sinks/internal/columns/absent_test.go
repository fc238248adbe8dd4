package columns

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/dedupd/dedupd/message"
)

// Which places are absent, and which are there and null.
func TestAbsent(t *testing.T) {
	keeps := func(place string) Column {
		c := column(t, "c", place, textType)
		c.Keeps = true
		return c
	}
	value := func(s string) message.Message { return message.Message{Value: []byte(s)} }
	header := func(v []byte) message.Message {
		return message.Message{Headers: []message.Header{{Key: "h", Value: v}}}
	}
	for name, c := range map[string]struct {
		place string
		m     message.Message
		want  bool
	}{
		"a path":               {"json:a", value(`{"a":1}`), false},
		"an empty text":        {"json:a", value(`{"a":""}`), false},
		"no such path":         {"json:a", value(`{"b":1}`), true},
		"null":                 {"json:a", value(`{"a":null}`), false},
		"null on the way":      {"json:a.b.c", value(`{"a":null}`), false},
		"nothing on the way":   {"json:a.b.c", value(`{"a":{}}`), true},
		"a number on the way":  {"json:a.b", value(`{"a":7}`), true},
		"a document of null":   {"json:a", value(` null `), false},
		"a document of a text": {"json:a", value(`"a"`), true},
		"a dot in a key":       {`json:a\.b`, value(`{"a":null}`), true},
		"a backslash":          {`json:a\\.b`, value(`{"a\\":null}`), false},
		"a short array":        {"json:a.1", value(`{"a":[1]}`), true},
		"no value":             {"json:a", message.Message{}, true},
		"a header":             {"header:h", header([]byte("x")), false},
		"an empty header":      {"header:h", header([]byte{}), false},
		"a header of null":     {"header:h", header(nil), false},
		"no header":            {"header:h", message.Message{}, true},
		"no key":               {"key", message.Message{}, true},
		"an empty key":         {"key", message.Message{Key: []byte{}}, false},
		"no time":              {"time", message.Message{}, true},
		"a time":               {"time", message.Message{Time: time.Unix(1, 0)}, false},
		"an id":                {"id", message.Message{}, false},
		"now":                  {"now", message.Message{}, false},
		"a constant":           {"const:", message.Message{}, false},
	} {
		c.m.ID = "x"
		v, err := set(t, column(t, "id", "id", textType), keeps(c.place)).Encode([]message.Message{{ID: "before", Value: []byte(`{"a":{"b":{"c":1}},"a.b":1,"a\\":{"b":1}}`)}, c.m})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if v.Absent(1, 1) != c.want || v.Absent(1, 0) || v.HasAbsent() != (c.want || v.Absent(0, 1)) {
			t.Errorf("%s: absent is %v", name, v.Absent(1, 1))
		}
		plain := column(t, "c", c.place, textType)
		if v, err := set(t, column(t, "id", "id", textType), plain).Encode([]message.Message{c.m}); err != nil || v.HasAbsent() {
			t.Errorf("%s: something is absent of columns that don't keep, %v", name, err)
		}
		if MayBeAbsent(plain.Field) != slices.Contains([]string{"json", "head", "key", "time"}, c.place[:min(4, len(c.place))]) {
			t.Errorf("MayBeAbsent(%s) is wrong", c.place)
		}
	}
}

// More than 64 columns, of which any may be absent.
func TestMasksOfManyColumns(t *testing.T) {
	const n = 130
	var cols []Column
	for i := range n {
		c := column(t, fmt.Sprint("c", i), fmt.Sprintf("header:%d", i), textType)
		c.Keeps = true
		cols = append(cols, c)
	}
	rapid.Check(t, func(t *rapid.T) {
		s, _ := NewSet(cols)
		there := rapid.SliceOfN(rapid.Bool(), n, n).Draw(t, "there")
		m := message.Message{}
		for i, is := range there {
			if is {
				m.Headers = append(m.Headers, message.Header{Key: fmt.Sprint(i), Value: []byte("x")})
			}
		}
		v, err := s.Encode([]message.Message{m})
		if err != nil {
			t.Fatal(err)
		}
		for i, is := range there {
			if bit := v.Masks()[0][i/8]>>(i%8)&1 == 1; bit == is || v.Absent(0, i) == is {
				t.Fatalf("column %d", i)
			}
		}
	})
}

// A fold is what applying the rows one by one makes of each group.
func TestFold(t *testing.T) {
	cols := []Column{column(t, "a", "header:a", jsonbType), column(t, "b", "header:b", Type{Cast: "bytea", Name: "bytea", OID: oidBytea}), column(t, "c", "id", textType), column(t, "d", "time", timeType)}
	for i := range cols {
		cols[i].Keeps = true
	}
	s, ids := set(t, cols...), set(t, cols[2])
	rapid.Check(t, func(t *rapid.T) {
		groups := rapid.IntRange(1, 5).Draw(t, "groups")
		n := rapid.IntRange(groups, 30).Draw(t, "n")
		group := make([]int32, n)
		msgs := make([]message.Message, n)
		type row [4]string
		want, of, lost := make([]row, groups), make([][4]int, groups), map[int]bool{}
		for i := range msgs {
			g := i
			if i >= groups { // each has at least one
				g = rapid.IntRange(0, groups-1).Draw(t, "group")
			}
			group[i] = int32(g + 1)
			values := row{"", "", fmt.Sprint(i), ""}
			for c := range 2 {
				if rapid.Bool().Draw(t, "there") {
					values[c] = fmt.Sprint(i)
					msgs[i].Headers = append(msgs[i].Headers, message.Header{Key: string(rune('a' + c)), Value: []byte(values[c])})
				}
			}
			if rapid.Bool().Draw(t, "time") {
				msgs[i].Time = time.Unix(int64(i), 0).UTC()
				values[3] = msgs[i].Time.String()
			}
			msgs[i].ID = values[2]
			for c, v := range values {
				if v == "" {
					continue
				}
				if c == 0 && want[g][c] != "" { // the server reads it
					lost[of[g][c]] = true
				}
				want[g][c], of[g][c] = v, i
			}
		}
		v, err := s.Encode(msgs)
		if err != nil {
			t.Fatal(err)
		}
		folded, unread := v.Fold(group, groups, ids)
		for g := range groups {
			got := row{folded.slots[0].text[g].String, string(folded.slots[1].bytes[g]), folded.slots[2].text[g].String, ""}
			if at := folded.slots[3].time[g]; at.Valid {
				got[3] = at.Time.String()
			}
			if got != want[g] {
				t.Fatalf("group %d is %v, want %v", g, got, want[g])
			}
			for c, v := range want[g] {
				if folded.Absent(g, c) != (v == "") {
					t.Fatalf("group %d, column %d: absent is %v", g, c, v != "")
				}
			}
		}
		if len(unread) != len(lost) || slices.ContainsFunc(unread, func(i int) bool { return !lost[i] }) {
			t.Fatalf("unread are %v, want %v", unread, lost)
		}
		// Some of the rows, with some of the columns.
		picked := folded.Rows([]int{groups - 1}).Of(ids)
		if picked.n != 1 || picked.slots[0].text[0].String != want[groups-1][2] {
			t.Fatalf("picked %v", picked.slots)
		}
	})
}
