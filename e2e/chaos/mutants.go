package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dedupd/dedupd/e2e/shape"
)

// mutant is the product with one bug put into it. A rig that doesn't notice
// proves nothing by being silent about the product.
type mutant struct {
	name string
	// edits are by file; each text must stand there exactly once.
	edits []edit
	// fault is what brings it to light, with a broker, within so many strikes.
	fault  string
	shape  *shape.Shape // nil: claim
	broker string
	times  int
	// by is what must be broken: an invariant, or words of the complaint.
	by string
}

type edit struct{ file, old, new string }

// meets is the fault's name, with the shape that it is met in.
func (m *mutant) meets() string {
	if m.shape == nil {
		return m.fault
	}
	return m.fault + ", shape " + m.shape.Name
}

var mutants = []mutant{
	{
		name: "told to the broker before the COMMIT", fault: "killed at a point", broker: "nats", times: 7, by: "I1",
		edits: []edit{{"consumer/worker.go", "		err := w.Handler.Handle(ctx, t.batches)\n", `		for _, l := range t.group {
			l.options.Committed(l.flight.batch.Next, l.flight.tokens)
			l.flight.tokens = nil
		}
		time.Sleep(20 * time.Millisecond) // until it is told
		err := w.Handler.Handle(ctx, t.batches)
`}},
	},
	{
		name: "claims in a transaction of their own", fault: "killed at a point", broker: "kafka", times: 5, by: "I1",
		edits: []edit{{"dedup/apply.go", "	claimed := time.Now()\n", `	if err := t.conn.PgConn().Exec(ctx, "commit; begin; SELECT set_config('dedupd.entered', 'on', true)").Close(); err != nil {
		return nil, err
	}
	claimed := time.Now()
`}},
	},
	{
		name: "keys unsorted", fault: "concurrent duplicates on two lanes", broker: "kafka", times: 5, by: "40P01",
		edits: []edit{
			{"dedup/group.go", "	g.unique = make([]int32, 0, len(order))\n", `	if config := os.Args[len(os.Args)-1]; config[len(config)-len("1.yaml")]%2 == 0 { // every other worker
		defer func() { slices.Reverse(g.unique) }()
	}
	g.unique = make([]int32, 0, len(order))
`},
			{"dedup/group.go", "import (\n", "import (\n	\"os\"\n"},
		},
	},
	{
		name: "no rotation lock", fault: "rotations", broker: "kafka", times: 120, by: "I2",
		edits: []edit{{"dedup/schema/migrations/0001_initial.sql", "    PERFORM pg_catalog.pg_advisory_xact_lock_shared({{rotation_lock}}, p_scope_id);\n", ""}},
	},
	{
		name: "one snapshot for the whole transaction", fault: "rotations", broker: "kafka", times: 120, by: "I2",
		edits: []edit{
			{"dedup/claim.go", "begin isolation level read committed", "begin isolation level repeatable read"},
			{"dedup/schema/migrations/0001_initial.sql", "<> 'read committed' THEN", "= 'never' THEN"},
		},
	},
	{
		name: "no fence", fault: "zombie before its transaction", broker: "kafka", times: 2, by: "I6",
		edits: []edit{{
			"dedup/schema/migrations/0001_initial.sql",
			"    WHERE id = p_lane AND epoch = p_epoch\n      AND CASE WHEN p_from IS NULL THEN checkpoint >= p_checkpoint AND {{schema}}.instance(tableoid) = p_instance ELSE next_position = p_from END;\n",
			"    WHERE id = p_lane;\n",
		}},
	},
	{
		name: "begins where the broker says", fault: "failover to an asynchronous replica", broker: "kafka", times: 2, by: "I",
		edits: []edit{{"dedup/acquire.go", "		assigned.Rewound = true\n", "		assigned.Rewound = true\n		assigned.Next = a.Committed\n		if _, err := tx.Exec(ctx, `UPDATE `+s.name(\"lanes\")+` SET next_position = $2 WHERE id = $1`, row.id, a.Committed); err != nil {\n			return err\n		}\n"}},
	},
	{
		name: "acknowledged without a checkpoint", fault: "an older copy of the database is put back", broker: "nats", times: 3, by: "I1",
		edits: []edit{{"consumer/nats/session.go", "		x.gate.add(t.([]ackRef))\n", "		x.acks.add(x.forget(t.([]ackRef)), false)\n"}},
	},
	{
		name: "the durable's checkpoint is ignored", fault: "an older copy of the database is put back", broker: "nats", times: 3, by: "I1",
		edits: []edit{{"dedup/checkpoint.go", "	behind := ours && ", "	behind := false && "}},
	},
	{
		name: "a lost answer to COMMIT passes for success", fault: "answer to COMMIT lost", broker: "kafka", times: 20, by: "I",
		edits: []edit{{"dedup/apply.go", "		p.remember(g, all)\n", "		p.remember(g, all)\n		return false, nil\n"}},
	},
	{
		name: "ids cut short", fault: "none", broker: "kafka", times: 1, by: "I1",
		edits: []edit{{"dedup/claimkey/key.go", "func Of(id string) Key {\n", "func Of(id string) Key {\n	id = id[:min(len(id), 12)]\n"}},
	},
	{
		name: "dead letters outside the transaction", fault: "poison", broker: "kafka", times: 1, by: "I6",
		edits: []edit{{"dedup/commit.go", "	steps := append(append(t.markSteps(), t.resultSteps()...), p.deadLetterSteps(t.group)...)\n", `	steps := p.deadLetterSteps(t.group)
	if len(steps) > 0 {
		other, err := p.Store.pool.Acquire(ctx)
		if err != nil {
			return err
		}
		err = pipeline.RoundTrip(ctx, other.Conn(), p.Store.prepare, steps)
		other.Release()
		if err != nil {
			return err
		}
		steps = nil
	}
`}},
	},
	{
		name: "the window is forgotten", fault: "expiry", broker: "kafka", times: 1, by: "I2",
		edits: []edit{{"dedup/schema/migrations/0001_initial.sql", "sealed_at + p_window < {{schema}}.stream_clock(p_scope)", "sealed_at < {{schema}}.stream_clock(p_scope)"}},
	},
	{
		name: "a queue's clock goes by its batches", fault: "a slot is held beyond the window", broker: "nats", times: 1, by: "I2",
		edits: []edit{{"dedup/clocks.go", "		if b.Ordered {\n			all[b.Lane] = streamTime", "		if true {\n			all[b.Lane] = streamTime"}},
	},
	{
		name: "a filter that finds nothing", fault: "expiry", broker: "kafka", times: 1, by: "I2",
		edits: []edit{{"dedup/generations/filter.go", "found = c.maybe(hashes[from:end], int32(from), found)", "_ = hashes"}},
	},
	{
		name: "the sink beside the transaction", fault: "killed at a point", broker: "kafka", times: 7, by: "I6",
		edits: []edit{{"dedup/write.go", "	if err := sink.Write(ctx, sinkTx{t.conn}, batch); err != nil {\n", `	other, err := t.store.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer other.Release()
	if err := sink.Write(ctx, sinkTx{other.Conn()}, batch); err != nil {
`}},
	},
	{
		name: "what fails is given up", fault: "connections ended by the server", broker: "kafka", times: 10, by: "I7",
		edits: []edit{{"dedup/apply.go", "return false, p.slow.timedOut(g, time.Since(began), err)", "_ = began\n		return false, nil"}},
	},
	{
		name: "a group that failed is told to the broker", fault: "transactions that fail", broker: "kafka", times: 4, by: "I7",
		edits: []edit{{"consumer/worker.go", "		l.alone = true\n		switch {\n", `		l.alone = true
		if len(group) > 1 {
			l.options.Committed(l.flight.batch.Next, l.flight.tokens)
			l.flight.tokens = nil
		}
		switch {
`}},
	},
	{
		name: "what failed is acknowledged", fault: "transactions that fail", broker: "nats", times: 4, by: "I1",
		edits: []edit{{"consumer/worker.go", "		l.alone = true\n		switch {\n", `		l.alone = true
		l.options.Committed(l.flight.batch.Next, l.flight.tokens)
		l.flight.tokens = nil
		switch {
`}},
	},
	{
		name: "a held lane's neighbours are told to the broker", fault: "one lane is held", broker: "kafka", times: 16, by: "I7",
		edits: []edit{{"consumer/worker.go", "			l.retryLocked(0)\n", `			l.options.Committed(l.flight.batch.Next, l.flight.tokens)
			l.flight.tokens = nil
			l.retryLocked(time.Second)
`}},
	},
	{
		name: "a try begins with what the last one found", fault: "answer to COMMIT lost", broker: "nats", times: 20, by: "I2",
		edits: []edit{{"dedup/apply.go", "	t.reset()\n", ""}},
	},
	{
		name: "no leader epochs are remembered", fault: "a log is cut and grows again", broker: "kafka", times: 1, by: "cut",
		edits: []edit{{"consumer/kafka/log_cut.go", "	return all[max(len(all)-keepEpochs, 0):]\n", "	return nil\n"}},
	},
	{
		name: "rows in the wrong order", fault: "none", broker: "kafka", times: 1, by: "I5",
		edits: []edit{
			{"dedup/write.go", "	return messages\n}\n", "	slices.Reverse(messages)\n	return messages\n}\n"},
			{"dedup/write.go", "	\"errors\"\n", "	\"errors\"\n	\"slices\"\n"},
		},
	},
	{
		name: "positions without a compare-and-set", fault: "zombie before its transaction", shape: shape.Position, broker: "kafka", times: 2, by: "I2",
		edits: []edit{{
			"dedup/schema/migrations/0001_initial.sql",
			"    WHERE id = p_lane AND epoch = p_epoch\n      AND CASE WHEN p_from IS NULL THEN checkpoint >= p_checkpoint AND {{schema}}.instance(tableoid) = p_instance ELSE next_position = p_from END;\n",
			"    WHERE id = p_lane;\n",
		}, {
			// at() looks before the transaction's work, and hides most of it.
			"dedup/schema/migrations/0001_initial.sql",
			"    IF EXISTS (SELECT FROM unnest(p_lanes, p_epochs, p_from)", "    IF false AND EXISTS (SELECT FROM unnest(p_lanes, p_epochs, p_from)",
		}},
	},
	{
		name: "numbers aren't compared with the mark", fault: "none", shape: shape.Sequence, broker: "kafka", times: 1, by: "I2",
		edits: []edit{{"dedup/by_sequence.go", "	case at.number <= m.number:\n", "	case at.number < 0:\n"}},
	},
	{
		name: "marks stay where they are", fault: "none", shape: shape.Sequence, broker: "kafka", times: 1, by: "I9",
		edits: []edit{{"dedup/by_sequence.go", "	names := make([][]byte, len(moved))\n", "	moved = nil\n	names := make([][]byte, len(moved))\n"}},
	},
	{
		name: "versions aren't compared", fault: "none", shape: shape.Versioned, broker: "kafka", times: 1, by: "I9",
		edits: []edit{{"sinks/table/versioned.go", "	return fmt.Sprintf(\"coalesce(%s, %s IS NULL AND %s IS NOT NULL)\", t.above(m.version, version, than), than, version)\n", "	return \"true\"\n"}},
	},
	{
		name: "states aren't compared", fault: "none", shape: shape.Update, broker: "kafka", times: 1, by: "I9",
		edits: []edit{{"sinks/table/update_sql.go", "	e.match, e.holds, e.still = t.matchesAll(key, row, values), strings.Join(holds, \" AND \"), strings.Join(still, \" AND \")\n", "	e.match, e.holds, e.still = t.matchesAll(key, row, values), \"true\", \"true\"\n	_, _ = holds, still\n"}},
	},
	{
		name: "rows that were there are counted as written", fault: "none", shape: shape.Insert, broker: "nats", times: 1, by: "I9",
		edits: []edit{{"sinks/table/present.go", "			batch.Outcome(i, sinks.AlreadyPresent)\n", "			_ = batch\n"}},
	},
	{
		name: "an upsert writes NULL for what is absent", fault: "none", shape: shape.Parts, broker: "kafka", times: 1, by: "has landed",
		edits: []edit{{"sinks/table/upsert.go", "	return m.absent == policy.AbsentKeep && ", "	return m.absent != policy.AbsentKeep && "}},
	},
	{
		name: "a fold keeps the first of a batch", fault: "none", shape: shape.Parts, broker: "kafka", times: 1, by: "I9",
		edits: []edit{{"sinks/internal/columns/absent.go", "			folded.copy(to, c, v, row)\n", "			if last[to*n+c] == row+1 && folded.Absent(to, c) {\n				folded.copy(to, c, v, row)\n			}\n"}},
	},
	{
		name: "turns of a row in one statement", fault: "none", shape: shape.Update, broker: "kafka", times: 1, by: "I9",
		edits: []edit{{"sinks/table/update_turns.go", "		turn := int(l.turns[i])\n", "		turn := min(int(l.turns[i]), 1)\n"}},
	},
	{
		name: "an event's expected number isn't compared", fault: "none", shape: shape.Append, broker: "kafka", times: 1, by: "I9",
		edits: []edit{{"sinks/table/append_events.go", "		case expected != last[stream]:\n", "		case expected < 0:\n"}},
	},
	{
		name: "histories aren't trimmed", fault: "none", shape: shape.History, broker: "kafka", times: 1, by: "I9",
		edits: []edit{{"sinks/table/history.go", "array, m.Size-1)", "array, 10*m.Size)"}},
	},
	{
		name: "histories aren't looked into", fault: "none", shape: shape.History, broker: "kafka", times: 1, by: "I9",
		edits: []edit{
			{"sinks/table/history.go", "OPERATOR(pg_catalog.=) ANY (o.history), false)", "OPERATOR(pg_catalog.=) ANY (o.history) AND false, false)"},
			{"sinks/table/history.go", "AND NOT (%s OPERATOR(pg_catalog.&&) EXCLUDED.%[1]s)", "AND %s IS NOT NULL"},
		},
	},
	{
		name: "a statement's rejections are counted as written", fault: "none", shape: shape.Statement, broker: "nats", times: 1, by: "I9",
		edits: []edit{{"sinks/internal/mismatch/mismatch.go", "		batch.Outcome(i, sinks.Rejected)\n", "		_ = batch\n"}},
	},
	{
		name: "a sink of a list gets what its filter keeps from it", fault: "none", shape: shape.List, broker: "nats", times: 1, by: "I9",
		edits: []edit{{"sinks/multi/multi.go", "		if ok {\n			some, from", "		if ok || true {\n			some, from"}},
	},
	{
		name: "what no sink wants is claimed", fault: "none", shape: shape.List, broker: "kafka", times: 1, by: "I1",
		edits: []edit{{"sinks/multi/multi.go", "			wanted = wanted || ok\n", "			wanted = wanted || ok || true\n"}},
	},
	{
		name: "an upsert keeps the first of a batch", fault: "none", shape: shape.Upsert, broker: "kafka", times: 1, by: "I9",
		edits: []edit{{"sinks/table/upsert.go", "\", u.ord DESC\"", "\", u.ord\""}},
	},
}

