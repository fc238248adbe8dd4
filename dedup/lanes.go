package dedup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// takeGrace is how long an owner of a newer group generation is taken to be at
// work after its last commit. Generations start again at 1 when a group is
// deleted; this is the way out. It is more than twice the session time-out.
const takeGrace = 25 * time.Second

// Take makes this worker the owner of a lane, under a new epoch, in a small
// transaction of its own. It waits for a transaction in which the last owner is
// moving the lane, and then sees what it committed.
//
// Where reading starts: the lane's row; without one, where the source says. The
// broker's position never wins by being further: it is ahead when the database
// lost commits, and then claims and effects are lost with the position, so that
// reading again is right. It wins by being behind what it once confirmed, for
// then somebody moved it back on purpose, unless a worker wrote it there: then it is an
// earlier copy of the lane's. And what the broker keeps beside it tells
// of a row that the database has lost: see beginAgain.
//
// A queue has no position to compare. It notices that the database went back by its
// checkpoint, which the broker keeps beside what it was told of, and its source then has
// the broker deliver again: from the last position that the broker confirmed, or from
// where the broker stood when the row was made, before anything of ours was
// acknowledged. See takeQueue.
//
// The error is message.ErrStale when a newer owner is at work, message.ErrLoss when
// the database may lose what its broker can't deliver again, message.ErrNoStart
// when neither the database nor the source knows where the lane begins, or a
// *message.HoldError when the lane's stream isn't the one it was.
func (s *Store) Acquire(ctx context.Context, t lane.Acquire) (taken lane.Assignment, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	err = pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		taken, err = s.take(ctx, tx, t)
		return err
	})
	if err != nil {
		return lane.Assignment{}, fmt.Errorf("take lane %s: %w", t.Lane, err)
	}
	if taken.Rewound {
		s.generations.Forget("lane " + t.Lane.String() + " went back")
	}
	s.forgetAttempts(ctx, t.Lane, t.Ordered, taken.Next)
	return taken, nil
}

// CaughtUp tells that these lanes had nothing left to read, so that their clocks
// follow the database's. A lane that has moved since is passed over, and so is one
// that is just being moved.
//
// gone are those that aren't as told: another worker has taken the lane, or somebody
// has moved it, or the database has lost commits. A quiet lane would learn of it by
// its next message only. The rows are read as the last commit left them, without a
// lock. So a transaction of the lane that is under way changes nothing: till it
// commits, the row is as told. Afterwards it stands above, which is no loss.
func (s *Store) Heartbeat(ctx context.Context, lanes []lane.Heartbeat) (gone []message.Lane, err error) {
	s.takeBackNotes(ctx)
	var sources, names []string
	var epochs, next, checkpoints []int64
	var ages []float64
	var instances []string
	for _, l := range lanes {
		sources, names = append(sources, l.Lane.Source), append(names, l.Lane.Name)
		epochs, next, ages = append(epochs, l.Epoch), append(next, l.Next), append(ages, l.Age.Seconds())
		checkpoints, instances = append(checkpoints, l.Checkpoint.Number), append(instances, l.Checkpoint.Instance)
	}
	rows, err := s.pool.Query(ctx, `
		WITH told AS (SELECT * FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::float8[], $7::bigint[], $8::text[]) AS u (source, lane, epoch, next, age, checkpoint, instance)),
		still AS (
			SELECT l.id, told.age FROM told
			JOIN `+s.name("lanes")+` l ON l.scope = $1 AND l.source = told.source AND l.lane = told.lane
				AND l.epoch = told.epoch AND CASE WHEN l.ordered THEN l.next_position = told.next ELSE l.checkpoint >= told.checkpoint AND `+s.name("instance")+`(l.tableoid) = told.instance END
			FOR UPDATE OF l SKIP LOCKED),
		followed AS (
			UPDATE `+s.name("lanes")+` l SET lag = 0, takes = 0, stream_time = greatest(CASE WHEN l.stream_time < `+s.name("clock")+`() + interval '1 minute' THEN l.stream_time END, `+s.name("clock")+`() - make_interval(secs => still.age))
			FROM still WHERE l.id = still.id)
		SELECT told.source, told.lane, coalesce(l.epoch <= told.epoch AND (l.ordered OR l.epoch < told.epoch OR l.checkpoint < told.checkpoint), true) FROM told
		LEFT JOIN `+s.name("lanes")+` l ON l.scope = $1 AND l.source = told.source AND l.lane = told.lane
		WHERE l.id IS NULL OR l.epoch <> told.epoch OR CASE WHEN l.ordered THEN l.next_position < told.next ELSE l.checkpoint < told.checkpoint OR `+s.name("instance")+`(l.tableoid) <> told.instance END`,
		s.scope, sources, names, epochs, next, ages, checkpoints, instances)
	if err != nil {
		return nil, fmt.Errorf("tell that lanes are caught up: %w", err)
	}
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
		return nil, fmt.Errorf("tell that lanes are caught up: %w", err)
	}
	for _, l := range lanes {
		s.suspicions.end(l.Lane) // what may have ended a process isn't here
	}
	switch {
	case went != "":
		s.generations.Forget("lane " + went + " went back")
	case len(gone) > 0:
		s.forgetLanes()
	}
	return gone, nil
}

