package nats

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/wait"
)

// durable finds the stream and its consumer, and makes the consumer as it must be.
type durable struct {
	config Config
	js     jetstream.JetStream
	log    *slog.Logger
	// ackPendingFloor is the least MaxAckPending that doesn't throttle us.
	ackPendingFloor int
	// allowed is how many pending acks the server accepted after it refused more; 0: it
	// refused none.
	allowed int

	// What was last seen of the consumer: where it begins again if somebody deletes it
	// while we run. It counts only in the instance of the database in which it was seen:
	// another one may lack what is below.
	known    bool
	logID    string
	ackFloor uint64
	instance string
	created  time.Time // of the consumer that was read last

	filter filter // what the durable is to deliver

	floorAge time.Duration // zero: the constant, but for tests
}

// binding is a consumer that is ready to be read. Its consumer is nil if there is none:
// then the database decides where it begins.
type binding struct {
	consumer jetstream.Consumer
	info     *jetstream.ConsumerInfo
	logID    string
	durable  *durable
	stream   jetstream.Stream
	// consumed: the stream deletes what is acknowledged.
	consumed bool
	// skips is what somebody changed of the consumer so that it passed messages over;
	// empty: nothing. It has to begin again at the database's position, or with
	// everything that a WorkQueue has left.
	skips string
	// read is for how long it was read.
	read   time.Duration
	floors floors
}

// ackPendingFloor leaves room for several workers of this size: nobody sees this limit
// throttle, for the server just stops delivering.
func ackPendingFloor(in *consumer.Session) int {
	return max(100_000, 8*(2*in.Writers()+1)*in.MaxMessages())
}

// requestTimeout bounds one request to the JetStream API.
const requestTimeout = 5 * time.Second

func (d *durable) bind(ctx context.Context) (*binding, error) {
	ctx, cancel := context.WithTimeout(ctx, 4*requestTimeout)
	defer cancel()
	stream, err := d.js.Stream(ctx, d.config.Stream)
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", d.config.Stream, err)
	}
	info := stream.CachedInfo()
	logID := logIDOf(info)
	if logID != d.logID {
		if d.logID != "" {
			d.log.Warn("the stream was created anew: reading it from its start", "stream", d.config.Stream)
		}
		d.known = d.logID != "" // namely that none of it is acknowledged
		d.logID, d.ackFloor = logID, 0
	}
	if info.Config.Retention == jetstream.WorkQueuePolicy && d.config.Start == policy.QueueLatest {
		return nil, &configError{fmt.Sprintf("stream %s has WorkQueue retention, which can't be read from %s; set start: %s", d.config.Stream, policy.QueueLatest, policy.QueueEarliest)}
	}
	b := &binding{logID: logID, durable: d, stream: stream, consumed: info.Config.Retention != jetstream.LimitsPolicy}
	b.floors.after = cmp.Or(d.floorAge, floorAge)
	found, err := stream.Consumer(ctx, d.config.Durable)
	switch {
	case errors.Is(err, jetstream.ErrConsumerNotFound) && !b.consumed:
		// The lane may have come far, with this worker or before it. And another worker
		// may be rewinding it at this moment.
		return b, nil
	case errors.Is(err, jetstream.ErrConsumerNotFound):
		position := int64(-1)
		if d.known && info.Config.Retention != jetstream.WorkQueuePolicy {
			position = int64(d.ackFloor) + 1
		}
		found, err = d.withinLimits(ctx, d.fresh(&info.Config, position), stream.CreateConsumer)
	case errors.Is(err, jetstream.ErrNotPullConsumer):
		return nil, &configError{fmt.Sprintf("durable %s is a push consumer; name another durable", d.config.Durable)}
	case err == nil:
		c := &found.CachedInfo().Config
		d.filter.follow(c, d.log)
		// With Interest retention the messages would be deleted with the durable.
		remade := info.Config.Retention != jetstream.InterestPolicy
		switch {
		case remade && refiltered(c):
			b.skips = "filter"
		case remade && d.filter.displaced(c):
			b.skips = "filter"
			d.filter.set++ // so that the other follows: it may have started when we did, with our number
		case remade && limited(c):
			b.skips = "limit of deliveries"
		default:
			found, err = d.amend(ctx, stream, found)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("durable %s: %w", d.config.Durable, err)
	}
	b.consumer, b.info = found, found.CachedInfo()
	return b, nil
}

