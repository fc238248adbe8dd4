package dedup

import (
	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
)

// HearWarnings has a pool's connections keep what COMMIT warns of, which pgx throws
// away: Postgres answers a COMMIT whose wait for a synchronous standby somebody
// cancelled (pg_cancel_backend) as one that succeeded, and only warns. Call it before
// the pool is made. A handler of notices that is there is called as before.
func HearWarnings(c *pgx.ConnConfig) { pipeline.HearWarnings(c) }
