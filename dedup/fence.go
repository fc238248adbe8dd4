package dedup

import (
	"fmt"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/dedup/internal/pipeline"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// advanceSteps move the lanes by advance(), which is the fence: it compares each lane's
// epoch and position with its row, and raises an error if another worker owns the lane, so
// that nothing is committed. Each lane moves once; several batches of a queue share its
// row. A step of before runs right before its lane's: everyone locks rows in one order.
func (s *Store) advanceSteps(batches []lane.Batch, clocks clocks, all []tally, before map[message.Lane]pipeline.Step) ([]pipeline.Step, error) {
	var steps []pipeline.Step
	for i := 0; i < len(batches); {
		b, sum := batches[i], all[i]
		j := i + 1
		// A batch of another epoch, or of another instance of the database, gets a step
		// of its own, which compares it with that.
		for ; j < len(batches) && batches[j].Lane == b.Lane && batches[j].Epoch == b.Epoch && batches[j].Checkpoint.Instance == b.Checkpoint.Instance; j++ {
			if b.Ordered {
				return nil, fmt.Errorf("bug: two batches of the ordered lane %s in one group", b.Lane)
			}
			for o, n := range all[j] {
				sum[o] += n
			}
			b.Next, b.Lag = max(b.Next, batches[j].Next), batches[j].Lag
			b.Checkpoint.Number = max(b.Checkpoint.Number, batches[j].Checkpoint.Number)
		}
		i = j
		l, err := s.laneID(b.Lane)
		if err != nil {
			return nil, err
		}
		var from, checkpoint, instance []byte
		if b.Ordered {
			from = pipeline.Int8(b.From)
		} else {
			checkpoint, instance = pipeline.Int8(b.Checkpoint.Number), []byte(b.Checkpoint.Instance)
		}
		if first, ok := before[b.Lane]; ok {
			steps = append(steps, first)
		}
		steps = append(steps, pipeline.Step{
			Name: "dedupd_advance",
			SQL:  `SELECT ` + s.name("advance") + `(` + advanceParams + `)`,
			OIDs: advanceOIDs,
			Params: [][]byte{
				pipeline.Int4(l), pipeline.Int8(b.Epoch), from, checkpoint, instance, pipeline.Int8(b.Next), pipeline.OptionalInt8(b.BrokerPosition), pipeline.Timestamptz(clocks[b.Lane]), pipeline.OptionalInt8(b.Lag),
				pipeline.Int8(sum[written]), pipeline.Int8(sum[alreadyPresent]), pipeline.Int8(sum[stale]), pipeline.Int8(sum[rejected]),
				pipeline.Int8(sum[redelivered]), pipeline.Int8(sum[resent]), pipeline.Int8(sum[crossSource]), pipeline.Int8(sum[conflict]), pipeline.Int8(sum[dead]), pipeline.Int8(sum[filtered]),
				epochPairs(lane.EpochsBelow(b.LeaderEpochs, b.Next)),
			},
		})
	}
	return steps, nil
}

// epochPairs encodes leader epochs as the lane's row stores them: NULL if none is known,
// since the epochs of an earlier position say nothing about this one.
func epochPairs(all []lane.LeaderEpoch) []byte {
	if len(all) == 0 {
		return nil
	}
	return pipeline.AppendInt8s(nil, 2*len(all), func(i int) int64 {
		if e := all[i/2]; i%2 == 0 {
			return int64(e.Epoch)
		} else {
			return e.From
		}
	})
}

// leaderEpochs decodes them.
func leaderEpochs(pairs []int64) (all []lane.LeaderEpoch) {
	for i := 0; i+1 < len(pairs); i += 2 {
		all = append(all, lane.LeaderEpoch{Epoch: int32(pairs[i]), From: pairs[i+1]})
	}
	return all
}

var advanceOIDs = []uint32{
	pgtype.Int4OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.TextOID, pgtype.Int8OID, pgtype.Int8OID, pgtype.TimestamptzOID, pgtype.Int8OID,
	pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID,
	pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID, pgtype.Int8OID,
	pgtype.Int8ArrayOID,
}

// advanceParams has the same types, for the server that prepares the statement.
const advanceParams = `$1::integer, $2::bigint, $3::bigint, $4::bigint, $5::text, $6::bigint, $7::bigint, $8::timestamptz, $9::bigint,
	$10::bigint, $11::bigint, $12::bigint, $13::bigint, $14::bigint, $15::bigint, $16::bigint, $17::bigint, $18::bigint, $19::bigint, $20::bigint[]`
