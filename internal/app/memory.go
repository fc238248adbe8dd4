package app

import (
	"os"
	"runtime/debug"
)

// workingMemory is what a process needs beside messages and filters: its code's
// data, a batch on its way to the database, the clients' buffers.
const workingMemory = 48 << 20

// limitMemory lets the heap grow to what was configured before the garbage collector
// works hard, and holds it there. The memory was given to be used; otherwise the same
// heap is marked several times a second. GOMEMLIMIT and GOGC in the environment take
// precedence: the operator then sets the limit.
//
// The returned function adds what the filters take.
func limitMemory(inflight int64) func(filters int64) {
	if os.Getenv("GOMEMLIMIT") != "" || os.Getenv("GOGC") != "" {
		return func(int64) {}
	}
	limit := func(filters int64) { debug.SetMemoryLimit(inflight + workingMemory + filters) }
	limit(0)
	debug.SetGCPercent(400)
	return limit
}
