package dedup

import (
	"context"
	"fmt"
)

// Server is what the connected Postgres tells of itself and of our place there.
type Server struct {
	Version string // such as 18.4
	Number  int    // such as 180004
	Role    string
	// Fsync is off where a crash of the machine loses what was committed.
	Fsync bool
	// FullPageWrites is off where such a crash may leave half-written pages.
	FullPageWrites bool
	// SynchronousStandby tells that commits wait for a standby.
	SynchronousStandby bool
	// FreeConnections is how many more an ordinary role may open now, in all;
	// RoleLimit how many the connected role may have, -1: any number.
	FreeConnections, RoleLimit int
}

// OldestServer is the first version of Postgres that dedupd works with.
const OldestServer = 140000

// waitsForStandby is SQL that tells whether commits wait for a standby.
const waitsForStandby = `current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') <> 'local'`

// Server asks for it.
func (s *Store) Server(ctx context.Context) (v Server, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT split_part(current_setting('server_version'), ' ', 1), current_setting('server_version_num')::integer, current_user::text,
			current_setting('fsync')::boolean, current_setting('full_page_writes')::boolean,
			`+waitsForStandby+`,
			current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
				- coalesce(current_setting('reserved_connections', true)::integer, 0) - (SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE backend_type = 'client backend')::integer,
			(SELECT rolconnlimit FROM pg_catalog.pg_roles WHERE rolname = current_user)`).
		Scan(&v.Version, &v.Number, &v.Role, &v.Fsync, &v.FullPageWrites, &v.SynchronousStandby, &v.FreeConnections, &v.RoleLimit)
	if err != nil {
		return v, fmt.Errorf("ask the server for its settings: %w", err)
	}
	return v, nil
}
