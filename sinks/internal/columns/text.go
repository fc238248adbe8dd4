package columns

import (
	"encoding/hex"
	"strconv"
	"unsafe"
)

// view is b as a string, without a copy. It is sound: nobody writes to a message's bytes
// while its batch lives, and pgx copies parameters into its own buffer before a call
// returns.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// bytesOf reverses view. It is never nil: an empty text isn't NULL. Nobody writes to the
// result.
func bytesOf(s string) []byte {
	if s == "" {
		return []byte{}
	}
	return unsafe.Slice(unsafe.StringData(s), len(s))
}

// quoted shows a value in an error, cut so that a large one doesn't fill the log.
func quoted(s string) string {
	const most = 60
	if len(s) > most {
		return strconv.Quote(s[:most]) + "…"
	}
	return strconv.Quote(s)
}

// parseUUID reads what Postgres reads: 32 hexadecimal digits of any case, optionally with
// hyphens after each group of four, and optionally in braces.
func parseUUID(s string) (u [16]byte, ok bool) {
	if len(s) > 1 && s[0] == '{' && s[len(s)-1] == '}' {
		s = s[1 : len(s)-1]
	}
	var digits [32]byte
	for i := 0; i < len(digits); i += 4 {
		if i > 0 && len(s) > 0 && s[0] == '-' {
			s = s[1:]
		}
		if len(s) < 4 {
			return u, false
		}
		copy(digits[i:i+4], s)
		s = s[4:]
	}
	_, err := hex.Decode(u[:], digits[:])
	return u, err == nil && s == ""
}
