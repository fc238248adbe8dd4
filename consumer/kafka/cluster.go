package kafka

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/describeconfigs"
	"github.com/segmentio/kafka-go/protocol/listoffsets"
	"github.com/segmentio/kafka-go/protocol/metadata"
	"github.com/segmentio/kafka-go/protocol/offsetfetch"
	"github.com/segmentio/kafka-go/sasl"

	"github.com/dedupd/dedupd/internal/policy"
)

const (
	// requestTimeout bounds a request that a broker answers at once.
	requestTimeout = 5 * time.Second
	// fetchWait is how long the broker holds a fetch that finds nothing.
	fetchWait = time.Second
	// fetchTimeout bounds a whole fetch. We wait for a broker that is slow with data,
	// not for one that has vanished.
	fetchTimeout = fetchWait + 30*time.Second

	// The timestamps by which ListOffsets names the two ends of a partition.
	firstOffset = kafkago.FirstOffset
	endOffset   = kafkago.LastOffset

	// readCommitted is the isolation level of requests for committed messages only.
	readCommitted int8 = 1

	// idleConnection is how long an unused connection is kept: lanes need many for a
	// moment when they are acquired, or all get messages at once.
	idleConnection = 10 * time.Second
)

// cluster sends requests to the brokers. All methods may be called concurrently.
type cluster struct {
	transport *kafkago.Transport
	conns     *connections
	addr      net.Addr
	group     string
	topics    []string
	isolation int8 // as in fetch and list requests: 0 or readCommitted
}

func newCluster(c *Config, mechanism sasl.Mechanism) *cluster {
	conns := newConnections(c)
	cl := &cluster{
		transport: &kafkago.Transport{
			Dial:        conns.dial,
			DialTimeout: dialTimeout,
			IdleTimeout: idleConnection,
			ClientID:    c.ClientID,
			SASL:        mechanism,
			// The transport looks leaders up at random moments within this time, and
			// not when a broker answers that it no longer leads.
			MetadataTTL:    2 * time.Second,
			MetadataTopics: c.Topics,
		},
		conns:  conns,
		addr:   bootstrap{c.Brokers},
		group:  c.Group,
		topics: c.Topics,
	}
	if c.Isolation == policy.ReadCommitted {
		cl.isolation = readCommitted
	}
	return cl
}

// close closes all connections, idle or not.
func (c *cluster) close() {
	c.transport.CloseIdleConnections()
	c.conns.cut()
}

// fetch asks a partition's leader for records from a position on, and returns the
// leader. want.maxBytes bounds them as the broker stores them; one record batch comes
// in any case. The error is errNoRoom if there is no room for it, and a kafkago.Error
// if it is the partition's.
func (c *cluster) fetch(ctx context.Context, want *wanted, has room) (got *fetched, leader int32, err error) {
	all := []*wanted{want}
	a, err := c.askForRecords(ctx, &exchange{
		room: has, latest: latestFetch(all),
		broker: func(layout protocol.Cluster) (protocol.Broker, error) {
			b, err := leaderOf(layout, want.topic, want.partition)
			leader = b.ID
			return b, err
		},
		request: func(version int16) outgoing { return fetchRequest(version, c.isolation, want.maxBytes, all) },
	})
	if err != nil {
		return nil, leader, err
	}
	outcomes, err := a.fetched(all)
	if err != nil {
		return nil, leader, err
	}
	return outcomes[0].fetched, leader, outcomes[0].err
}

// errMoved says that another broker leads the partition, or none.
var errMoved = errors.New("the broker no longer leads the partition")

// fetchAll asks one broker for records of partitions, maxBytes in all. The partitions
// of a topic must be next to each other. A partition that the broker no longer leads,
// as far as is known, is left out and gets errMoved. The error is errNoRoom if there is
// no room for the answer.
func (c *cluster) fetchAll(ctx context.Context, broker int32, maxBytes int, all []*wanted, has room) ([]outcome, error) {
	outcomes := make([]outcome, len(all))
	var led []*wanted
	a, err := c.askForRecords(ctx, &exchange{
		room: has, latest: latestFetch(all),
		broker: func(layout protocol.Cluster) (protocol.Broker, error) {
			leader := protocol.Broker{ID: -1}
			for i, w := range all {
				if b, err := leaderOf(layout, w.topic, w.partition); err == nil && b.ID == broker {
					led, leader = append(led, w), b
				} else {
					outcomes[i].err = errMoved
				}
			}
			if len(led) == 0 {
				return leader, errMoved
			}
			return leader, nil
		},
		request: func(version int16) outgoing { return fetchRequest(version, c.isolation, maxBytes, led) },
	})
	if errors.Is(err, errMoved) {
		return outcomes, nil
	}
	if err != nil {
		return nil, err
	}
	answered, err := a.fetched(led)
	if err != nil {
		return nil, err
	}
	for i := range outcomes {
		if outcomes[i].err == nil {
			outcomes[i], answered = answered[0], answered[1:]
		}
	}
	return outcomes, nil
}

