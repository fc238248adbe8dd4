package nats

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// The waits grow up to the longest, and begin anew only after a session that lasted.
func TestWaitsBetweenSessions(t *testing.T) {
	t.Parallel()
	var r retries
	for i, most := range []time.Duration{100, 200, 400, 800, 1600, 3200, 5000, 5000} {
		most *= time.Millisecond
		if wait := r.failed(time.Second); wait < most/2 || wait > most {
			t.Errorf("wait %d is %s, not between %s and %s", i+1, wait, most/2, most)
		}
	}
	if wait := r.failed(steady); wait > shortestWait {
		t.Errorf("after a session that lasted: %s", wait)
	}
}

// A reason is logged once, also when others come between, and again as a reminder.
func TestReasonsAreLoggedOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		log := slog.New(slog.NewTextHandler(&text, nil))
		var r reasons
		logged := func(reason string) int { return strings.Count(text.String(), "error=\""+reason) }
		for range 100 {
			r.warn(log, "not reading", errors.New("no stream"))
			r.warn(log, "not reading", errors.New("no rights"))
		}
		if logged("no stream") != 1 || logged("no rights") != 1 {
			t.Errorf("logged: %s", text.String())
		}
		time.Sleep(remindAfter)
		r.warn(log, "not reading", errors.New("no stream"))
		if logged("no stream") != 2 {
			t.Error("no reminder was logged")
		}
		r.forget()
		r.warn(log, "not reading", errors.New("no stream"))
		if logged("no stream") != 3 {
			t.Error("what comes again after it was over wasn't logged")
		}
		for i := range 10 * mostReasons {
			r.warn(log, "not reading", fmt.Errorf("reason %d", i))
		}
		if len(r.logged) > mostReasons {
			t.Errorf("%d reasons are kept", len(r.logged))
		}
	})
}
