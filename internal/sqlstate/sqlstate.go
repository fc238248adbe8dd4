// Package sqlstate reads Postgres' error codes.
package sqlstate

import (
	"errors"

	"github.com/jackc/pgx/v5/pgconn"
)

// sqlstate is an error's code; empty where Postgres has not spoken.
func Of(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}
