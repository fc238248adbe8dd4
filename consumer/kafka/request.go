package kafka

import (
	"context"
	"io"
	"math/rand/v2"

	"github.com/segmentio/kafka-go/protocol"
)

// coordinate asks the group's coordinator.
func coordinate[R protocol.Message](ctx context.Context, c *cluster, req protocol.Message, latest int16) (R, error) {
	return ask[R](ctx, c, &toCoordinator{versioned{Message: req, clientID: c.transport.ClientID, latest: latest}, c.group})
}

// toCoordinator sends a request to a group's coordinator.
type toCoordinator struct {
	versioned
	group string
}

var _ protocol.GroupMessage = (*toCoordinator)(nil)

func (r *toCoordinator) Group() string { return r.group }

// versioned is one of kafka-go's requests in a version of our choice. It always goes
// to a broker: the transport would answer some requests itself.
type versioned struct {
	protocol.Message
	clientID        string
	latest, version int16
}

var _ protocol.RawExchanger = (*versioned)(nil)

// Required gets the versions that were agreed on with the broker.
func (r *versioned) Required(versions map[protocol.ApiKey]int16) bool {
	r.version = min(versions[r.ApiKey()], r.latest)
	return true
}

// RawExchange sends the request and reads the answer. An error ends the
// connection.
func (r *versioned) RawExchange(conn io.ReadWriter) (protocol.Message, error) {
	res, err := protocol.RoundTrip(conn, r.version, rand.Int32(), r.clientID, r.Message)
	if err != nil {
		return nil, err
	}
	return reply{res}, nil
}

// reply hides an answer from the transport, which would take it for the answer to a
// request of its own.
type reply struct{ protocol.Message }

// ask sends a request and waits for the answer.
func ask[R protocol.Message](ctx context.Context, c *cluster, req protocol.Message) (res R, err error) {
	answer, err := c.transport.RoundTrip(ctx, c.addr, req)
	if err != nil {
		return res, err
	}
	if r, ok := answer.(reply); ok {
		answer = r.Message
	}
	res, ok := answer.(R)
	if !ok {
		err = errAnswer
	}
	return res, err
}
