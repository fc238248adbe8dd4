// Command peers runs what a team would take instead of dedupd, written as a
// careful user of each library would write it. Every peer moves a Kafka topic,
// or a stream of NATS, into Postgres until it gets SIGTERM, and makes the same promise: one row for
// each id, whatever is delivered again. The benchmark starts it as a process of
// its own; this file stands for no peer, it reads the command line.
//
// A message has its id, a UUID as text, in the header "id", and JSON as
// its value. The tables are the runner's to make:
//
//	CREATE TABLE claims (id uuid PRIMARY KEY);
//	CREATE TABLE rows (id uuid NOT NULL, payload jsonb NOT NULL);
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// options of the command line. Which flags there are depends on the peer.
type options struct {
	brokers, topic, group, postgres string

	members        int           // of the consumer group, all in this process
	commitInterval time.Duration // 0: a synchronous commit after each transaction
	batch          int           // messages at most
	linger         time.Duration // how long a batch waits for more, from its first message on
}

// peers by the name of their command. Each returns when the context ends, or
// with an error that no later try can mend.
var peers = map[string]func(context.Context, options, *pgxpool.Pool) error{
	"byhand":         byHand,
	"byhand-batched": byHandBatched,
	"watermill":      watermillRouter,
	"nats":           natsConsumer,
}

var errUsage = errors.New("usage: peers byhand|byhand-batched|watermill|nats -brokers HOST:PORT -topic T -group G -postgres URL [flags]; peers NAME -h lists them")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	asked := ctx.Err() != nil && errors.Is(err, context.Canceled)
	stop()
	switch {
	case err == nil, asked, errors.Is(err, flag.ErrHelp):
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	default:
		log.Fatal(err)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 || peers[args[0]] == nil {
		return errUsage
	}
	o, err := parse(args[0], args[1:])
	if err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(o.postgres)
	if err != nil {
		return err
	}
	// Watermill handles each partition at the same time, whatever its subscribers.
	config.MaxConns = int32(max(o.members, 8))
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	return peers[args[0]](ctx, o, pool)
}

func parse(peer string, args []string) (o options, err error) {
	f := flag.NewFlagSet("peers "+peer, flag.ContinueOnError)
	f.StringVar(&o.brokers, "brokers", "", "host:port, several separated by commas; for nats a URL")
	f.StringVar(&o.topic, "topic", "", "the topic, or stream; a new group begins at its start")
	f.StringVar(&o.group, "group", "", "the consumer group, or the durable consumer")
	f.StringVar(&o.postgres, "postgres", "", "the database's URL")
	members, interval := "readers", time.Duration(0) // the tutorial's
	switch peer {
	case "watermill":
		members = "subscribers"
	case "nats":
		members = "consumers"
	case "byhand-batched":
		interval = time.Second
		f.IntVar(&o.batch, "batch", 1000, "messages of a transaction, at most")
		f.DurationVar(&o.linger, "linger", 10*time.Millisecond, "how long a batch waits for more, from its first message on")
	}
	f.IntVar(&o.members, members, 1, "members of the group, all in this process")
	if peer != "watermill" && peer != "nats" {
		f.DurationVar(&o.commitInterval, "commit-interval", interval, "how often offsets are committed; 0: synchronously, after each transaction")
	}
	switch err := f.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return o, err
	case err != nil: // it has been told
		return o, errUsage
	}
	if f.NArg() > 0 || o.brokers == "" || o.topic == "" || o.group == "" || o.postgres == "" || o.members < 1 || (peer == "byhand-batched" && o.batch < 1) {
		return o, errUsage
	}
	return o, nil
}

func (o options) brokerList() []string { return strings.Split(o.brokers, ",") }
