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
	othersBehind    func(context.Context) bool
}

// Acquire acquires a lane of this source, see Lanes, and logs a rewind or a reset.
func (in *Session) Acquire(ctx context.Context, a lane.Acquire) (lane.Assignment, error) {
	got, err := in.Lanes.Acquire(ctx, a)
	if err != nil {
		return got, err
	}
	log := in.w.Logger.With("source", a.Lane.Source, "lane", a.Lane.Name, "position", got.Next)
	if got.GroupOf != "" {
		log.Warn("the group's offset was written for another scope: while both are in the group, each gets only a part of the messages, and begins at the other's position. Give each scope a group of its own", "other_scope", got.GroupOf, "broker_position", a.Committed)
	}
	switch {
	case got.Rewound && !a.Ordered:
		in.w.Metrics.rewinds.Inc()
		log.Warn("the database lacks commits that were acknowledged: it went back to an earlier state. Asking for everything since to be delivered again", "broker_position", got.BrokerPosition)
	case got.Rewound:
		in.w.Metrics.rewinds.Inc()
		log.Warn("the broker is ahead of the database, which must have lost commits: reading again from the database's position", "broker_position", a.Committed)
	case got.Reset:
		in.w.Metrics.rewinds.Inc()
		log.Warn("the group's offsets were moved back at the broker: following them")
	case got.Outdated:
		log.Warn("the group's offset is below what the broker has confirmed, but a worker wrote it, as when the group's name was changed and changed back: going on at the database's position. To read again, set the lane's position", "broker_position", a.Committed)
	default:
		log.Debug("lane acquired", "epoch", got.Epoch)
	}
	return got, nil
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

// Open opens a lane that was acquired.
func (in *Session) Open(o LaneOptions) *Lane {
	l := &Lane{
		w: in.w, options: o, lag: -1, position: o.Next, unmoved: true,
		lost:  make(chan struct{}),
		space: make(chan struct{}, 1),
		ended: make(chan struct{}),
	}
	in.w.mu.Lock()
	in.w.lanes[l] = struct{}{}
	l.restoreHeldLocked()
	in.w.activity = time.Now()
	in.w.mu.Unlock()
	in.w.Metrics.lanePosition.WithLabelValues(o.Lane.Source, o.Lane.Name).Set(float64(o.Next))
	return l
}

// Ready reports whether the source has reached its broker and opened whatever
// lanes it has been given.
func (in *Session) Ready(ok bool) { in.setReady(ok, nil) }

// NotReady tells that the source can't read, and why.
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

// AskOthers has a run until idle ask, once our lanes are caught up, whether others have
// lanes that aren't, and may never be: it goes on then, and asks again. Nil: there are no
// others.
func (in *Session) AskOthers(behind func(context.Context) bool) {
	in.w.mu.Lock()
	defer in.w.mu.Unlock()
	in.othersBehind = behind
}

// Budget is the byte budget that all sources share.
func (in *Session) Budget() *Budget { return in.w.Budget }

// MaxMessages is the most messages a batch should have.
func (in *Session) MaxMessages() int { return in.w.MaxMessages }

// MaxBytes is the most bytes a batch should have.
func (in *Session) MaxBytes() int64 { return in.w.MaxBytes }

// Share is how much a source should ask for at a time: what is worth holding of one
// lane ahead of the writers. It falls with the number of lanes that have something to
// read, so that many of them hold no more than a few. It is at most MaxMessages and
// MaxBytes.
func (in *Session) Share() (messages int, bytes int64) {
	in.w.mu.Lock()
	defer in.w.mu.Unlock()
	return in.w.shareLocked()
}

// Writers is how many transactions may run at a time.
func (in *Session) Writers() int { return in.w.Writers }

// Drain is how long transactions in flight may take when the process ends.
func (in *Session) Drain() time.Duration { return in.w.Drain }

// Logger is the worker's logger.
func (in *Session) Logger() *slog.Logger { return in.w.Logger }

// Rebalanced counts a new assignment of lanes.
func (in *Session) Rebalanced() {
	in.w.Metrics.rebalances.Inc()
	in.w.mu.Lock()
	defer in.w.mu.Unlock()
	for l := range in.w.evicted {
		if l.Source == in.source { // it may be another worker's now
			in.w.forgetEvictedLocked(l)
		}
	}
}

// CommitFailed counts a commit or an acknowledgement that the broker refused or
// didn't answer. That is never a reason to stop: the database is the authority.
func (in *Session) CommitFailed() { in.w.Metrics.commitErrors.Inc() }

// Skipped counts positions that the broker had deleted and that on_gap: skip
// passed over. Unlike the holes that a log may have, they were lost messages.
func (in *Session) Skipped(n int64) {
	in.w.Metrics.skipped.WithLabelValues(in.source).Add(float64(n))
}
