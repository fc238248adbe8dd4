package kafka

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/heartbeat"
	"github.com/segmentio/kafka-go/protocol/joingroup"
	"github.com/segmentio/kafka-go/protocol/leavegroup"
	"github.com/segmentio/kafka-go/protocol/syncgroup"
)

// The latest versions of group requests that are spoken. Brokers from Kafka 0.11 to 4
// know them or, of joining, an earlier one; kafka-go takes later ones apart otherwise
// than brokers put them together.
const (
	joinVersion      = 4 // a member is told its id before it waits (KIP-394)
	syncVersion      = 2
	heartbeatVersion = 0
	leaveVersion     = 0
)

// groupProtocol is what members of a consumer group call themselves.
const groupProtocol = "consumer"

// group is our membership in the consumer group: members join it, one of them, its
// leader, divides the partitions, and each learns its own by the answer to sync.
//
// kafka-go's ConsumerGroup isn't used (decision 0027): its leader asks for topics in
// a way that has brokers create them, gives nobody anything while one is missing,
// and fails as a whole where it may not see one.
type group struct {
	*run
	// member is the broker's name for us; empty: none yet.
	member string
}

// assignment is what a member is given in one generation of the group.
type assignment struct {
	generation int32
	member     string
	partitions map[string][]int // by topic
}

// balancers divide partitions, the best first. A group uses the first that all
// members know.
func balancers() []kafkago.GroupBalancer {
	return []kafkago.GroupBalancer{kafkago.RangeGroupBalancer{}, kafkago.RoundRobinGroupBalancer{}}
}

// join waits for the group's next generation, and returns our part of it. After an
// error it may be called again, by and by.
func (g *group) join(ctx context.Context) (*assignment, error) {
	// The group waits for members that still drain, then for its leader.
	ctx, cancel := context.WithTimeout(ctx, g.config.RebalanceTimeout+requestTimeout)
	defer cancel()
	joined, err := g.enter(ctx)
	if err != nil {
		return nil, err
	}
	req := &syncgroup.Request{GroupID: g.config.Group, GenerationID: joined.GenerationID, MemberID: joined.MemberID}
	if joined.LeaderID == joined.MemberID {
		if req.Assignments, err = g.lead(ctx, joined); err != nil {
			return nil, err
		}
	}
	res, err := coordinate[*syncgroup.Response](ctx, g.cluster, req, syncVersion)
	if err == nil {
		err = g.judge(res.ErrorCode)
	}
	if err != nil {
		return nil, fmt.Errorf("sync: %w", err)
	}
	partitions, counts, err := readAssignment(res.Assignments)
	if err != nil {
		return nil, fmt.Errorf("sync: %w", err)
	}
	if counts == nil { // the leader is another program
		counts = maps.Clone(g.seen.partitions)
	}
	g.assigned = counts
	return &assignment{generation: joined.GenerationID, member: joined.MemberID, partitions: partitions}, nil
}

// enter joins, and returns once all members have.
func (g *group) enter(ctx context.Context) (*joingroup.Response, error) {
	req := &joingroup.Request{
		GroupID:            g.config.Group,
		MemberID:           g.member,
		SessionTimeoutMS:   int32(g.config.SessionTimeout.Milliseconds()),
		RebalanceTimeoutMS: int32(g.config.RebalanceTimeout.Milliseconds()),
		ProtocolType:       groupProtocol,
	}
	metadata := writeSubscription(g.seen.partitions)
	g.leads = false
	for _, b := range balancers() {
		req.Protocols = append(req.Protocols, joingroup.RequestProtocol{Name: b.ProtocolName(), Metadata: metadata})
	}
	for {
		res, err := coordinate[*joingroup.Response](ctx, g.cluster, req, joinVersion)
		if err != nil {
			return nil, fmt.Errorf("join: %w", err)
		}
		if kafkago.Error(res.ErrorCode) == kafkago.MemberIDRequired && req.MemberID == "" && res.MemberID != "" {
			g.member, req.MemberID = res.MemberID, res.MemberID
			continue
		}
		if err := g.judge(res.ErrorCode); err != nil {
			return nil, fmt.Errorf("join: %w", err)
		}
		g.member = res.MemberID
		return res, nil
	}
}

// judge makes an error of the group's answer. A name that the broker has forgotten
// is of no use any more.
func (g *group) judge(code int16) error {
	if code == 0 {
		return nil
	}
	err := kafkago.Error(code)
	if errors.Is(err, kafkago.UnknownMemberId) {
		g.member = ""
	}
	return err
}

// lead divides the partitions among the members. Those of topics that we can't
// see, but others can, are as many as they say: we may lack a right that they have.
// Of a topic that we see we know best.
func (g *group) lead(ctx context.Context, joined *joingroup.Response) ([]syncgroup.RequestAssignment, error) {
	if now, err := g.cluster.look(ctx); err == nil { // else what we saw when we joined
		g.seen = now
	}
	told := make(map[string]int)
	var members []kafkago.GroupMember
	for _, m := range joined.Members {
		topics, counts, err := readSubscription(m.Metadata)
		if err != nil {
			return nil, fmt.Errorf("member %s: %w", m.MemberID, err)
		}
		for topic, n := range counts {
			told[topic] = max(told[topic], n)
		}
		members = append(members, kafkago.GroupMember{ID: m.MemberID, Topics: topics})
	}
	maps.Copy(told, g.seen.partitions)
	var partitions []kafkago.Partition
	for _, topic := range slices.Sorted(maps.Keys(told)) {
		for id := range told[topic] {
			partitions = append(partitions, kafkago.Partition{Topic: topic, ID: id})
		}
	}
	i := slices.IndexFunc(balancers(), func(b kafkago.GroupBalancer) bool { return b.ProtocolName() == joined.ProtocolName })
	if i < 0 {
		return nil, fmt.Errorf("the group divides its partitions by %q, which dedupd doesn't know: do others than dedupd consume in it?", joined.ProtocolName)
	}
	g.leads = true
	divided := balancers()[i].AssignGroups(members, partitions)
	var all []syncgroup.RequestAssignment
	for _, m := range members {
		all = append(all, syncgroup.RequestAssignment{MemberID: m.ID, Assignment: writeAssignment(divided[m.ID], told)})
	}
	return all, nil
}

