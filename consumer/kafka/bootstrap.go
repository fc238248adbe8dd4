package kafka

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/segmentio/kafka-go/protocol"
)

// bootstrap is where kafka-go asks for the layout of the cluster. It would only ask the
// configured brokers, and give up all others when none of these is there. So we dial
// whichever broker is known.
type bootstrap struct{ brokers []string }

// bootstrapNetwork has dial connect to any broker.
const bootstrapNetwork = "any broker"

// Network and String make it an address of kafka-go's.
func (bootstrap) Network() string  { return bootstrapNetwork }
func (b bootstrap) String() string { return b.brokers[0] }

// learn remembers the brokers of the last layout. It is called for every request, so
// it makes no addresses: dialling does. kafka-go makes a new map for each layout, and
// never changes it.
func (c *connections) learn(layout protocol.Cluster) {
	if len(layout.Brokers) == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.learnt = layout.Brokers
}

// others are the addresses of the last layout that aren't configured ones.
func (c *connections) others() []string {
	c.mu.Lock()
	learnt := c.learnt
	c.mu.Unlock()
	var all []string
	for _, b := range learnt {
		address := net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port)))
		if !slices.Contains(c.brokers, address) {
			all = append(all, address)
		}
	}
	return all
}

// dialAny connects to a configured broker, or to one of the last layout. A broker that
// doesn't answer leaves time for the others.
func (c *connections) dialAny(ctx context.Context) (net.Conn, error) {
	learnt := c.others()
	var problem error
	for _, some := range [][]string{slices.Clone(c.brokers), learnt} {
		rand.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
		for _, address := range some {
			before := problem
			one, cancel := context.WithTimeout(ctx, max(dialTimeout/time.Duration(len(c.brokers)+len(learnt)), time.Second))
			conn, err := c.dial(one, "tcp", address)
			cancel()
			if err == nil {
				return conn, nil
			}
			if problem = err; before != nil {
				problem = fmt.Errorf("%w; %w", before, err)
			}
			if ctx.Err() != nil {
				return nil, problem
			}
		}
	}
	return nil, problem
}
