package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/internal/app"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/retention"
)

// The exit codes, a part of the contract with scripts. Beyond them, 128+n is an
// end by the second signal n.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2 // bad configuration or usage
	exitServer = 3 // a server is missing or not as it must be
)

// usageError is a mistake in the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// exitError ends the program with a code and, where err is nil, in silence: all
// has been said.
type exitError struct {
	code int
	err  error
}

func (e exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e exitError) Unwrap() error { return e.err }

// report prints an error, once, and tells the exit code.
func (c *command) report(err error) int {
	var exit exitError
	if errors.As(err, &exit) && exit.err == nil {
		return exit.code
	}
	var problems config.Problems
	if errors.As(err, &problems) {
		for _, p := range problems {
			fmt.Fprintln(c.stderr, p)
		}
		fmt.Fprintf(c.stderr, "dedupd: the configuration has %s\n", count(len(problems), "problem"))
		return exitUsage
	}
	fmt.Fprintln(c.stderr, "dedupd: "+flat(err))
	return exitCode(err)
}

// flat is an error in one line: pgx gives each address tried a line, and the
// same address often two.
func flat(err error) string {
	var lines []string
	for line := range strings.Lines(err.Error()) {
		if line = strings.TrimSpace(line); !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, " ")
}

// exitCode tells what kind of failure an error is.
func exitCode(err error) int {
	var (
		exit     exitError
		usage    usageError
		problems config.Problems
		unusable *app.ConfigError
		query    *dedup.QueryError
		server   *app.ServerError
		l        *schema.Error
		encoding *schema.EncodingError
		missing  *retention.MissingError
		connect  *pgconn.ConnectError
		postgres *pgconn.PgError
		network  *net.OpError
	)
	switch {
	case errors.As(err, &exit):
		return exit.code
	case errors.As(err, &usage), errors.As(err, &problems), errors.As(err, &unusable), errors.As(err, &query):
		return exitUsage
	case errors.As(err, &server), errors.As(err, &l), errors.As(err, &encoding), errors.As(err, &missing), errors.As(err, &connect):
		return exitServer
	case errors.As(err, &postgres):
		return postgresExit(postgres.Code)
	case errors.As(err, &network) && network.Op == "dial":
		return exitServer
	case errors.Is(err, context.DeadlineExceeded):
		return exitServer // whom we waited for didn't answer
	}
	return exitFailed
}

// postgresExit tells a database that isn't as it must be from a statement that
// failed.
func postgresExit(sqlstate string) int {
	switch {
	case strings.HasPrefix(sqlstate, "08"), // no connection
		strings.HasPrefix(sqlstate, "28"), // not let in
		strings.HasPrefix(sqlstate, "3D"), // no such database
		strings.HasPrefix(sqlstate, "3F"), // no such schema
		strings.HasPrefix(sqlstate, "53"), // no room for another connection
		strings.HasPrefix(sqlstate, "57P"),
		sqlstate == "42501",                      // a grant is missing
		sqlstate == "42P01", sqlstate == "42883", // no such table, no such function
		sqlstate == "42703", // no such column
		sqlstate == "25006": // a standby
		return exitServer
	}
	return exitFailed
}

func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
