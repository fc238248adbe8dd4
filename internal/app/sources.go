package app

import (
	"errors"
	"fmt"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/consumer/kafka"
	"github.com/dedupd/dedupd/consumer/nats"
	"github.com/dedupd/dedupd/internal/config"
)

func newSources(cfg *config.Config) ([]consumer.Source, error) {
	var all []consumer.Source
	for i := range cfg.Sources {
		s := &cfg.Sources[i]
		var source consumer.Source
		var err error
		switch {
		case s.Kafka != nil:
			source, err = newKafka(s.Name, s.Kafka, int64(cfg.Batch.MaxInflatedBytes))
		case s.NATS != nil:
			source, err = newNATS(s.Name, s.NATS)
		default:
			err = errors.New("has no kind")
		}
		if err != nil {
			return nil, fmt.Errorf("sources[%d]: %w", i, err)
		}
		all = append(all, source)
	}
	return all, nil
}

func newKafka(name string, k *config.Kafka, maxInflated int64) (consumer.Source, error) {
	tls, err := k.TLS.Client()
	if err != nil {
		return nil, fmt.Errorf("kafka.tls.%w", err)
	}
	return kafka.New(kafka.Config{
		Name: name, Brokers: k.Brokers, Topics: k.Topics, Group: k.Group,
		Start: k.Start, Isolation: k.Isolation, OnGroupReset: k.OnGroupReset, OnGap: k.OnGap, MaxInflatedBytes: maxInflated,
		TLS: tls, Authorities: k.TLS.Authorities,
		SASL: kafka.SASL{Mechanism: k.SASL.Mechanism, Username: k.SASL.Username, CurrentPassword: k.SASL.CurrentPassword},
	})
}

func newNATS(name string, n *config.NATS) (consumer.Source, error) {
	tls, err := n.TLS.Client()
	if err != nil {
		return nil, fmt.Errorf("nats.tls.%w", err)
	}
	return nats.New(nats.Config{
		Name: name, Servers: n.Servers, Stream: n.Stream, Subjects: n.Subjects, Durable: n.Durable,
		Start: n.Start, MaxAckPending: n.MaxAckPending, OnGap: n.OnGap,
		CredsFile: n.CredsFile, NkeySeedFile: n.NKeySeedFile, TLS: tls, Authorities: n.TLS.Authorities,
	}), nil
}
