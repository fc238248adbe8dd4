package kafka

import (
	"context"
	"strconv"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/message"
)

// generation is our share of the group's partitions between two rebalances.
type generation struct {
	*run
	member    *kafkago.Generation
	ready     *readiness
	committer *committer
	logs      *logs

	// soft ends when the lanes are to be let go: it is what fetches run under.
	soft context.Context
	// hard ends when batches in their transactions are no longer waited for.
	hard context.Context
}

func newGeneration(r *run, member *kafkago.Generation) *generation {
	return &generation{
		run:       r,
		member:    member,
		ready:     newReadiness(r.in),
		committer: newCommitter(membership{r.cluster, member.ID, member.MemberID}, r.in.CommitFailed, r.log),
		logs:      new(logs),
	}
}

// serve reads the lanes until ctx (the program ends) or member (the group
// rebalances) ends or a topic has grown, and returns once nothing of them is in
// hand and the broker knows what was committed.
func (g *generation) serve(ctx, member context.Context) {
	if member.Err() != nil {
		return // it was over before it began
	}
	soft, letGo := context.WithCancel(ctx)
	defer letGo()
	defer context.AfterFunc(member, letGo)()
	hard, cutOff := context.WithCancel(context.Background())
	defer cutOff()
	g.soft, g.hard = soft, hard

	g.in.Rebalanced()
	lanes := g.lanes()
	g.log.Info("lanes assigned", "group_generation", g.member.ID, "lanes", len(lanes))
	for _, l := range lanes {
		g.ready.set(l.id.Name, false)
	}
	g.ready.begin()

	g.committer.start()
	var reading sync.WaitGroup
	for _, l := range lanes {
		reading.Go(l.run)
	}
	g.watchTopics(soft)
	letGo()

	g.ready.end()
	budget := g.config.drainBudget()
	if ctx.Err() != nil {
		budget = g.in.Drain() // we leave for good, so nobody's session counts
	}
	defer time.AfterFunc(budget, cutOff).Stop()
	g.committer.draining()
	reading.Wait()
	g.committer.stop()
	g.log.Debug("lanes let go", "group_generation", g.member.ID)
}

func (g *generation) lanes() []*lane {
	var all []*lane
	for _, topic := range g.config.Topics {
		for _, p := range g.member.Assignments[topic] {
			all = append(all, &lane{
				generation: g,
				id:         message.Lane{Source: g.config.Name, Name: laneName(topic, p.ID)},
				topic:      topic,
				partition:  p.ID,
			})
		}
	}
	return all
}

func laneName(topic string, partition int) string {
	return topic + "/" + strconv.Itoa(partition)
}

// readiness tells the worker whether everything of a generation is well: all
// lanes open, all topics there.
type readiness struct {
	in *consumer.Intake

	mu      sync.Mutex
	running bool
	missing map[string]struct{}
}

func newReadiness(in *consumer.Intake) *readiness {
	return &readiness{in: in, missing: make(map[string]struct{})}
}

// set notes whether one thing is well, and tells whether that is new.
func (r *readiness) set(name string, ok bool) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, was := r.missing[name]
	if was == !ok {
		return false
	}
	if ok {
		delete(r.missing, name)
	} else {
		r.missing[name] = struct{}{}
	}
	r.tell()
	return true
}

func (r *readiness) begin() { r.run(true) }
func (r *readiness) end()   { r.run(false) }

func (r *readiness) run(running bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running = running
	r.tell()
}

func (r *readiness) tell() { r.in.Ready(r.running && len(r.missing) == 0) }
