// Command dedupd lands Kafka and NATS JetStream topics in Postgres, each message
// id once.
package main

import (
	"os"

	"github.com/dedupd/dedupd/cmd/dedupd/cli"

	// The kinds of sinks this binary has. For one of your own, copy this file into
	// a module of yours, import the package that calls sinks.Register here, and
	// build: it is then a kind that the configuration knows.
	_ "github.com/dedupd/dedupd/sinks/statement"
	_ "github.com/dedupd/dedupd/sinks/table"
)

func main() { os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr)) }