// askForRecords sends a fetch and reads the answer.
func (c *cluster) askForRecords(ctx context.Context, e *exchange) (*answer, error) {
	// A deadline would become the connection's, and end a good connection with every
	// poll that is given up.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer time.AfterFunc(fetchTimeout, func() { cancel(errFetchTimeout) }).Stop()

	has, forget := e.room.untilForgotten()
	defer forget()
	e.key, e.oldest, e.tags, e.room = protocol.Fetch, minFetchVersion, fetchTags, has
	a, err := c.exchange(ctx, e)
	if err != nil && errors.Is(context.Cause(ctx), errFetchTimeout) {
		err = errFetchTimeout
	}
	return a, err
}

// readable is the end of what may be read.
func (c *cluster) readable(f *fetched) int64 {
	if c.isolation == readCommitted {
		return f.lastStableOffset
	}
	return f.highWatermark
}

func (c *cluster) exchange(ctx context.Context, e *exchange) (*answer, error) {
	e.clientID, e.conns = c.transport.ClientID, c.conns
	return ask[*answer](ctx, c, e)
}

// epochEnd is where the leader's log ends in an epoch, or in the last epoch before it
// that the leader has; epoch -1: the leader doesn't know the epoch. ok is false if the
// broker is too old to answer.
func (c *cluster) epochEnd(ctx context.Context, topic string, partition int, epoch int32) (end epochEnd, ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	a, err := c.exchange(ctx, &exchange{
		key: protocol.OffsetForLeaderEpoch, oldest: minEpochVersion, latest: maxEpochVersion, tags: epochTags,
		broker:  func(layout protocol.Cluster) (protocol.Broker, error) { return leaderOf(layout, topic, partition) },
		request: func(version int16) outgoing { return epochRequest(version, topic, partition, epoch) },
	})
	if err == nil {
		end, ok, err = a.epochEnd(topic, partition)
	}
	if err != nil {
		err = fmt.Errorf("ask where leader epoch %d ends: %w", epoch, err)
	}
	return end, ok, err
}

// mayRead returns an error if the login may not read a topic: seeing it takes another
// right. Only a fetch shows that; of an empty partition it takes as long as a fetch
// waits.
func (c *cluster) mayRead(ctx context.Context, topic string) error {
	first, err := c.start(ctx, topic, 0, firstOffset)
	if err == nil {
		_, _, err = c.fetch(ctx, &wanted{topic: topic, position: first, epoch: -1, maxBytes: 1}, nil)
	}
	if errors.Is(err, kafkago.TopicAuthorizationFailed) {
		return fmt.Errorf("the broker doesn't let this login read the topic: grant Read on it (%w)", err)
	}
	return nil // the lanes report other errors
}

var (
	errAnswer       = errors.New("the broker's answer doesn't match the request")
	errFetchTimeout = fmt.Errorf("the broker has not answered a fetch for %s", fetchTimeout)
)

// span is a partition's first position and the one after its last, committed or not.
func (c *cluster) span(ctx context.Context, topic string, partition int) (first, end int64, err error) {
	if first, err = c.list(ctx, topic, partition, firstOffset, 0); err != nil {
		return 0, 0, err
	}
	end, err = c.list(ctx, topic, partition, endOffset, 0)
	return first, end, err
}

// start is a partition's first position, or the end of what may be read now.
func (c *cluster) start(ctx context.Context, topic string, partition int, at int64) (int64, error) {
	return c.list(ctx, topic, partition, at, c.isolation)
}

func (c *cluster) list(ctx context.Context, topic string, partition int, at int64, isolation int8) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	res, err := ask[*listoffsets.Response](ctx, c, &listoffsets.Request{
		ReplicaID:      -1,
		IsolationLevel: isolation,
		Topics: []listoffsets.RequestTopic{{
			Topic: topic,
			Partitions: []listoffsets.RequestPartition{{
				Partition: int32(partition), CurrentLeaderEpoch: -1, Timestamp: at,
			}},
		}},
	})
	if err == nil && (len(res.Topics) != 1 || len(res.Topics[0].Partitions) != 1) {
		err = errAnswer
	}
	if err != nil {
		return 0, fmt.Errorf("list offsets: %w", err)
	}
	p := res.Topics[0].Partitions[0]
	switch {
	case p.ErrorCode != 0:
		return 0, fmt.Errorf("list offsets: %w", kafkago.Error(p.ErrorCode))
	case p.Offset < 0:
		return 0, fmt.Errorf("list offsets: %w", errAnswer)
	}
	return p.Offset, nil
}

