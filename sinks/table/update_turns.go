package table

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dedupd/dedupd/sinks"
	"github.com/dedupd/dedupd/sinks/internal/columns"
	"github.com/dedupd/dedupd/sinks/internal/mismatch"
)

// lockedRows is what the first statement has found. Messages are numbers from 1.
type lockedRows struct {
	messages int64
	found    []int64 // the first messages of the rows that are there
	places   []pgtype.TID
	// later are the messages that aren't the first of their row, with their turns and the first
	// message of the row.
	later, turns, firsts []int64
	states               []byte
}

// turnsOf are the messages of each turn, by their indexes in a batch of n. Those of rows that
// aren't there have none but the first.
func (l *lockedRows) turnsOf(n int) (all [][]int, without []int) {
	isFound, isLater := make([]bool, n), make([]bool, n)
	for _, ord := range l.found {
		isFound[ord-1] = true
	}
	all = [][]int{make([]int, 0, n)}
	for i, ord := range l.later {
		isLater[ord-1] = true
		turn := int(l.turns[i])
		if !isFound[l.firsts[i]-1] {
			without = append(without, int(ord-1))
			continue
		}
		for len(all) < turn {
			all = append(all, nil)
		}
		all[turn-1] = append(all[turn-1], int(ord-1))
	}
	for i := range n {
		if !isLater[i] {
			all[0] = append(all[0], i)
		}
	}
	return all, without
}

// placesOf are the places of the rows of the first turn.
func (l *lockedRows) placesOf(n int, turn []int) []pgtype.TID {
	all, some := make([]pgtype.TID, n), make([]pgtype.TID, len(turn))
	for i, ord := range l.found {
		all[ord-1] = l.places[i]
	}
	for i, at := range turn {
		some[i] = all[at]
	}
	return some
}

// mostTurns is how many turns are sent at once.
const mostTurns = 256

// takeTurns updates the rows, turn by turn, and settles the messages that didn't find their
// row as they expected.
func (w *updateWriter) takeTurns(ctx context.Context, tx sinks.Tx, batch *sinks.Batch, values *columns.Values, l *lockedRows) error {
	n := len(batch.Messages())
	switch {
	case l.messages == 0:
		return errChanged
	case l.messages != int64(n):
		return fmt.Errorf("the columns of sink.table.key find more than one row for a message (%d rows for %d messages); name columns that identify a row", l.messages, n)
	}
	r := &turnResults{applied: make([]bool, n), why: make(map[int]string)}
	if err := r.read(w.m.expected, l.states, nil); err != nil {
		return err
	}
	turns, without := l.turnsOf(n)
	for first := 0; first < len(turns); first += mostTurns {
		var b pgx.Batch
		b.Queue("SET LOCAL enable_seqscan = off")
		if first > 0 || len(turns) > 1 || !w.places {
			b.Queue("SET LOCAL plan_cache_mode = force_custom_plan") // for the table as it is now
		}
		for i, turn := range turns[first:min(first+mostTurns, len(turns))] {
			some := values
			if len(turn) < n {
				some = values.Rows(turn)
			}
			var places []pgtype.TID
			if first+i == 0 && w.places {
				places = l.placesOf(n, turn)
			}
			if first+i > 0 {
				w.queueStates(&b, some, turn, r)
			}
			q := w.updating(some, places)
			b.Queue(q.sql, q.args...).QueryRow(func(row pgx.Row) error {
				var done []int64
				err := row.Scan(&done)
				for _, ord := range done {
					r.applied[turn[ord-1]] = true
				}
				return err
			})
		}
		if first+mostTurns >= len(turns) && len(without) > 0 {
			w.queueStates(&b, values.Rows(without), without, r)
		}
		b.Queue("SET LOCAL enable_seqscan = DEFAULT")
		b.Queue("SET LOCAL plan_cache_mode = DEFAULT")
		w.m.queueTargets(&b, w.p)
		if err := tx.SendBatch(ctx, &b).Close(); err != nil {
			return err
		}
	}
	if err := w.lookAgain(ctx, tx, values, l); err != nil {
		return err
	}
	return w.settle(batch, r)
}

