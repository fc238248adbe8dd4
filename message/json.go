package message

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/tidwall/gjson"
)

// MaxJSONDepth is how deep arrays and objects may nest. The check of a document recurses
// with each level, and a Go program whose stack reaches its limit ends at once: without
// a bound, one message of 8 MiB of "[" would take down every worker that reads it.
// Postgres has its own limit, which depends on its stack (some 10,000 levels with the
// default of 2 MB) and is reported as if the server were at fault.
const MaxJSONDepth = 1000

var errNotJSON = errors.New("it is not valid JSON")

// ValidJSON returns why a document can't be read: it is no JSON, or nests deeper than
// MaxJSONDepth. It doesn't check the UTF-8 within strings.
func ValidJSON(doc []byte) error {
	if err := ShallowJSON(doc); err != nil {
		return err
	}
	if !gjson.ValidBytes(doc) {
		return errNotJSON
	}
	return nil
}

// ShallowJSON refuses what nests deeper than MaxJSONDepth, be it JSON or not.
func ShallowJSON(doc []byte) error {
	if tooDeep(doc) {
		return fmt.Errorf("its JSON nests deeper than %d levels", MaxJSONDepth)
	}
	return nil
}

// tooDeep counts levels without recursing. Nearly all documents are too short to be too
// deep, or have too few brackets, and aren't scanned.
func tooDeep(doc []byte) bool {
	if len(doc) <= MaxJSONDepth || bytes.Count(doc, []byte{'['})+bytes.Count(doc, []byte{'{'}) <= MaxJSONDepth {
		return false
	}
	depth, inString := 0, false
	for i := 0; i < len(doc); i++ {
		switch c := doc[i]; {
		case inString:
			if c == '\\' {
				i++
			} else if c == '"' {
				inString = false
			}
		case c == '"':
			inString = true
		case c == '[' || c == '{':
			if depth++; depth > MaxJSONDepth {
				return true
			}
		case c == ']' || c == '}':
			depth--
		}
	}
	return false
}