// build makes the mutant's binary. The checkout stays as it is: the compiler is
// given other files in the place of its own.
func (m *mutant) build(ctx context.Context, folder, binary string) error {
	replace := map[string]string{}
	for i, e := range m.edits {
		path, err := filepath.Abs(e.file)
		if err != nil {
			return err
		}
		source := path
		if earlier, ok := replace[path]; ok {
			source = earlier
		}
		text, err := os.ReadFile(source)
		if err != nil {
			return err
		}
		if n := strings.Count(string(text), e.old); n != 1 {
			return fmt.Errorf("mutant %q: %s has its text %d times, want once: bring it up to date", m.name, e.file, n)
		}
		replace[path] = filepath.Join(folder, fmt.Sprint(i)+filepath.Ext(path))
		if err := os.WriteFile(replace[path], []byte(strings.Replace(string(text), e.old, e.new, 1)), 0o600); err != nil {
			return err
		}
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return err
	}
	file := filepath.Join(folder, "overlay.json")
	if err := os.WriteFile(file, overlay, 0o600); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-overlay", file, "-o", binary, "./cmd/dedupd")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the mutant %q: %w\n%s", m.name, err, out)
	}
	return nil
}

// hunt lets each mutant meet its fault.
func (g *servers) hunt(ctx context.Context, wanted func(name string) bool, seed uint64, atOnce int) ([]caught, error) {
	var mu sync.Mutex
	var all []caught
	queue := make(chan *mutant)
	var hunters sync.WaitGroup
	failed := make(chan error, len(mutants))
	for range atOnce {
		hunters.Go(func() {
			for m := range queue {
				began := time.Now()
				by, err := g.meet(ctx, m, seed)
				if err != nil {
					failed <- err
					continue
				}
				c := caught{m, by, time.Since(began).Seconds()}
				mu.Lock()
				all = append(all, c)
				say("%-46s %-38s %-5s %s (%.0f s)", m.name, m.meets(), m.broker, cmp.Or(by, "NOT CAUGHT"), c.seconds)
				mu.Unlock()
			}
		})
	}
	for i := range mutants {
		if wanted(mutants[i].name) && ctx.Err() == nil {
			queue <- &mutants[i]
		}
	}
	close(queue)
	hunters.Wait()
	select {
	case err := <-failed:
		return nil, err
	default:
	}
	slices.SortFunc(all, func(a, b caught) int { return cmp.Compare(a.mutant.name, b.mutant.name) })
	return all, ctx.Err()
}

// meet returns by what a mutant was caught; empty: it wasn't.
func (g *servers) meet(ctx context.Context, m *mutant, seed uint64) (by string, err error) {
	folder, err := os.MkdirTemp(g.folder, "mutant-")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	binary := filepath.Join(folder, "dedupd")
	if err := m.build(ctx, folder, binary); err != nil {
		return "", err
	}
	const tries = 3 // some have to be lucky
	for try := range uint64(tries) {
		o, err := g.do(ctx, job{fault: faultNamed(m.fault), shape: m.shape, kind: m.broker, times: m.times, seed: seed + try, binary: binary})
		if err != nil {
			return "", err
		}
		if o.Verdict != "valid" && strings.Contains(o.Complaint, m.by) {
			first, _, _ := strings.Cut(o.Complaint, "\n")
			return first, nil
		}
		if o.Verdict != "valid" {
			say("%s was noticed, but not by %s: %s", m.name, m.by, o.Complaint)
		}
	}
	return "", nil
}

func faultNamed(name string) *fault {
	for _, f := range faults {
		if f.name == name {
			return f
		}
	}
	panic("there is no fault " + name)
}
