package lane

import "github.com/dedupd/dedupd/message"

// Checkpoint shows a queue that the database went back: a failover lost commits, or
// an older copy took its place. What was acknowledged since would be lost, and a queue
// has no position that shows it.
type Checkpoint struct {
	// Number only rises. It is in the lane's row, in the offset metadata at the broker,
	// and with the worker: a row below either of the others went back.
	Number int64
	// Instance names one run of a database server. It changes with each start, and
	// where a copy takes its place: what was committed in one instance and isn't
	// acknowledged yet may be missing in the next.
	Instance string
}

// Confirm asks, before a queue's messages are acknowledged, whether the database still
// has everything that was committed in it.
type Confirm struct {
	Lane       message.Lane
	Epoch      int64
	Checkpoint Checkpoint // the last one known
	// OffsetMetadata is what the broker keeps now.
	OffsetMetadata string
	// Raise the checkpoint: older copies of the database then lack it, and with it
	// what was committed before this call.
	Raise bool
}

// Confirmation is a queue's checkpoint as the database has it now.
type Confirmation struct {
	Checkpoint Checkpoint
	// OffsetMetadata must be kept at the broker before anything that this checkpoint
	// confirms is acknowledged.
	OffsetMetadata string
}
