package kafka

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/logonce"
	"github.com/dedupd/dedupd/internal/wait"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

const (
	// lagInterval is how old an answer of the broker may be before the lag is
	// asked for.
	lagInterval = 3 * time.Second
	// idleFetchBytes is what a lane asks for while it has nothing to read: what
	// is asked for counts against the byte budget, and most lanes wait most of
	// the time.
	idleFetchBytes = 64 << 10
	// maxFetchBytes is the most that may be asked for at once.
	maxFetchBytes = 64 << 20
	// lazyProgress is how long progress without messages (markers, aborted
	// records) waits for a message to go with, before it is written by itself.
	lazyProgress = time.Second
	// flushTimeout bounds the wait for such progress when the lane is let go:
	// losing it costs the next owner a few markers to read.
	flushTimeout = 250 * time.Millisecond
	// batchPause is the wait before a batch that is too large is looked at again:
	// finding that out takes a while.
	batchPause = 30 * time.Second
	// alarmAfter is how long a lane's fetches may fail before the source counts
	// as not ready.
	alarmAfter = 10 * time.Second
)

// fetcher reads one open lane and hands on what it finds.
type fetcher struct {
	*partitionReader
	open    *consumer.Lane
	mark    *mark
	taken   lane.Assignment
	decoder decoder

	position int64              // where to fetch next
	topicID  [16]byte           // zero: not known
	epochs   []lane.LeaderEpoch // of what was read, up to position
	offered  int64              // where what was offered ends; at most position
	done     atomic.Int64       // the position that is durable
	since    time.Time          // when offered fell behind position
	end      int64              // of what may be read; -1: not known
	want     int                // bytes to ask for
	needs    int64              // bytes in memory, beside want, that what stands at position comes to; 0: not known
	growth   float64            // bytes in memory per byte asked for, as last seen; at least 1
	size     float64            // bytes in memory of a message, as the last fetch had them; 0: it had none

	news  time.Time  // when a fetch last brought something
	quiet *quietLane // nil: the lane fetches for itself

	// answered is when a fetch last brought what can be read, in Unix nanoseconds.
	answered atomic.Int64

	failing time.Time // since when fetches fail; zero: they don't
	problem logonce.Problem
}

// read opens the lane and reads it until it is lost, or can't go on where it
// stands (which take then looks into), or the generation ends. On return
// nothing of it is in hand. An error is a reason to take it anew later.
func (l *partitionReader) read(s stand) error {
	ctx, stop := context.WithCancel(l.soft)
	defer stop()
	f := &fetcher{
		partitionReader: l,
		mark:            l.committer.add(l, &s.Assignment),
		taken:           s.Assignment,
		decoder:         decoder{lane: l.id, topic: l.topic, readCommitted: l.config.Isolation == ReadCommitted, limit: l.config.MaxInflatedBytes},
		position:        s.Next,
		topicID:         s.topicID,
		epochs:          lane.EpochsBelow(s.LeaderEpochs, s.Next),
		offered:         s.Next,
		end:             -1,
		want:            min(idleFetchBytes, l.config.FetchBytes),
		growth:          1,
	}
	f.done.Store(s.Next)
	f.open = l.in.Open(consumer.LaneOptions{
		Lane:      l.id,
		Epoch:     s.Epoch,
		Next:      s.Next,
		Committed: f.committed,
		Abandoned: f.abandoned,
	})
	// The database stands here, so may the broker's copy: it may have none yet,
	// or stand above a database that went back.
	l.committer.set(f.mark, s.Next)
	go func() {
		select {
		case <-f.open.Lost():
			stop()
		case <-ctx.Done():
		}
	}()
	l.well()
	f.answered.Store(time.Now().UnixNano())
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		f.watchLag(ctx)
	}()
	err := f.loop(ctx, s.skipTo)
	f.leave()
	stop()
	<-watched
	select {
	case <-f.open.Lost():
		// Its position no longer holds, whatever the broker has yet to be told.
		l.committer.drop(f.mark)
	default:
		f.flush()
	}
	f.open.Close(l.hard)
	if l.soft.Err() == nil {
		l.ready.set(l.id.Name, false)
		if err == nil {
			err = errLost
		}
	}
	return err
}

var errLost = errors.New("the lane was lost to another worker, or the database went back")

