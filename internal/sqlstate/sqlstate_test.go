package sqlstate

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestACodeOrItsClassHasTheMeaning(t *testing.T) {
	t.Parallel()
	for code, m := range meanings {
		if len(code) != 2 && (len(code) != 5 || m == meanings[Class(code)]) {
			t.Errorf("%s is no class, and no code that means anything else than its class", code)
		}
	}
	for _, c := range []struct {
		code string
		m    Meaning
		want bool
	}{
		{"22P02", Data, true},
		{"22P02", Data | Unclear, true},
		{"22P02", Transient, false},
		{LockNotAvailable, Transient, true},
		{"55000", Transient, false},
		{"", ^Meaning(0), false},
		{"2", ^Meaning(0), false},
	} {
		if got := Means(c.code, c.m); got != c.want {
			t.Errorf("%q means %b: %v, want %v", c.code, c.m, got, c.want)
		}
	}
	if code := Of(fmt.Errorf("write: %w", &pgconn.PgError{Code: Deadlock})); code != "40P01" {
		t.Error(code)
	}
}
