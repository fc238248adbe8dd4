package kafka

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/message"
)

// groupGeneration serves our share of the group's partitions between two
// rebalances.
type groupGeneration struct {
	run        *run
	group      *group
	assignment *assignment

	readiness *readiness
	committer *committer
	shared    *sharedFetches
	topicIDs  sync.Map // by topic: the ids under which lanes were acquired

	// behindSince is when other members' lanes were first found to be behind; zero: never.
	behindSince time.Time

	// readCtx ends when the lanes are to be released: fetches run under it.
	readCtx context.Context
	// drainCtx ends when in-flight transactions are no longer waited for.
	drainCtx context.Context
}

func newGroupGeneration(r *run, g *group, mine *assignment) *groupGeneration {
	member := offsetSender{cluster: r.cluster, groupGeneration: mine.groupGeneration, member: mine.member}
	return &groupGeneration{
		run:        r,
		group:      g,
		assignment: mine,
		readiness:  newReadiness(r.session),
		committer:  newCommitter(member, r.session.CommitFailed, r.session.BrokerConfirmed, r.log),
	}
}

// serve reads the lanes until ctx (the program's) ends, the group rebalances, or a
// topic has other partitions. It returns once no batch is in flight and the broker
// knows what was committed.
func (g *groupGeneration) serve(ctx context.Context) {
	readCtx, release := context.WithCancel(ctx)
	defer release()
	drainCtx, cutOff := context.WithCancel(context.Background())
	defer cutOff()
	g.readCtx, g.drainCtx = readCtx, drainCtx
	g.shared = newSharedFetches(readCtx, g.run.cluster, g.run.session.Budget(), g.run.config.FetchBytes)

	g.run.session.Rebalanced()
	readers := g.readers()
	g.run.log.Info("lanes assigned", "group_generation", g.assignment.groupGeneration, "lanes", len(readers))
	for _, r := range readers {
		g.readiness.setLane(r.lane.Name, false)
	}
	g.reportTopics(g.group.seen)
	g.readiness.setServing(true)
	g.run.session.AskOthers(g.othersBehind)

	// We send heartbeats for as long as there may be something to commit.
	beating, quit := context.WithCancel(context.Background())
	var beats sync.WaitGroup
	beats.Go(func() { g.sendHeartbeats(beating, release) })
	go g.committer.loop()
	var reading sync.WaitGroup
	for _, r := range readers {
		reading.Go(r.read)
	}
	g.watchTopics(readCtx)
	release()

	g.readiness.setServing(false)
	g.run.session.AskOthers(nil)
	budget := g.run.config.drainBudget()
	if ctx.Err() != nil {
		budget = g.run.session.Drain() // we leave the group, so no session timeout counts
	}
	defer time.AfterFunc(budget, cutOff).Stop()
	reading.Wait()
	g.shared.polling.Wait()
	g.committer.stop()
	quit()
	beats.Wait()
	g.run.log.Debug("lanes released", "group_generation", g.assignment.groupGeneration)
}

// othersBehind reports whether other members have lanes that aren't read to their ends, and
// may be dead: the group gives us such a member's lanes after the session timeout. Whoever is
// a member for longer is alive, and works on them. One goroutine calls it.
func (g *groupGeneration) othersBehind(ctx context.Context) bool {
	c := g.run.config
	dead := c.SessionTimeout + 2*c.HeartbeatInterval // until we hear of it
	if !g.behindSince.IsZero() && time.Since(g.behindSince) > dead {
		return false
	}
	name := g.unfinished(ctx)
	if name != "" && g.behindSince.IsZero() {
		g.behindSince = time.Now()
		g.run.log.Info("caught up, but another member of the group isn't: waiting to see that it is alive", "lane", name, "for", dead)
	}
	return name != ""
}

// unfinished is a lane of another member in which the group isn't at the end, as far as can
// be known; empty: there is none.
func (g *groupGeneration) unfinished(ctx context.Context) string {
	for topic, n := range g.assignment.divided {
		for p := range n {
			if slices.Contains(g.assignment.partitions[topic], p) {
				continue
			}
			end, err := g.run.cluster.start(ctx, topic, p, endOffset)
			if err == nil && end == 0 {
				continue
			}
			if at, failed := g.run.cluster.committed(ctx, topic, p); err != nil || failed != nil || at.offset < end {
				return laneName(topic, p)
			}
		}
	}
	return ""
}

// sendHeartbeats sends the group signs of life until ctx ends, also while lanes
// drain. It releases the lanes when the group rebalances, no longer knows us, or
// hasn't heard from us for the session timeout.
func (g *groupGeneration) sendHeartbeats(ctx context.Context, release func()) {
	heard := time.Now()
	for wait.For(ctx, g.run.config.HeartbeatInterval) {
		sent := time.Now()
		err := g.group.heartbeat(ctx, g.assignment)
		switch {
		case err == nil:
			heard = sent
		case errors.Is(err, kafkago.RebalanceInProgress):
			heard = sent
			release()
		case ctx.Err() != nil:
			return
		case isExpelled(err):
			g.run.log.Debug("no longer a member of the group", "error", err)
			release()
			return
		default: // the coordinator moves, or can't be reached
			g.run.log.Debug("heartbeat failed", "error", err)
			if time.Since(heard) > g.run.config.SessionTimeout {
				release()
			}
		}
	}
}

// isExpelled: the group refuses our heartbeats for good.
func isExpelled(err error) bool {
	return errors.Is(err, kafkago.UnknownMemberId) || errors.Is(err, kafkago.IllegalGeneration) || errors.Is(err, kafkago.GroupAuthorizationFailed)
}

// readers are one for each of our partitions.
func (g *groupGeneration) readers() []*partitionReader {
	var all []*partitionReader
	for _, topic := range g.run.config.Topics {
		for _, p := range g.assignment.partitions[topic] {
			all = append(all, &partitionReader{
				run: g.run, gen: g,
				lane:  message.Lane{Source: g.run.config.Name, Name: laneName(topic, p)},
				topic: topic, partition: p,
			})
		}
	}
	return all
}

func laneName(topic string, partition int) string {
	return topic + "/" + strconv.Itoa(partition)
}
