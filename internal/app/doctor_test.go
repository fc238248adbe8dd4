package app

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// A pooler that is set up wrongly, or isn't configured, gets the same cure wherever it
// shows.
func TestCureOfAPooler(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"26000", "42P05", "08P01"} {
		err := fmt.Errorf("connect to the database: %w", &pgconn.PgError{Code: code})
		if cure := connectCure(err); !strings.Contains(cure, "database.pooler: pgbouncer_transaction") || sinkCure(err) != cure {
			t.Errorf("%s: %q, and for a sink %q", code, cure, sinkCure(err))
		}
	}
	if cure := sinkCure(&pgconn.PgError{Code: "42P01"}); !strings.Contains(cure, "create or grant") {
		t.Errorf("a missing table: %q", cure)
	}
}
