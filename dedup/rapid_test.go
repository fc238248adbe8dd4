package dedup_test

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"pgregory.net/rapid"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/claimkey"
	"github.com/dedupd/dedupd/internal/pgtest"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/lane"
	"github.com/dedupd/dedupd/message"
)

// An example of the model takes about half a second. For more of them:
// go test ./dedup -run TestClaimsFollowTheModel -rapid.checks=1000.
func init() {
	for name, value := range map[string]string{"checks": "20", "steps": "50"} {
		if os.Getenv("RAPID_"+strings.ToUpper(name)) == "" {
			if err := flag.Set("rapid."+name, value); err != nil {
				panic(err)
			}
		}
	}
}

// TestClaimsFollowTheModel does whatever may happen to claims, in any order, and compares
// the database with a model of maps after each step: an id is new if and only if no
// generation that has not expired holds it. Two workers alternate, so that each meets
// what the other did with what it remembers.
func TestClaimsFollowTheModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		example := &exampleTB{TB: t}
		rt.Cleanup(example.end)
		m := newMachine(rt, example)
		actions := rapid.StateMachineActions(m)
		// Most of what happens is work.
		for i := range 5 {
			actions[fmt.Sprint("Handle", i)] = m.Handle
		}
		actions["PrepareAndRotate2"], actions["BuildAndLoad2"], actions["BuildAndLoad3"] = m.PrepareAndRotate, m.BuildAndLoad, m.BuildAndLoad
		rt.Repeat(actions)
	})
}

// exampleTB lets an example have a database of its own, which ends with it: there
// are hundreds when a failure is made smaller.
type exampleTB struct {
	testing.TB
	cleanups []func()
}

func (e *exampleTB) Cleanup(f func()) { e.cleanups = append(e.cleanups, f) }

func (e *exampleTB) end() {
	for _, f := range slices.Backward(e.cleanups) {
		f()
	}
}

// Times of the model are hours since its start. All are multiples of 5, so that
// none comes near to another plus one of these.
const (
	modelWindow  = 24
	modelMaxHold = 102
)

// machine is the database, the workers, and what is expected of them.
type machine struct {
	db          *pgtest.DB
	pool        *pgxpool.Pool
	tb          *exampleTB
	workers     []*modelWorker
	chunkClaims int

	hours       int // the database's clock
	lanes       []*modelLane
	generations map[int]*modelGeneration
	ids         int      // how many ids were thought of
	written     []string // what the sink was given since the last check
	rows        int64    // the last row of the sink that was checked
}

type modelWorker struct {
	*dedup.Processor
	pool   *pgxpool.Pool
	epochs map[*modelLane]lane.Assignment // as this worker acquired them
}

type modelLane struct {
	message.Lane
	ordered  bool
	streamID string
	owner    *modelWorker
	next     int64
	broker   int64 // -1: none
	stream   *int  // nil: not known
	books    dedup.Books
}

type modelGeneration struct {
	state  string
	sealed int
	claims map[claimkey.Key]modelClaim
}

type modelClaim struct {
	lane     *modelLane // nil: claimed by no lane
	position int64
	value    string
	result   string // of the library only
}

func newMachine(t *rapid.T, tb *exampleTB) *machine {
	m := &machine{
		tb: tb, chunkClaims: rapid.IntRange(1, 6).Draw(t, "claims of a chunk"),
		generations: map[int]*modelGeneration{1: {state: "open", claims: map[claimkey.Key]modelClaim{}}},
	}
	m.db = pgtest.NewFrom(tb, "rapid", func(ctx context.Context, url string) error {
		pool, err := pgxpool.New(ctx, url)
		if err != nil {
			return err
		}
		defer pool.Close()
		if _, err := pool.Exec(ctx, createRows); err != nil {
			return err
		}
		store, err := dedup.NewStore(dedup.StoreConfig{Pool: pool, Scope: "test"})
		if err != nil {
			return err
		}
		_, err = store.Schema().Migrate(ctx)
		return err
	})
	m.pool = m.db.Pool(tb)
	for range 2 {
		m.workers = append(m.workers, m.newWorker(t))
	}
	for _, l := range []message.Lane{{Source: "kafka", Name: "orders/0"}, {Source: "kafka", Name: "orders/1"}, {Source: "nats", Name: "lane-0"}, {Source: "nats", Name: "queue"}} {
		lane := &modelLane{Lane: l, ordered: l.Name != "queue", broker: -1}
		m.acquire(t, m.workers[0], lane)
		m.lanes = append(m.lanes, lane)
	}
	return m
}

