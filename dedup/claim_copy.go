package dedup

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/dedupd/dedupd/internal/sqlstate"
)

// There are two ways to claim a group. INSERT ... ON CONFLICT settles everything in the
// statement that claims: nothing goes before, nothing fails. But it visits the index
// twice for each key and makes each row by itself, which is a third of all that a message
// costs Postgres. So a large group looks its keys up first and copies what is missing
// (decision 0016). The table's unique index still decides: if a concurrent duplicate of a
// key commits between the look-up and the copy, or is in flight and then commits, COPY
// fails and the transaction with it. The group is then retried by ON CONFLICT, which
// waits for concurrent duplicates and accepts them. Both ways claim keys in the same
// order.

const (
	// defaultCopyFrom is the number of ids from which looking them up first is worth its
	// additional round trip.
	defaultCopyFrom = 256
	// copyPause is for how long everything is claimed by ON CONFLICT once a copy has met
	// a concurrent duplicate. Where resends go to another lane at the same time, such a
	// duplicate is seldom alone, and each failed copy wastes a group's work.
	copyPause = time.Minute
)

// errConcurrentDuplicate says that somebody else claimed a key between the look-up and
// the copy.
var errConcurrentDuplicate = errors.New("claimed by another transaction meanwhile")

// copyGuard remembers when a copy last met a concurrent duplicate. It affects speed
// alone: either way of claiming is right at any time.
type copyGuard struct {
	hold  time.Duration
	until atomic.Int64 // Unix nanoseconds
}

// claimsByCopy chooses the way for a group.
func (p *Processor) claimsByCopy(g *group) bool {
	from := cmp.Or(p.CopyFrom, defaultCopyFrom)
	return len(g.unique) >= from && !g.metDuplicate && time.Now().UnixNano() >= p.copies.until.Load()
}

func (t *copyGuard) met(g *group) {
	g.metDuplicate = true
	t.until.Store(time.Now().Add(t.hold).UnixNano())
}

// copy claims what is left to claim: all of it, or it fails.
func (t *txn) copy(ctx context.Context) error {
	if len(t.claims) == 0 {
		return nil
	}
	columns := "key, position, lane"
	if t.fingerprint {
		columns += ", fingerprint"
	}
	_, err := t.conn.PgConn().CopyFrom(ctx, bytes.NewReader(t.encode()), "COPY "+t.catalog.Open.Name+" ("+columns+") FROM STDIN (FORMAT binary)")
	if err != nil {
		if sqlstate.Of(err) == sqlstate.UniqueViolation {
			return fmt.Errorf("%w: %w", errConcurrentDuplicate, err)
		}
		return err
	}
	for _, at := range t.claims {
		t.items[at].isNew = true
	}
	return nil
}

// copySignature begins data for COPY in binary form: signature, flags, length of
// the header's extension. copyTrailer ends it.
var (
	copySignature = []byte("PGCOPY\n\xff\r\n\x00\x00\x00\x00\x00\x00\x00\x00\x00")
	copyTrailer   = []byte{0xFF, 0xFF}
)

// encode returns the rows in the binary form of COPY.
func (t *txn) encode() []byte {
	const row = 2 + 4 + 16 + 4 + 8 + 4 + 4 + 4 + 8
	be := binary.BigEndian
	buf := append(make([]byte, 0, len(copySignature)+row*len(t.claims)+len(copyTrailer)), copySignature...)
	columns := uint16(3)
	if t.fingerprint {
		columns++
	}
	for _, at := range t.claims {
		it := &t.items[at]
		buf = be.AppendUint16(buf, columns)
		buf = append(be.AppendUint32(buf, uint32(len(it.key))), it.key[:]...)
		buf = be.AppendUint64(be.AppendUint32(buf, 8), uint64(t.message(it).Position.Offset))
		buf = be.AppendUint32(be.AppendUint32(buf, 4), uint32(t.lanes[it.batch]))
		if t.fingerprint {
			buf = be.AppendUint64(be.AppendUint32(buf, 8), uint64(it.fingerprint))
		}
	}
	return append(buf, copyTrailer...)
}