// lookAgain looks once more for the rows that weren't found. A row that is replaced while its
// lock is waited for isn't seen: not the old one, which is gone, nor the new one, which the
// statement's snapshot doesn't have. Nor is one that has just been added. By then the messages
// of its later turns were passed over.
func (w *updateWriter) lookAgain(ctx context.Context, tx sinks.Tx, values *columns.Values, l *lockedRows) error {
	missing := make([]int, 0, int(l.messages)-len(l.found))
	known := make([]bool, l.messages)
	for _, ord := range slices.Concat(l.found, l.later) {
		known[ord-1] = true
	}
	for i, is := range known {
		if !is {
			missing = append(missing, i)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	var there bool
	var b pgx.Batch
	b.Queue("SET LOCAL enable_seqscan = off")
	b.Queue(w.there, values.Rows(missing).Of(w.compared).Args()...).QueryRow(func(row pgx.Row) error { return row.Scan(&there) })
	b.Queue("SET LOCAL enable_seqscan = DEFAULT")
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	if there {
		return meanwhile("somebody else has added or replaced a row of this batch meanwhile")
	}
	return nil
}

// queueStates finds out which messages of a turn don't find their row as they expect.
func (w *updateWriter) queueStates(b *pgx.Batch, values *columns.Values, turn []int, r *turnResults) {
	if !w.explains {
		return
	}
	b.Queue(w.states, values.Of(w.compared).Args()...).QueryRow(func(row pgx.Row) error {
		var states []byte
		return errors.Join(row.Scan(&states), r.read(w.m.expected, states, turn))
	})
}

// settle settles the messages that weren't applied.
func (w *updateWriter) settle(batch *sinks.Batch, r *turnResults) error {
	var refused []error
	for i, applied := range r.applied {
		if !applied {
			why := cmp.Or(r.why[i], "the row is as it expects, but a trigger, rule or policy of the table left it unchanged")
			refused = append(refused, mismatch.Settle(batch, i, w.m.onMismatch, fmt.Errorf("%s; sink.table.on_mismatch is %s", why, w.m.onMismatch)))
		}
	}
	return errors.Join(refused...)
}

// turnResults is what became of the messages.
type turnResults struct {
	applied []bool
	why     map[int]string // not, by their indexes
}

// read reads the states that the statements tell, of a turn; nil: of the whole batch.
func (r *turnResults) read(expected []columns.Column, states []byte, turn []int) error {
	if states == nil {
		return nil
	}
	var all [][]*string // ord, found, and for each column what is expected and what is found
	if err := json.Unmarshal(states, &all); err != nil {
		return fmt.Errorf("read the states of rows: %w", err)
	}
	for _, s := range all {
		ord, err := strconv.Atoi(*s[0])
		if err != nil {
			return fmt.Errorf("read the states of rows: %w", err)
		}
		at := ord - 1
		if turn != nil {
			at = turn[at]
		}
		want, have := make([]string, len(expected)), make([]string, len(expected))
		for i, e := range expected {
			want[i], have[i] = shown(e.Name, s[2+2*i]), shown(e.Name, s[3+2*i])
		}
		r.why[at] = "it expects " + listed(want) + "; "
		if s[1] == nil {
			r.why[at] += "there is no row with its key"
		} else {
			r.why[at] += "its row has " + listed(have)
		}
	}
	return nil
}

// shown is a column's value in a reason.
func shown(column string, value *string) string {
	if value == nil {
		return column + " = NULL"
	}
	text, more := *value, ""
	if r := []rune(text); len(r) > mostShown {
		text, more = string(r[:mostShown]), "…"
	}
	return column + " = " + strconv.Quote(text) + more
}

// mostListed is how many columns a reason lists.
const mostListed = 8

func listed(all []string) string {
	if n := len(all) - mostListed; n > 0 {
		return strings.Join(all[:mostListed], ", ") + fmt.Sprintf(" and %d more", n)
	}
	return strings.Join(all, ", ")
}