// Copied tells what the broker has confirmed of ordered lanes since their last
// batches. A row that was taken by another since, or stands below, as it does when the
// database has lost commits, is passed over; so is one that is just being moved.
func (s *Store) BrokerConfirmed(ctx context.Context, all []lane.BrokerPosition) error {
	var sources, names []string
	var epochs, positions []int64
	for _, c := range all {
		sources, names = append(sources, c.Lane.Source), append(names, c.Lane.Name)
		epochs, positions = append(epochs, c.Epoch), append(positions, c.Position)
	}
	_, err := s.pool.Exec(ctx, `
		WITH told AS (SELECT * FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[]) AS u (source, lane, epoch, position)),
		still AS (
			SELECT l.id, told.position FROM told
			JOIN `+s.name("lanes")+` l ON l.scope = $1 AND l.source = told.source AND l.lane = told.lane AND l.ordered
				AND l.epoch = told.epoch AND l.next_position >= told.position AND l.broker_position IS DISTINCT FROM told.position
			FOR UPDATE OF l SKIP LOCKED)
		UPDATE `+s.name("lanes")+` l SET broker_position = still.position FROM still WHERE l.id = still.id`,
		s.scope, sources, names, epochs, positions)
	if err != nil {
		return fmt.Errorf("tell what the broker has confirmed: %w", err)
	}
	return nil
}

// LetGo tells that a lane was let go without having moved under that epoch, and
// that nothing happened to it: the take doesn't count.
func (s *Store) Release(ctx context.Context, lane message.Lane, epoch int64) error {
	id, err := s.laneID(lane)
	if err != nil {
		return err
	}
	if _, err := s.pool.Exec(ctx, `UPDATE `+s.name("lanes")+` SET takes = 0 WHERE id = $1 AND epoch = $2 AND takes > 0`, id, epoch); err != nil {
		return fmt.Errorf("tell that lane %s was let go: %w", lane, err)
	}
	return nil
}