func (m *machine) newWorker(t *rapid.T) *modelWorker {
	w := &modelWorker{pool: m.db.Pool(m.tb), epochs: map[*modelLane]lane.Assignment{}}
	store, err := dedup.NewStore(dedup.StoreConfig{Pool: w.pool, Scope: "test", Owner: "model", FilterMemory: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	store.Generations().ChunkClaims = m.chunkClaims
	identity, err := message.NewIdentity([]string{"header:id"}, 64<<10)
	if err != nil {
		t.Fatal(err)
	}
	fingerprint, err := claimkey.NewFingerprint([]string{"value"})
	if err != nil {
		t.Fatal(err)
	}
	w.Processor = &dedup.Processor{
		Store: store, Sink: &rows{}, Identity: identity, Fingerprint: fingerprint,
		Missing: policy.MissingDeadLetter, OnDuplicate: policy.DuplicateDrop, OnConflict: policy.ConflictDrop,
		MaxDeadShare: 0.5, DeadWindow: 1000, CopyFrom: rapid.SampledFrom([]int{1, 4, math.MaxInt}).Draw(t, "copy from"), Metrics: dedup.NewMetrics(prometheus.NewRegistry()),
	}
	if err := w.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return w
}

func (m *machine) worker(t *rapid.T) *modelWorker {
	return m.workers[rapid.IntRange(0, len(m.workers)-1).Draw(t, "worker")]
}

func (m *machine) acquire(t *rapid.T, w *modelWorker, l *modelLane) {
	assigned, err := w.Store.Acquire(t.Context(), lane.Acquire{Lane: l.Lane, Ordered: l.ordered, LogID: l.streamID, Committed: -1})
	if err != nil {
		t.Fatalf("acquire: %v", err)
	}
	if assigned.Next != l.next {
		t.Fatalf("lane %s starts at %d, want %d", l.Lane, assigned.Next, l.next)
	}
	l.streamID, l.owner, w.epochs[l] = assigned.StreamID, w, assigned
}

// id is the text of the nth id: hashed ones, UUIDs of two versions, and ULIDs.
func id(n int) string {
	sum := sha256.Sum256(fmt.Append(nil, n))
	switch n % 5 {
	case 0:
		return fmt.Sprint("order-", n)
	case 1:
		return fmt.Sprintf("%x-%x-4%03x-a%03x-%x", sum[:4], sum[4:6], sum[6], sum[7], sum[8:14])
	case 2:
		return fmt.Sprintf("%08x-%04x-7000-8000-%x", 0x019aa000, n, sum[:6])
	case 3:
		// The same bytes as the one before, written in capitals.
		return strings.ToUpper(id(n - 1))
	default:
		return fmt.Sprintf("01K%023d", n)
	}
}

// id draws one that was thought of before, or a new one.
func (m *machine) id(t *rapid.T) string {
	n := rapid.IntRange(0, m.ids+4).Draw(t, "id")
	m.ids = max(m.ids, n+1)
	return id(n)
}

// find is the claim of an id that has not expired.
func (m *machine) find(key claimkey.Key) (modelClaim, bool) {
	for _, g := range m.generations {
		if c, ok := g.claims[key]; ok && (g.state == "open" || g.state == "sealed") {
			return c, true
		}
	}
	return modelClaim{}, false
}

// generation is the only one in that state; 0: there is none.
func (m *machine) generation(state string) int {
	for n, g := range m.generations {
		if g.state == state {
			return n
		}
	}
	return 0
}

func (m *machine) inState(state string) (numbers []int) {
	for _, n := range slices.Sorted(maps.Keys(m.generations)) {
		if m.generations[n].state == state {
			numbers = append(numbers, n)
		}
	}
	return numbers
}

// batch draws messages for a lane, and the hours that its clock goes by.
func (m *machine) batch(t *rapid.T, l *modelLane, w *modelWorker) (b lane.Batch, hours []int) {
	b = lane.Batch{Lane: l.Lane, Ordered: l.ordered, StreamID: l.streamID, Epoch: w.epochs[l].Epoch, Checkpoint: w.epochs[l].Checkpoint, From: l.next, Lag: 0, BrokerPosition: l.next - 1}
	if !l.ordered && rapid.Bool().Draw(t, "delivered again") {
		b.From = rapid.Int64Range(0, l.next).Draw(t, "from")
	}
	// A lane's clock may be behind for as long as its worker was away, and a
	// producer's clock may say anything.
	base := 5 * rapid.IntRange(-2, m.hours/5).Draw(t, "hour/5")
	at := b.From
	for range rapid.IntRange(1, 8).Draw(t, "messages") {
		at += rapid.SampledFrom([]int64{0, 0, 0, 3}).Draw(t, "hole")
		hour := base + rapid.SampledFrom([]int{0, 0, 0, 0, 0, 0, 500_000, -500_000}).Draw(t, "off by")
		value := rapid.SampledFrom([]string{"v", "v", "v", "v", "v", "other"}).Draw(t, "value")
		b.Messages = append(b.Messages, message.Message{
			Topic: "t", Value: []byte(value), Time: time.Now().Add(time.Duration(hour) * time.Hour),
			Headers:  []message.Header{{Key: "id", Value: []byte(m.id(t))}},
			Position: message.Position{Lane: l.Lane, Offset: at},
		})
		hours = append(hours, hour)
		at++
	}
	b.Next = at
	if l.ordered {
		return b, hours
	}
	// Others may hold older messages of a queue; how old, the broker may not know.
	if rapid.Bool().Draw(t, "outstanding is known") {
		hour := 5 * rapid.IntRange(-2, m.hours/5).Draw(t, "outstanding since hour/5")
		b.OutstandingSince = time.Now().Add(time.Duration(hour) * time.Hour)
		return b, []int{hour}
	}
	return b, nil
}

// Handle gives a worker batches of some lanes, which it acquires if they are the other's.
func (m *machine) Handle(t *rapid.T) {
	w := m.worker(t)
	var batches []lane.Batch
	var lanes []*modelLane // in their order, as m.lanes are
	var hours [][]int
	for _, l := range m.lanes {
		if rapid.Bool().Draw(t, l.String()) {
			continue
		}
		if _, known := w.epochs[l]; !known || l.owner != w {
			m.acquire(t, w, l)
		}
		b, h := m.batch(t, l, w)
		batches, lanes, hours = append(batches, b), append(lanes, l), append(hours, h)
	}
	if len(batches) == 0 {
		return
	}
	// A lane that was acquired again and again without moving is quarantined: it comes
	// after the others.
	order := make([]int, len(lanes))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Compare(w.Store.Quarantined(lanes[a].Lane), w.Store.Quarantined(lanes[b].Lane))
	})
	if err := w.Handle(t.Context(), batches); err != nil {
		t.Fatalf("handle: %v", err)
	}
	newClaims := map[claimkey.Key]modelClaim{}
	for _, i := range order {
		l := lanes[i]
		for _, msg := range batches[i].Messages {
			text, _ := msg.Header("id")
			m.settle(newClaims, l, string(text), string(msg.Value), msg.Position.Offset)
		}
		l.books.Fetched += int64(len(batches[i].Messages))
		if l.next = batches[i].Next; !l.ordered {
			l.next = max(l.next, l.books.NextPosition)
		}
		l.books.NextPosition = l.next
		if b := batches[i].BrokerPosition; b >= 0 {
			l.broker = b
		}
		if slices.Sort(hours[i]); len(hours[i]) > 0 {
			l.follow(min(hours[i][(len(hours[i])-1)/2], m.hours))
		}
	}
	maps.Copy(m.generations[m.generation("open")].claims, newClaims)
}

