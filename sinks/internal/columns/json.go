package columns

import (
	"errors"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/dedupd/dedupd/message"
)

// jsonColumn returns the text that a JSON element becomes in a column of type t. ok is false
// for null and for a path that leads nowhere.
func jsonColumn(t Type, r gjson.Result) (text string, ok bool, err error) {
	switch {
	case r.Type == gjson.Null:
		return "", false, nil
	case t.json():
		return r.Raw, true, checkEscapes(t, r.Raw)
	case t.Category == 'A' && r.IsArray():
		var b strings.Builder
		b.Grow(len(r.Raw) + 16)
		if err := writeArray(&b, r, t.jsonElement()); err != nil {
			return "", false, err
		}
		return b.String(), true, nil
	}
	text, err = message.JSONText(r)
	return text, err == nil, err
}

// writeArray writes a JSON array as a Postgres array literal. Everything but NULL is quoted,
// so that no element is read as NULL, as a nested array or as white space. With jsonElements
// a nested array is an element, else a dimension.
func writeArray(b *strings.Builder, array gjson.Result, jsonElements bool) (err error) {
	b.WriteByte('{')
	first := true
	array.ForEach(func(_, r gjson.Result) bool {
		if !first {
			b.WriteByte(',')
		}
		first = false
		switch {
		case r.Type == gjson.Null:
			b.WriteString("NULL")
		case jsonElements:
			writeElement(b, r.Raw)
		case r.IsArray():
			err = writeArray(b, r, false)
		default:
			var text string
			if text, err = message.JSONText(r); err == nil {
				writeElement(b, text)
			}
		}
		return err == nil
	})
	b.WriteByte('}')
	return err
}

func writeElement(b *strings.Builder, s string) {
	b.WriteByte('"')
	for {
		i := strings.IndexAny(s, `"\`)
		if i < 0 {
			break
		}
		b.WriteString(s[:i])
		b.WriteByte('\\')
		b.WriteByte(s[i])
		s = s[i+1:]
	}
	b.WriteString(s)
	b.WriteByte('"')
}

// checkEscapes finds \u0000, which JSON allows and jsonb refuses. (The type json takes it,
// since it keeps a document as it is written.)
func checkEscapes(t Type, raw string) error {
	if t.OID != oidJSONB {
		return nil
	}
	for from := 0; ; {
		i := strings.Index(raw[from:], `\u0000`)
		if i < 0 {
			return nil
		}
		i += from
		// After an odd number of backslashes, this one is the second half of an escaped
		// backslash.
		n := 0
		for i-n > 0 && raw[i-n-1] == '\\' {
			n++
		}
		if n%2 == 0 {
			return errEscapedNUL
		}
		from = i + 1
	}
}

var errEscapedNUL = errors.New(`its JSON holds a \u0000, which jsonb can't; a column of type json or bytea takes it`)
