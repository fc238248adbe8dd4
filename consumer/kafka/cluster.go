package kafka

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/describeconfigs"
	"github.com/segmentio/kafka-go/protocol/listoffsets"
	"github.com/segmentio/kafka-go/protocol/metadata"
	"github.com/segmentio/kafka-go/protocol/offsetcommit"
	"github.com/segmentio/kafka-go/protocol/offsetfetch"
	"github.com/segmentio/kafka-go/sasl"
)

const (
	// requestTimeout bounds a request that the broker answers at once.
	requestTimeout = 5 * time.Second
	// fetchWait is how long the broker holds a fetch that finds nothing.
	fetchWait = time.Second
	// fetchTimeout bounds a fetch as a whole: a broker that is slow with data is
	// waited for, one that has vanished is not.
	fetchTimeout = fetchWait + 30*time.Second

	// The timestamps by which ListOffsets names the two ends of a partition.
	firstOffset = kafkago.FirstOffset
	endOffset   = kafkago.LastOffset

	// readCommitted is how requests ask for what is committed only.
	readCommitted int8 = 1

	// idleConnection is how long a connection is kept that nobody uses: lanes need many
	// for a moment when they are taken, or get messages all at once.
	idleConnection = 10 * time.Second
)

// cluster asks the brokers. All methods may be called concurrently.
type cluster struct {
	transport *kafkago.Transport
	conns     *connections
	addr      net.Addr
	group     string
	topics    []string
	isolation int8 // as in fetch and list requests: 0 or readCommitted
}

func newCluster(c *Config, mechanism sasl.Mechanism, conns *connections) *cluster {
	cl := &cluster{
		transport: &kafkago.Transport{
			Dial:        conns.dial,
			DialTimeout: dialTimeout,
			IdleTimeout: idleConnection,
			ClientID:    c.ClientID,
			SASL:        mechanism,
			// Leaders are looked up at random moments within this time only,
			// not when one of them says that it no longer leads.
			MetadataTTL:    2 * time.Second,
			MetadataTopics: c.Topics,
		},
		conns:  conns,
		addr:   bootstrap{c.Brokers},
		group:  c.Group,
		topics: c.Topics,
	}
	if c.Isolation == ReadCommitted {
		cl.isolation = readCommitted
	}
	return cl
}

func (c *cluster) close() { c.transport.CloseIdleConnections() }

// fetch asks a partition's leader, which it names, for records from a position on.
// maxBytes bounds what is stored at the broker; one record batch comes in any case, if
// there is room for it: the error is errNoRoom if not, and of the partition a
// kafkago.Error.
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

// errMoved says of a partition that another broker leads it, or none.
var errMoved = errors.New("the broker leads the partition no more")

// fetchAll asks one broker for records of partitions, those of a topic one after the
// other, and for maxBytes of all of them together. One that it no longer leads, as far
// as is known, is left out, and gets errMoved. The error is errNoRoom where there is
// none for the answer.
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

// askForRecords has a broker answer a fetch.
func (c *cluster) askForRecords(ctx context.Context, e *exchange) (*answer, error) {
	// Not a deadline: that would become the connection's, and end a good
	// connection with every poll that is given up.
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

// readable is where what may be read ends.
func (c *cluster) readable(f *fetched) int64 {
	if c.isolation == readCommitted {
		return f.lastStableOffset
	}
	return f.highWatermark
}

func (c *cluster) exchange(ctx context.Context, e *exchange) (*answer, error) {
	e.clientID, e.conns = c.transport.ClientID, c.conns
	res, err := c.transport.RoundTrip(ctx, c.addr, e)
	if err != nil {
		return nil, err
	}
	a, ok := res.(*answer)
	if !ok {
		return nil, errAnswer
	}
	return a, nil
}

// epochEnd is where the log of a partition's leader ends in an epoch, or in the last
// one before it that it has; epoch -1: the leader knows of none as late as that. ok
// is false where the broker is too old to tell.
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

// mayRead tells whether the login may read a topic: to see it takes another right. A
// fetch is what tells; of an empty partition it takes as long as a fetch waits.
func (c *cluster) mayRead(ctx context.Context, topic string) error {
	first, err := c.start(ctx, topic, 0, firstOffset)
	if err == nil {
		_, _, err = c.fetch(ctx, &wanted{topic: topic, position: first, epoch: -1, maxBytes: 1}, nil)
	}
	if errors.Is(err, kafkago.TopicAuthorizationFailed) {
		return fmt.Errorf("the broker doesn't let this login read the topic: grant Read on it (%w)", err)
	}
	return nil // of other errors the lanes tell
}

var (
	errAnswer       = errors.New("the broker's answer is not for what was asked")
	errFetchTimeout = fmt.Errorf("the broker has not answered a fetch for %s", fetchTimeout)
)

// span is a partition's first position and the one after its last, whether
// that is committed or not.
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
	res, err := c.transport.RoundTrip(ctx, c.addr, &listoffsets.Request{
		ReplicaID:      -1,
		IsolationLevel: isolation,
		Topics: []listoffsets.RequestTopic{{
			Topic: topic,
			Partitions: []listoffsets.RequestPartition{{
				Partition: int32(partition), CurrentLeaderEpoch: -1, Timestamp: at,
			}},
		}},
	})
	if err != nil {
		return 0, fmt.Errorf("list offsets: %w", err)
	}
	r, ok := res.(*listoffsets.Response)
	if !ok || len(r.Topics) != 1 || len(r.Topics[0].Partitions) != 1 {
		return 0, fmt.Errorf("list offsets: %w", errAnswer)
	}
	p := r.Topics[0].Partitions[0]
	if p.ErrorCode != 0 {
		return 0, fmt.Errorf("list offsets: %w", kafkago.Error(p.ErrorCode))
	}
	if p.Offset < 0 {
		return 0, fmt.Errorf("list offsets: %w", errAnswer)
	}
	return p.Offset, nil
}