// settle books what becomes of one message; newClaims are those that its group has made
// so far.
func (m *machine) settle(newClaims map[claimkey.Key]modelClaim, l *modelLane, text, value string, position int64) {
	key := claimkey.Of(text)
	original, claimed := m.find(key)
	if c, ok := newClaims[key]; ok {
		original, claimed = c, true
	}
	switch {
	case !claimed:
		newClaims[key] = modelClaim{l, position, value, ""}
		m.written = append(m.written, text)
		l.books.Applied++
		return
	case original.lane != nil && original.value != value:
		l.books.Conflicts++
		return
	case original.lane == l && original.position == position:
		l.books.Redelivered++
	case original.lane != nil && original.lane.Source != l.Source:
		l.books.CrossSource++
	default:
		l.books.Resent++
	}
	l.books.Duplicates++
}

// follow moves a lane's clock, which never goes back.
func (l *modelLane) follow(hour int) {
	if l.stream == nil || *l.stream < hour {
		l.stream = &hour
	}
}

// Claim claims ids in a transaction of its own, and lets it commit or not.
func (m *machine) Claim(t *rapid.T) {
	w, commit := m.worker(t), rapid.Bool().Draw(t, "commit")
	list := make([]string, rapid.IntRange(1, 10).Draw(t, "ids"))
	for i := range list {
		list[i] = m.id(t)
	}
	claims, err := m.claim(t, w, list, commit)
	if err != nil {
		t.Fatalf("claim: %v", err)
	}
	newClaims := map[claimkey.Key]modelClaim{}
	for i, text := range list {
		key := claimkey.Of(text)
		before, claimed := m.find(key)
		if _, ok := newClaims[key]; ok {
			claimed = true
		}
		if claims[i].IsNew == claimed || string(claims[i].Result) != before.result {
			t.Fatalf("id %q: %+v, want new %v and the result %q", text, claims[i], !claimed, before.result)
		}
		if !claimed {
			newClaims[key] = modelClaim{result: text}
		}
	}
	if commit {
		maps.Copy(m.generations[m.generation("open")].claims, newClaims)
	}
}

