package app

import (
	"os"
	"runtime/debug"
)

// workingMemory is what a process needs beside messages and filters: its code's
// data, a batch on its way into the database, the clients' buffers.
const workingMemory = 48 << 20

// limitMemory lets the garbage collector take its time until the heap has grown
// to what was configured, and keeps it there: memory is given to be used, and
// the same heap is otherwise marked several times a second. GOMEMLIMIT and GOGC
// in the environment go before; the limit is then the operator's own.
//
// The result is told how much the filters take, which comes on top.
func limitMemory(inflight int64) func(filters int64) {
	if os.Getenv("GOMEMLIMIT") != "" || os.Getenv("GOGC") != "" {
		return func(int64) {}
	}
	limit := func(filters int64) { debug.SetMemoryLimit(inflight + workingMemory + filters) }
	limit(0)
	debug.SetGCPercent(400)
	return limit
}
