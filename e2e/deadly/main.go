// Command deadly is dedupd with a sink that ends the process, or hangs, at
// messages that ask for it. The tests of what the workers make of that run it.
package main

import (
	"context"
	"encoding/json"
	"os"
	"strconv"
	"syscall"

	"github.com/dedupd/dedupd/cmd/dedupd/cli"
	"github.com/dedupd/dedupd/sinks"
)

func main() {
	sinks.Register("deadly", func(decode func(into any) error) (sinks.Sink, error) { return sink{}, decode(new(struct{})) })
	os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr))
}

type sink struct{}

// Write lands messages in public.orders; a message's "do" may ask for the end. Its result is
// its number.
func (sink) Write(ctx context.Context, tx sinks.Tx, batch *sinks.Batch) error {
	var ids, lanes, payloads []string
	var positions, numbers []int64
	for i := range batch.Messages() {
		m := &batch.Messages()[i]
		var order struct {
			N  int64  `json:"n"`
			Do string `json:"do"`
		}
		if err := json.Unmarshal(m.Value, &order); err != nil {
			return sinks.PermanentAt(i, err)
		}
		switch order.Do {
		case "exit":
			os.Exit(2)
		case "kill": // as a machine does that is out of memory
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		case "hang":
			select {}
		}
		ids, lanes, payloads = append(ids, m.ID), append(lanes, m.Position.Lane.Name), append(payloads, string(m.Value))
		batch.Result(i, strconv.AppendInt(nil, order.N, 10))
		positions, numbers = append(positions, m.Position.Offset), append(numbers, order.N)
	}
	_, err := tx.Exec(ctx, `INSERT INTO public.orders (id, lane, position, n, payload) SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::jsonb[])`,
		ids, lanes, positions, numbers, payloads)
	return err
}