// claim gives each new claim its id as the result.
func (m *machine) claim(t *rapid.T, w *modelWorker, list []string, commit bool) (claims []dedup.Claimed, err error) {
	err = pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
		claims, err = w.Store.Claim(t.Context(), tx, list, dedup.ClaimOptions{})
		for i := range claims {
			if err == nil && claims[i].IsNew {
				err = claims[i].SetResult(t.Context(), tx, []byte(list[i]))
			}
		}
		if err == nil && !commit {
			err = errRollback
		}
		return err
	})
	if errors.Is(err, errRollback) {
		err = nil
	}
	return claims, err
}

var errRollback = errors.New("the model wants it so")

func codeOf(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// Zombie lets the worker that has lost a lane go on with it.
func (m *machine) Zombie(t *rapid.T) {
	w, l := m.worker(t), m.lanes[rapid.IntRange(0, len(m.lanes)-1).Draw(t, "lane")]
	if _, known := w.epochs[l]; !known || l.owner == w || !l.ordered {
		t.Skip("it has not lost it")
	}
	b, _ := m.batch(t, l, w)
	var fenced *lane.FencedError
	if err := w.Handle(t.Context(), []lane.Batch{b}); !errors.As(err, &fenced) {
		t.Fatalf("a worker that lost its lane got %v, want a fence", err)
	}
}

// Reset moves a lane back, as an operator does by the group's offset: what was
// read is delivered again, from the same places.
func (m *machine) Reset(t *rapid.T) {
	w, l := m.worker(t), m.lanes[rapid.IntRange(0, len(m.lanes)-1).Draw(t, "lane")]
	if !l.ordered || l.broker <= 0 {
		t.Skip("the broker has confirmed nothing")
	}
	to := rapid.Int64Range(0, l.broker-1).Draw(t, "to")
	assigned, err := w.Store.Acquire(t.Context(), lane.Acquire{Lane: l.Lane, Ordered: true, Committed: to, HonourReset: true})
	if err != nil || !assigned.Reset || assigned.Next != to {
		t.Fatalf("reset to %d: %+v, %v", to, assigned, err)
	}
	l.owner, w.epochs[l] = w, assigned
	l.next, l.broker, l.books.NextPosition, l.stream = to, to, to, nil
}

func (m *machine) Prepare(t *rapid.T) {
	if led, err := m.worker(t).Store.Generations().Prepare(t.Context()); err != nil || !led {
		t.Fatalf("prepare: led %v, %v", led, err)
	}
	if m.generation("next") == 0 {
		m.generations[1+slices.Max(slices.Collect(maps.Keys(m.generations)))] = &modelGeneration{state: "next", claims: map[claimkey.Key]modelClaim{}}
	}
}

func (m *machine) Rotate(t *rapid.T) {
	open, next := m.generation("open"), m.generation("next")
	asked := open + rapid.SampledFrom([]int{0, 0, 0, 0, -1, 1}).Draw(t, "off by")
	rotated, led, _, err := m.worker(t).Store.Generations().Rotate(t.Context(), asked)
	if err != nil || !led || rotated != (asked == open && next != 0) {
		t.Fatalf("rotate %d of %d: %v, led %v, %v", asked, open, rotated, led, err)
	}
	if rotated {
		m.generations[open].state, m.generations[open].sealed = "sealed", m.hours
		m.generations[next].state = "open"
	}
}

// PrepareAndRotate makes rotations as frequent as what lives of them.
func (m *machine) PrepareAndRotate(t *rapid.T) {
	m.Prepare(t)
	m.Rotate(t)
}

// BuildFilter builds a few chunks, often not all.
func (m *machine) BuildFilter(t *rapid.T) {
	for range rapid.SampledFrom([]int{1, 2, 4, 100}).Draw(t, "chunks") {
		n, led, err := m.worker(t).Store.Generations().BuildFilter(t.Context())
		if err != nil || !led {
			t.Fatalf("build a filter: led %v, %v", led, err)
		}
		if n > m.chunkClaims {
			t.Fatalf("a chunk has %d claims, want %d at most", n, m.chunkClaims)
		}
		if n == 0 {
			return
		}
	}
}

func (m *machine) LoadFilters(t *rapid.T) {
	if err := m.worker(t).Store.Generations().LoadFilters(t.Context()); err != nil {
		t.Fatalf("load filters: %v", err)
	}
}

func (m *machine) BuildAndLoad(t *rapid.T) {
	m.BuildFilter(t)
	m.LoadFilters(t)
}

func (m *machine) ChangeBudget(t *rapid.T) {
	m.worker(t).Store.Generations().FilterMemory = rapid.SampledFrom([]int64{0, 100, 300, 1000, 1 << 20}).Draw(t, "bytes")
}

// DamageFilters spoils what is stored of them; what is loaded stays.
func (m *machine) DamageFilters(t *rapid.T) {
	chunk := rapid.IntRange(0, 3).Draw(t, "chunk")
	m.exec(t, rapid.SampledFrom([]string{
		`DELETE FROM dedupd.filters`,
		`DELETE FROM dedupd.filters WHERE chunk = $1`,
		`DELETE FROM dedupd.filters WHERE chunk >= $1`,
		`UPDATE dedupd.filters SET data = set_byte(data, 20, get_byte(data, 20) # 1) WHERE chunk = $1 AND length(data) > 20`,
		`UPDATE dedupd.filters SET data = '' WHERE chunk = $1`,
		`UPDATE dedupd.filters SET last = NOT last WHERE chunk = $1`,
		`UPDATE dedupd.filters SET last_key = '80000000-0000-0000-0000-000000000000' WHERE chunk = $1`,
		`UPDATE dedupd.filters SET claims = claims + 1 WHERE chunk = $1`,
	}).Draw(t, "damage"), chunk)
}

func (m *machine) exec(t *rapid.T, sql string, chunk int) {
	var args []any
	if strings.Contains(sql, "$1") {
		args = append(args, chunk)
	}
	if _, err := m.pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

// Restart replaces a worker by one that remembers nothing.
func (m *machine) Restart(t *rapid.T) {
	i := rapid.IntRange(0, len(m.workers)-1).Draw(t, "worker")
	m.workers[i].pool.Close()
	m.workers[i] = m.newWorker(t)
}

func (m *machine) Forget(t *rapid.T) { m.worker(t).Store.Generations().Forget("the model says so") }

func (m *machine) PassTime(t *rapid.T) {
	m.hours += 5 * rapid.IntRange(1, 10).Draw(t, "hours/5")
	m.exec(t, fmt.Sprintf(`CREATE OR REPLACE FUNCTION dedupd.clock() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT pg_catalog.now() + interval ''%d hours'''`, m.hours), 0)
}

// CatchUp reports that nothing is left to read in a worker's lanes.
func (m *machine) CatchUp(t *rapid.T) {
	w := m.worker(t)
	var told []lane.Heartbeat
	var lost []message.Lane
	for _, l := range m.lanes {
		assigned, known := w.epochs[l]
		if !known || rapid.IntRange(0, 3).Draw(t, l.String()) == 0 {
			continue
		}
		age := 5 * rapid.IntRange(0, 2).Draw(t, "age/5")
		told = append(told, lane.Heartbeat{Lane: l.Lane, Epoch: assigned.Epoch, Next: l.next, Checkpoint: assigned.Checkpoint, Age: time.Duration(age) * time.Hour})
		if l.owner == w || !l.ordered {
			l.follow(m.hours - age)
		} else {
			lost = append(lost, l.Lane)
		}
	}
	gone, err := w.Store.Heartbeat(t.Context(), told)
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(gone, message.Lane.Compare)
	slices.SortFunc(lost, message.Lane.Compare)
	if !slices.Equal(gone, lost) {
		t.Fatalf("%v are gone, want %v", gone, lost)
	}
}

func (m *machine) Expire(t *rapid.T) {
	stream := m.hours
	for _, l := range m.lanes {
		if l.stream == nil {
			stream = -1 << 30
		} else {
			stream = min(stream, *l.stream)
		}
	}
	want := 0
	for _, g := range m.generations {
		if g.state == "sealed" && (g.sealed+modelWindow < stream || g.sealed+modelMaxHold < m.hours) {
			g.state = "dropping"
			want++
		}
	}
	n, led, err := m.worker(t).Store.Generations().Expire(t.Context(), modelWindow*time.Hour, modelMaxHold*time.Hour)
	if err != nil || !led || n != want {
		t.Fatalf("%d generations expired, want %d; led %v, %v", n, want, led, err)
	}
}

func (m *machine) Drop(t *rapid.T) {
	number := rapid.SampledFrom(append(m.inState("dropping"), m.generation("open"))).Draw(t, "generation")
	if led, err := m.worker(t).Store.Generations().Drop(t.Context(), number); err != nil || !led {
		t.Fatalf("drop generation %d: led %v, %v", number, led, err)
	}
	if m.generations[number].state == "dropping" {
		delete(m.generations, number)
	}
}

func (m *machine) Sweep(t *rapid.T) {
	if dropped, led, err := m.worker(t).Store.Generations().Sweep(t.Context()); err != nil || !led || len(dropped) > 0 {
		t.Fatalf("swept %q, led %v, %v", dropped, led, err)
	}
}

// Check compares the database with the model.
func (m *machine) Check(t *rapid.T) {
	var written []string
	if err := m.pool.QueryRow(t.Context(), `SELECT coalesce(array_agg(id ORDER BY n), '{}'), coalesce(max(n), $1) FROM public.rows WHERE n > $1`, m.rows).
		Scan(&written, &m.rows); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(written, m.written) {
		t.Fatalf("the sink was given %q, want %q", written, m.written)
	}
	m.written = nil

	books, err := m.workers[0].Store.Books(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range books {
		l := m.lanes[i]
		got := dedup.Books{
			Fetched: b.Fetched, Applied: b.Applied, Duplicates: b.Duplicates, Redelivered: b.Redelivered, Resent: b.Resent,
			CrossSource: b.CrossSource, Conflicts: b.Conflicts, Dead: b.Dead, NextPosition: b.NextPosition,
		}
		if b.Source != l.Source || b.Lane != l.Name || got != l.books {
			t.Fatalf("books of %s: %+v, want %+v", l.Lane, got, l.books)
		}
		if (b.StreamTime == nil) != (l.stream == nil) {
			t.Fatalf("the clock of %s: %v, want it known: %v", l.Lane, b.StreamTime, l.stream != nil)
		}
		if l.stream != nil {
			if off := time.Until(b.StreamTime.Add(time.Duration(-*l.stream) * time.Hour)); off > time.Minute || off < -time.Hour {
				t.Fatalf("the clock of %s is at %s, which is %s from hour %d", l.Lane, b.StreamTime, off, *l.stream)
			}
		}
	}

	generations, err := m.workers[1].Store.Generations().List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range generations {
		if want := m.generations[g.Number]; want == nil || want.state != g.State || g.Missing {
			t.Fatalf("generation %+v, want %+v", g, want)
		}
	}
	if len(generations) != len(m.generations) {
		t.Fatalf("%d generations, want %d", len(generations), len(m.generations))
	}
	rows, err := m.pool.Query(t.Context(), `SELECT generation, key FROM dedupd.claims`)
	if err != nil {
		t.Fatal(err)
	}
	type claim struct {
		Generation int
		Key        [16]byte
	}
	claims, err := pgx.CollectRows(rows, pgx.RowToStructByPos[claim])
	if err != nil {
		t.Fatal(err)
	}
	n := len(claims)
	for _, c := range claims {
		if _, ok := m.generations[c.Generation].claims[c.Key]; !ok {
			t.Fatalf("generation %d holds the key %s, which it should not", c.Generation, claimkey.Key(c.Key))
		}
	}
	for _, g := range m.generations {
		n -= len(g.claims)
	}
	if n != 0 {
		t.Fatalf("%d claims more than there should be", n)
	}
}
