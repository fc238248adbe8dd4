package kafka

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

const (
	// lagInterval is how old an answer of the broker may be before the lag is
	// asked for.
	lagInterval = 3 * time.Second
	// idleFetchBytes is what a lane asks for while it has nothing to read: what it
	// asks for counts against the byte budget, and most lanes wait most of the time.
	idleFetchBytes = 64 << 10
	// maxFetchBytes is the most that may be asked for at once.
	maxFetchBytes = 64 << 20
	// lazyProgress is how long progress without messages (markers, aborted
	// records) waits for a message to go with, before it is written by itself.
	lazyProgress = time.Second
	// flushTimeout bounds the wait for such progress when the lane is released:
	// losing it costs the next owner a few markers to read.
	flushTimeout = 250 * time.Millisecond
	// batchPause is the wait before another attempt at a batch that is too large:
	// finding that out takes a while.
	batchPause = 30 * time.Second
	// alarmAfter is how long a lane's fetches may fail before the source counts
	// as not ready.
	alarmAfter = 10 * time.Second
)

// fetcher reads one open lane and hands on what it finds.
type fetcher struct {
	run    *run
	gen    *groupGeneration
	reader *partitionReader

	open       *consumer.Lane
	mark       *mark
	assignment lane.Assignment
	decoder    decoder

	position int64              // where to fetch next
	topicID  [16]byte           // zero: not known
	epochs   []lane.LeaderEpoch // of what was read, up to position
	offered  int64              // where what was offered ends; at most position
	done     atomic.Int64       // the position that is durable
	since    time.Time          // when offered fell behind position
	end      int64              // of what may be read; -1: not known
	want     int                // bytes to ask for
	needs    int64              // bytes of memory, beyond want, for what is at position; 0: not known
	growth   float64            // bytes of memory per byte asked for, as last seen; at least 1
	size     float64            // bytes of memory per message of the last fetch; 0: it had none

	news  time.Time  // when a fetch last brought something
	quiet *quietLane // nil: the lane fetches for itself

	// answered is when a fetch last brought what can be read, in Unix nanoseconds.
	answered atomic.Int64

	failing time.Time // since when fetches fail; zero: they don't
	problem logonce.Problem
}

func newFetcher(r *partitionReader, a *acquired) *fetcher {
	config := r.run.config
	f := &fetcher{
		run: r.run, gen: r.gen, reader: r,
		mark:       r.gen.committer.add(r, &a.Assignment),
		assignment: a.Assignment,
		decoder:    decoder{lane: r.lane, topic: r.topic, readCommitted: config.Isolation == policy.ReadCommitted, limit: config.MaxInflatedBytes},
		position:   a.Next,
		topicID:    a.topicID,
		epochs:     lane.EpochsBelow(a.LeaderEpochs, a.Next),
		offered:    a.Next,
		end:        -1,
		want:       min(idleFetchBytes, config.FetchBytes),
		growth:     1,
	}
	f.done.Store(a.Next)
	return f
}

// readOpen opens the lane and reads it until it is lost, can't go on at its position
// (which acquiring it again looks into), or the group generation ends. On return no
// batch of it is in flight. An error is a reason to acquire it again later.
func (r *partitionReader) readOpen(a acquired) error {
	ctx, stop := context.WithCancel(r.gen.readCtx)
	defer stop()
	f := newFetcher(r, &a)
	f.open = r.run.session.Open(consumer.LaneOptions{
		Lane:      r.lane,
		Epoch:     a.Epoch,
		Next:      a.Next,
		Committed: f.committed,
		Abandoned: f.abandoned,
	})
	// This is the database's position, so it is committed: the broker may have no copy
	// yet, or one above a database that went back.
	r.gen.committer.set(f.mark, a.Next)
	go func() {
		select {
		case <-f.open.Lost():
			stop()
		case <-ctx.Done():
		}
	}()
	r.recovered()
	f.answered.Store(time.Now().UnixNano())
	var watching sync.WaitGroup
	watching.Go(func() { f.watchLag(ctx) })
	err := f.loop(ctx, a.skipTo)
	f.fetchAlone()
	stop()
	watching.Wait()
	select {
	case <-f.open.Lost():
		// Its position no longer holds, whatever is still to be committed.
		r.gen.committer.drop(f.mark)
	default:
		f.flush()
	}
	f.open.Close(r.gen.drainCtx)
	if r.gen.readCtx.Err() == nil {
		r.gen.readiness.setLane(r.lane.Name, false)
		if err == nil {
			err = errLost
		}
	}
	return err
}

