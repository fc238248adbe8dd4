package shape

import (
	"fmt"
	"math/rand/v2"
)

// Position lands each position once: what the producer sends twice lands twice.
var Position = &Shape{
	Name: "position", By: ByPosition, Ordered: true,
	Worker: `dedup: {strategy: position}
sink:
  table:
    name: public.effects
    columns: {id: "header:message-id", source: "const:main", lane: lane, position: position, n: json:n, payload: value}
`,
	Draw: func(rng *rand.Rand, partitions int) func() []Message {
		n := 0
		return func() []Message {
			return again(rng, &n, func(n int) Message {
				return Message{ID: fmt.Sprint("change-", n), Partition: n % partitions, Value: fmt.Appendf(nil, `{"n": %d}`, n)}
			})
		}
	},
}
