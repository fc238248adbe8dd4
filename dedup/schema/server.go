package schema

import (
	"context"
	"fmt"
)

// Server describes the connected Postgres, and our role there.
type Server struct {
	Version string // such as 18.4
	Number  int    // such as 180004
	Role    string
	// Started tells servers apart: the moment of their start.
	Started string
	// Encoding is the database's. Only UTF8 is accepted.
	Encoding string
	// Fsync: if off, a crash of the machine loses what was committed.
	Fsync bool
	// FullPageWrites: if off, such a crash may leave half-written pages.
	FullPageWrites bool
	// SynchronousStandby: commits wait for a standby.
	SynchronousStandby bool
	// FreeConnections is how many more connections ordinary roles may open now, in all.
	// RoleLimit is how many the connected role may have; -1: any number.
	FreeConnections, RoleLimit int
}

// OldestServer is the first version of Postgres that dedupd works with.
const OldestServer = 140000

// WaitsForStandby is SQL for whether commits wait for a standby.
const WaitsForStandby = `current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') <> 'local'`

// Server asks the server to describe itself.
func (s *Schema) Server(ctx context.Context) (v Server, err error) {
	err = s.Pool.QueryRow(ctx, `
		SELECT split_part(current_setting('server_version'), ' ', 1), current_setting('server_version_num')::integer, current_user::text, pg_catalog.pg_postmaster_start_time()::text, current_setting('server_encoding'),
			current_setting('fsync')::boolean, current_setting('full_page_writes')::boolean,
			`+WaitsForStandby+`,
			current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
				- coalesce(current_setting('reserved_connections', true)::integer, 0) - (SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE backend_type = 'client backend')::integer,
			(SELECT rolconnlimit FROM pg_catalog.pg_roles WHERE rolname = current_user)`).
		Scan(&v.Version, &v.Number, &v.Role, &v.Started, &v.Encoding, &v.Fsync, &v.FullPageWrites, &v.SynchronousStandby, &v.FreeConnections, &v.RoleLimit)
	if err != nil {
		return v, fmt.Errorf("ask the server for its settings: %w", err)
	}
	return v, nil
}

// EncodingError says that the database isn't UTF8: it would store text as other text, or
// can't hold it. Its text says what to do.
type EncodingError struct{ Encoding string }

func (e *EncodingError) Error() string {
	return "the database's encoding is " + e.Encoding + ", in which the text of messages would be stored as other text, or not at all: dedupd needs UTF8. " +
		"An encoding can't be changed: " + EncodingCure
}

// EncodingCure says what to do about an EncodingError.
const EncodingCure = "create a database with TEMPLATE template0 ENCODING 'UTF8', and bring the tables there by pg_dump and psql"

func (s *Schema) checkEncoding(ctx context.Context) error {
	var encoding string
	if err := s.Pool.QueryRow(ctx, `SELECT pg_catalog.current_setting('server_encoding')`).Scan(&encoding); err != nil {
		return fmt.Errorf("ask for the database's encoding: %w", err)
	}
	if encoding != utf8 {
		return &EncodingError{encoding}
	}
	return nil
}

const utf8 = "UTF8"

// UTF8 reports whether the database can hold the text of messages.
func (v Server) UTF8() bool { return v.Encoding == utf8 }
