package dedup

import (
	"context"
	"fmt"
	"time"

	"github.com/dedupd/dedupd/dedup/generations"
)

// Status is what expiry depends on: the clocks and the generations of the scope.
type Status struct {
	// Now is the database's clock.
	Now time.Time
	// Stream is the stream clock, to which every lane has come; zero while a lane's clock
	// isn't known.
	Stream time.Time
	// Lane is the one furthest behind, which holds up expiry, as source:lane; empty if
	// the scope has no lanes. LaneTime is its clock; nil: not known. A clock that is
	// ahead of Now isn't believed.
	Lane     string
	LaneTime *time.Time
	// LanesAhead is how many lanes have a clock that is ahead of the database's.
	LanesAhead int
	// Generations are all of the scope's, oldest first.
	Generations []generations.Generation
}

// Status reads the scope's clocks and generations.
func (s *Store) Status(ctx context.Context) (status Status, err error) {
	var stream *time.Time
	// The stream clock is -infinity while a lane's isn't known.
	err = s.pool.QueryRow(ctx, `
		SELECT c.now, CASE WHEN pg_catalog.isfinite(c.stream) THEN c.stream END, coalesce(l.source || ':' || l.lane, ''), l.stream_time,
		       (SELECT count(*) FROM `+s.name("lanes")+` WHERE scope = $1 AND `+s.clockAhead()+`)
		FROM (SELECT `+s.name("clock")+`() AS now, `+s.name("stream_clock")+`($1) AS stream) c
		LEFT JOIN LATERAL (SELECT source, lane, stream_time FROM `+s.name("lanes")+` WHERE scope = $1
		                   ORDER BY `+s.laneClock()+` NULLS FIRST, source, lane LIMIT 1) l ON true`, s.scope).
		Scan(&status.Now, &stream, &status.Lane, &status.LaneTime, &status.LanesAhead)
	if err != nil {
		return Status{}, fmt.Errorf("read the clocks: %w", err)
	}
	if stream != nil {
		status.Stream = *stream
	}
	status.Generations, err = s.generations.List(ctx)
	return status, err
}