var errLost = errors.New("the lane was lost to another worker, or the database went back")

// loop fetches until ctx ends, or until the lane has to be acquired again.
func (f *fetcher) loop(ctx context.Context, skipTo int64) error {
	if skipTo > f.position {
		f.run.session.Skipped(skipTo - f.position)
		f.advance(skipTo)
		f.epochs = nil // who wrote what is before it isn't known
		if f.offer(ctx, nil, 0, skipTo, nil) != nil {
			return nil
		}
	}
	for ctx.Err() == nil {
		err := f.step(ctx)
		var throttled *throttledError
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, kafkago.OffsetOutOfRange), errors.As(err, new(*divergedError)):
			return err
		case errors.As(err, &throttled):
			f.throttled(throttled)
			wait.For(ctx, throttled.wait)
		case err != nil:
			wait.For(ctx, f.failed(err))
		default:
			f.recovered()
		}
	}
	return nil
}

// step is one fetch and its hand-over.
func (f *fetcher) step(ctx context.Context) error {
	if f.offered < f.position && time.Since(f.since) >= lazyProgress {
		if f.offer(ctx, nil, 0, f.position, nil) != nil {
			return nil
		}
		f.open.SetLag(f.lag(f.offered))
	}
	memory, answer := f.fetch(ctx)
	err := answer.err
	if errors.Is(err, errNoRoom) {
		f.waitForRoom(memory)
		return nil
	}
	if err == nil && answer.fetched.diverging != nil {
		err = &divergedError{position: f.position, leader: *answer.fetched.diverging}
	}
	if err != nil {
		memory.settle(0)
		if ctx.Err() != nil {
			return nil
		}
		f.open.SetLag(-1) // whatever it was, it may have grown
		return err
	}
	memory.answer(int64(len(answer.fetched.records)))
	got, err := f.decoder.decode(answer.fetched, f.position, memory)
	if errors.Is(err, errNoRoom) {
		f.waitForRoom(memory)
		return nil
	}
	if err != nil {
		memory.settle(0)
		return err
	}
	memory.settle(got.held)
	f.learn(answer.fetched, &got)
	f.handOver(ctx, got.messages, got.held)
	// The last stable offset isn't enough: a transaction that is open behind it has
	// messages that will come with the time at which they were written.
	if f.offered >= answer.fetched.highWatermark {
		f.open.SetCaughtUp(answer.sent)
	}
	f.plan()
	return nil
}

// learn updates what is known about the lane from a fetch.
func (f *fetcher) learn(answer *fetched, got *records) {
	f.needs = 0
	f.answered.Store(time.Now().UnixNano())
	f.growth = max(float64(got.held)/float64(f.want), 0.9*f.growth, 1)
	f.size = float64(got.held) / float64(max(len(got.messages), 1))
	f.end = f.run.cluster.readable(answer)
	// Before the lag is set, which this answer may bring to 0.
	f.open.SetUndecided(answer.highWatermark - f.end)
	f.advance(got.next)
	f.epochs = appendEpochs(f.epochs, got.epochs)
}

// waitForRoom has the next fetch wait for as much memory as this one needed. The
// answer isn't kept while we wait: it has to come again.
func (f *fetcher) waitForRoom(memory *grant) {
	f.needs = memory.wanted - int64(f.want)
	memory.settle(0)
}

