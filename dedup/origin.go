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

// origin is what the broker keeps of a lane, beside its position or what was
// acknowledged of it. If the database loses the lane's row, nothing else tells that
// there was one.
type origin struct {
	Scope  string `json:"scope"`
	Source string `json:"source"`
	Began  int64  `json:"began"`
	// Epoch is the one under which the position was told.
	Epoch int64 `json:"epoch"`
	// Checkpoint is a queue's: the row had reached it when the broker was told.
	Checkpoint int64 `json:"checkpoint,omitempty"`
	// Log is the broker's own mark of what the lane reads.
	Log string `json:"log,omitempty"`
}

// originPrefix tells our notes from those of other programs.
const originPrefix = "dedupd:"

func (o origin) String() string {
	text, err := json.Marshal(o)
	if err != nil { // it has but texts and numbers
		panic(err)
	}
	return originPrefix + string(text)
}

func parseOrigin(text string) (o origin, ok bool) {
	text, ok = strings.CutPrefix(text, originPrefix)
	return o, ok && json.Unmarshal([]byte(text), &o) == nil
}

// OriginScope is the scope whose worker wrote what a broker keeps of a lane; empty: no
// worker did.
func OriginScope(text string) string {
	o, _ := parseOrigin(text)
	return o.Scope
}

// originOf is what the broker keeps of a lane of ours.
func (s *Store) originOf(lane message.Lane, text string) (o origin, ok bool) {
	o, ok = parseOrigin(text)
	return o, ok && o.Scope == s.scope && o.Source == lane.Source
}

// forgotten tells whether an operator let a lane's row go that had such an epoch, or an
// earlier one. If not, and the row isn't there, the database has lost it. The audit
// tells, also of a row whose word at the broker is older than the row was in the end.
func (s *Store) forgotten(ctx context.Context, tx pgx.Tx, lane message.Lane, epoch int64) (yes bool, err error) {
	err = tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+s.name("audit")+`
		WHERE scope = $1 AND CASE WHEN action = 'lanes forget' AND subject = $2 THEN (detail->>'epoch')::bigint >= $3 END)`,
		s.scope, string(pipeline.CleanText(laneSubject(lane.Source, lane.Name))), epoch).Scan(&yes)
	return yes, err
}

// beginAgain has a new row begin where the row began that the database has lost. All
// that the lane ever had effected was committed after that row, and so is lost with it.
// If an operator let the lane go, the row stays where the source said.
//
// It is asked in a statement of its own, behind the row's: that one has waited for
// whoever was deleting the old row, and its snapshot is older than what it waited for.
func (s *Store) beginAgain(ctx context.Context, tx pgx.Tx, id int32, t lane.Acquire, taken *lane.Assignment) error {
	was, ok := s.originOf(t.Lane, t.OffsetMetadata)
	if !ok || t.Committed <= was.Began || was.Began < 0 || was.Log != "" && t.LogID != "" && was.Log != t.LogID {
		return nil
	}
	forgotten, err := s.forgotten(ctx, tx, t.Lane, was.Epoch)
	if err != nil || forgotten {
		return err
	}
	if _, err := tx.Exec(ctx, `UPDATE `+s.name("lanes")+` SET next_position = $2, began = $2 WHERE id = $1`, id, was.Began); err != nil {
		return err
	}
	taken.Rewound, taken.Next = true, was.Began
	return nil
}

// beginAdded has a new row begin at the partition's beginning if the topic didn't
// have that partition yet when another of its lanes was first taken. Partitions are
// numbered in the order in which they come, and none goes. So where a topic is first
// read, by however many workers, none of its partitions passes for an added one.
func (s *Store) beginAdded(ctx context.Context, tx pgx.Tx, id int32, t lane.Acquire, taken *lane.Assignment) error {
	p := t.Partition
	if p == nil || p.Added < 0 || t.Committed >= 0 {
		return nil
	}
	done, err := tx.Exec(ctx, `UPDATE `+s.name("lanes")+` SET next_position = $2, began = $2 WHERE id = $1 AND EXISTS (
		SELECT FROM `+s.name("lanes")+` WHERE id <> $1 AND scope = $3 AND source = $4 AND starts_with(lane, $5) AND partitions <= $6)`,
		id, p.Added, s.scope, t.Lane.Source, p.Topic+"/", p.Number)
	if err != nil {
		return err
	}
	if done.RowsAffected() > 0 {
		taken.Next = p.Added
	}
	return nil
}