func (s *Store) take(ctx context.Context, tx pgx.Tx, t lane.Acquire) (taken lane.Assignment, err error) {
	if !t.Ordered {
		if err := s.forgetGaps(ctx, tx, t); err != nil {
			return taken, err
		}
	}
	row, err := s.takeRow(ctx, tx, t)
	if err != nil {
		return taken, err
	}
	taken, id, log, began := row.taken, row.id, row.log, row.began
	if t.Ordered && t.LogID != "" && log != t.LogID {
		return taken, &lane.HoldError{Lane: t.Lane, Err: fmt.Errorf("it was created anew (its id is %s, the lane's was %s), so its positions mean other messages: \"dedupd lanes set-position %s %s 0\" has it read from its beginning",
			t.LogID, log, t.Lane.Source, t.Lane.Name)}
	}
	if !t.Ordered {
		if err := s.takeQueue(ctx, tx, queueRow{id, log, began}, t, &taken); err != nil {
			return taken, err
		}
	}
	if t.Ordered && row.created {
		if err := s.beginAgain(ctx, tx, id, t, &taken); err != nil {
			return taken, err
		}
		if err := s.beginAdded(ctx, tx, id, t, &taken); err != nil {
			return taken, err
		}
		began = &taken.Next
	}
	writer, byWorker := parseOrigin(t.OffsetMetadata) // a person's offset has no such note
	if t.Ordered && byWorker && writer.Scope != s.scope {
		taken.GroupOf = writer.Scope
	}
	if t.Ordered && !row.created && t.Committed >= 0 {
		switch {
		case t.Committed > taken.Next:
			taken.Rewound = true
		case t.Committed < taken.BrokerPosition && byWorker:
			taken.Outdated = true
		case t.Committed < taken.BrokerPosition && t.HonourReset:
			// Both columns, or the same reset is seen again at the next start. The
			// lane's clock goes back with it, to what isn't known yet: claims must
			// not expire before what is read again has passed them. A log that was cut
			// above is read from there again, by this.
			if err := tx.QueryRow(ctx, `UPDATE `+s.name("lanes")+` SET next_position = $2, broker_position = $2, stream_time = NULL, `+lowerBegan+`,
				incarnation = CASE WHEN cut_at >= $2 THEN `+newIncarnation+` ELSE incarnation END, cut_at = CASE WHEN cut_at < $2 THEN cut_at END
				WHERE id = $1 RETURNING began, incarnation, coalesce(cut_at, -1)`,
				id, t.Committed).Scan(&began, &taken.StreamID, &taken.Cut); err != nil {
				return taken, err
			}
			taken.Reset, taken.Next, taken.BrokerPosition = true, t.Committed, t.Committed
		case t.Committed > taken.BrokerPosition:
			// The last owner may have ended before it could tell.
			if _, err := tx.Exec(ctx, `UPDATE `+s.name("lanes")+` SET broker_position = $2 WHERE id = $1`, id, t.Committed); err != nil {
				return taken, err
			}
			taken.BrokerPosition = t.Committed
		}
	}
	if t.Ordered && began != nil {
		taken.OffsetMetadata = origin{Scope: s.scope, Source: t.Lane.Source, Began: *began, Epoch: taken.Epoch, Log: log}.String()
	}
	tried, err := s.openAttempts(ctx, tx, id, taken.Next)
	if err != nil {
		return taken, err
	}
	s.remember(t.Lane, id)
	s.suspicions.set(t.Lane, t.Ordered && (row.takes > suspectTakes || tried))
	return taken, nil
}

// takenRow is a lane's row as a take has left it, before what the broker tells of the
// lane is compared with it.
type takenRow struct {
	taken   lane.Assignment
	id      int32
	created bool
	takes   int
	log     string
	began   *int64
}

// takeRow makes this worker the owner of the lane's row, or makes the row. It gives
// message.ErrStale and message.ErrNoStart: see Take.
//
// A row that is there is locked first, and no other is inserted: ON CONFLICT DO UPDATE
// would draw a number of lanes.id for each take, and they end. A lost race for a new
// lane still costs one.
//
// The incarnation is of the log and of the row. A row that was forgotten may have
// been at a log of the same mark, of which a part was lost since: what is known by
// its place isn't taken for what stood there then. And all workers of a queue have
// the same one of the same log, whatever others have taken in between.
//
// A queue's positions begin again with another log.
//
// An epoch is the database's clock in microseconds, or one more than the
// last: it only ever rises, and one that was lost with a failover is not
// given out again, so that a worker from before can't pass for a new owner.
func (s *Store) takeRow(ctx context.Context, tx pgx.Tx, t lane.Acquire) (row takenRow, err error) {
	var partitions *int
	if t.Partition != nil {
		partitions = &t.Partition.Of
	}
	for {
		var how string
		var epochs []int64
		taken := &row.taken
		err := tx.QueryRow(ctx, s.takeSQL(), s.scope, t.Lane.Source, t.Lane.Name, t.LogID, partitions, t.BrokerGeneration, s.owner, takeGrace.Seconds(), t.Ordered, t.Start).
			Scan(&how, &row.id, &taken.Epoch, &taken.Next, &taken.BrokerPosition, &taken.StreamID, &row.takes, &taken.Checkpoint.Number, &taken.Checkpoint.Instance, &row.log, &row.began, &epochs, &taken.Cut)
		switch {
		case errors.Is(err, pgx.ErrNoRows) && t.Start < 0:
			return takenRow{}, lane.ErrNoStart
		case errors.Is(err, pgx.ErrNoRows):
			continue // another worker made the row in this moment
		case sqlstate.Of(err) == "2200H":
			return takenRow{}, fmt.Errorf("no number is left for a new lane; the schema's owner restarts the sequence at the first number of a range that no lane uses: ALTER TABLE %s ALTER COLUMN id RESTART WITH …: %w", s.name("lanes"), err)
		case err != nil:
			return takenRow{}, err
		case how == "stale":
			return takenRow{}, lane.ErrStale
		}
		taken.LeaderEpochs, taken.Reached, row.created = leaderEpochs(epochs), taken.Next, how == "made"
		return row, nil
	}
}

