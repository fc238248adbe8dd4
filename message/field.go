package message

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"
)

// FieldKind is a kind of place in a message.
type FieldKind int

// The kinds of places that configuration can name.
const (
	FieldID FieldKind = iota + 1
	FieldKey
	FieldValue
	FieldTopic
	FieldLane
	FieldPosition
	FieldTime
	FieldHeader
	FieldJSON
	FieldNow
	FieldConst
	FieldCloudEvent
	FieldNATSMsgID
)

var plainFields = map[string]FieldKind{
	"id":          FieldID,
	"key":         FieldKey,
	"value":       FieldValue,
	"topic":       FieldTopic,
	"lane":        FieldLane,
	"position":    FieldPosition,
	"time":        FieldTime,
	"now":         FieldNow,
	"cloudevent":  FieldCloudEvent,
	"nats-msg-id": FieldNATSMsgID,
}

// Field names a place in a message, as configuration writes it: "key", "value",
// "header:NAME", "json:PATH" and so on. It is the one vocabulary of id.from,
// dedup.fingerprint and the columns of sinks.
type Field struct {
	Kind FieldKind
	// Name is the header's name, the JSON path or the constant's text.
	Name string
	// path is the JSON path in the form gjson takes.
	path string
}

// ParseField parses one place. The error lists the valid ones.
func ParseField(s string) (Field, error) {
	if kind, ok := plainFields[s]; ok {
		return Field{Kind: kind}, nil
	}
	prefix, name, ok := strings.Cut(s, ":")
	if !ok {
		return Field{}, fmt.Errorf("%q is no place in a message; use one of id, key, value, topic, lane, position, time, now, header:NAME, json:PATH, const:TEXT, cloudevent, nats-msg-id", s)
	}
	switch prefix {
	case "header":
		if name == "" {
			return Field{}, fmt.Errorf("%q lacks the header's name", s)
		}
		return Field{Kind: FieldHeader, Name: name}, nil
	case "json":
		path, err := compilePath(name)
		if err != nil {
			return Field{}, fmt.Errorf("%q: %w", s, err)
		}
		return Field{Kind: FieldJSON, Name: name, path: path}, nil
	case "const":
		return Field{Kind: FieldConst, Name: name}, nil
	}
	return Field{}, fmt.Errorf("%q: unknown prefix %q; use header:NAME, json:PATH or const:TEXT", s, prefix)
}

func (f Field) String() string {
	switch f.Kind {
	case FieldHeader:
		return "header:" + f.Name
	case FieldJSON:
		return "json:" + f.Name
	case FieldConst:
		return "const:" + f.Name
	}
	for name, kind := range plainFields {
		if kind == f.Kind {
			return name
		}
	}
	return ""
}

// JSON finds the field's path in a JSON document, which must be valid. The result
// doesn't exist where the path leads nowhere. If an object has a key twice, the first
// one counts.
func (f Field) JSON(doc []byte) gjson.Result { return gjson.GetBytes(doc, f.path) }

// NullIn reports whether a JSON document has a null at the field's path, or on the way there:
// whoever says that there is no customer says that the customer has no name. The document
// must be valid.
func (f Field) NullIn(doc []byte) bool {
	for path := f.path; path != ""; path = parentPath(path) {
		if r := gjson.GetBytes(doc, path); r.Exists() {
			return r.Type == gjson.Null
		}
	}
	return gjson.ParseBytes(doc).Type == gjson.Null
}

// parentPath cuts the last part off a compiled path. It is empty if there is only one.
func parentPath(path string) string {
	for i := len(path) - 1; i > 0; i-- {
		if path[i] != '.' {
			continue
		}
		escapes := 0
		for escapes < i && path[i-escapes-1] == '\\' {
			escapes++
		}
		if escapes%2 == 0 {
			return path[:i]
		}
	}
	return ""
}

// compilePath turns "order.items.0.id" into gjson's form. A dot within a key is written
// "\."; gjson's query language is not offered: a path always means one place.
func compilePath(path string) (string, error) {
	if path == "" {
		return "", fmt.Errorf("the JSON path is empty")
	}
	if !utf8.ValidString(path) {
		return "", fmt.Errorf("the JSON path is not valid UTF-8")
	}
	var b strings.Builder
	empty := true
	for i := 0; i < len(path); i++ {
		c := path[i]
		switch {
		case c == '.':
			if empty {
				return "", fmt.Errorf("the JSON path has an empty part")
			}
			b.WriteByte('.')
			empty = true
			continue
		case c == '\\':
			i++
			if i == len(path) {
				return "", fmt.Errorf("the JSON path ends in a backslash")
			}
			writePathByte(&b, path[i])
		default:
			writePathByte(&b, c)
		}
		empty = false
	}
	if empty {
		return "", fmt.Errorf("the JSON path has an empty part")
	}
	return b.String(), nil
}

// writePathByte escapes everything that gjson would read as more than a letter.
func writePathByte(b *strings.Builder, c byte) {
	if c < utf8.RuneSelf && !(c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || c == '-' || c == ' ' || c == '/' || c == ':') {
		b.WriteByte('\\')
	}
	b.WriteByte(c)
}

// JSONText returns the text of a JSON scalar: a string without its quotes and escapes, a
// number or a boolean as written. Two different documents never give the same text by
// losing something: a string with half a surrogate pair, which has no text, is refused.
func JSONText(r gjson.Result) (string, error) {
	if r.Type != gjson.String {
		return r.Raw, nil
	}
	if strings.Contains(r.Raw, `\u`) && halfSurrogate(r.Raw) {
		return "", fmt.Errorf("the JSON string holds half of a surrogate pair, which is no text")
	}
	return r.Str, nil
}

func halfSurrogate(raw string) bool {
	high := false // the escape just before was the first half of a pair
	for i := 0; i < len(raw); i++ {
		unit := int64(-1)
		if raw[i] == '\\' && i+1 < len(raw) {
			i++
			if raw[i] == 'u' && i+4 < len(raw) {
				unit, _ = strconv.ParseInt(raw[i+1:i+5], 16, 32)
				i += 4
			}
		}
		low := unit >= 0xDC00 && unit <= 0xDFFF
		if low != high {
			return true
		}
		high = unit >= 0xD800 && unit <= 0xDBFF
	}
	return high
}
