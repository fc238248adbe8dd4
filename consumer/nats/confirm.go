package nats

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/lane"
)

// What is committed is acknowledged once the durable keeps a checkpoint that no older
// copy of the database has: the database raises it, it goes into the durable's metadata,
// and the database is asked once more. So if a database that is found later lacks
// something that was acknowledged, its checkpoint is below the durable's. See
// docs/decisions/0029.

const (
	// confirmEvery is how often that is done at most, unless so much waits that the
	// server is about to deliver no more. Each time costs an update of the durable, which
	// in a cluster goes through the group of all its servers.
	confirmEvery = 500 * time.Millisecond
	// confirmAttempt bounds one attempt, lastConfirm the one at the end of a session.
	confirmAttempt = 2 * requestTimeout
	lastConfirm    = 3 * time.Second
)

// offsetMetadataKey is the key of the lane's offset metadata in the durable's metadata.
const offsetMetadataKey = "dedupd"

// gate holds what is committed until it may be acknowledged.
type gate struct {
	mu             sync.Mutex
	waiting        []ackRef
	known          lane.Checkpoint
	offsetMetadata string // what the durable was last known to keep
	enough         int    // so many waiting are confirmed at once
	requested      chan struct{}
	full           chan struct{}
}

func (g *gate) open(known lane.Checkpoint, info *jetstream.ConsumerInfo) {
	g.known, g.offsetMetadata = known, offsetMetadataOf(info)
	g.requested, g.full = make(chan struct{}, 1), make(chan struct{}, 1)
	g.setLimit(info.Config.MaxAckPending, 0)
}

// setLimit learns how many messages the server allows to be outstanding, and how many of
// them others have. A quarter of the rest is enough to wait: the remainder is for what
// is being read and written meanwhile.
func (g *gate) setLimit(limit int, others int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.enough = largestGate
	if limit > 0 {
		g.enough = min(g.enough, max(1, (limit-int(max(0, others)))/4))
	}
}

// largestGate bounds what waits in memory, where the server sets no limit.
const largestGate = 100_000

func (g *gate) add(all []ackRef) {
	g.mu.Lock()
	g.waiting = append(g.waiting, all...)
	full := len(g.waiting) >= g.enough
	g.mu.Unlock()
	g.request()
	if full {
		signal(g.full)
	}
}

// request asks for a confirmation, also where nothing waits.
func (g *gate) request() { signal(g.requested) }

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (g *gate) checkpoint() lane.Checkpoint {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.known
}

// differs reports whether the durable keeps something else than when it was last written
// or compared with the database.
func (g *gate) differs(info *jetstream.ConsumerInfo) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return offsetMetadataOf(info) != g.offsetMetadata
}

func (g *gate) learn(confirmed lane.Confirmation, info *jetstream.ConsumerInfo) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.known.Number = max(g.known.Number, confirmed.Checkpoint.Number)
	g.offsetMetadata = offsetMetadataOf(info)
}

// count is how many wait now: all of them were committed before.
func (g *gate) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.waiting)
}

// pass removes the first n of what waits; -1: all.
func (g *gate) pass(n int) (all []ackRef) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if n < 0 {
		n = len(g.waiting)
	}
	all, g.waiting = g.waiting[:n:n], append([]ackRef(nil), g.waiting[n:]...)
	return all
}

// confirmAll confirms until all slots are closed, and then what is left.
func (x *session) confirmAll(drained <-chan struct{}) {
	var problem logonce.Problem
	failures := 0
	for {
		select {
		case <-x.gate.requested:
		case <-drained:
			x.confirmRest()
			return
		}
		pause := confirmEvery
		err := x.confirm(x.closing, confirmAttempt)
		var fenced *lane.FencedError
		switch {
		case err == nil:
			problem.End()
			failures = 0
		case errors.Is(err, errGone):
			x.end(errGone)
		case errors.As(err, &fenced):
			x.end(errLost)
		case x.closing.Err() != nil:
		default:
			failures++
			pause = min(confirmEvery<<min(failures, 10), 5*time.Second)
			x.in.CommitFailed()
			if problem.IsNew(err) {
				x.log.Warn("what is committed is not acknowledged yet; trying again", "error", err)
			}
			x.gate.request()
		}
		select {
		case <-time.After(pause):
		case <-x.gate.full:
		case <-drained:
		}
	}
}

// confirmRest confirms at the session's end, and gives back what it can't: whoever gets
// it next finds out whether it is committed.
func (x *session) confirmRest() {
	if x.gate.count() == 0 {
		return
	}
	if err := x.confirm(context.WithoutCancel(x.closing), lastConfirm); err != nil {
		x.log.Debug("give back what is committed and can't be acknowledged", "error", err)
	}
	x.acks.add(x.forget(x.gate.pass(-1)), true)
}