// takeSQL gives no row if another transaction made the lane's row after this
// statement began, or if there is none and it isn't known where the lane begins.
func (s *Store) takeSQL() string {
	return `
		WITH new AS MATERIALIZED (
			SELECT (extract(epoch FROM clock_timestamp()) * 1e6)::bigint AS epoch, $4::text || '/' || gen_random_uuid() AS incarnation, nullif($4::text, '') AS log),
		old AS MATERIALIZED (
			SELECT l.*, l.tableoid AS relation FROM ` + s.name("lanes") + ` l WHERE scope = $1 AND source = $2 AND lane = $3 FOR NO KEY UPDATE),
		taken AS (
			UPDATE ` + s.name("lanes") + ` AS l SET
				epoch             = CASE WHEN l.ordered THEN greatest(l.epoch + 1, new.epoch) ELSE l.epoch END,
				incarnation       = CASE WHEN l.moved AND l.cut_at IS NOT NULL THEN new.incarnation WHEN l.log <> new.log AND (l.moved OR NOT l.ordered) THEN $4 || '/' || right(l.incarnation, 36) ELSE l.incarnation END,
				log               = CASE WHEN l.log IS NULL OR l.moved OR NOT l.ordered THEN coalesce(new.log, l.log) ELSE l.log END,
				began             = CASE WHEN l.moved AND l.log <> $4 THEN l.next_position WHEN l.ordered OR coalesce(l.log = new.log, true) THEN l.began END,
				partitions        = coalesce(l.partitions, $5::integer),
				cut_at            = CASE WHEN NOT l.moved AND (l.ordered OR coalesce(l.log = new.log, true)) THEN l.cut_at END,
				next_position     = CASE WHEN l.ordered OR coalesce(l.log = new.log, true) THEN l.next_position ELSE 0 END,
				moved             = false,
				broker_generation = $6,
				owner             = $7,
				takes             = CASE WHEN l.ordered THEN l.takes + 1 ELSE 0 END,
				broker_position   = CASE WHEN l.ordered OR coalesce(l.log = new.log, true) THEN l.broker_position END,
				claimed_at        = now()
			FROM old, new
			WHERE l.id = old.id AND (l.broker_generation <= $6 OR greatest(l.updated_at, l.claimed_at) < now() - make_interval(secs => $8))
			RETURNING l.*, l.tableoid AS relation),
		made AS (
			INSERT INTO ` + s.name("lanes") + ` AS l (scope, source, lane, ordered, incarnation, epoch, broker_generation, owner, next_position, takes, log, began, partitions)
			SELECT $1, $2, $3, $9::boolean, new.incarnation, new.epoch, $6::bigint, $7, $10::bigint, $9::boolean::integer, new.log, CASE WHEN $9::boolean THEN $10::bigint END, $5::integer
			FROM new WHERE $10::bigint >= 0 AND NOT EXISTS (SELECT FROM old)
			ON CONFLICT (scope, source, lane) DO NOTHING
			RETURNING l.*, l.tableoid AS relation),
		lane AS (
			SELECT 'taken' AS how, * FROM taken UNION ALL SELECT 'made', * FROM made UNION ALL SELECT 'stale', * FROM old WHERE NOT EXISTS (SELECT FROM taken))
		SELECT how, id, epoch, next_position, coalesce(broker_position, -1), incarnation, takes, checkpoint, ` + s.name("instance") + `(relation), coalesce(log, ''), began, leader_epochs, coalesce(cut_at, -1)
		FROM lane`
}

// LogCut keeps that the log of a lane was cut below its position, or has an ordered
// lane go on there. That one is then taken anew, under a new incarnation: positions from the
// cut on are those of other messages, and ids or dead letters made of them would pass
// for what was read before. Messages with ids of their own are told by these.
//
// The error is a *message.FencedError when the epoch isn't the lane's any more.
func (s *Store) LogCut(ctx context.Context, cut lane.LogCut) error {
	set, which := `cut_at = $2`, ``
	if cut.Follow {
		which = ` AND ordered`
		// As SetPosition does it.
		set = `next_position = least(next_position, $2), broker_position = NULL, lag = NULL, cut_at = NULL, incarnation = ` + newIncarnation + `,
			stream_time = CASE WHEN $2 < next_position THEN NULL ELSE stream_time END, ` + lowerBegan
	}
	done, err := s.pool.Exec(ctx, `UPDATE `+s.name("lanes")+` SET `+set+` WHERE epoch = $1 AND scope = $3 AND source = $4 AND lane = $5`+which,
		cut.Epoch, cut.At, s.scope, cut.Lane.Source, cut.Lane.Name)
	switch {
	case err != nil:
		return fmt.Errorf("tell that the log of lane %s was cut: %w", cut.Lane, err)
	case done.RowsAffected() == 0:
		return &lane.FencedError{Lanes: []message.Lane{cut.Lane}}
	}
	return nil
}