// committed is what a group has of a partition.
type committed struct {
	offset   int64  // -1: none
	metadata string // beside it
}

// committed is what the group has of a partition now.
func (c *cluster) committed(ctx context.Context, topic string, partition int) (committed, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	res, err := ask[*offsetfetch.Response](ctx, c, &offsetfetch.Request{
		GroupID: c.group,
		Topics:  []offsetfetch.RequestTopic{{Name: topic, PartitionIndexes: []int32{int32(partition)}}},
	})
	switch {
	case err != nil:
	case res.ErrorCode != 0:
		err = kafkago.Error(res.ErrorCode)
	case len(res.Topics) != 1 || len(res.Topics[0].Partitions) != 1:
		err = errAnswer
	}
	if err != nil {
		return committed{}, fmt.Errorf("fetch the group's offset: %w", err)
	}
	p := res.Topics[0].Partitions[0]
	if p.ErrorCode != 0 {
		return committed{}, fmt.Errorf("fetch the group's offset: %w", kafkago.Error(p.ErrorCode))
	}
	return committed{max(p.CommittedOffset, -1), p.Metadata}, nil
}

// topics is what a broker says about the configured topics.
type topics struct {
	partitions map[string]int   // how many each topic has that we can see
	problems   map[string]error // why we can't see the others
}

var errNoTopic = errors.New("the broker has no such topic: create it, or take it out of the source's topics")

// metadataVersion is the latest version whose answers kafka-go reads. From 4 on, a
// request can say that it must create no topic.
const metadataVersion = 8

// lookUpTopics asks a broker about the topics: what the transport knows may be two
// seconds old. With an error, nothing is known.
func (c *cluster) lookUpTopics(ctx context.Context) (topics, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	all := topics{partitions: make(map[string]int), problems: make(map[string]error)}
	res, err := ask[*metadata.Response](ctx, c, &versioned{
		Message: &metadata.Request{TopicNames: c.topics}, clientID: c.transport.ClientID, latest: metadataVersion,
	})
	if err != nil {
		return all, fmt.Errorf("look up the topics: %w", err)
	}
	for _, t := range res.Topics {
		// Partitions whose leader is missing for the moment count as well.
		if len(t.Partitions) > 0 {
			all.partitions[t.Name] = len(t.Partitions)
			continue
		}
		switch code := kafkago.Error(t.ErrorCode); code {
		case 0, kafkago.UnknownTopicOrPartition:
			all.problems[t.Name] = errNoTopic
		case kafkago.TopicAuthorizationFailed:
			all.problems[t.Name] = fmt.Errorf("the broker doesn't let this login see the topic: grant Read and Describe on it (%w)", code)
		default:
			all.problems[t.Name] = code
		}
	}
	return all, nil
}

// settings are the topics' settings, by topic and name: those of names that the broker
// knows. The error says which topics it knows nothing of.
func (c *cluster) settings(ctx context.Context, names ...string) (map[string]map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	// This finds out why no broker can be reached. The library would send the next
	// request to a broker that it doesn't know, and report that.
	if _, err := ask[*metadata.Response](ctx, c, &metadata.Request{TopicNames: c.topics}); err != nil {
		return nil, fmt.Errorf("describe the topics: %w", err)
	}
	req := &describeconfigs.Request{}
	for _, t := range c.topics {
		req.Resources = append(req.Resources, describeconfigs.RequestResource{
			ResourceType: int8(kafkago.ResourceTypeTopic), ResourceName: t, ConfigNames: names,
		})
	}
	res, err := ask[*describeconfigs.Response](ctx, c, req)
	if err != nil {
		return nil, fmt.Errorf("describe the topics: %w", err)
	}
	known := make(map[string]map[string]string, len(res.Resources))
	var problems []error
	for _, t := range res.Resources {
		if t.ErrorCode != 0 {
			problems = append(problems, fmt.Errorf("describe topic %s: %w", t.ResourceName, kafkago.Error(t.ErrorCode)))
			continue
		}
		known[t.ResourceName] = make(map[string]string)
		for _, e := range t.ConfigEntries {
			known[t.ResourceName][e.ConfigName] = e.ConfigValue
		}
	}
	return known, errors.Join(problems...)
}
