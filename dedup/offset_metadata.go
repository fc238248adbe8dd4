package dedup

import (
	"context"
	"encoding/json"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// offsetMetadata is what the broker keeps of a lane, beside its position or what was
// acknowledged of it. If the database loses the lane's row, nothing else shows that
// there was one.
type offsetMetadata struct {
	Scope  string `json:"scope"`
	Source string `json:"source"`
	// Start is the lowest position that the lane has begun at; -1: not known.
	Start int64 `json:"start"`
	// Epoch is the one under which the position was committed to the broker.
	Epoch int64 `json:"epoch"`
	// Checkpoint is a queue's: the row had reached it when this was written.
	Checkpoint int64 `json:"checkpoint,omitempty"`
	// LogID is the broker's own id of the log that the lane reads.
	LogID string `json:"log_id,omitempty"`
}

// offsetMetadataPrefix tells ours from other programs'.
const offsetMetadataPrefix = "dedupd:"

func (m offsetMetadata) String() string {
	text, err := json.Marshal(m)
	if err != nil { // it has only strings and numbers
		panic(err)
	}
	return offsetMetadataPrefix + string(text)
}

func parseOffsetMetadata(text string) (m offsetMetadata, ok bool) {
	text, ok = strings.CutPrefix(text, offsetMetadataPrefix)
	return m, ok && json.Unmarshal([]byte(text), &m) == nil
}

// OffsetMetadataScope is the scope whose worker wrote a lane's offset metadata; empty:
// no worker did.
func OffsetMetadataScope(text string) string {
	m, _ := parseOffsetMetadata(text)
	return m.Scope
}

// ownOffsetMetadata parses what the broker keeps of a lane; ok is false unless this scope
// wrote it.
func (s *Store) ownOffsetMetadata(lane message.Lane, text string) (m offsetMetadata, ok bool) {
	m, ok = parseOffsetMetadata(text)
	return m, ok && m.Scope == s.scope && m.Source == lane.Source
}

// forgotten reports whether an operator forgot a row of the lane that had come to that
// epoch. If not, and the row isn't there, the database has lost it. The audit shows it
// even if the metadata at the broker is older than the row was in the end.
func (s *Store) forgotten(ctx context.Context, tx pgx.Tx, lane message.Lane, epoch int64) (yes bool, err error) {
	err = tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+s.name("audit")+`
		WHERE scope = $1 AND CASE WHEN action = 'lanes forget' AND subject = $2 THEN (detail->>'epoch')::bigint >= $3 END)`,
		s.scope, string(pipeline.CleanText(laneSubject(lane.Source, lane.Name))), epoch).Scan(&yes)
	return yes, err
}

// restart has a new row begin where the row began that the database has lost. All that
// the lane ever had effected was committed after that row, and so is lost with it. If an
// operator forgot the lane, the row stays where the source said.
//
// It runs in a statement of its own, after the row's: that one has waited for whoever was
// deleting the old row, and its snapshot is older than what it waited for.
func (s *Store) restart(ctx context.Context, tx pgx.Tx, row *laneRow, a lane.Acquire) error {
	was, ok := s.ownOffsetMetadata(a.Lane, a.OffsetMetadata)
	if !ok || a.Committed <= was.Start || was.Start < 0 || was.LogID != "" && a.LogID != "" && was.LogID != a.LogID {
		return nil
	}
	forgotten, err := s.forgotten(ctx, tx, a.Lane, was.Epoch)
	if err != nil || forgotten {
		return err
	}
	if _, err := tx.Exec(ctx, `UPDATE `+s.name("lanes")+` SET next_position = $2, start_position = $2 WHERE id = $1`, row.id, was.Start); err != nil {
		return err
	}
	row.assigned.Rewound, row.assigned.Next = true, was.Start
	return nil
}

// startAdded has a new row begin at the partition's beginning if the topic lacked that
// partition when another of its lanes was first acquired. Partitions are numbered in the
// order in which they are added, and none is removed. So when a topic is first read, by
// however many workers, none of its partitions passes for an added one.
func (s *Store) startAdded(ctx context.Context, tx pgx.Tx, row *laneRow, a lane.Acquire) error {
	p := a.Partition
	if p == nil || p.Added < 0 || a.Committed >= 0 {
		return nil
	}
	done, err := tx.Exec(ctx, `UPDATE `+s.name("lanes")+` SET next_position = $2, start_position = $2 WHERE id = $1 AND EXISTS (
		SELECT FROM `+s.name("lanes")+` WHERE id <> $1 AND scope = $3 AND source = $4 AND starts_with(lane, $5) AND partitions <= $6)`,
		row.id, p.Added, s.scope, a.Lane.Source, p.Topic+"/", p.Number)
	if err != nil {
		return err
	}
	if done.RowsAffected() > 0 {
		row.assigned.Next = p.Added
	}
	return nil
}
