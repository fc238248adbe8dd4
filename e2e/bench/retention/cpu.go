package main

import (
	"os"
	"time"

	"github.com/dedupd/dedupd/e2e/bench/measure"
)

// cpu is the processor time that was used: by the workers, which are this
// process, and by Postgres.
type cpu struct{ workers, postgres measure.CPU }

func (c cpu) since(before cpu) cpu {
	return cpu{c.workers - before.workers, c.postgres - before.postgres}
}

func (c cpu) total() time.Duration { return c.workers + c.postgres }

// used reads the clocks. No backend ends during a run.
func (b *bench) used() cpu {
	return cpu{measure.CPUOf(os.Getpid()), measure.CPUOfChildren(b.server.Pid())}
}
