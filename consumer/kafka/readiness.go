package kafka

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/dedupd/dedupd/consumer"
)

// readiness tells the worker whether a group generation reads everything it
// should: all lanes are open, all topics are there.
type readiness struct {
	session *consumer.Session

	mu       sync.Mutex
	serving  bool
	problems map[string]error // by lane or topic
}

func newReadiness(session *consumer.Session) *readiness {
	return &readiness{session: session, problems: make(map[string]error)}
}

// setLane records whether a lane is read. It reports whether that is new.
func (r *readiness) setLane(lane string, ok bool) (changed bool) {
	if ok {
		return r.set("lane "+lane, nil)
	}
	return r.set("lane "+lane, errNotRead)
}

// setTopic records why a topic can't be read; nil: it can.
func (r *readiness) setTopic(topic string, problem error) { r.set("topic "+topic, problem) }

var errNotRead = errors.New("it isn't read; the log says why")

func (r *readiness) set(name string, problem error) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.problems[name]
	if problem != nil {
		r.problems[name] = problem
	} else {
		delete(r.problems, name)
	}
	r.reportLocked()
	return (was == nil) != (problem == nil)
}

// setServing says whether the group generation reads at all.
func (r *readiness) setServing(serving bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.serving = serving
	r.reportLocked()
}

// reportLocked tells the worker, under the mutex so that reports keep the order of the
// changes.
func (r *readiness) reportLocked() {
	switch {
	case !r.serving:
		r.session.Ready(false)
	case len(r.problems) == 0:
		r.session.Ready(true)
	default:
		// One problem is enough to report, always the same: topics sort after lanes,
		// and are the reason for more.
		name := slices.Max(slices.Collect(maps.Keys(r.problems)))
		r.session.NotReady(fmt.Errorf("%s: %w", name, r.problems[name]))
	}
}
