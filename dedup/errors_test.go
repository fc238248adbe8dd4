package dedup

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/sinks"
)

func TestErrorsHaveOneMeaning(t *testing.T) {
	t.Parallel()
	states := map[reaction][]string{
		retry: {
			"08000", "08006", "40001", "40P01", "53100", "53300", "55P03", "55006", "57014", "57P01", "57P02", "57P03", "57P05",
			"25P03", "25P04", "25006", "58030",
		},
		fence:    {sqlstate.Fenced},
		reload:   {sqlstate.CatalogChanged},
		isolate:  {"21000", "22021", "22P02", "22P05", "22003", "23502", "23503", "23505", "23514", "54000", "54001"},
		doubt:    {"P0001", "P0004", "20000", "38000", "45000", "0A000", "3F000", "42501", "42601", "42602", "42704", "42883", "42P01", "44000"},
		internal: {"XX000"},
		// What nobody has thought of must hold: it is neither skipped nor retried in a
		// hurry.
		hold: {"28P01", "3D000", "42703", "42804", "25001", "XX001", "DD999", "99999", "P", ""},
	}
	ours := map[string]reaction{"42P01": reload}
	for want, codes := range states {
		for _, code := range codes {
			err := fmt.Errorf("write: %w", &sinkError{&pgconn.PgError{Code: code}})
			if got := react(err); got != want {
				t.Errorf("%s: reaction %d, want %d", code, got, want)
			}
			want := want
			if want == isolate || want == doubt {
				want = hold // no message is at fault for what dedupd's own statement met
			}
			if w, ok := ours[code]; ok {
				want = w
			}
			if got := react(&ownError{err}); got != want {
				t.Errorf("%s of our own: reaction %d, want %d", code, got, want)
			}
		}
	}
	for _, c := range []struct {
		err  error
		want reaction
	}{
		{context.DeadlineExceeded, retry},
		{context.Canceled, retry},
		{&net.OpError{Op: "read", Err: errors.New("connection reset by peer")}, retry},
		{fmt.Errorf("write failed: %w", net.ErrClosed), retry},
		{fmt.Errorf("%w: %w", errConnection, errors.New("conn closed")), retry},
		{&commitError{&pgconn.PgError{Code: "57P01", SeverityUnlocalized: "FATAL"}}, retry},
		{sinks.Permanent(errors.New("bad")), isolate},
		{&sinkError{sinks.PermanentAt(3, errors.New("bad"))}, isolate},
		{&lane.HoldError{Err: &pgconn.PgError{Code: "40001"}}, hold},
		{errors.New("out of ink"), hold},
	} {
		if got := react(c.err); got != c.want {
			t.Errorf("%v: reaction %d, want %d", c.err, got, c.want)
		}
	}
}

func TestWhatCountsAsAnAnswerToCommit(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want bool
	}{
		{fmt.Errorf("commit: %w", &pgconn.PgError{Severity: "FEHLER", SeverityUnlocalized: "ERROR", Code: "40P01"}), true},
		{&pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P01"}, false},
		{errors.New("unexpected EOF"), false},
		{context.DeadlineExceeded, false},
	} {
		if got := answer(c.err) != nil; got != c.want {
			t.Errorf("%v: an answer %v, want %v", c.err, got, c.want)
		}
	}
}

func FuzzReactToState(f *testing.F) {
	for _, code := range []string{"", "0", "40001", "DD001", "\xff\xff\xff\xff\xff"} {
		f.Add(code)
	}
	f.Fuzz(func(t *testing.T, code string) {
		if r := react(&pgconn.PgError{Code: code}); r < retry || r > hold {
			t.Fatalf("%q has the reaction %d", code, r)
		}
	})
}

func TestReasonsBecomeText(t *testing.T) {
	t.Parallel()
	if got := string(pipeline.CleanText("a\x00b\xffc")); got != "a␀b\uFFFDc" {
		t.Errorf("%q", got)
	}
}

// A policy that nobody knows must not pass for another.
func TestStartRefusesAnUnknownPolicy(t *testing.T) {
	p := &Processor{Missing: "guess", OnDuplicate: "twice", OnConflict: "both"}
	err := p.Start(t.Context())
	for _, want := range []string{
		`"guess" is not one of dead_letter, position, stop`, `"twice" is not one of drop, dead_letter, reply`, `"both" is not one of dead_letter, drop, stop`,
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
}