// fetch asks for what is at the position: alone, or together with other lanes that have
// nothing to read either. Also with an error, the grant has to be settled.
func (f *fetcher) fetch(ctx context.Context) (*grant, laneAnswer) {
	memory := &grant{budget: f.run.session.Budget()}
	if f.quiet != nil && f.gen.shared.covers(f.quiet) {
		select {
		case a := <-f.quiet.answers:
			if a.last {
				f.quiet = nil
			}
			// Which lane's records had no room isn't known.
			if !errors.Is(a.err, errMoved) && !errors.Is(a.err, errNoRoom) {
				if a.last {
					f.news = time.Now()
				}
				memory.held = a.held
				return memory, a
			}
		case <-ctx.Done():
			return memory, laneAnswer{outcome: outcome{err: ctx.Err()}}
		}
	}
	if err := memory.budget.Acquire(ctx, int64(f.want)+f.needs); err != nil {
		return memory, laneAnswer{outcome: outcome{err: err}}
	}
	memory.held = int64(f.want) + f.needs
	want := wanted{
		topic: f.reader.topic, id: f.topicID, partition: f.reader.partition,
		position: f.position, epoch: lastEpoch(f.epochs, f.position), maxBytes: f.want,
	}
	a := laneAnswer{sent: time.Now()}
	var leader int32
	a.fetched, leader, a.err = f.run.cluster.fetch(ctx, &want, memory.room)
	switch {
	case f.gen.shared.isNews(&want, a.outcome):
		f.fetchAlone()
		f.news = time.Now()
	case f.quiet == nil && time.Since(f.news) >= quietAfter:
		f.quiet = f.gen.shared.join(want, leader)
	}
	return memory, a
}

// fetchAlone takes the lane out of the shared fetches.
func (f *fetcher) fetchAlone() {
	if f.quiet != nil {
		f.gen.shared.leave(f.quiet)
		f.quiet = nil
	}
}

// advance moves the position, and records since when there is progress to offer.
func (f *fetcher) advance(next int64) {
	if f.offered == f.position && next > f.position {
		f.since = time.Now()
	}
	f.position = next
}

// plan chooses how much to ask for next: little while there is nothing to read,
// up to the configured size while there is more to come.
func (f *fetcher) plan() {
	f.want = min(idleFetchBytes, f.run.config.FetchBytes)
	if f.position < f.end {
		f.want = min(max(f.fitting(f.run.session.Share()), idleFetchBytes), f.run.config.FetchBytes)
	}
}

// fitting is how many bytes to ask for, to get about so much. Compressed data may be
// many times as large in memory. What holds no messages, such as aborted
// transactions, isn't limited by their number.
func (f *fetcher) fitting(messages int, bytes int64) int {
	memory := float64(bytes)
	if f.size > 0 {
		memory = min(memory, float64(messages)*f.size)
	}
	return int(memory / f.growth)
}

// handOver offers what was fetched, in batches of the size that the worker wants. It
// holds held bytes of memory and of the byte budget. What can't be offered is
// dropped: whoever reads the lane next fetches it again.
func (f *fetcher) handOver(ctx context.Context, messages []message.Message, held int64) {
	for len(messages) > 0 {
		n, bytes := portion(messages, f.run.session.MaxMessages(), f.run.session.MaxBytes())
		next := messages[n-1].Position.Offset + 1
		if n == len(messages) {
			// The last batch keeps the answer as a whole in memory, with what it held
			// beside messages.
			next, bytes = f.position, held
		}
		held -= bytes
		// The capacity ends with the batch: the worker may append to it.
		if f.offer(ctx, messages[:n:n], bytes, next, nil) != nil {
			f.run.session.Budget().Release(held)
			f.position = f.offered // else flush would move the lane over them
			return
		}
		messages = messages[n:]
	}
	f.open.SetLag(f.lag(f.offered))
}

// portion is how many messages make a batch, at least one, and their memory.
func portion(messages []message.Message, most int, maxBytes int64) (n int, bytes int64) {
	for n < len(messages) && (n == 0 || n < most) {
		size := footprint(messages[n : n+1])
		if n > 0 && bytes+size > maxBytes {
			break
		}
		bytes += size
		n++
	}
	return n, bytes
}

