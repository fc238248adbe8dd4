package app

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/internal/config"
)

// The pools of a process's scopes share a server's connections and a role's limit.
func TestConnectionsAreSummed(t *testing.T) {
	t.Parallel()
	scope := func(server, role string, limit, free, most int, pooler config.Pooler) *doctor {
		return &doctor{
			cfg:     &config.Config{Database: config.Database{MaxConnections: most, Pooler: pooler}},
			reached: &schema.Server{Started: server, Role: role, RoleLimit: limit, FreeConnections: free},
		}
	}
	none, bouncer := config.PoolerNone, config.PoolerTransaction
	for name, c := range map[string]struct {
		scopes []*doctor
		want   []string
	}{
		"one fits":              {[]*doctor{scope("s", "a", 4, 4, 4, none)}, nil},
		"one doesn't":           {[]*doctor{scope("s", "a", -1, 3, 4, none)}, []string{"warning: room for 3 more connections, and one more worker wants up to 4"}},
		"two fit":               {[]*doctor{scope("s", "a", 8, 8, 4, none), scope("s", "a", 8, 8, 4, none)}, nil},
		"two are too many":      {[]*doctor{scope("s", "a", -1, 7, 4, none), scope("s", "b", -1, 7, 4, none)}, []string{"warning: room for 7 more connections, and one more worker wants up to 8"}},
		"two of one role":       {[]*doctor{scope("s", "a", 7, 90, 4, none), scope("s", "a", 7, 90, 4, none)}, []string{"error: role a may have 7 connections, and one worker wants up to 8"}},
		"two roles":             {[]*doctor{scope("s", "a", 7, 90, 4, none), scope("s", "b", 3, 90, 4, none)}, []string{"error: role b may have 3 connections, and one worker wants up to 4"}},
		"two servers":           {[]*doctor{scope("s", "a", 7, 7, 4, none), scope("u", "a", 7, 7, 4, none)}, nil},
		"one by a pooler":       {[]*doctor{scope("s", "a", -1, 7, 4, none), scope("s", "a", -1, 7, 4, bouncer)}, nil},
		"one isn't reached":     {[]*doctor{{cfg: &config.Config{}}, scope("s", "a", -1, 3, 4, none)}, []string{"warning: room for 3 more"}},
		"a role and its server": {[]*doctor{scope("s", "a", 7, 3, 4, none), scope("s", "b", -1, 3, 4, none), scope("s", "a", 7, 3, 4, none)}, []string{"error: role a may have 7", "warning: room for 3 more connections, and one more worker wants up to 12"}},
	} {
		got := connections(c.scopes)
		ok := len(got) == len(c.want)
		for i := 0; ok && i < len(got); i++ {
			level, text, _ := strings.Cut(c.want[i], ": ")
			ok = got[i].Level == level && strings.Contains(got[i].Text, text) && got[i].Cure != ""
		}
		if !ok {
			t.Errorf("%s: %+v, want %q", name, got, c.want)
		}
	}
}

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
