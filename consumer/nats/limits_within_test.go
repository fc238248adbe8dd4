package nats

import (
	"context"
	"log/slog"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
)

// limitedServer takes what is within its limits, and refuses the rest as a server
// does: one that came by its limits after the durable did.
type limitedServer struct {
	pulls, pending int
	asked          int
}

func (s *limitedServer) apply(_ context.Context, c jetstream.ConsumerConfig) (jetstream.Consumer, error) {
	s.asked++
	refuse := func(e *server.ApiError) error {
		return &jetstream.APIError{Code: e.Code, ErrorCode: jetstream.ErrorCode(e.ErrCode), Description: e.Description}
	}
	switch {
	case c.MaxRequestBatch > s.pulls:
		return nil, refuse(server.NewJSConsumerMaxRequestBatchExceededError(s.pulls))
	case c.MaxAckPending > s.pending:
		return nil, refuse(server.NewJSConsumerMaxPendingAckExcessError(s.pending))
	case c.MaxWaiting < 0:
		return nil, refuse(server.NewJSConsumerMaxWaitingNegativeError())
	}
	return nil, nil //nolint:nilnil // nobody looks at it
}

// A durable that is beyond what the server allows by now is asked for with less, and
// any other refusal is returned.
func TestADurableBeyondTheLimits(t *testing.T) {
	for name, c := range map[string]struct {
		config jetstream.ConsumerConfig
		asked  int
		fails  bool
	}{
		"within":     {config: jetstream.ConsumerConfig{MaxRequestBatch: 20, MaxAckPending: 100}, asked: 1},
		"pulls":      {config: jetstream.ConsumerConfig{MaxRequestBatch: 21, MaxAckPending: 100}, asked: 2},
		"pending":    {config: jetstream.ConsumerConfig{MaxRequestBatch: 20, MaxAckPending: 400}, asked: 3},
		"both":       {config: jetstream.ConsumerConfig{MaxRequestBatch: 40, MaxAckPending: 101}, asked: 3},
		"wrong, too": {config: jetstream.ConsumerConfig{MaxRequestBatch: 40, MaxWaiting: -1}, asked: 2, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := &limitedServer{pulls: 20, pending: 100}
			d := &durable{log: slog.New(slog.DiscardHandler)}
			if _, err := d.withinLimits(t.Context(), c.config, s.apply); (err != nil) != c.fails || s.asked != c.asked {
				t.Errorf("asked %d times, want %d: %v", s.asked, c.asked, err)
			}
		})
	}
}
