package shape

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
)

// Sequence lands each number of a producer once. Producers leave numbers out, send their
// last ones again, and begin anew under a higher epoch.
var Sequence = &Shape{
	Name: "sequence", By: ByNumber, Ordered: true,
	Worker: `dedup:
  strategy: sequence
  sequence: {producer: json:producer, epoch: json:epoch, seq: json:seq}
sink:
  table:
    name: public.effects
    columns: {id: "header:message-id", source: "const:main", lane: lane, position: position, n: json:seq, payload: value}
`,
	Draw:   drawNumbers,
	Demand: demandMarks,
}

// numberID is the id that says a producer, its epoch and its number.
func numberID(producer string, epoch, number int64) string {
	return fmt.Sprintf("%s/%d/%d", producer, epoch, number)
}

// Number reads such an id.
func Number(id string) (producer string, epoch, number int64, ok bool) {
	parts := strings.Split(id, "/")
	if len(parts) != 3 {
		return "", 0, 0, false
	}
	epoch, err := strconv.ParseInt(parts[1], 10, 64)
	if err != nil {
		return "", 0, 0, false
	}
	number, err = strconv.ParseInt(parts[2], 10, 64)
	return parts[0], epoch, number, err == nil
}

func drawNumbers(rng *rand.Rand, partitions int) func() []Message {
	type producer struct {
		epoch int64
		sent  []int64 // its last numbers
	}
	producers := make([]producer, 40)
	message := func(p int, number int64, sentBefore int) Message {
		name, epoch := fmt.Sprint("producer-", p), producers[p].epoch
		return Message{
			ID: numberID(name, epoch, number), Copy: sentBefore, Partition: p % partitions,
			Value: fmt.Appendf(nil, `{"producer": %q, "epoch": %d, "seq": %d}`, name, epoch, number),
		}
	}
	return func() (all []Message) {
		i := rng.IntN(len(producers))
		p := &producers[i]
		next := int64(1)
		if len(p.sent) > 0 {
			next = p.sent[len(p.sent)-1] + 1
		}
		switch rng.IntN(200) {
		case 0:
			p.epoch, p.sent, next = p.epoch+1, nil, 1
		case 1:
			next += rng.Int64N(3) // it leaves some out
		}
		if rng.IntN(8) == 0 { // it had no answer, and sends its last ones again
			for _, number := range p.sent[rng.IntN(len(p.sent)+1):] {
				all = append(all, message(i, number, 1))
			}
		}
		p.sent = append(p.sent, next)
		p.sent = p.sent[max(0, len(p.sent)-10):]
		return append(all, message(i, next, 0))
	}
}

// demandMarks: each producer's mark is the highest of what has come by its lane.
func demandMarks(r *Run) {
	want := map[string]Mark{}
	for _, m := range r.Messages {
		if !m.Landed {
			continue
		}
		producer, epoch, number, _ := Number(m.ID)
		if at, ok := want[producer]; !ok || epoch > at.Epoch || epoch == at.Epoch && number > at.Number {
			want[producer] = Mark{producer, m.Lane, epoch, number}
		}
	}
	for _, mark := range r.Marks {
		if w, ok := want[mark.Producer]; !ok {
			r.wrong("%s has a mark, %+v, and nothing of it has landed", mark.Producer, mark)
		} else if mark != w {
			r.wrong("the mark is %+v, want %+v", mark, w)
		}
		delete(want, mark.Producer)
	}
	for _, producer := range slices.Sorted(maps.Keys(want)) {
		r.wrong("%s has no mark, want %+v", producer, want[producer])
	}
}
