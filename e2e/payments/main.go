// Command payments runs the example of claims as a library, for the tests that kill it. It
// takes the database's URL and for how long a request waits, and prints its address.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/examples/claim"
)

func main() {
	if err := run(os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

func run(database, wait string) error {
	pool, err := pgxpool.New(context.Background(), database)
	if err != nil {
		return err
	}
	service, err := claim.Open(context.Background(), pool)
	if err != nil {
		return err
	}
	if service.Wait, err = time.ParseDuration(wait); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(listener.Addr())
	return (&http.Server{Handler: service, ReadHeaderTimeout: time.Second}).Serve(listener)
}