// committed is what a group holds of a partition.
type committed struct {
	offset   int64  // -1: none
	metadata string // beside it
}

// committed is what the group holds of a partition now.
func (c *cluster) committed(ctx context.Context, topic string, partition int) (committed, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	res, err := c.transport.RoundTrip(ctx, c.addr, &offsetfetch.Request{
		GroupID: c.group,
		Topics:  []offsetfetch.RequestTopic{{Name: topic, PartitionIndexes: []int32{int32(partition)}}},
	})
	if err != nil {
		return committed{}, fmt.Errorf("fetch the group's offset: %w", err)
	}
	r, ok := res.(*offsetfetch.Response)
	if !ok {
		return committed{}, fmt.Errorf("fetch the group's offset: %w", errAnswer)
	}
	if r.ErrorCode != 0 {
		return committed{}, fmt.Errorf("fetch the group's offset: %w", kafkago.Error(r.ErrorCode))
	}
	if len(r.Topics) != 1 || len(r.Topics[0].Partitions) != 1 {
		return committed{}, fmt.Errorf("fetch the group's offset: %w", errAnswer)
	}
	p := r.Topics[0].Partitions[0]
	if p.ErrorCode != 0 {
		return committed{}, fmt.Errorf("fetch the group's offset: %w", kafkago.Error(p.ErrorCode))
	}
	return committed{max(p.CommittedOffset, -1), p.Metadata}, nil
}

// membership commits for a member of the group. kafka-go's own commit has no place
// for an origin.
type membership struct {
	cluster         *cluster
	groupGeneration int32
	member          string
}

// commit tells the group of positions, and calls taken for each that the broker has
// taken. The error is the first of those that it has not.
func (m membership) commit(all map[string]map[int]committed, taken func(topic string, partition int)) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	req := &offsetcommit.Request{GroupID: m.cluster.group, GenerationID: m.groupGeneration, MemberID: m.member, RetentionTimeMs: -1}
	for _, topic := range slices.Sorted(maps.Keys(all)) { // so that the error is the same each time
		t := offsetcommit.RequestTopic{Name: topic}
		for partition, c := range all[topic] {
			t.Partitions = append(t.Partitions, offsetcommit.RequestPartition{
				PartitionIndex: int32(partition), CommittedOffset: c.offset, CommittedLeaderEpoch: -1, CommittedMetadata: c.metadata,
			})
		}
		req.Topics = append(req.Topics, t)
	}
	res, err := m.cluster.transport.RoundTrip(ctx, m.cluster.addr, req)
	if err != nil {
		return fmt.Errorf("commit the group's offsets: %w", err)
	}
	r, ok := res.(*offsetcommit.Response)
	if !ok {
		return fmt.Errorf("commit the group's offsets: %w", errAnswer)
	}
	for _, t := range r.Topics {
		for _, p := range t.Partitions {
			switch {
			case p.ErrorCode == 0:
				taken(t.Name, int(p.PartitionIndex))
			case err == nil:
				err = fmt.Errorf("commit the group's offsets of topic %s: %w", t.Name, kafkago.Error(p.ErrorCode))
			}
		}
	}
	return err
}

// topics is what the broker tells of the configured topics.
type topics struct {
	partitions map[string]int   // of those that we can see
	problems   map[string]error // why we can't see the others
}

var errNoTopic = errors.New("the broker has no such topic: create it, or take it out of the source's topics")

// metadataVersion is the latest whose answers kafka-go reads. From 4 on, such a
// request can say that it is to create no topic.
const metadataVersion = 8

// lookUpTopics asks a broker about the topics: what the transport knows of them may be two
// seconds old. An error says that nothing is known.
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

// settings are what a topic is configured to, by name: those that were asked for
// and that the broker knows. The error says of which topics nothing is known.
func (c *cluster) settings(ctx context.Context, names ...string) (map[string]map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	// This tells why no broker can be reached. The library would send what follows
	// to a broker that it doesn't know, and speak of that.
	if _, err := c.transport.RoundTrip(ctx, c.addr, &metadata.Request{TopicNames: c.topics}); err != nil {
		return nil, fmt.Errorf("describe the topics: %w", err)
	}
	req := &describeconfigs.Request{}
	for _, t := range c.topics {
		req.Resources = append(req.Resources, describeconfigs.RequestResource{
			ResourceType: int8(kafkago.ResourceTypeTopic), ResourceName: t, ConfigNames: names,
		})
	}
	res, err := c.transport.RoundTrip(ctx, c.addr, req)
	if err != nil {
		return nil, fmt.Errorf("describe the topics: %w", err)
	}
	r, ok := res.(*describeconfigs.Response)
	if !ok {
		return nil, fmt.Errorf("describe the topics: %w", errAnswer)
	}
	known := make(map[string]map[string]string, len(r.Resources))
	var problems []error
	for _, t := range r.Resources {
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
