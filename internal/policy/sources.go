package policy

// Start says where a Kafka lane begins that has no position, if the group has
// committed none either.
type Start string

const (
	// StartEarliest begins with the partition's first message.
	StartEarliest Start = "earliest"
	// StartLatest begins after what is committed now. A partition that is added
	// later begins with its first message.
	StartLatest Start = "latest"
	// StartGroup begins nowhere: the lane is held until somebody commits an offset
	// to the group.
	StartGroup Start = "group"
)

func (Start) Values() []string { return Values(StartEarliest, StartLatest, StartGroup) }

// QueueStart says where a NATS durable begins that doesn't exist yet.
type QueueStart string

const (
	// QueueEarliest begins with the stream's first message.
	QueueEarliest QueueStart = "earliest"
	// QueueLatest begins after the stream's last message.
	QueueLatest QueueStart = "latest"
)

func (QueueStart) Values() []string { return Values(QueueEarliest, QueueLatest) }

// Gap says what happens when the broker no longer has the messages that come next in
// a lane, or its log was cut below.
type Gap string

const (
	// GapStop holds the lane.
	GapStop Gap = "stop"
	// GapSkip counts what is missing and goes on with what is left.
	GapSkip Gap = "skip"
)

func (Gap) Values() []string { return Values(GapStop, GapSkip) }

// Isolation says whether messages of open and aborted transactions are read.
type Isolation string

const (
	// ReadCommitted leaves them out.
	ReadCommitted Isolation = "read_committed"
	// ReadUncommitted reads them.
	ReadUncommitted Isolation = "read_uncommitted"
)

func (Isolation) Values() []string { return Values(ReadCommitted, ReadUncommitted) }

// GroupReset says whether a lane follows when the group's offset was moved back.
type GroupReset string

const (
	// GroupResetHonour reads again from the group's offset.
	GroupResetHonour GroupReset = "honour"
	// GroupResetIgnore goes on at the lane's own position.
	GroupResetIgnore GroupReset = "ignore"
)

func (GroupReset) Values() []string { return Values(GroupResetHonour, GroupResetIgnore) }

// Mechanism is how to log in to Kafka by SASL.
type Mechanism string

// The mechanisms that a configuration may name.
const (
	// MechanismNone is for brokers that ask for none.
	MechanismNone        Mechanism = ""
	MechanismPlain       Mechanism = "plain"
	MechanismScramSHA256 Mechanism = "scram-sha-256"
	MechanismScramSHA512 Mechanism = "scram-sha-512"
	// MechanismOAuthBearer isn't available yet.
	MechanismOAuthBearer Mechanism = "oauthbearer"
)

func (Mechanism) Values() []string {
	return Values(MechanismNone, MechanismPlain, MechanismScramSHA256, MechanismScramSHA512, MechanismOAuthBearer)
}

// Mode says how workers share a NATS stream.
type Mode string

const (
	// ModeQueue lets any number of workers share one durable. It keeps no order.
	ModeQueue Mode = "queue"
	// ModeLanes isn't available yet.
	ModeLanes Mode = "lanes"
)

func (Mode) Values() []string { return Values(ModeQueue, ModeLanes) }
