package message

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/tidwall/gjson"
)

// MaxJSONDepth is how deep arrays and objects may nest. The check of a document
// calls itself for each level, and a Go program whose stack reaches its limit
// ends at once: without a bound, one message of 8 MiB of "[" would take every
// worker down that meets it. Postgres has a limit of its own, which hangs on its
// stack (some 10,000 levels with the default of 2 MB) and is reported as if the
// server were at fault.
const MaxJSONDepth = 1000

var errNotJSON = errors.New("it is not valid JSON")

// ValidJSON says why a document can't be looked into: it is no JSON, or nests
// deeper than MaxJSONDepth. It doesn't look for bad UTF-8 within strings.
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

// tooDeep counts levels without taking any itself. Nearly all documents are too
// short for it, or have too few brackets, and are not looked at twice.
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