// beat is one sign of life.
func (g *group) beat(ctx context.Context, a *assignment) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	res, err := coordinate[*heartbeat.Response](ctx, g.cluster, &heartbeat.Request{
		GroupID: g.config.Group, GenerationID: a.generation, MemberID: a.member,
	}, heartbeatVersion)
	if err != nil {
		return err
	}
	return g.judge(res.ErrorCode)
}

// leave takes us out of the group, which else would wait for the session timeout.
func (g *group) leave() error {
	if g.member == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), leaveTimeout)
	defer cancel()
	res, err := coordinate[*leavegroup.Response](ctx, g.cluster, &leavegroup.Request{
		GroupID: g.config.Group, MemberID: g.member,
	}, leaveVersion)
	if err == nil {
		err = g.judge(res.ErrorCode)
	}
	g.member = ""
	return err
}

// coordinate asks the group's coordinator.
func coordinate[R protocol.Message](ctx context.Context, c *cluster, req protocol.Message, latest int16) (R, error) {
	return ask[R](ctx, c, &toCoordinator{versioned{Message: req, clientID: c.transport.ClientID, latest: latest}, c.group})
}

// toCoordinator leads a request to a group's coordinator.
type toCoordinator struct {
	versioned
	group string
}

var _ protocol.GroupMessage = (*toCoordinator)(nil)

func (r *toCoordinator) Group() string { return r.group }

// versioned is one of kafka-go's requests in a version of our choice, and that
// goes to a broker in any case: some of them the transport would answer itself.
type versioned struct {
	protocol.Message
	clientID        string
	latest, version int16
}

var _ protocol.RawExchanger = (*versioned)(nil)

// Required is asked with the versions that were agreed on with the broker.
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

// reply keeps an answer from the transport, which takes one of kafka-go's for the
// answer to kafka-go's request.
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
		return res, errAnswer
	}
	return res, nil
}

// What members tell the leader, and the leader them, is Kafka's consumer protocol
// in its first version, so that its own tools can show it: numbers, and strings and
// lists with their length in front. What programs may add is in our case a number of
// partitions for each topic, in JSON: those that the member sees; those that the
// leader has divided.

func writeSubscription(seen map[string]int) []byte {
	b := []byte{0, 0} // version
	b = binary.BigEndian.AppendUint32(b, uint32(len(seen)))
	for _, topic := range slices.Sorted(maps.Keys(seen)) {
		b = appendString(b, topic)
	}
	return appendCounts(b, seen)
}

// readSubscription reads what a member wants to read, and what it sees of that.
// The member may be another program.
func readSubscription(b []byte) (topics []string, seen map[string]int, err error) {
	c := cursor{b: b}
	c.int16() // version: later ones have more behind
	for range c.length(2) {
		topics = append(topics, string(c.take(int(c.int16()))))
	}
	seen = readCounts(&c)
	if c.bad {
		return nil, nil, errors.New("it doesn't say what it consumes in the way of consumer groups")
	}
	return topics, seen, nil
}

func writeAssignment(topics map[string][]int, divided map[string]int) []byte {
	b := []byte{0, 0} // version
	b = binary.BigEndian.AppendUint32(b, uint32(len(topics)))
	for _, topic := range slices.Sorted(maps.Keys(topics)) {
		b = appendString(b, topic)
		b = binary.BigEndian.AppendUint32(b, uint32(len(topics[topic])))
		for _, p := range topics[topic] {
			b = binary.BigEndian.AppendUint32(b, uint32(p))
		}
	}
	return appendCounts(b, divided)
}

// readAssignment reads what we were given, and of how much; nil: the leader, which
// may be another program, doesn't say.
func readAssignment(b []byte) (topics map[string][]int, divided map[string]int, err error) {
	topics = make(map[string][]int)
	if len(b) == 0 {
		return topics, nil, nil
	}
	c := cursor{b: b}
	c.int16() // version
	for range c.length(2 + 4) {
		topic := string(c.take(int(c.int16())))
		for range c.length(4) {
			topics[topic] = append(topics[topic], int(c.int32()))
		}
	}
	divided = readCounts(&c)
	if c.bad {
		return nil, nil, errors.New("the group's leader has assigned partitions in a way that dedupd doesn't read")
	}
	return topics, divided, nil
}

func appendString(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint16(b, uint16(len(s))), s...)
}

func appendCounts(b []byte, counts map[string]int) []byte {
	text, _ := json.Marshal(counts) // of these it has no errors
	b = binary.BigEndian.AppendUint32(b, uint32(len(text)))
	return append(b, text...)
}

// maxPartitions is the most that another member is believed to see of a topic.
const maxPartitions = 1 << 17

// readCounts reads what appendCounts has written; nil: another program has written.
func readCounts(c *cursor) (counts map[string]int) {
	if json.Unmarshal(c.take(max(int(c.int32()), 0)), &counts) != nil { // -1: nothing
		return nil
	}
	maps.DeleteFunc(counts, func(_ string, n int) bool { return n < 1 || n > maxPartitions })
	return counts
}