// newIncarnation is another one of the same log: of its mark, and a number.
const newIncarnation = `left(incarnation, -36) || gen_random_uuid()`

// lowerBegan goes with an update that sets a lane's position to $2. A lane of which
// it isn't known where it began stays one.
const lowerBegan = `began = CASE WHEN $2 < began THEN $2 ELSE began END`

func (s *Store) remember(lane message.Lane, id int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.numbers[lane] = id
	s.lanes[id] = lane
}

// laneID is the number that claims know the lane by.
func (s *Store) laneID(lane message.Lane) (int32, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	id, ok := s.numbers[lane]
	if !ok {
		return 0, fmt.Errorf("lane %s was never taken", lane)
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

// sourceOf tells which source a lane number belongs to; empty where the lane is
// gone. It reads the database at most once for a lane of another worker.
func (s *Store) sourceOf(ctx context.Context, tx interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, id int32,
) (string, error) {
	s.mu.RLock()
	lane, ok := s.lanes[id]
	s.mu.RUnlock()
	if ok {
		return lane.Source, nil
	}
	err := tx.QueryRow(ctx, `SELECT source, lane FROM `+s.name("lanes")+` WHERE id = $1`, id).Scan(&lane.Source, &lane.Name)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", err
	}
	s.mu.Lock()
	s.lanes[id] = lane // without a name, where the lane is gone
	s.mu.Unlock()
	return lane.Source, nil
}

// refuseLoss is message.ErrLoss where a failover of the database could lose
// messages: a broker that deletes what it was told of can't be asked for it
// again. A synchronous standby has what it is told of, too.
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

// standing is where a lane's row stands.
type standing struct {
	epoch, next, checkpoint int64
	// elsewhere tells that a queue was taken in another instance of the database.
	elsewhere bool
}

// standings reads the rows of the batches' lanes.
func (s *Store) standings(ctx context.Context, batches []lane.Batch) ([]standing, error) {
	all := make([]standing, len(batches))
	for i, b := range batches {
		err := s.pool.QueryRow(ctx, `SELECT epoch, next_position, checkpoint, NOT ordered AND `+s.name("instance")+`(tableoid) <> $4 FROM `+s.name("lanes")+` WHERE scope = $1 AND source = $2 AND lane = $3`,
			s.scope, b.Lane.Source, b.Lane.Name, b.Checkpoint.Instance).Scan(&all[i].epoch, &all[i].next, &all[i].checkpoint, &all[i].elsewhere)
		if errors.Is(err, pgx.ErrNoRows) {
			all[i] = standing{epoch: -1, next: -1, checkpoint: -1} // forgotten, or lost with the database
		} else if err != nil {
			return nil, fmt.Errorf("read lane %s: %w", b.Lane, err)
		}
	}
	return all, nil
}

// Books are one lane's, as the view of the same name shows them.
type Books struct {
	Scope        string     `json:"scope"`
	Source       string     `json:"source"`
	Lane         string     `json:"lane"`
	Fetched      int64      `json:"fetched"`
	Applied      int64      `json:"applied"`
	Duplicates   int64      `json:"duplicates"`
	Redelivered  int64      `json:"redelivered"`
	Resent       int64      `json:"resent"`
	CrossSource  int64      `json:"cross_source"`
	Conflicts    int64      `json:"conflicts"`
	Dead         int64      `json:"dead"`
	NextPosition int64      `json:"next_position"`
	Lag          *int64     `json:"lag"`         // nil: not known
	StreamTime   *time.Time `json:"stream_time"` // nil: nothing committed yet
	Owner        string     `json:"owner"`
	UpdatedAt    time.Time  `json:"updated_at"`
}

// Books lists the scope's lanes with their books, by source and lane.
func (s *Store) Books(ctx context.Context) ([]Books, error) {
	rows, err := s.pool.Query(ctx, `SELECT * FROM `+s.name("books")+` WHERE scope = $1 ORDER BY source, lane`, s.scope)
	if err != nil {
		return nil, fmt.Errorf("read the books: %w", err)
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Books])
}
