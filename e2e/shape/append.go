package shape

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
)

// Append is an event store, which is its own memory: nothing is claimed. Some messages expect
// a version that their stream isn't at. To a quarter of the streams an application appends,
// too.
var Append = &Shape{
	Name: "append", By: ByPosition, Ordered: true,
	Worker: `id: {from: header:message-id}
dedup: {strategy: position}
sink:
  table:
    name: public.target
    mode: append
    stream: stream
    version: version
    operation: op
    event_id: id
    expected: json:expected
    on_mismatch: ignore
    columns: {stream: json:stream, lane: lane, position: position}
`,
	Table: `CREATE TABLE public.target (id uuid PRIMARY KEY, stream text NOT NULL, version bigint NOT NULL, op text NOT NULL, lane text, position bigint, txn xid8 NOT NULL DEFAULT pg_current_xact_id());
CREATE UNIQUE INDEX ON public.target (stream, version);
CREATE UNIQUE INDEX ON public.target (stream, op)`,
	Draw: func(rng *rand.Rand, partitions int) func() []Message {
		var sent []Message
		versions := map[int]int{} // where streams are, as the producer sees it
		n := 0
		return func() []Message {
			return again(rng, &n, func(n int) Message {
				if n < len(sent) {
					return sent[n]
				}
				stream := 20*(n/400) + rng.IntN(20)
				expected := fmt.Sprint(versions[stream])
				switch rng.IntN(10) {
				case 0:
					expected = fmt.Sprint(versions[stream] + 1)
				case 1:
					expected = fmt.Sprint(max(0, versions[stream]-1))
				case 2, 3, 4, 5:
					expected = "null"
					fallthrough
				default:
					versions[stream]++
				}
				m := Message{ID: fmt.Sprint("id-", n), Partition: stream % partitions, Value: fmt.Appendf(nil, `{"stream": "account-%d", "expected": %s}`, stream, expected)}
				sent = append(sent, m)
				return m
			})
		}
	},
	Beside: func(rng *rand.Rand, n int) string {
		return fmt.Sprintf(`INSERT INTO public.target (id, stream, version, op)
			SELECT gen_random_uuid(), '%s', coalesce(max(version), 0) + 1, 'application-' || gen_random_uuid() FROM public.target WHERE stream = '%[1]s' ON CONFLICT DO NOTHING`,
			account(n, 4*rng.IntN(5)))
	},
	// The application is never long out of the way.
	Retries: true,
	Demand:  demandStreams,
}

// event is a row of the event store.
type event struct {
	version int64
	op      string
	message int // -1: the application's
}

// demandStreams: the events of a stream are numbered from 1 without a gap. Each message that
// found its stream as it expected is one of them, once, and no other is.
func demandStreams(r *Run) {
	type toAppend struct {
		message  int
		expected *int64
	}
	messages, events := map[string][]toAppend{}, map[string][]event{}
	landings, written := int64(0), int64(0)
	landed(r, func(i int, value struct {
		Stream   string
		Expected *int64
	},
	) {
		landings++
		messages[value.Stream] = append(messages[value.Stream], toAppend{i, value.Expected})
	})
	for _, row := range r.Rows {
		e := event{op: row["op"], message: -1}
		e.version, _ = strconv.ParseInt(row["version"], 10, 64)
		if !strings.HasPrefix(e.op, "application-") {
			written++
			if e.message = r.messageOf(row); e.message < 0 || r.Messages[e.message].ID != e.op {
				r.wrong("event %d of %s, by %s, is of %s %s, where the log has another message", e.version, row["stream"], e.op, row["lane"], row["position"])
				continue
			}
		}
		events[row["stream"]] = append(events[row["stream"]], e)
	}
	for stream, all := range events {
		slices.SortFunc(all, func(a, b event) int { return cmp.Compare(a.version, b.version) })
		last := -1
		for i, e := range all {
			if e.version != int64(i+1) {
				r.wrong("event %d of %s has number %d", i+1, stream, e.version)
			}
			if e.message >= 0 && e.message <= last {
				r.wrongOf(e.message, "it is event %d of %s, behind what came after it", e.version, stream)
			}
			last = max(last, e.message)
		}
		if len(messages[stream]) == 0 && last >= 0 {
			r.wrong("%s has events, and no messages", stream)
		}
	}
	for stream, all := range messages {
		done := map[string]bool{}
		have := map[int]event{}
		shared := false
		for _, e := range events[stream] {
			have[e.message] = e
			shared = shared || e.message < 0
		}
		at := int64(0)
		for _, m := range all {
			e, ok := have[m.message]
			id := r.Messages[m.message].ID
			fits := m.expected == nil || *m.expected == at
			if shared { // only the table knows where the stream was
				fits = m.expected == nil || ok && e.version == *m.expected+1
			}
			switch want := fits && !done[id]; {
			case want && !ok:
				r.wrongOf(m.message, "%s was at %d, and it is no event of it", stream, at)
			case !want && ok:
				r.wrongOf(m.message, "it is event %d of %s, which it isn't to be", e.version, stream)
			case ok && !shared && e.version != at+1:
				r.wrongOf(m.message, "it is event %d of %s, want %d", e.version, stream, at+1)
			}
			if ok {
				at++
				done[id] = true
			}
		}
	}
	if b := r.Books; b.Written != written || b.Written+b.AlreadyPresent+b.Rejected != landings || b.Stale != 0 || b.Filtered != 0 {
		r.wrong("the books say %+v of %d messages and %d events", b, landings, written)
	}
}

// texts reads an array as a row has it.
func texts(column string) (all []string) {
	_ = json.Unmarshal([]byte(column), &all) // none, then
	return all
}