// offer hands on a batch from where the last one ended to next. Its messages, which
// may be none, hold bytes of the budget.
func (f *fetcher) offer(ctx context.Context, messages []message.Message, bytes, next int64, token any) error {
	b := lane.Batch{
		Lane:           f.reader.lane,
		Ordered:        true,
		StreamID:       f.assignment.StreamID,
		Epoch:          f.assignment.Epoch,
		From:           f.offered,
		Next:           next,
		Messages:       messages,
		Lag:            f.lag(next),
		BrokerPosition: f.mark.confirmed.Load(),
		LeaderEpochs:   lane.EpochsBelow(f.epochs, next),
		Bytes:          bytes,
	}
	if err := f.open.Offer(ctx, b, token); err != nil {
		return err
	}
	f.offered = next
	return nil
}

// lag is how many positions are between next and the end.
func (f *fetcher) lag(next int64) int64 {
	if f.end < 0 {
		return -1
	}
	return max(f.end-next, 0)
}

// watchLag measures the lag while no fetch does: the worker may take nothing for
// hours, or the broker not answer, and the last lag seen would then pass for the
// present one.
func (f *fetcher) watchLag(ctx context.Context) {
	for wait.For(ctx, lagInterval) {
		if ctx.Err() != nil || time.Since(time.Unix(0, f.answered.Load())) < lagInterval {
			continue
		}
		end, err := f.run.cluster.start(ctx, f.reader.topic, f.reader.partition, endOffset)
		if err != nil {
			f.open.SetLag(-1)
			continue
		}
		f.open.SetLag(max(end-f.done.Load(), 0))
	}
}

// flush hands on progress without messages before the lane is released.
func (f *fetcher) flush() {
	if f.offered >= f.position {
		return
	}
	ctx, cancel := context.WithTimeout(f.gen.drainCtx, flushTimeout)
	defer cancel()
	done := make(flushed)
	if f.offer(ctx, nil, 0, f.position, done) != nil {
		return
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// flushed is the token of a batch whose commit flush waits for.
type flushed chan struct{}

func (f *fetcher) committed(next int64, tokens []any) {
	f.done.Store(next)
	f.gen.committer.set(f.mark, next)
	f.abandoned(tokens)
}

func (f *fetcher) abandoned(tokens []any) {
	for _, t := range tokens {
		if done, ok := t.(flushed); ok {
			close(done)
		}
	}
}

// failed logs a failed fetch, once until the problem changes, and returns how long to
// wait.
func (f *fetcher) failed(err error) time.Duration {
	if f.failing.IsZero() {
		f.failing = time.Now()
	}
	long := time.Since(f.failing) > alarmAfter
	if hold := (*lane.HoldError)(nil); errors.As(err, &hold) {
		return f.hold(err)
	}
	name := f.reader.lane.Name
	if (long || !isPassing(err)) && f.problem.IsNew(err) {
		f.run.log.Warn("fetch failed, trying again", "lane", name, "position", f.position, "error", err)
	}
	if long && f.gen.readiness.setLane(name, false) {
		f.run.log.Error("the lane can't be read", "lane", name, "position", f.position, "error", err)
	}
	if isPassing(err) || !long {
		return 100*time.Millisecond + rand.N(400*time.Millisecond)
	}
	return retryPause + rand.N(retryPause)
}

// throttled logs, once, that the broker makes us wait. Nothing fails: the lane is
// read as fast as it may be.
func (f *fetcher) throttled(err *throttledError) {
	if !f.run.throttled.Swap(true) {
		f.run.log.Warn("fetching more slowly", "lane", f.reader.lane.Name, "reason", err)
	}
	f.recovered()
}

// hold reports that a person has to do something about what is at the position.
// The lane stays open: it is fenced once somebody has moved it.
func (f *fetcher) hold(err error) time.Duration {
	f.run.session.Hold(f.reader.lane, err)
	f.gen.readiness.setLane(f.reader.lane.Name, false)
	if f.problem.IsNew(err) {
		f.run.log.Error("lane held", "lane", f.reader.lane.Name, "position", f.position, "error", err)
	}
	return batchPause/2 + rand.N(batchPause/2)
}

func (f *fetcher) recovered() {
	if f.failing.IsZero() {
		return
	}
	f.run.session.Hold(f.reader.lane, nil)
	f.failing = time.Time{}
	f.gen.readiness.setLane(f.reader.lane.Name, true)
	if f.problem.End() {
		f.run.log.Info("fetching goes on", "lane", f.reader.lane.Name)
	}
}
