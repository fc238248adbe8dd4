package kafka

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/message"
)

// generation is our share of the group's partitions between two rebalances.
type generation struct {
	*group
	*assignment
	ready     *readiness
	committer *committer
	logs      *logs
	polls     *polls

	// soft ends when the lanes are to be let go: it is what fetches run under.
	soft context.Context
	// hard ends when batches in their transactions are no longer waited for.
	hard context.Context
}

func newGeneration(g *group, mine *assignment) *generation {
	return &generation{
		group:      g,
		assignment: mine,
		ready:      newReadiness(g.in),
		committer:  newCommitter(membership{g.cluster, mine.generation, mine.member}, g.in.CommitFailed, g.in.BrokerConfirmed, g.log),
		logs:       new(logs),
	}
}

// serve reads the lanes until ctx (the program ends) ends or the group rebalances
// or a topic has other partitions, and returns once nothing of them is in hand and the broker
// knows what was committed.
func (g *generation) serve(ctx context.Context) {
	soft, letGo := context.WithCancel(ctx)
	defer letGo()
	hard, cutOff := context.WithCancel(context.Background())
	defer cutOff()
	g.soft, g.hard = soft, hard
	g.polls = newPolls(soft, g.cluster, g.in.Budget(), g.config.FetchBytes)

	g.in.Rebalanced()
	lanes := g.lanes()
	g.log.Info("lanes assigned", "group_generation", g.generation, "lanes", len(lanes))
	for _, l := range lanes {
		g.ready.set(l.id.Name, false)
	}
	g.tell(g.seen)
	g.ready.begin()

	// We are heard of as long as there is something to commit.
	beating, quit := context.WithCancel(context.Background())
	var beats sync.WaitGroup
	beats.Go(func() { g.keepAlive(beating, letGo) })
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
	reading.Wait()
	g.polls.polling.Wait()
	g.committer.stop()
	quit()
	beats.Wait()
	g.log.Debug("lanes let go", "group_generation", g.generation)
}

// keepAlive tells the group that we live, until ctx ends, also while lanes drain.
// It lets the lanes go when the group wants to divide them anew, or knows us no
// more, or hasn't heard of us for as long as it waits.
func (g *generation) keepAlive(ctx context.Context, letGo func()) {
	heard := time.Now()
	for wait.For(ctx, g.config.HeartbeatInterval) {
		sent := time.Now()
		err := g.beat(ctx, g.assignment)
		switch {
		case err == nil:
			heard = sent
		case errors.Is(err, kafkago.RebalanceInProgress):
			heard = sent
			letGo()
		case ctx.Err() != nil:
			return
		case isExpelled(err):
			g.log.Debug("no member of the group any more", "error", err)
			letGo()
			return
		default: // the coordinator moves, or can't be reached
			g.log.Debug("no heartbeat", "error", err)
			if time.Since(heard) > g.config.SessionTimeout {
				letGo()
			}
		}
	}
}

// isExpelled tells whether a heartbeat was refused for good.
func isExpelled(err error) bool {
	return errors.Is(err, kafkago.UnknownMemberId) || errors.Is(err, kafkago.IllegalGeneration) || errors.Is(err, kafkago.GroupAuthorizationFailed)
}

func (g *generation) lanes() []*partitionReader {
	var all []*partitionReader
	for _, topic := range g.config.Topics {
		for _, p := range g.partitions[topic] {
			all = append(all, &partitionReader{
				generation: g,
				id:         message.Lane{Source: g.config.Name, Name: laneName(topic, p)},
				topic:      topic,
				partition:  p,
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
	in *consumer.Session

	mu      sync.Mutex
	running bool
	missing map[string]error
}

func newReadiness(in *consumer.Session) *readiness {
	return &readiness{in: in, missing: make(map[string]error)}
}

// set notes whether a lane is well, and tells whether that is new.
func (r *readiness) set(lane string, ok bool) (changed bool) {
	if ok {
		return r.note("lane "+lane, nil)
	}
	return r.note("lane "+lane, errNotOpen)
}

var errNotOpen = errors.New("it isn't read; the log says why")

// note keeps what is wrong with one thing, nil if nothing is, and tells whether
// that is new.
func (r *readiness) note(name string, problem error) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.missing[name]
	if problem != nil {
		r.missing[name] = problem
	} else {
		delete(r.missing, name)
	}
	r.tell()
	return (was == nil) != (problem == nil)
}

func (r *readiness) begin() { r.run(true) }
func (r *readiness) end()   { r.run(false) }

func (r *readiness) run(running bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running = running
	r.tell()
}

func (r *readiness) tell() {
	switch {
	case !r.running:
		r.in.Ready(false)
	case len(r.missing) == 0:
		r.in.Ready(true)
	default:
		// One of them is enough to say, always the same: topics come after lanes,
		// and are the reason for more.
		name := slices.Max(slices.Collect(maps.Keys(r.missing)))
		r.in.NotReady(fmt.Errorf("%s: %w", name, r.missing[name]))
	}
}
