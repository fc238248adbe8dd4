package consumer

import (
	"math/rand/v2"
	"time"
)

// The longest waits between tries: what ends by itself is tried often enough to
// go on soon; what needs a person doesn't fill the log or the database.
const (
	retryBackoff = 5 * time.Second
	holdBackoff  = 30 * time.Second
)

// backoff is the wait before try number attempts+1: exponential from 50 ms with
// full jitter (M. Brooker, "Exponential Backoff And Jitter", 2015), so that many
// lanes that failed together don't come back together.
func backoff(attempts int, longest time.Duration) time.Duration {
	limit := min(longest, 50*time.Millisecond<<min(attempts, 10))
	return time.Millisecond + rand.N(limit)
}
