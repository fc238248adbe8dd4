package lane

import "github.com/dedupd/dedupd/message"

// Checkpoint tells a queue of a database that went back: a failover that lost
// commits, or an older copy that was put in its place. What was acknowledged at the
// broker since is lost, and no position shows it.
type Checkpoint struct {
	// Number only rises. The lane's row has it, and the broker beside what it was
	// told of (Origin), and the worker: a row below either went back.
	Number int64
	// Instance names the database as it was reached. It is another one after each
	// start of its server, and where a copy was put in its place: what was committed
	// in one instance and isn't acknowledged yet may not be in the next.
	Instance string
}

// Confirm asks whether the database still has what a queue committed in it, before
// the broker is told of that.
type Confirm struct {
	Lane       message.Lane
	Epoch      int64
	Checkpoint Checkpoint // the last that is known
	// Origin is what the broker keeps of the lane now.
	OffsetMetadata string
	// Raise has the checkpoint raised: all that was committed before is then told
	// apart from what any older copy has.
	Raise bool
}

// Confirmed is a queue's checkpoint as the database has it now.
type Confirmation struct {
	Checkpoint Checkpoint
	// Origin is to be kept at the broker before it is told of anything that this
	// checkpoint confirms.
	OffsetMetadata string
}
