// Command customsink is dedupd with one more kind of sink: cmd/dedupd/main.go with one
// more import. Run it like dedupd:
//
//	go run ./examples/customsink run -c examples/customsink/balance.yaml
package main

import (
	"os"

	"github.com/dedupd/dedupd/cmd/dedupd/cli"

	_ "github.com/dedupd/dedupd/examples/customsink/balance"
	_ "github.com/dedupd/dedupd/sinks/statement"
	_ "github.com/dedupd/dedupd/sinks/table"
)

func main() { os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr)) }