// confirm has everything acknowledged that waits now.
func (x *session) confirm(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	waiting := x.gate.count()
	before := x.unacked.Load()
	info, err := x.bound.current(ctx)
	if err != nil {
		return err
	}
	x.gate.setLimit(info.Config.MaxAckPending, int64(info.NumAckPending)-max(before, x.unacked.Load()))
	confirmed, err := x.ask(ctx, info, waiting > 0)
	if err != nil {
		return err
	}
	if info, confirmed, err = x.publish(ctx, info, confirmed); err != nil {
		return err
	}
	x.gate.learn(confirmed, info)
	x.setKeptFloor(info)
	if confirmed.OffsetMetadata != offsetMetadataOf(info) {
		x.gate.request() // too many at a time: again in a moment
	}
	if waiting > 0 {
		x.acks.add(x.forget(x.gate.pass(waiting)), false)
	}
	return nil
}

// patience is how often publish and write check what others have written meanwhile.
const patience = 3

// publish has the durable keep what the database wants it to, and asks the database once
// more: it may have been replaced since it was asked, and a worker have acquired the
// lane in its successor before the durable was written.
//
// Two workers may write at a time, and the lower checkpoint last: the one that finds the
// database beyond what it wrote writes again. An update carries the whole configuration,
// so the durable is read right before, or what somebody changed by hand would be undone.
func (x *session) publish(ctx context.Context, info *jetstream.ConsumerInfo, confirmed lane.Confirmation) (*jetstream.ConsumerInfo, lane.Confirmation, error) {
	for tries := 0; (confirmed.OffsetMetadata != offsetMetadataOf(info) || x.bound.floors.due(info)) && tries <= patience; tries++ {
		now, err := x.bound.current(ctx)
		if err == nil && (tries == patience || offsetMetadataOf(now) == offsetMetadataOf(info)) {
			now, err = x.bound.write(ctx, now, confirmed.OffsetMetadata)
		}
		if err != nil {
			return nil, confirmed, err
		}
		info = now
		if confirmed, err = x.ask(ctx, info, false); err != nil {
			return nil, confirmed, err
		}
	}
	return info, confirmed, nil
}

func (x *session) ask(ctx context.Context, info *jetstream.ConsumerInfo, raise bool) (lane.Confirmation, error) {
	return x.in.Confirm(ctx, lane.Confirm{
		Lane: x.source.lane(), Epoch: x.assignment.Epoch, Checkpoint: x.gate.checkpoint(), OffsetMetadata: offsetMetadataOf(info), Raise: raise,
	})
}

// acked inspects the durable once there is nothing left to do: somebody may wait for
// that.
func (x *session) acked() {
	if x.pending.Load() == 0 && x.gate.count() == 0 {
		x.inspectSoon()
	}
}

// offsetMetadataOf is what a durable keeps of our lane; empty: nothing.
func offsetMetadataOf(info *jetstream.ConsumerInfo) string {
	if info == nil {
		return ""
	}
	return info.Config.Metadata[offsetMetadataKey]
}

// current is the consumer's state; errGone: it isn't the one that was bound.
func (b *binding) current(ctx context.Context) (*jetstream.ConsumerInfo, error) {
	info, err := b.consumer.Info(ctx)
	switch {
	case errors.Is(err, jetstream.ErrConsumerNotFound), errors.Is(err, jetstream.ErrStreamNotFound):
		return nil, errGone
	case err != nil:
		return nil, fmt.Errorf("ask for the durable's state: %w", err)
	case !info.Created.Equal(b.info.Created):
		return nil, errGone
	}
	return info, nil
}

// saveMetadata has the durable keep offset metadata, unless it does already.
func (b *binding) saveMetadata(ctx context.Context, offsetMetadata string) error {
	if offsetMetadataOf(b.info) == offsetMetadata && !b.floors.due(b.info) {
		return nil
	}
	info, err := b.write(ctx, b.info, offsetMetadata)
	if err == nil {
		b.info = info
	}
	return err
}

// write has the durable keep offset metadata. A worker that comes at the same moment
// amends the durable as it found it, without what we write: then it is written again.
func (b *binding) write(ctx context.Context, info *jetstream.ConsumerInfo, offsetMetadata string) (*jetstream.ConsumerInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	for tries := 0; ; tries++ {
		written, err := b.update(ctx, info, offsetMetadata)
		if err != nil || offsetMetadataOf(written) != "" { // ours, or another worker's by now
			return written, err
		}
		if tries == patience {
			return nil, &configError{"the server keeps no metadata of its consumers, without which a database that went back isn't noticed: it must be NATS 2.10 or later"}
		}
		if info, err = b.current(ctx); err != nil {
			return nil, err
		}
	}
}

func (b *binding) update(ctx context.Context, info *jetstream.ConsumerInfo, offsetMetadata string) (*jetstream.ConsumerInfo, error) {
	config := info.Config
	config.Metadata = maps.Clone(config.Metadata)
	if config.Metadata == nil {
		config.Metadata = make(map[string]string)
	}
	config.Metadata[offsetMetadataKey] = offsetMetadata
	b.floors.note(info, config.Metadata)
	updated, err := b.durable.withinLimits(ctx, config, b.stream.UpdateConsumer)
	switch {
	case errors.Is(err, jetstream.ErrConsumerDoesNotExist):
		return nil, errGone
	case err != nil:
		return nil, fmt.Errorf("record the checkpoint at the durable: %w", err)
	}
	info = updated.CachedInfo()
	if !info.Created.Equal(b.info.Created) {
		return nil, errGone
	}
	return info, nil
}
