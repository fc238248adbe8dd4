// Package shape has the shapes of runs: ways of being idempotent, a file each. Those who
// drive workers take from a shape what the workers are told, what producers send and the
// sink's table; those who judge a run take what the table must hold after it.
//
// It knows of the product only what a user does.
package shape

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
)

// Shape is one way of being idempotent.
type Shape struct {
	Name string
	// By is what makes two messages the same.
	By By
	// Ordered: its lanes need an order, which queues don't have.
	Ordered bool
	// Worker is the part of a worker's configuration that is the shape's: id, dedup, sink.
	Worker string
	// Table makes the sink's table, Target. Empty: the sink inserts into the judge's own,
	// public.effects.
	Table string
	// Draw begins a producer. Each call of what it returns is what is sent next, at once and in
	// this order. Nil: whoever drives the run sends ids of his own.
	Draw func(rng *rand.Rand, partitions int) func() []Message
	// Beside, unless nil, is SQL of an application that writes to the table beside the
	// workers, while the nth message is sent.
	Beside func(rng *rand.Rand, n int) string
	// Filtered, unless nil, tells whether no sink wants a message.
	Filtered func(value []byte) bool
	// Retries: workers may get in each other's way, by deadlocks too, and try again.
	Retries bool
	// Demand, unless nil, finds what is wrong with the table after a run.
	Demand func(*Run)
}

// By is what makes two messages the same.
type By int

const (
	// ByID is by the id that they carry.
	ByID By = iota
	// ByPosition is by nothing: each position of the log is a message of its own.
	ByPosition
	// ByNumber is by the producer, its epoch and its number. The id says all three, as
	// numberID makes it.
	ByNumber
)

// Target is the sink's table.
const Target = "public.target"

// All are the shapes; the first is what runs are unless they ask for another.
var All = []*Shape{Claim, Position, Sequence, Insert, Versioned, Upsert, Parts, Update, Append, History, Statement, List}

// Setup is SQL for a database that the judge has prepared. What comes into its own table is
// judged by its very bytes; n is what a run may make poison by.
func (s *Shape) Setup() string {
	return `ALTER TABLE public.effects ADD n bigint, ADD payload bytea, DROP sum,
	ADD sum text GENERATED ALWAYS AS (encode(sha256(payload), 'hex')) STORED;
` + s.Table
}

// Named finds a shape.
func Named(name string) (*Shape, error) {
	var names []string
	for _, s := range All {
		if s.Name == name {
			return s, nil
		}
		names = append(names, s.Name)
	}
	return nil, fmt.Errorf("there is no shape %s: the shapes are %s", name, strings.Join(names, ", "))
}

// Message is one to be sent. Its id goes into the header message-id.
type Message struct {
	ID        string
	Copy      int // 0 is the first
	Partition int
	Value     []byte
}

// Run is what a shape judges: a finished run, as log, table and books have it.
type Run struct {
	Messages []Logged // by lane, in the order of their positions
	Rows     []Row
	Marks    []Mark // of strategy sequence
	Books    Books
	// Ordered: its lanes have an order.
	Ordered bool

	complain func(message int, what string)
	at       map[place]int // messages
}

type place struct{ lane, position string }

// Logged is a message as the log has it.
type Logged struct {
	Lane     string
	Position int64
	ID       string
	Value    []byte
	// Landed: it was given to the sink, and isn't a dead letter. The copies of an id that has
	// landed by another message haven't.
	Landed bool
}

// Row is one of the table: its columns as text, and those that are NULL not at all.
type Row map[string]string

// Mark is how far a producer has come.
type Mark struct {
	Producer, Lane string
	Epoch, Number  int64
}

// Books are what the sink said of the messages that have landed, and those that it didn't
// want.
type Books struct{ Written, AlreadyPresent, Stale, Rejected, Filtered int64 }

// Judge tells complain what is wrong with a run, and of which message; -1: of none.
func (s *Shape) Judge(r *Run, complain func(message int, what string)) {
	if s.Demand == nil {
		return
	}
	r.complain = complain
	s.Demand(r)
}

// wrong is a complaint about no message in particular.
func (r *Run) wrong(format string, args ...any) { r.complain(-1, fmt.Sprintf(format, args...)) }

// wrongOf is one about a message.
func (r *Run) wrongOf(message int, format string, args ...any) {
	r.complain(message, fmt.Sprintf(format, args...))
}

// landed calls each for every message that has landed, lane by lane, with its value.
func landed[T any](r *Run, each func(i int, value T)) {
	for i := range r.Messages {
		if !r.Messages[i].Landed {
			continue
		}
		var v T
		if err := json.Unmarshal(r.Messages[i].Value, &v); err != nil {
			r.wrongOf(i, "it has landed, and its value is none of this shape: %s", err)
			continue
		}
		each(i, v)
	}
}

// messageOf is the message of a row, by the columns lane and position; -1: there is none.
func (r *Run) messageOf(row Row) int {
	if r.at == nil {
		r.at = make(map[place]int, len(r.Messages))
		for i, m := range r.Messages {
			r.at[place{m.Lane, fmt.Sprint(m.Position)}] = i
		}
	}
	if i, ok := r.at[place{row["lane"], row["position"]}]; ok {
		return i
	}
	return -1
}

// rowsByID are the rows by the column id, which no two of them share.
func (r *Run) rowsByID() map[string]Row {
	rows := make(map[string]Row, len(r.Rows))
	for _, row := range r.Rows {
		if rows[row["id"]] != nil {
			r.wrong("two rows have the id %s", row["id"])
		}
		rows[row["id"]] = row
	}
	return rows
}

// booked demands what the books say.
func (r *Run) booked(want Books) {
	if r.Books != want {
		r.wrong("the books say %+v, want %+v", r.Books, want)
	}
}

// noise is a number that depends on n alone, and looks like none that n would lead to.
func noise(n int) int {
	x := uint64(n)*0x9e3779b97f4a7c15 + 0x632be59bd9b4e019
	x ^= x >> 32
	return int(x * 0xd6e8feb86659fd93 >> 33)
}

// again draws what is sent next: mostly message n, which is then passed; sometimes a copy of
// an earlier one, mostly of late.
func again(rng *rand.Rand, n *int, message func(n int) Message) []Message {
	if *n > 0 && rng.IntN(5) == 0 {
		back := rng.IntN(20)
		if rng.IntN(2) == 0 {
			back = int(float64(*n) * rng.Float64() * rng.Float64() * rng.Float64())
		}
		m := message(max(0, *n-1-back))
		m.Copy = 1
		return []Message{m}
	}
	*n++
	return []Message{message(*n - 1)}
}
