package nats

import (
	"context"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Rewind has a durable begin at a position, as a session does after a failover.
func Rewind(ctx context.Context, js jetstream.JetStream, stream jetstream.Stream, c Config, position int64) error {
	d := &durable{config: c, js: js, log: slog.New(slog.DiscardHandler), ackPendingFloor: 1000, filter: filter{subjects: c.Subjects}}
	return (&binding{stream: stream, durable: d}).rewind(ctx, position, "metadata")
}

// KeepFloorAfter has durables keep a floor that is so old.
func (s *Source) KeepFloorAfter(d time.Duration) { s.floorAge = d }

// Floor is what a durable keeps of its floor.
func Floor(info *jetstream.ConsumerInfo) uint64 { return floorOf(info).Floor }
