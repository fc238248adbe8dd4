package generations

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/internal/sqlstate"
)

// TestARotationsWaitsGrow never gets the lock: somebody holds it for longer than any
// worker would, and then the others aren't made to wait for long any more.
func TestARotationsWaitsGrow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var all Set
		expect := func(want string, got error) {
			t.Helper()
			var waits []string
			err := all.withRotationLock(t.Context(), func(wait string) error {
				waits = append(waits, wait)
				if got == nil || len(waits) < 3 {
					return &pgconn.PgError{Code: "55P03"}
				}
				return got
			})
			if strings.Join(waits, " ") != want || got != nil && !errors.Is(err, got) || got == nil && sqlstate.Of(err) != "55P03" {
				t.Errorf("waited %q, want %s; %v", waits, want, err)
			}
		}
		other := errors.New("another")
		const whole, short = "100ms 200ms 400ms 800ms 1600ms 3200ms 6400ms 12800ms 30000ms", "100ms 200ms 400ms 1000ms"
		expect("100ms 200ms 400ms", other)
		expect(whole, nil)
		expect(short, nil)
		expect("100ms 200ms 400ms", other)
		time.Sleep(10 * time.Minute)
		expect(whole, nil)
	})
}
