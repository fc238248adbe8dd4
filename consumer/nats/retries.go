package nats

import (
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
)

const (
	// shortestWait and longestWait bound the wait between two sessions.
	shortestWait = 100 * time.Millisecond
	longestWait  = 5 * time.Second
	// steady is for how long a session must have been read before an earlier failure
	// counts as over. One that fails soon after each start hasn't recovered.
	steady = 2 * longestWait
	// remindAfter is after what time a lasting reason is logged again.
	remindAfter = 10 * time.Minute
	// mostReasons bounds the memory of reasons, should their texts vary.
	mostReasons = 64
)

// retries spaces out the sessions that fail, and logs why.
type retries struct {
	reasons
	attempt int
}

// failed returns how long to wait after a session that failed after it was read for so
// long.
func (r *retries) failed(read time.Duration) time.Duration {
	if read >= steady {
		r.attempt = 0
		r.forget()
	}
	limit := min(shortestWait<<min(r.attempt, 10), longestWait)
	r.attempt++
	return limit/2 + rand.N(limit/2) // workers that failed together shouldn't come back together
}

// reasons logs each reason once while it lasts, and then as a reminder.
type reasons struct {
	mu     sync.Mutex
	logged map[string]time.Time
}

// warn logs what happened, as a warning if this error is new. Only the log goes by its
// text.
func (r *reasons) warn(log *slog.Logger, what string, err error, args ...any) {
	to := log.Debug
	if r.isNew(what + ": " + err.Error()) {
		to = log.Warn
	}
	to(what, append(args, "error", err)...)
}

func (r *reasons) isNew(reason string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at, known := r.logged[reason]; known && time.Since(at) < remindAfter {
		return false
	}
	if r.logged == nil || len(r.logged) >= mostReasons {
		r.logged = make(map[string]time.Time)
	}
	r.logged[reason] = time.Now()
	return true
}

// forget has all reasons logged again.
func (r *reasons) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.logged = nil
}
