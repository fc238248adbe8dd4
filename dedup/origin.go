package dedup

import (
	"context"
	"encoding/json"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/message"
)

// origin is what the broker keeps of a lane beside its position. If the database
// loses the lane's row, nothing else tells that there was one.
type origin struct {
	Scope  string `json:"scope"`
	Source string `json:"source"`
	Began  int64  `json:"began"`
	// Epoch is the one under which the position was told.
	Epoch   int64  `json:"epoch"`
	History string `json:"history"`
	Log     string `json:"log,omitempty"`
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

// lost tells whether a row that was there in the origin's history may be missing in
// the present one because the database went back: it is the same cluster on another
// timeline, which a promoted replica and a restore to a point in time begin.
func (o origin) lost(present string) bool {
	cluster, timeline, ok := strings.Cut(o.History, "/")
	presentCluster, presentTimeline, presentOK := strings.Cut(present, "/")
	return ok && presentOK && cluster == presentCluster && timeline != presentTimeline &&
		timeline != unknownTimeline && presentTimeline != unknownTimeline
}

// unknownTimeline is what timeline() tells where a service forbids to ask.
const unknownTimeline = "unknown"

// beginAgain has a new row begin where the row began that a failover or a restore
// of the database has lost. All that the lane ever had effected was committed after
// that row, and so is lost with it. If an operator let the lane go, the row stays
// where the source said: the audit tells, also of a worker whose commit to the
// broker is older than the present history.
//
// It is asked in a statement of its own, behind the row's: that one has waited for
// whoever was deleting the old row, and its snapshot is older than what it waited for.
func (s *Store) beginAgain(ctx context.Context, tx pgx.Tx, id int32, t message.Take, taken *message.Taken) error {
	was, ok := parseOrigin(t.Origin)
	if !ok || was.Scope != s.scope || was.Source != t.Lane.Source || t.Committed <= was.Began || was.Began < 0 || !was.lost(taken.History) ||
		was.Log != "" && t.Incarnation != "" && was.Log != t.Incarnation {
		return nil
	}
	done, err := tx.Exec(ctx, `UPDATE `+s.name("lanes")+` SET next_position = $2, began = $2 WHERE id = $1 AND NOT EXISTS (
		SELECT FROM `+s.name("audit")+` WHERE scope = $3 AND CASE WHEN action = 'lanes forget' AND subject = $4 THEN (detail->>'epoch')::bigint >= $5 END)`,
		id, was.Began, s.scope, string(cleanText(laneSubject(t.Lane.Source, t.Lane.Name))), was.Epoch)
	if err != nil {
		return err
	}
	if done.RowsAffected() > 0 {
		taken.Rewound, taken.Next = true, was.Began
	}
	return nil
}

// beginAdded has a new row begin at the partition's beginning if the topic didn't
// have that partition yet when another of its lanes was first taken. Partitions are
// numbered in the order in which they come, and none goes. So where a topic is first
// read, by however many workers, none of its partitions passes for an added one.
func (s *Store) beginAdded(ctx context.Context, tx pgx.Tx, id int32, t message.Take, taken *message.Taken) error {
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
