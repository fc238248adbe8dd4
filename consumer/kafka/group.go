package kafka

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol/heartbeat"
	"github.com/segmentio/kafka-go/protocol/joingroup"
	"github.com/segmentio/kafka-go/protocol/leavegroup"
	"github.com/segmentio/kafka-go/protocol/syncgroup"
)

// The latest versions of group requests that are used. Brokers from Kafka 0.11 to 4
// know them or, of joining, an earlier one; kafka-go misreads what brokers answer to
// later ones.
const (
	joinVersion      = 4 // a member learns its id before it waits (KIP-394)
	syncVersion      = 2
	heartbeatVersion = 0
	leaveVersion     = 0
)

// groupProtocol is the protocol type of consumer groups.
const groupProtocol = "consumer"

// rebalanceTimeout is how long the group waits for a member that still drains.
const rebalanceTimeout = 30 * time.Second

// leaveTimeout bounds leaving the group once nothing is read any more. A member
// that is cut off instead keeps its partitions for the session timeout.
const leaveTimeout = 3 * time.Second

// group is our membership in the consumer group: members join it, one of them, its
// leader, divides the partitions, and each member learns its own by the answer to
// sync.
//
// kafka-go's ConsumerGroup isn't used (decision 0027): its leader asks for topics in
// a way that has brokers create them, assigns nothing while one is missing, and
// fails as a whole where it may not see one.
type group struct {
	config  *Config
	cluster *cluster

	// seen are the topics as they were when we last joined or divided.
	seen topics
	// member is the broker's name for us; empty: none yet.
	member string
}

// assignment is what a member gets in one group generation.
type assignment struct {
	groupGeneration int32
	member          string
	partitions      map[string][]int // ours, by topic
	divided         map[string]int   // how many of each topic were divided among all members
	leader          bool             // we divided them
}

// balancers divide partitions, the best first. A group uses the first that all
// members know.
func balancers() []kafkago.GroupBalancer {
	return []kafkago.GroupBalancer{kafkago.RangeGroupBalancer{}, kafkago.RoundRobinGroupBalancer{}}
}

// join waits for the next group generation, and returns our part of it. After an
// error it may be called again.
func (g *group) join(ctx context.Context) (*assignment, error) {
	// The group waits for members that still drain, then for its leader.
	ctx, cancel := context.WithTimeout(ctx, rebalanceTimeout+requestTimeout)
	defer cancel()
	joined, err := g.enter(ctx)
	if err != nil {
		return nil, err
	}
	mine := &assignment{groupGeneration: joined.GenerationID, member: joined.MemberID, leader: joined.LeaderID == joined.MemberID}
	req := &syncgroup.Request{GroupID: g.config.Group, GenerationID: joined.GenerationID, MemberID: joined.MemberID}
	if mine.leader {
		if req.Assignments, err = g.divide(ctx, joined); err != nil {
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
	if mine.partitions, mine.divided, err = readAssignment(res.Assignments); err != nil {
		return nil, fmt.Errorf("sync: %w", err)
	}
	if mine.divided == nil { // the leader is another program
		mine.divided = maps.Clone(g.seen.partitions)
	}
	return mine, nil
}

// enter joins, and returns once all members have joined.
func (g *group) enter(ctx context.Context) (*joingroup.Response, error) {
	req := &joingroup.Request{
		GroupID:            g.config.Group,
		MemberID:           g.member,
		SessionTimeoutMS:   int32(g.config.SessionTimeout.Milliseconds()),
		RebalanceTimeoutMS: int32(rebalanceTimeout.Milliseconds()),
		ProtocolType:       groupProtocol,
	}
	metadata := writeSubscription(g.seen.partitions)
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

// judge makes an error of the code that the group answered. It drops a member id
// that the broker has forgotten.
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

// divide divides the partitions among the members, as their leader. For a topic that
// we can't see but another member can, that member's count holds: it may have a right
// that we lack. For a topic that we see, ours holds.
func (g *group) divide(ctx context.Context, joined *joingroup.Response) ([]syncgroup.RequestAssignment, error) {
	if now, err := g.cluster.lookUpTopics(ctx); err == nil { // else what we saw when we joined
		g.seen = now
	}
	counts := make(map[string]int)
	var members []kafkago.GroupMember
	for _, m := range joined.Members {
		topics, seen, err := readSubscription(m.Metadata)
		if err != nil {
			return nil, fmt.Errorf("member %s: %w", m.MemberID, err)
		}
		for topic, n := range seen {
			counts[topic] = max(counts[topic], n)
		}
		members = append(members, kafkago.GroupMember{ID: m.MemberID, Topics: topics})
	}
	maps.Copy(counts, g.seen.partitions)
	var partitions []kafkago.Partition
	for _, topic := range slices.Sorted(maps.Keys(counts)) {
		for id := range counts[topic] {
			partitions = append(partitions, kafkago.Partition{Topic: topic, ID: id})
		}
	}
	i := slices.IndexFunc(balancers(), func(b kafkago.GroupBalancer) bool { return b.ProtocolName() == joined.ProtocolName })
	if i < 0 {
		return nil, fmt.Errorf("the group divides its partitions by %q, which dedupd doesn't know: does another program consume in it?", joined.ProtocolName)
	}
	divided := balancers()[i].AssignGroups(members, partitions)
	var all []syncgroup.RequestAssignment
	for _, m := range members {
		all = append(all, syncgroup.RequestAssignment{MemberID: m.ID, Assignment: writeAssignment(divided[m.ID], counts)})
	}
	return all, nil
}

// heartbeat sends one sign of life.
func (g *group) heartbeat(ctx context.Context, a *assignment) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	res, err := coordinate[*heartbeat.Response](ctx, g.cluster, &heartbeat.Request{
		GroupID: g.config.Group, GenerationID: a.groupGeneration, MemberID: a.member,
	}, heartbeatVersion)
	if err != nil {
		return err
	}
	return g.judge(res.ErrorCode)
}

// leave takes us out of the group, which otherwise waits for the session timeout.
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
