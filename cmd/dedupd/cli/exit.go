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
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/retention"
)

// The exit codes, which scripts rely on. 128+n: a second signal n ended the program.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2 // bad configuration or usage
	exitServer = 3 // a server is missing or not as it must be
)

// usageError is a mistake on the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// exitError ends the program with a code. Without err it is silent: the output says
// everything.
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

// report prints an error and returns the exit code.
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

// flat puts an error on one line: pgx writes a line for each address that it tried,
// often two for the same.
func flat(err error) string {
	var lines []string
	for line := range strings.Lines(err.Error()) {
		if line = strings.TrimSpace(line); !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, " ")
}

// exitCode is the exit code for an error.
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
		network  *net.OpError
	)
	switch state := sqlstate.Of(err); {
	case errors.As(err, &exit):
		return exit.code
	case errors.As(err, &usage), errors.As(err, &problems), errors.As(err, &unusable), errors.As(err, &query):
		return exitUsage
	case errors.As(err, &server), errors.As(err, &l), errors.As(err, &encoding), errors.As(err, &missing), errors.As(err, &connect):
		return exitServer
	case sqlstate.Means(state, sqlstate.Setup):
		return exitServer
	case state != "":
		return exitFailed
	case errors.As(err, &network) && network.Op == "dial":
		return exitServer
	case errors.Is(err, context.DeadlineExceeded):
		return exitServer // it didn't answer in time
	}
	return exitFailed
}

func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
