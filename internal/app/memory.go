package app

import (
	"os"
	"runtime/debug"
	"sync"
)

// workingMemory is what a scope's worker needs beside messages and filters: its code's
// data, a batch on its way to the database, the clients' buffers.
const workingMemory = 48 << 20

// limitMemory lets the heap grow to what was configured before the garbage collector
// works hard, and holds it there. The memory was given to be used; otherwise the same
// heap is marked several times a second. GOMEMLIMIT and GOGC in the environment take
// precedence: the operator then sets the limit.
//
// The returned function adds what the filters take.
func limitMemory(inflight int64, scopes int) func(filters int64) {
	if os.Getenv("GOMEMLIMIT") != "" || os.Getenv("GOGC") != "" {
		return func(int64) {}
	}
	limit := func(filters int64) { debug.SetMemoryLimit(inflight + int64(scopes)*workingMemory + filters) }
	limit(0)
	debug.SetGCPercent(400)
	return limit
}

// shareLimit makes n functions of one: it is called with the sum of what they get.
func shareLimit(limit func(filters int64), n int) []func(filters int64) {
	var mu sync.Mutex
	parts, all := make([]int64, n), make([]func(int64), n)
	for i := range all {
		all[i] = func(filters int64) {
			mu.Lock()
			defer mu.Unlock()
			parts[i] = filters
			sum := int64(0)
			for _, part := range parts {
				sum += part
			}
			limit(sum)
		}
	}
	return all
}
