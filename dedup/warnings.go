package dedup

import (
	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
)

// HearWarnings makes a pool's connections keep COMMIT's warnings, which pgx drops. If
// somebody cancels a COMMIT's wait for a synchronous standby (pg_cancel_backend),
// Postgres answers that the COMMIT succeeded, and only warns. Call it before the pool is
// made. A notice handler that is there is still called.
func HearWarnings(c *pgx.ConnConfig) { pipeline.HearWarnings(c) }
