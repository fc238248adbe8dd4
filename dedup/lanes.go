package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// Heartbeat reports that these lanes have nothing left to read, so that their clocks
// follow the database's. It skips a lane that has moved since, or is being moved right
// now.
//
// gone lists the lanes whose rows aren't as reported: another worker has acquired the
// lane, or somebody has moved it, or the database has lost commits. Otherwise a quiet
// lane would learn of it only by its next message. The rows are read as the last commit
// left them, without a lock. So an in-flight transaction of the lane changes nothing:
// until it commits, the row is as reported. Afterwards it is above, which is no loss.
func (s *Store) Heartbeat(ctx context.Context, lanes []lane.Heartbeat) (gone []message.Lane, err error) {
	s.clearAttempts(ctx)
	var sources, names []string
	var epochs, next, checkpoints []int64
	var ages []float64
	var instances []string
	for _, l := range lanes {
		sources, names = append(sources, l.Lane.Source), append(names, l.Lane.Name)
		epochs, next, ages = append(epochs, l.Epoch), append(next, l.Next), append(ages, l.Age.Seconds())
		checkpoints, instances = append(checkpoints, l.Checkpoint.Number), append(instances, l.Checkpoint.Instance)
	}
	rows, _ := s.pool.Query(ctx, `
		WITH reported AS (SELECT * FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::float8[], $7::bigint[], $8::text[]) AS u (source, lane, epoch, next, age, checkpoint, instance)),
		still AS (
			SELECT l.id, reported.age FROM reported
			JOIN `+s.name("lanes")+` l ON l.scope = $1 AND l.source = reported.source AND l.lane = reported.lane
				AND l.epoch = reported.epoch AND CASE WHEN l.ordered THEN l.next_position = reported.next ELSE l.checkpoint >= reported.checkpoint AND `+s.name("instance")+`(l.tableoid) = reported.instance END
			FOR UPDATE OF l SKIP LOCKED),
		followed AS (
			UPDATE `+s.name("lanes")+` l SET lag = 0, acquisitions = 0, stream_time = greatest(CASE WHEN l.stream_time < `+s.name("clock")+`() + interval '1 minute' THEN l.stream_time END, `+s.name("clock")+`() - make_interval(secs => still.age))
			FROM still WHERE l.id = still.id)
		SELECT reported.source, reported.lane, coalesce(l.epoch <= reported.epoch AND (l.ordered OR l.epoch < reported.epoch OR l.checkpoint < reported.checkpoint), true) FROM reported
		LEFT JOIN `+s.name("lanes")+` l ON l.scope = $1 AND l.source = reported.source AND l.lane = reported.lane
		WHERE l.id IS NULL OR l.epoch <> reported.epoch OR CASE WHEN l.ordered THEN l.next_position < reported.next ELSE l.checkpoint < reported.checkpoint OR `+s.name("instance")+`(l.tableoid) <> reported.instance END`,
		s.scope, sources, names, epochs, next, ages, checkpoints, instances)
	var lane message.Lane
	var back bool // epochs, positions and checkpoints only rise
	went := ""
	_, err = pgx.ForEachRow(rows, []any{&lane.Source, &lane.Name, &back}, func() error {
		gone = append(gone, lane)
		if back {
			went = lane.String()
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("report that lanes are caught up: %w", err)
	}
	for _, l := range lanes {
		s.quarantine.set(l.Lane, false) // it has no message left that could end a process
	}
	switch {
	case went != "":
		s.generations.Forget("lane " + went + " went back")
	case len(gone) > 0:
		s.forgetLanes()
	}
	return gone, nil
}

// BrokerConfirmed records what the broker has confirmed of ordered lanes since their last
// batches. It skips a row that another worker has acquired since, one that is below, as
// it is once the database has lost commits, and one that is being moved right now.
func (s *Store) BrokerConfirmed(ctx context.Context, all []lane.BrokerPosition) error {
	var sources, names []string
	var epochs, positions []int64
	for _, c := range all {
		sources, names = append(sources, c.Lane.Source), append(names, c.Lane.Name)
		epochs, positions = append(epochs, c.Epoch), append(positions, c.Position)
	}
	_, err := s.pool.Exec(ctx, `
		WITH reported AS (SELECT * FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[]) AS u (source, lane, epoch, position)),
		still AS (
			SELECT l.id, reported.position FROM reported
			JOIN `+s.name("lanes")+` l ON l.scope = $1 AND l.source = reported.source AND l.lane = reported.lane AND l.ordered
				AND l.epoch = reported.epoch AND l.next_position >= reported.position AND l.broker_position IS DISTINCT FROM reported.position
			FOR UPDATE OF l SKIP LOCKED)
		UPDATE `+s.name("lanes")+` l SET broker_position = still.position FROM still WHERE l.id = still.id`,
		s.scope, sources, names, epochs, positions)
	if err != nil {
		return fmt.Errorf("record what the broker has confirmed: %w", err)
	}
	return nil
}

// Release records that a lane was released without having moved under that epoch, and
// that nothing happened to it: the acquisition doesn't count.
func (s *Store) Release(ctx context.Context, lane message.Lane, epoch int64) error {
	id, err := s.laneID(lane)
	if err != nil {
		return err
	}
	if _, err := s.pool.Exec(ctx, `UPDATE `+s.name("lanes")+` SET acquisitions = 0 WHERE id = $1 AND epoch = $2 AND acquisitions > 0`, id, epoch); err != nil {
		return fmt.Errorf("release lane %s: %w", lane, err)
	}
	return nil
}

// ReportLogCut records that the log of a lane was cut below its position, or has an
// ordered lane go on there. Such a lane is then acquired anew, under a new stream id:
// positions from the cut on are those of other messages, and ids or dead letters made of
// them would pass for what was read before. Messages with ids of their own are recognised
// by these.
//
// The error is a *lane.FencedError if the lane has another epoch by now.
func (s *Store) ReportLogCut(ctx context.Context, cut lane.LogCut) error {
	set, which := `cut_at = $2`, ``
	if cut.Follow {
		which = ` AND ordered`
		// As SetPosition does.
		set = `next_position = least(next_position, $2), broker_position = NULL, lag = NULL, cut_at = NULL, stream_id = ` + newStreamID + `,
			stream_time = CASE WHEN $2 < next_position THEN NULL ELSE stream_time END, ` + lowerStart
	}
	done, err := s.pool.Exec(ctx, `UPDATE `+s.name("lanes")+` SET `+set+` WHERE epoch = $1 AND scope = $3 AND source = $4 AND lane = $5`+which,
		cut.Epoch, cut.At, s.scope, cut.Lane.Source, cut.Lane.Name)
	switch {
	case err != nil:
		return fmt.Errorf("record that the log of lane %s was cut: %w", cut.Lane, err)
	case done.RowsAffected() == 0:
		return &lane.FencedError{Lanes: []message.Lane{cut.Lane}}
	}
	return nil
}

func (s *Store) remember(lane message.Lane, id int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.numbers[lane] = id
	s.lanes[id] = lane
}

// laneID is the number by which claims know the lane.
func (s *Store) laneID(lane message.Lane) (int32, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	id, ok := s.numbers[lane]
	if !ok {
		return 0, fmt.Errorf("lane %s was never acquired", lane)
	}
	return id, nil
}

// laneIDs are the numbers of the batches' lanes.
func (s *Store) laneIDs(batches []lane.Batch) ([]int32, error) {
	ids := make([]int32, len(batches))
	for i := range batches {
		var err error
		if ids[i], err = s.laneID(batches[i].Lane); err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// sourceOf is the source that a lane number belongs to; empty if the lane is gone. It
// reads the database at most once for a lane of another worker.
func (s *Store) sourceOf(ctx context.Context, conn *pgx.Conn, id int32) (string, error) {
	s.mu.RLock()
	lane, ok := s.lanes[id]
	s.mu.RUnlock()
	if ok {
		return lane.Source, nil
	}
	err := conn.QueryRow(ctx, `SELECT source, lane FROM `+s.name("lanes")+` WHERE id = $1`, id).Scan(&lane.Source, &lane.Name)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", err
	}
	s.mu.Lock()
	s.lanes[id] = lane // without a name, where the lane is gone
	s.mu.Unlock()
	return lane.Source, nil
}

// refuseLoss is lane.ErrLoss if a failover of the database could lose messages: a broker
// that deletes what is acknowledged can't be asked for it again. With a synchronous
// standby nothing acknowledged is lost.
func (s *Store) refuseLoss(ctx context.Context, tx pgx.Tx) error {
	if s.acceptLoss {
		return nil
	}
	var replicated bool
	err := tx.QueryRow(ctx, `SELECT `+schema.WaitsForStandby).Scan(&replicated)
	if err != nil || replicated {
		return err
	}
	return lane.ErrLoss
}

// lanePosition is what a lane's row says of its position.
type lanePosition struct {
	epoch, next, checkpoint int64
	// elsewhere is set if a queue was acquired in another instance of the database.
	elsewhere bool
}

// lanePositions reads the rows of the batches' lanes.
func (s *Store) lanePositions(ctx context.Context, batches []lane.Batch) ([]lanePosition, error) {
	all := make([]lanePosition, len(batches))
	for i, b := range batches {
		err := s.pool.QueryRow(ctx, `SELECT epoch, next_position, checkpoint, NOT ordered AND `+s.name("instance")+`(tableoid) <> $4 FROM `+s.name("lanes")+` WHERE scope = $1 AND source = $2 AND lane = $3`,
			s.scope, b.Lane.Source, b.Lane.Name, b.Checkpoint.Instance).Scan(&all[i].epoch, &all[i].next, &all[i].checkpoint, &all[i].elsewhere)
		if errors.Is(err, pgx.ErrNoRows) {
			all[i] = lanePosition{epoch: -1, next: -1, checkpoint: -1} // forgotten, or lost with the database
		} else if err != nil {
			return nil, fmt.Errorf("read lane %s: %w", b.Lane, err)
		}
	}
	return all, nil
}

// Books are one lane's, as the view of the same name shows them.
type Books struct {
	Scope          string     `json:"scope"`
	Source         string     `json:"source"`
	Lane           string     `json:"lane"`
	Fetched        int64      `json:"fetched"`
	Applied        int64      `json:"applied"`
	Written        int64      `json:"written"`
	AlreadyPresent int64      `json:"already_present"`
	Stale          int64      `json:"stale"`
	Rejected       int64      `json:"rejected"`
	Duplicates     int64      `json:"duplicates"`
	Redelivered    int64      `json:"redelivered"`
	Resent         int64      `json:"resent"`
	CrossSource    int64      `json:"cross_source"`
	Conflicts      int64      `json:"conflicts"`
	Dead           int64      `json:"dead"`
	Filtered       int64      `json:"filtered"`
	NextPosition   int64      `json:"next_position"`
	Lag            *int64     `json:"lag"`         // nil: not known
	StreamTime     *time.Time `json:"stream_time"` // nil: nothing committed yet
	Owner          string     `json:"owner"`
	UpdatedAt      time.Time  `json:"updated_at"`
}

// Books lists the scope's lanes with their books, by source and lane.
func (s *Store) Books(ctx context.Context) ([]Books, error) {
	rows, _ := s.pool.Query(ctx, `SELECT * FROM `+s.name("books")+` WHERE scope = $1 ORDER BY source, lane`, s.scope)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Books])
	if err != nil {
		return nil, fmt.Errorf("read the books: %w", err)
	}
	return all, nil
}