// logIDOf tells streams of one name apart.
func logIDOf(info *jetstream.StreamInfo) string {
	return info.Created.UTC().Format(time.RFC3339Nano)
}

// rewind has the server deliver everything again from a position on. What was
// acknowledged for the lost database isn't any more; what this one has is a duplicate.
// An older acknowledgement that is still on its way could pass for one of the new
// consumer's: none waits for a connection (ReconnectBufSize), and the others have had
// the time of a failover to arrive.
func (b *binding) rewind(ctx context.Context, position int64, offsetMetadata string) error {
	d := b.durable
	if b.consumed {
		d.log.Warn("the stream has deleted what was acknowledged: what the database has lost of it can't be read again, as --accept-loss-on-failover accepts", "stream", d.config.Stream)
		return b.saveMetadata(ctx, offsetMetadata)
	}
	return b.remake(ctx, position, offsetMetadata)
}

// remake deletes the consumer and creates it anew, from a position on; -1: where start
// says.
func (b *binding) remake(ctx context.Context, position int64, offsetMetadata string) error {
	d := b.durable
	ctx, cancel := context.WithTimeout(ctx, 4*requestTimeout)
	defer cancel()
	for {
		if err := b.stream.DeleteConsumer(ctx, d.config.Durable); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
			return err
		}
		err := b.create(ctx, position, offsetMetadata)
		var fatal *configError
		if err == nil || errors.As(err, &fatal) {
			return err
		}
		// Another worker does the same. Its durable may begin elsewhere; and where two
		// delete and create one at the same moment, the server may give the new one the
		// old one's state.
		d.log.Debug("the durable consumer is not as it was asked for", "error", err)
		if !wait.For(ctx, time.Duration(50+rand.IntN(200))*time.Millisecond) {
			return err
		}
	}
}

// create creates a consumer that begins at a position; -1: where start says.
func (b *binding) create(ctx context.Context, position int64, offsetMetadata string) error {
	d := b.durable
	if position > 0 {
		d.seen(uint64(position) - 1)
		d.ackFloor = uint64(position) - 1
	}
	config := d.fresh(&b.stream.CachedInfo().Config, position)
	config.Metadata[offsetMetadataKey] = offsetMetadata
	made, err := d.withinLimits(ctx, config, b.stream.CreateConsumer)
	if err != nil {
		return err
	}
	anew := &binding{durable: d, stream: b.stream, consumer: made, info: made.CachedInfo()}
	if offsetMetadataOf(anew.info) == "" {
		err = anew.saveMetadata(ctx, offsetMetadata)
	}
	if err != nil || position < 0 {
		return err
	}
	floor := made.CachedInfo().AckFloor.Stream
	beyond, err := b.beyond(ctx, floor, position)
	if err == nil && beyond {
		err = fmt.Errorf("%w: it is at %d, not at %d", errNotFresh, floor+1, position)
	}
	return err
}

// beyond reports whether a consumer's ack floor skips messages from a position on. What
// the stream has deleted by its limits isn't skipped: no consumer can begin there.
func (b *binding) beyond(ctx context.Context, floor uint64, position int64) (bool, error) {
	if position < 0 || floor < uint64(position) {
		return false, nil
	}
	info, err := b.stream.Info(ctx)
	if err != nil {
		return false, err
	}
	if first := info.State.FirstSeq; floor < first {
		b.durable.log.Warn("the stream no longer has the durable's next messages", "durable", b.durable.config.Durable, "sequence", position, "first", first)
		return false, nil
	}
	return true, nil
}

