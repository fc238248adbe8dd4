package nats

import (
	"math/rand/v2"
	"time"

	"github.com/dedupd/dedupd/internal/logonce"
)

const (
	// shortestWait and longestWait bound the wait between two sessions.
	shortestWait = 100 * time.Millisecond
	longestWait  = 5 * time.Second
	// steady is for how long a session must have been read before an earlier failure
	// counts as over. One that fails soon after each start hasn't recovered.
	steady = 2 * longestWait
)

// retries spaces out the sessions that fail.
type retries struct {
	attempt int
	problem logonce.Problem // why they fail
}

// failed returns how long to wait after a session that failed after it was read for so
// long.
func (r *retries) failed(read time.Duration) time.Duration {
	if read >= steady {
		r.attempt = 0
		r.problem.End()
	}
	limit := min(shortestWait<<min(r.attempt, 10), longestWait)
	r.attempt++
	return limit/2 + rand.N(limit/2) // workers that failed together shouldn't come back together
}
