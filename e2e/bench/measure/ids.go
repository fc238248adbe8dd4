package measure

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// RandomID is a UUIDv4 in its text form.
func RandomID() []byte {
	return fmt.Appendf(nil, "%08x-%04x-4%03x-8%03x-%012x", rand.Uint32(), rand.Uint32N(1<<16), rand.Uint32N(1<<12), rand.Uint32N(1<<12), rand.Uint64N(1<<48))
}

// TimedID is a UUIDv7 of now in its text form.
func TimedID() []byte {
	t := time.Now().UnixMilli()
	return fmt.Appendf(nil, "%08x-%04x-7%03x-8%03x-%012x", t>>16, t&0xFFFF, rand.Uint32N(1<<12), rand.Uint32N(1<<12), rand.Uint64N(1<<48))
}
