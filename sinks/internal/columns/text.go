package columns

import (
	"strconv"
	"unsafe"
)

// view is b as a string, without a copy. It is sound because nobody writes to a
// message's bytes while its batch lives, and pgx copies parameters into its own
// buffer before a call returns.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// bytesOf is the way back, and never nil: an empty text is not NULL. Nobody
// writes to the result.
func bytesOf(s string) []byte {
	if s == "" {
		return []byte{}
	}
	return unsafe.Slice(unsafe.StringData(s), len(s))
}

// quoted shows a value in an error without letting a large one fill the log.
func quoted(s string) string {
	const most = 60
	if len(s) > most {
		return strconv.Quote(s[:most]) + "…"
	}
	return strconv.Quote(s)
}

// parseUUID reads the forms that Postgres reads: 32 hexadecimal digits of any
// case, a hyphen allowed after every fourth, braces allowed around them.
func parseUUID(s string) (u [16]byte, ok bool) {
	if len(s) > 1 && s[0] == '{' && s[len(s)-1] == '}' {
		s = s[1 : len(s)-1]
	}
	for i := range u {
		if i > 0 && i%2 == 0 && len(s) > 0 && s[0] == '-' {
			s = s[1:]
		}
		if len(s) < 2 {
			return u, false
		}
		hi, lo := hexDigit[s[0]], hexDigit[s[1]]
		if hi|lo > 15 {
			return u, false
		}
		u[i] = hi<<4 | lo
		s = s[2:]
	}
	return u, s == ""
}

// hexDigit is what a digit is worth, 255 where it is none. A table: digits of
// random ids leave a branch predictor nothing to predict.
var hexDigit = func() (t [256]byte) {
	for i := range t {
		t[i] = 255
	}
	for i := range byte(16) {
		t["0123456789abcdef"[i]] = i
		t["0123456789ABCDEF"[i]] = i
	}
	return t
}()