// misplaced reports whether somebody who doesn't know the lane's row has created the
// durable anew, and it begins beyond the row's position: what is between was neither
// delivered nor acknowledged. A floor that moved by our acknowledgements is beyond the
// row's position, too, but then the durable keeps offset metadata: without it none of
// ours has read it. (That messages were delivered proves nothing: a pull for the old
// durable goes to the new one of the same name.) And whoever names a start sequence
// knows what it is for, as we do.
func (b *binding) misplaced(ctx context.Context, position int64) (bool, error) {
	ours := offsetMetadataOf(b.info) != "" || b.info.Created.Equal(b.durable.created)
	if b.consumed || ours || b.info.Config.DeliverPolicy == jetstream.DeliverByStartSequencePolicy {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return b.beyond(ctx, b.info.AckFloor.Stream, position)
}

// errNotFresh: the server gave a new consumer what it had stored of a deleted one.
var errNotFresh = errors.New("the new consumer has the old one's state")

// seen remembers an ack floor of the consumer.
func (d *durable) seen(floor uint64) {
	d.known, d.ackFloor = true, max(d.ackFloor, floor)
}

// knownIn reports whether something was seen of the consumer in this instance of the
// database. What was seen in another is forgotten.
func (d *durable) knownIn(instance string) bool {
	if instance != d.instance {
		d.instance, d.known, d.ackFloor = instance, false, 0
	}
	return d.known
}

// committed is the position below which the consumer has everything acknowledged; -1:
// there is no consumer.
func (b *binding) committed() int64 {
	if b.info == nil {
		return -1
	}
	return int64(b.info.AckFloor.Stream) + 1
}

// fresh is the configuration of a consumer that doesn't exist, from a position on; -1:
// where start says.
func (d *durable) fresh(stream *jetstream.StreamConfig, position int64) jetstream.ConsumerConfig {
	c := jetstream.ConsumerConfig{
		Durable:        d.config.Durable,
		Description:    "dedupd source " + d.config.Name,
		AckPolicy:      jetstream.AckExplicitPolicy,
		AckWait:        d.config.AckWait,
		MaxDeliver:     -1,
		MaxAckPending:  d.maxAckPending(),
		FilterSubjects: d.filter.subjects,
		Metadata:       make(map[string]string),
	}
	d.filter.mark(c.Metadata)
	if c.AckWait == 0 {
		c.AckWait = defaultAckWait
	}
	if limit := stream.ConsumerLimits.MaxAckPending; limit > 0 && limit < c.MaxAckPending {
		d.log.Warn("the stream limits the pending acks of its consumers, which may slow reading down", "limit", limit, "wanted", c.MaxAckPending)
		c.MaxAckPending = limit
	}
	switch {
	case position >= 0:
		// Somebody deleted it, or the stream. Everything below the position is durable;
		// "latest" would skip messages, and "earliest" read the whole stream again, with
		// ids that may be older than the window.
		d.log.Warn("the durable consumer is gone: creating it again where it was", "durable", d.config.Durable, "sequence", position)
		c.DeliverPolicy, c.OptStartSeq = jetstream.DeliverByStartSequencePolicy, uint64(position)
		return c
	case d.config.Start == policy.QueueLatest:
		c.DeliverPolicy = jetstream.DeliverNewPolicy
	default:
		c.DeliverPolicy = jetstream.DeliverAllPolicy
	}
	d.log.Info("creating the durable consumer", "durable", d.config.Durable, "start", d.config.Start)
	return c
}

// amend updates a consumer that somebody else or an older version created.
func (d *durable) amend(ctx context.Context, stream jetstream.Stream, found jetstream.Consumer) (jetstream.Consumer, error) {
	was := found.CachedInfo().Config
	want := was
	if was.AckPolicy != jetstream.AckExplicitPolicy {
		return nil, &configError{fmt.Sprintf("durable %s acknowledges by policy %q, which can't be changed and is not safe here: an ack would cover messages that are not durable. Name another durable, or delete this one", d.config.Durable, was.AckPolicy)}
	}
	if was.PriorityPolicy != jetstream.PriorityPolicyNone || len(was.PriorityGroups) > 0 {
		return nil, &configError{fmt.Sprintf("durable %s has priority groups; name another durable", d.config.Durable)}
	}
	if was.MaxDeliver > 0 {
		d.log.Warn("the durable dropped messages after some deliveries, silently; that is now off", "durable", d.config.Durable, "max_deliver", was.MaxDeliver)
		want.MaxDeliver = -1
	}
	if len(was.BackOff) > 0 {
		d.log.Warn("the durable had a redelivery backoff, which overrides its ack wait; that is now off", "durable", d.config.Durable)
		want.BackOff = nil
	}
	if was.HeadersOnly {
		d.log.Warn("the durable delivered headers only; that is now off", "durable", d.config.Durable)
		want.HeadersOnly = false
	}
	if was.InactiveThreshold > 0 {
		// The server gives it to all durables of a stream that has such a limit.
		if stream.CachedInfo().Config.ConsumerLimits.InactiveThreshold > 0 {
			d.log.Warn("the stream has its durables deleted when nobody reads for a while; it is created again at the database's position", "durable", d.config.Durable, "inactive_threshold", was.InactiveThreshold)
		} else {
			d.log.Warn("the durable was to be deleted when nobody reads for a while; that is now off", "durable", d.config.Durable, "inactive_threshold", was.InactiveThreshold)
			want.InactiveThreshold = 0
		}
	}
	want.AckWait = max(was.AckWait, defaultAckWait)
	if d.config.AckWait > 0 {
		want.AckWait = d.config.AckWait
	}
	switch {
	case d.config.MaxAckPending > 0:
		want.MaxAckPending = d.maxAckPending()
	case was.MaxAckPending > 0:
		want.MaxAckPending = max(was.MaxAckPending, d.maxAckPending())
		if limit := stream.CachedInfo().Config.ConsumerLimits.MaxAckPending; limit > 0 {
			want.MaxAckPending = min(want.MaxAckPending, limit)
		}
	}
	if !sameSubjects(&was, d.filter.subjects) {
		d.log.Warn("the durable's filter is changed; what the new one adds is read from the durable's position on, not from the stream's start", "durable", d.config.Durable, "subjects", d.filter.subjects)
		want.FilterSubject, want.FilterSubjects = "", d.filter.subjects
	}
	d.filter.take(&was)
	want.Metadata = maps.Clone(was.Metadata)
	if want.Metadata == nil {
		want.Metadata = make(map[string]string)
	}
	d.filter.mark(want.Metadata)
	if same(was, want) {
		return found, nil
	}
	return d.withinLimits(ctx, want, stream.UpdateConsumer)
}

func same(a, b jetstream.ConsumerConfig) bool {
	return a.MaxDeliver == b.MaxDeliver && len(a.BackOff) == len(b.BackOff) && a.HeadersOnly == b.HeadersOnly &&
		a.InactiveThreshold == b.InactiveThreshold && a.AckWait == b.AckWait && a.MaxAckPending == b.MaxAckPending &&
		a.FilterSubject == b.FilterSubject && slices.Equal(a.FilterSubjects, b.FilterSubjects) &&
		a.Metadata[filterKey] == b.Metadata[filterKey] && a.Metadata[filterSetKey] == b.Metadata[filterSetKey]
}

// limited reports whether somebody has given a durable of dedupd's a limit of deliveries:
// the server passes over what it has delivered so often, such as to a worker that was
// giving it back.
func limited(c *jetstream.ConsumerConfig) bool {
	_, ours := c.Metadata[filterKey]
	return ours && c.MaxDeliver > 0
}

// altered reports whether somebody has changed what a durable delivers, or how often:
// it has to be amended.
func altered(c *jetstream.ConsumerConfig) bool {
	return c.AckPolicy != jetstream.AckExplicitPolicy || c.MaxDeliver > 0 || len(c.BackOff) > 0 || c.HeadersOnly || refiltered(c)
}

// errAltered ends a session whose consumer was altered.
var errAltered = errors.New("somebody changed the durable consumer")

func (d *durable) maxAckPending() int {
	n := d.ackPendingFloor
	if d.config.MaxAckPending > 0 {
		n = d.config.MaxAckPending
	}
	if d.allowed > 0 {
		n = min(n, d.allowed)
	}
	return n
}
