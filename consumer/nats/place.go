package nats

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// place makes the durable begin where the database is, and keep the offset metadata of
// the assignment. errRewound: the durable is another one now.
func (x *session) place(ctx context.Context, stream *jetstream.StreamInfo) error {
	bound, got := x.bound, x.assignment
	d := bound.durable
	known := d.knownIn(got.Checkpoint.Instance)
	switch {
	case got.Rewound:
		if err := x.rewind(ctx, got.BrokerPosition); err != nil {
			return fmt.Errorf("have the server deliver again what the database has lost: %w", err)
		}
		return errRewound
	case bound.consumer == nil:
		return x.createAgain(ctx, known)
	case stateLost(stream, bound.info) && bound.skips == "":
		return x.restoreFloor(ctx)
	case bound.consumed && bound.skips != "":
		return x.deliverRest(ctx)
	}
	why, err := x.whySetBack(ctx)
	if err != nil {
		return err
	}
	if why != "" {
		position := got.BrokerPosition
		if bound.skips != "" && known { // under our filter; the row's may be of another one
			position = min(position, int64(d.ackFloor)+1)
		}
		x.log.Warn(why+": setting it back to the database's position", "durable", d.config.Durable, "sequence", position)
		if err := x.rewind(ctx, position); err != nil {
			return fmt.Errorf("set the durable consumer back: %w", err)
		}
		return errRewound
	}
	d.seen(bound.info.AckFloor.Stream)
	d.created = bound.info.Created
	if !bound.consumed {
		bound.floors.observe(bound.info, time.Now())
	}
	return bound.saveMetadata(ctx, got.OffsetMetadata)
}

// createAgain creates a durable that was never there or that somebody deleted. All below
// the row's position is sure then, and what was acknowledged since in this database.
func (x *session) createAgain(ctx context.Context, known bool) error {
	position := x.assignment.BrokerPosition
	if known {
		position = int64(x.bound.durable.ackFloor) + 1
	}
	err := x.bound.create(ctx, position, x.assignment.OffsetMetadata)
	if errors.Is(err, errNotFresh) {
		// By the time this one is deleted, it may be one that another worker rewound
		// after one more failover: so the row decides, as it is then.
		err = x.rewind(ctx, position)
	}
	if err != nil && !errors.Is(err, jetstream.ErrConsumerExists) {
		return fmt.Errorf("create the durable consumer again: %w", err)
	}
	return errRewound
}

// whySetBack tells why the durable has to be set back to the database's position; empty:
// it hasn't.
func (x *session) whySetBack(ctx context.Context) (string, error) {
	misplaced, err := x.bound.misplaced(ctx, x.assignment.BrokerPosition)
	switch {
	case err != nil:
		return "", err
	case misplaced:
		return "somebody created the durable consumer anew, and it would skip messages", nil
	case x.bound.skips != "":
		return "somebody changed the durable consumer's " + x.bound.skips + ", and it has passed over messages", nil
	}
	return "", nil
}

// deliverRest creates the durable of a WorkQueue anew. The stream has deleted what was
// acknowledged, so what it still has is what wasn't.
func (x *session) deliverRest(ctx context.Context) error {
	x.log.Warn("somebody changed the durable consumer's "+x.bound.skips+", and it has passed over messages: creating it anew, to deliver everything that the stream still has", "durable", x.source.config.Durable)
	if err := x.bound.remake(ctx, -1, x.assignment.OffsetMetadata); err != nil {
		return fmt.Errorf("create the durable consumer anew: %w", err)
	}
	return errRewound
}

// rewind has the server deliver again from a position on, until the database
// confirms that all below is sure: it may go back once more meanwhile. The durable gets
// the offset metadata first: until the database knows of the rewind, every worker finds
// it behind the durable, and rewinds.
func (x *session) rewind(ctx context.Context, position int64) error {
	for {
		from := max(position, 1)
		if err := x.bound.rewind(ctx, from, x.assignment.OffsetMetadata); err != nil {
			return err
		}
		if x.bound.consumed {
			from = 0 // what is lost is lost
		}
		sure, err := x.in.ConfirmRewind(ctx, x.source.lane(), x.assignment, from)
		if err != nil || sure >= from {
			return err
		}
		position = sure
	}
}
