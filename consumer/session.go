package consumer

import (
	"context"
	"log/slog"
	"time"

	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// Session is one source's view of the worker. The embedded Lanes is the
// authority itself; Acquire and ReportLogCut log and count in addition.
type Session struct {
	Lanes
	w      *Worker
	source string
	// Guarded by w.mu.
	ready, wasReady bool
	why             error                     // the source isn't ready because of this; nil: it gave no reason
	held            map[message.Lane]heldLane // lanes that can't be opened
}

// heldLane is why a lane can't be opened, and since when.
type heldLane struct {
	err   error
	since time.Time
}

// Take takes a lane of this source and tells of a rewind or a reset.
func (in *Session) Acquire(ctx context.Context, t lane.Acquire) (lane.Assignment, error) {
	taken, err := in.Lanes.Acquire(ctx, t)
	if err != nil {
		return taken, err
	}
	log := in.w.Logger.With("source", t.Lane.Source, "lane", t.Lane.Name, "position", taken.Next)
	if taken.GroupOf != "" {
		log.Warn("the group's offset was written for another scope: while both are in the group, each gets a part of the messages only, and begins where the other stands. Give each scope a group of its own", "other_scope", taken.GroupOf, "broker_position", t.Committed)
	}
	switch {
	case taken.Rewound && !t.Ordered:
		in.w.Metrics.rewinds.Inc()
		log.Warn("the database lacks commits that were acknowledged: it went back to an earlier state. Having the queue delivered again from where it is sure", "broker_position", taken.BrokerPosition)
	case taken.Rewound:
		in.w.Metrics.rewinds.Inc()
		log.Warn("the broker is ahead of the database, which must have lost commits: reading again from the database's position", "broker_position", t.Committed)
	case taken.Reset:
		in.w.Metrics.rewinds.Inc()
		log.Warn("the group's offsets were moved back at the broker: following them")
	case taken.Outdated:
		log.Warn("the group's offset stands below what the broker has confirmed, but a worker wrote it, as before the group's name was changed and changed back: going on at the database's position. To read again, set the lane's position", "broker_position", t.Committed)
	default:
		log.Debug("lane taken", "epoch", taken.Epoch)
	}
	return taken, nil
}

// ReportLogCut reports a cut log, see Lanes, and counts a rewind where the lane
// follows the cut.
func (in *Session) ReportLogCut(ctx context.Context, cut lane.LogCut) error {
	err := in.Lanes.ReportLogCut(ctx, cut)
	if err == nil && cut.Follow {
		in.w.Metrics.rewinds.Inc()
	}
	return err
}

// Open opens a lane that was taken.
func (in *Session) Open(o LaneOptions) *Lane {
	l := &Lane{
		w: in.w, options: o, lag: -1, position: o.Next, fresh: true,
		lost:  make(chan struct{}),
		space: make(chan struct{}, 1),
		ended: make(chan struct{}),
	}
	in.w.mu.Lock()
	in.w.lanes[l] = struct{}{}
	l.heldStill()
	in.w.activity = time.Now()
	in.w.mu.Unlock()
	in.w.Metrics.lanePosition.WithLabelValues(o.Lane.Source, o.Lane.Name).Set(float64(o.Next))
	return l
}

// Hold notes that a lane can't be opened until somebody changes something, as
// after a loss of data at the broker: it counts among the held lanes, and makes
// the process not ready. A nil error takes that back. The error is shown to whoever
// asks for readiness: it must quote no message.
func (in *Session) Hold(lane message.Lane, err error) {
	in.w.mu.Lock()
	defer in.w.mu.Unlock()
	old, was := in.held[lane]
	switch {
	case err == nil && was:
		delete(in.held, lane)
		in.w.Metrics.held.Dec()
	case err != nil && was:
		in.held[lane] = heldLane{err, old.since}
	case err != nil:
		if in.held == nil {
			in.held = make(map[message.Lane]heldLane)
		}
		in.held[lane] = heldLane{err, time.Now()}
		in.w.Metrics.held.Inc()
	}
}

// Ready tells whether the source has reached its broker and opened whatever
// lanes it has been given.
func (in *Session) Ready(ok bool) { in.setReady(ok, nil) }

// NotReady tells that the source can't read what it is to read, and why.
func (in *Session) NotReady(why error) { in.setReady(false, why) }

func (in *Session) setReady(ok bool, why error) {
	in.w.mu.Lock()
	defer in.w.mu.Unlock()
	in.ready, in.why = ok, why
	in.wasReady = in.wasReady || ok
	value := 0.0
	if ok {
		value = 1
	}
	in.w.Metrics.ready.WithLabelValues(in.source).Set(value)
}

// Budget is the byte budget that all sources share.
func (in *Session) Budget() *Budget { return in.w.Budget }

// MaxMessages is the most messages a batch should have.
func (in *Session) MaxMessages() int { return in.w.MaxMessages }

// MaxBytes is the most bytes a batch should have.
func (in *Session) MaxBytes() int64 { return in.w.MaxBytes }

// Share is how much of a lane's messages is worth holding ahead of the writers,
// in number and in bytes: what a source should ask for at a time. It falls with
// the number of lanes that have something to read, so that many of them hold no
// more than a few. It is at most MaxMessages and MaxBytes.
func (in *Session) Share() (messages int, bytes int64) {
	in.w.mu.Lock()
	defer in.w.mu.Unlock()
	return in.w.share()
}

// Writers is how many transactions may run at a time.
func (in *Session) Writers() int { return in.w.Writers }

// Drain is how long transactions in hand may take when the process ends.
func (in *Session) Drain() time.Duration { return in.w.Drain }

// Logger is the worker's logger.
func (in *Session) Logger() *slog.Logger { return in.w.Logger }

// Rebalanced counts a new assignment of lanes.
func (in *Session) Rebalanced() {
	in.w.Metrics.rebalances.Inc()
	in.w.mu.Lock()
	defer in.w.mu.Unlock()
	for lane := range in.w.gaveBack {
		if lane.Source == in.source { // it may be another worker's now
			in.w.forgetGivenBack(lane)
		}
	}
}

// CommitFailed counts a commit or an acknowledgement that the broker didn't
// take. That is never a reason to stop: the database is the authority.
func (in *Session) CommitFailed() { in.w.Metrics.commitErrors.Inc() }

// Skipped counts positions that the broker no longer had and that the source was
// told to skip. Unlike the holes that a log may have, they were lost messages.
func (in *Session) Skipped(n int64) {
	in.w.Metrics.skipped.WithLabelValues(in.source).Add(float64(n))
}