// loop fetches until ctx ends, or until fetching on makes no sense.
func (f *fetcher) loop(ctx context.Context, skipTo int64) error {
	if skipTo > f.position {
		f.in.Skipped(skipTo - f.position)
		f.advance(skipTo)
		f.epochs = nil // who wrote what stands before it isn't known
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
			wait.For(ctx, f.fail(err))
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
	memory, part := f.fetch(ctx)
	err := part.err
	if errors.Is(err, errNoRoom) {
		f.waitForRoom(memory)
		return nil
	}
	if err == nil && part.diverging != nil {
		err = &divergedError{f.position, *part.diverging}
	}
	if err != nil {
		memory.settle(0)
		if ctx.Err() != nil {
			return nil
		}
		f.open.SetLag(-1) // whatever it was, it may have grown
		return err
	}
	memory.answer(int64(len(part.records)))
	got, err := f.decoder.decode(part.fetched, f.position, memory)
	if errors.Is(err, errNoRoom) {
		f.waitForRoom(memory)
		return nil
	}
	if err != nil {
		memory.settle(0)
		return err
	}
	f.needs = 0
	f.answered.Store(time.Now().UnixNano())
	memory.settle(got.held)
	f.growth = max(float64(got.held)/float64(f.want), 0.9*f.growth, 1)
	f.size = float64(got.held) / float64(max(len(got.messages), 1))

	f.end = f.cluster.readable(part.fetched)
	// Before the lag is told, which may come to 0 by this answer.
	f.open.SetUndecided(part.highWatermark - f.end)
	f.advance(got.next)
	f.epochs = appendEpochs(f.epochs, got.epochs)
	f.handOver(ctx, got.messages, got.held)
	// Not the last stable offset: a transaction that is open behind it holds
	// messages that will come with the time at which they were written.
	if f.offered >= part.highWatermark {
		f.open.SetCaughtUp(part.sent)
	}
	f.plan()
	return nil
}

// waitForRoom has the next fetch wait for as much memory as this one needed. The answer
// isn't held while we wait, so it has to come again.
func (f *fetcher) waitForRoom(memory *grant) {
	f.needs = memory.wanted - int64(f.want)
	memory.settle(0)
}

// fetch asks for what stands at the position: by itself, or together with other lanes
// that have nothing to read either. Also with an error, what is held of the byte budget
// has to be settled.
func (f *fetcher) fetch(ctx context.Context) (*grant, polled) {
	memory := &grant{budget: f.in.Budget()}
	if f.quiet != nil && f.polls.covers(f.quiet) {
		select {
		case a := <-f.quiet.answers:
			if a.last {
				f.quiet = nil
			}
			// Nor is it known for which of them an answer has no room.
			if !errors.Is(a.err, errMoved) && !errors.Is(a.err, errNoRoom) {
				if a.last {
					f.news = time.Now()
				}
				memory.held = a.held
				return memory, a
			}
		case <-ctx.Done():
			return memory, polled{outcome: outcome{err: ctx.Err()}}
		}
	}
	if err := memory.budget.Acquire(ctx, int64(f.want)+f.needs); err != nil {
		return memory, polled{outcome: outcome{err: err}}
	}
	memory.held = int64(f.want) + f.needs
	want := wanted{
		topic: f.topic, id: f.topicID, partition: f.partition, position: f.position, epoch: lastEpoch(f.epochs, f.position), maxBytes: f.want,
	}
	a := polled{sent: time.Now()}
	var leader int32
	a.fetched, leader, a.err = f.cluster.fetch(ctx, &want, memory.room)
	switch {
	case f.polls.isNews(&want, a.outcome):
		f.leave()
		f.news = time.Now()
	case f.quiet == nil && time.Since(f.news) >= quietAfter:
		f.quiet = f.polls.join(want, leader)
	}
	return memory, a
}

// leave has nobody else fetch for the lane.
func (f *fetcher) leave() {
	if f.quiet != nil {
		f.polls.leave(f.quiet)
		f.quiet = nil
	}
}

// advance moves the position, and notes since when there is progress to tell.
func (f *fetcher) advance(next int64) {
	if f.offered == f.position && next > f.position {
		f.since = time.Now()
	}
	f.position = next
}

// plan chooses how much to ask for next: little while there is nothing to read,
// up to the configured size while there is more to come.
func (f *fetcher) plan() {
	f.want = min(idleFetchBytes, f.config.FetchBytes)
	if f.position < f.end {
		f.want = min(max(f.fitting(f.in.Share()), idleFetchBytes), f.config.FetchBytes)
	}
}

// fitting is how many bytes to ask for, to get about so much. Compressed data may
// be many times as large in memory; and what holds no messages, such as aborted
// transactions, holds up nobody.
func (f *fetcher) fitting(messages int, bytes int64) int {
	memory := float64(bytes)
	if f.size > 0 {
		memory = min(memory, float64(messages)*f.size)
	}
	return int(memory / f.growth)
}

// handOver offers what was fetched, in batches of the size that the worker
// wants. It is held bytes in memory, and of the byte budget. What can't be offered is
// forgotten, to be fetched again by whoever reads the lane next.
func (f *fetcher) handOver(ctx context.Context, messages []message.Message, held int64) {
	for len(messages) > 0 {
		n, bytes := portion(messages, f.in.MaxMessages(), f.in.MaxBytes())
		next := messages[n-1].Position.Offset + 1
		if n == len(messages) {
			// What the answer held beside messages stays in memory as long as the
			// last of them, and so does the answer as a whole.
			next, bytes = f.position, held
		}
		held -= bytes
		// The capacity ends with the batch: the worker may append to it.
		if f.offer(ctx, messages[:n:n], bytes, next, nil) != nil {
			f.in.Budget().Release(held)
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

// offer hands on a batch from where the last one ended to next. Its messages,
// which may be none, hold bytes of the budget.
func (f *fetcher) offer(ctx context.Context, messages []message.Message, bytes, next int64, token any) error {
	b := lane.Batch{
		Lane:           f.id,
		Ordered:        true,
		StreamID:       f.taken.StreamID,
		Epoch:          f.taken.Epoch,
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

// lag is how many positions stand between next and the end.
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
	for ctx.Err() == nil {
		wait.For(ctx, lagInterval)
		if ctx.Err() != nil || time.Since(time.Unix(0, f.answered.Load())) < lagInterval {
			continue
		}
		end, err := f.cluster.start(ctx, f.topic, f.partition, endOffset)
		if err != nil {
			f.open.SetLag(-1)
			continue
		}
		f.open.SetLag(max(end-f.done.Load(), 0))
	}
}

// flush hands on progress without messages before the lane is let go.
func (f *fetcher) flush() {
	if f.offered >= f.position {
		return
	}
	ctx, cancel := context.WithTimeout(f.hard, flushTimeout)
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

// flushed is the token of a batch whose end is waited for.
type flushed chan struct{}

func (f *fetcher) committed(next int64, tokens []any) {
	f.done.Store(next)
	f.committer.set(f.mark, next)
	f.abandoned(tokens)
}

func (f *fetcher) abandoned(tokens []any) {
	for _, t := range tokens {
		if done, ok := t.(flushed); ok {
			close(done)
		}
	}
}

// fail tells of a failed fetch, once until it changes, and returns how long to
// wait.
func (f *fetcher) fail(err error) time.Duration {
	if f.failing.IsZero() {
		f.failing = time.Now()
	}
	long := time.Since(f.failing) > alarmAfter
	if hold := (*lane.HoldError)(nil); errors.As(err, &hold) {
		return f.hold(err)
	}
	if (long || !isPassing(err)) && f.problem.IsNew(err) {
		f.log.Warn("fetch failed, trying again", "lane", f.id.Name, "position", f.position, "error", err)
	}
	if long && f.ready.set(f.id.Name, false) {
		f.log.Error("the lane can't be read", "lane", f.id.Name, "position", f.position, "error", err)
	}
	if isPassing(err) || !long {
		return 100*time.Millisecond + rand.N(400*time.Millisecond)
	}
	return retryPause + rand.N(retryPause)
}

// throttled notes that the broker makes us wait, which is nothing that fails: the lane
// is read, as fast as it may be. The log is told once.
func (f *fetcher) throttled(err *throttledError) {
	if !f.quota.Swap(true) {
		f.log.Warn("fetching more slowly", "lane", f.id.Name, "reason", err)
	}
	f.recovered()
}

// hold tells that a person has to do something about what stands at the position.
// The lane stays open: it is fenced once somebody has moved it.
func (f *fetcher) hold(err error) time.Duration {
	f.in.Hold(f.id, err)
	f.ready.set(f.id.Name, false)
	if f.problem.IsNew(err) {
		f.log.Error("lane held", "lane", f.id.Name, "position", f.position, "error", err)
	}
	return batchPause/2 + rand.N(batchPause/2)
}

func (f *fetcher) recovered() {
	if f.failing.IsZero() {
		return
	}
	f.in.Hold(f.id, nil)
	f.failing = time.Time{}
	f.ready.set(f.id.Name, true)
	if f.problem.End() {
		f.log.Info("fetching goes on", "lane", f.id.Name)
	}
}
