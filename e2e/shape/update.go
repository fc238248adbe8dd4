package shape

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// Update takes rows from one state to the next, beside an application that takes each seventh
// step. Each message expects a state. Those of some rows come by one lane, in order; those of
// others by all lanes, in any order, and many of these are rejected.
var Update = &Shape{
	Name: "update",
	Worker: `id: {from: header:message-id}
sink:
  table:
    name: public.target
    mode: update
    key: [id]
    expect: {version: "json:from"}
    on_mismatch: ignore
    columns: {id: json:id, version: "json:to", lane: lane, position: position}
`,
	// The trigger notes by whom each step was made.
	Table: `CREATE TABLE public.target (id text PRIMARY KEY, version bigint NOT NULL, lane text, position bigint, path text NOT NULL DEFAULT '');
INSERT INTO public.target SELECT 'account-' || i, 0 FROM generate_series(0, 9999) i;
CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  NEW.path := OLD.path || ' ' || coalesce(NEW.lane || '@' || NEW.position, 'application');
  RETURN NEW;
END $$;
CREATE TRIGGER note BEFORE UPDATE ON public.target FOR EACH ROW EXECUTE FUNCTION public.note()`,
	Draw: func(rng *rand.Rand, partitions int) func() []Message {
		n := 0
		return func() []Message {
			return again(rng, &n, func(n int) Message {
				id, step := account(n, noise(n+1)), 0
				for before := n - n%400; before < n; before++ {
					if account(before, noise(before+1)) == id {
						step++
					}
				}
				lane := noise(len(id) + int(id[len(id)-1]))
				if id[len(id)-1]%4 == 0 {
					lane = noise(n)
				}
				from := step + step/applicationsStep // the application takes the others
				return Message{ID: fmt.Sprint("id-", n), Partition: lane % partitions, Value: fmt.Appendf(nil, `{"id": %q, "from": %d, "to": %d}`, id, from, from+1)}
			})
		}
	},
	Beside: func(rng *rand.Rand, n int) string {
		return fmt.Sprintf(`UPDATE public.target SET version = version + 1, lane = NULL, position = NULL WHERE id = '%s' AND version %% %d = %d`,
			account(n, rng.Int()), applicationsStep+1, applicationsStep)
	},
	Demand: demandPaths,
}

// applicationsStep is the first step that the application takes.
const applicationsStep = 6

// demandPaths: each row has come to its state step by step, each step by the application or
// by a message that expected the state before it. Where order is known, so are the first
// steps.
func demandPaths(r *Run) {
	type step struct {
		ID   string
		From int
	}
	steps, made := map[int]step{}, map[int]bool{} // by message
	of := map[string][]int{}
	landed(r, func(i int, s step) {
		steps[i] = s
		of[s.ID] = append(of[s.ID], i)
	})
	written := int64(0)
	for id, row := range r.rowsByID() {
		path := strings.Fields(row["path"])
		if row["version"] != fmt.Sprint(len(path)) {
			r.wrong("%s has version %s after %d steps", id, row["version"], len(path))
		}
		var messages []int
		for version, by := range path {
			lane, position, _ := strings.Cut(by, "@")
			i := r.messageOf(Row{"lane": lane, "position": position})
			switch s, known := steps[i]; {
			case by == "application" && version%(applicationsStep+1) == applicationsStep:
				continue
			case by == "application" || !known:
				r.wrong("the step of %s from version %d is by %s, which didn't land", id, version, by)
			case s.ID != id || s.From != version:
				r.wrongOf(i, "it took %s from version %d, and expected %s at %d", id, version, s.ID, s.From)
			case made[i]:
				r.wrongOf(i, "it was applied twice")
			}
			made[i] = true
			messages = append(messages, i)
			written++
		}
		if first := firstSteps(r, of[id], func(i int) int { return steps[i].From }); len(messages) < len(first) || !slices.Equal(messages[:len(first)], first) {
			r.wrong("the steps of %s are by the messages %v, and should begin with %v", id, messages, first)
		}
	}
	r.booked(Books{Written: written, Rejected: int64(len(steps)) - written})
}

// firstSteps are the messages of a row that must be applied before the application comes. It
// is known if all come by one lane with an order.
func firstSteps(r *Run, messages []int, from func(int) int) (first []int) {
	for _, i := range messages {
		if !r.Ordered || r.Messages[i].Lane != r.Messages[messages[0]].Lane {
			return nil
		}
		if from(i) == len(first) && len(first) < applicationsStep {
			first = append(first, i)
		}
	}
	return first
}
