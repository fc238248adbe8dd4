// Command dedupd lands Kafka and NATS JetStream topics in Postgres, each message
// id once.
package main

import (
	"os"

	"github.com/dedupd/dedupd/cmd/dedupd/cli"

	// The kinds of sinks that this binary has. To add your own, copy this file into
	// your module, import your package here, which calls sinks.Register, and build:
	// the configuration then knows that kind.
	_ "github.com/dedupd/dedupd/sinks/statement"
	_ "github.com/dedupd/dedupd/sinks/table"
)

func main() { os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr)) }
