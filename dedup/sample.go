package dedup

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/generations"
)

// Sample is what the database says of a scope at one moment, for a display that
// refreshes.
type Sample struct {
	// Now is the database's clock, Stream the stream clock; nil while a lane's clock
	// isn't known. Database is the database's name.
	Now      time.Time
	Stream   *time.Time
	Database string
	// Connections are the other sessions with this session's application name, as far as
	// the role may see them: those of the scope's workers. Behind a pooler there may be
	// none.
	Connections int
	Lanes       []SampledLane
	Generations []generations.Generation
	// DeadLetters are those kept, counted up to one more than MostDeadLetters.
	DeadLetters int64
	// LatestDuplicate bounds the age, in seconds, of the oldest duplicate of today
	// and yesterday; nil: there was none; math.MaxInt64: no bound is known.
	LatestDuplicate *int64
}

// SampledLane is a lane with its books.
type SampledLane struct {
	Books
	Ordered bool
	// Acquisitions is how often an ordered lane was acquired without having moved since.
	Acquisitions int
	// Quarantined counts the lane's messages with recorded attempts: a worker may have
	// crashed at them.
	Quarantined int
}

// InQuarantine reports whether the lane is in quarantine: see docs/operations.md.
func (l *SampledLane) InQuarantine() bool {
	return l.Acquisitions > quarantineAcquisitions || l.Quarantined > 0
}

// MostDeadLetters is how far Sample counts dead letters.
const MostDeadLetters = 10_000

// sampleTimeout bounds each statement of a sample at the server.
const sampleTimeout = 2 * time.Second

// Sample reads what there is to watch of the scope, in two round trips, with the rights
// that any worker has. No statement takes longer than two seconds.
func (s *Store) Sample(ctx context.Context) (v Sample, err error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return Sample{}, fmt.Errorf("read the scope: %w", err)
	}
	// A transaction that failed is still open: the pool closes its connection.
	defer conn.Release()
	// Before anything else, and not in the batch: preparing its statements waits for
	// locks, too.
	if _, err := conn.Exec(ctx, fmt.Sprintf(`BEGIN READ ONLY; SET LOCAL statement_timeout = '%ds'; SET LOCAL lock_timeout = '200ms'`, int(sampleTimeout.Seconds()))); err != nil {
		return Sample{}, fmt.Errorf("read the scope: %w", err)
	}
	var batch pgx.Batch
	batch.Queue(`
		SELECT c.now, CASE WHEN pg_catalog.isfinite(c.stream) THEN c.stream END, pg_catalog.current_database(),
		       (SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE datname = pg_catalog.current_database() AND application_name = pg_catalog.current_setting('application_name') AND pid <> pg_catalog.pg_backend_pid()),
		       (SELECT count(*) FROM (SELECT FROM `+s.name("dead_letters")+` WHERE scope = $1 LIMIT $2) d),
		       (SELECT max(up_to_seconds) FROM `+s.name("duplicate_ages")+` WHERE scope = $1 AND duplicates > 0 AND day >= (c.now AT TIME ZONE 'UTC')::date - 1)
		FROM (SELECT `+s.name("clock")+`() AS now, `+s.name("stream_clock")+`($1) AS stream) c`, s.scope, MostDeadLetters+1).
		QueryRow(func(row pgx.Row) error {
			return row.Scan(&v.Now, &v.Stream, &v.Database, &v.Connections, &v.DeadLetters, &v.LatestDuplicate)
		})
	batch.Queue(`
		SELECT l.scope, l.source, l.lane, l.fetched, l.applied, l.written, l.already_present, l.stale, l.rejected, l.redelivered + l.resent + l.cross_source, l.redelivered, l.resent, l.cross_source,
		       l.conflicts, l.dead, l.filtered, l.next_position, l.lag, l.stream_time, l.owner, l.updated_at, l.ordered, l.acquisitions,
		       (SELECT count(*) FROM `+s.name("attempts")+` a WHERE a.lane = l.id)
		FROM `+s.name("lanes")+` l WHERE l.scope = $1 ORDER BY l.source, l.lane`, s.scope).
		Query(func(rows pgx.Rows) error {
			v.Lanes, err = pgx.CollectRows(rows, pgx.RowToStructByPos[SampledLane])
			return err
		})
	sql, args := s.generations.ListQuery()
	batch.Queue(sql, args...).Query(func(rows pgx.Rows) error {
		v.Generations, err = pgx.CollectRows(rows, generations.ScanGeneration)
		return err
	})
	batch.Queue(`COMMIT`)
	if err := conn.SendBatch(ctx, &batch).Close(); err != nil {
		return Sample{}, fmt.Errorf("read the scope: %w", err)
	}
	return v, nil
}
