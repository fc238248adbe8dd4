package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// wrongClock is the binary with a wall clock of its own: time.Now is ahead by the
// seconds in DEDUPD_TEST_CLOCK. The compiler is given another time.go; nothing of
// ours is changed. What time passes, it tells as before.
func wrongClock(t *testing.T) (binary string) {
	t.Helper()
	goroot, err := goTool(t.Context(), "env", "GOROOT")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(strings.TrimSpace(goroot), "src", "time", "time.go")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	changed := string(text)
	for old, now := range map[string]string{
		"import (\n": "import (\n\t\"syscall\"\n",
		"func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n": "func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n\tsec += ahead\n",
	} {
		if strings.Count(changed, old) != 1 {
			t.Fatalf("%s has not %q once: bring this test up to date", file, old)
		}
		changed = strings.Replace(changed, old, now, 1)
	}
	changed += `
var ahead = func() (seconds int64) {
	text, _ := syscall.Getenv("DEDUPD_TEST_CLOCK")
	sign := int64(1)
	for _, c := range text {
		if c == '-' {
			sign = -1
			continue
		}
		seconds = seconds*10 + int64(c-'0')
	}
	return sign * seconds
}()
`
	dir := t.TempDir()
	other, overlay, binary := filepath.Join(dir, "time.go"), filepath.Join(dir, "overlay.json"), filepath.Join(dir, "dedupd")
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{file: other}})
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{other: []byte(changed), overlay: replace} {
		if err := os.WriteFile(name, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := goTool(t.Context(), "build", "-overlay", overlay, "-o", binary, "./cmd/dedupd"); err != nil {
		t.Fatal(err)
	}
	return binary
}

// No worker's clock decides anything about claims, lanes or dead letters. Workers
// that are more than a year ahead, behind and right share lanes of both brokers,
// take them from each other, rotate, expire and dead-letter; all of it by the database's
// clock.
func TestWorkersWithWrongClocks(t *testing.T) {
	needServices(t)
	t.Parallel()
	const scope = "e2e-clocks"
	db := newDatabase(t)
	db.exec(ordersTable)
	db.exec(`ALTER TABLE public.orders ADD CHECK (payload ->> 'note' <> 'dead')`)
	began := one[time.Time](db, "SELECT clock_timestamp()")
	c := &clockRun{T: t, tp: newTopic(t, "clocks", 4), st: newStream(t, "CLOCKS"), rounds: 6, each: 400, dead: 12}
	config := configFile(t, fmt.Sprintf("scope: %s\nsources:\n  - kafka: {brokers: [%q], topics: [%q]}\n  - nats: {servers: [%q], stream: %s}\ndatabase:\n  url: %q\n%s%s",
		scope, c.tp.broker.Addr(), c.tp.name, c.st.url, c.st.name, db.url, ordersSink, rotating))
	fleet := c.startFleet(config)
	for round := range c.rounds {
		c.produce(round*c.each, (round+1)*c.each)
		if round > 0 {
			c.produce((round-1)*c.each, round*c.each) // sent again, after rotations
		}
		handled := int64((2*round + 1) * c.each * 3 / 2)
		await(t, "the books have what was sent", time.Minute, func() error {
			lanes, err := db.books(context.Background(), scope)
			sum := int64(0)
			for _, p := range lanes {
				sum += p.Applied + p.Duplicates - p.Redelivered + p.Dead + p.Conflicts
			}
			if err == nil && sum < handled {
				err = fmt.Errorf("%d of %d messages have an outcome", sum, handled)
			}
			return err
		})
		// The lanes change hands, among clocks that are years apart.
		w := fleet[round%len(fleet)]
		w.Kill()
		w.start()
	}
	for _, w := range fleet {
		w.address()
		w.drain(drainLimit)
	}
	c.audit(db, scope)
	db.auditRotations(scope)
	db.auditClocks(began)
}

// clockRun sends so many messages a round, each to Kafka and every other one to NATS as
// well. Some of all are to be dead.
type clockRun struct {
	*testing.T
	tp                 *topic
	st                 *stream
	rounds, each, dead int
}

// startFleet starts workers two years ahead, two years behind, and right.
func (c *clockRun) startFleet(config string) (fleet []*worker) {
	c.Helper()
	const year = 366 * 24 * time.Hour
	binary := wrongClock(c.T)
	for i, ahead := range []time.Duration{2 * year, -2 * year, 0} {
		w := newWorker(c.T, fmt.Sprintf("worker %d", i+1), config, "DEDUPD_TEST_CLOCK="+strconv.Itoa(int(ahead.Seconds())))
		w.binary = binary
		w.start()
		w.address()
		if year := strconv.Itoa(time.Now().Add(ahead).UTC().Year()); !strings.Contains(w.logText(), year+"-") {
			c.Fatalf("%s doesn't log as of %s: its clock isn't what this test needs", w.name, year)
		}
		fleet = append(fleet, w)
	}
	return fleet
}

func (c *clockRun) produce(from, to int) {
	c.Helper()
	var records []*kgo.Record
	for n := from; n < to; n++ {
		s := send{n: int32(n), partition: int32(n % 4)}
		body := s.body()
		if n%(c.rounds*c.each/c.dead) == 7 {
			body = fmt.Appendf(nil, `{"n":%d,"note":"dead"}`, n)
		}
		r := record(s)
		r.Value = body
		records = append(records, r)
		if n%2 == 0 { // the other source has it as well
			if _, err := c.st.js.PublishMsg(c.Context(), c.st.message(0, s.id(), body)); err != nil {
				c.Fatal(err)
			}
		}
	}
	if err := c.tp.produce(records...); err != nil {
		c.Fatal(err)
	}
}

// audit wants each message in the books and in one place.
func (c *clockRun) audit(db *database, scope string) {
	c.Helper()
	total := c.rounds * c.each
	lanes, sum := db.settledBooks(scope)
	if sum.Applied != int64(total-c.dead) || sum.Dead < int64(c.dead) || sum.Conflicts != 0 || len(lanes) != 5 {
		c.Errorf("the books say %+v in %d lanes; want %d applied and %d dead", sum, len(lanes), total-c.dead, c.dead)
	}
	if n := one[int64](db, "SELECT count(DISTINCT id) FROM public.orders"); n != int64(total-c.dead) || n != one[int64](db, "SELECT count(*) FROM public.orders") {
		c.Errorf("%d ids landed, in %d rows; want %d once each", n, one[int64](db, "SELECT count(*) FROM public.orders"), total-c.dead)
	}
	if n := one[int64](db, "SELECT count(DISTINCT message_id) FROM dedupd.dead_letters"); n != int64(c.dead) {
		c.Errorf("%d messages are dead letters, want %d", n, c.dead)
	}
}

// auditClocks wants no time in dedupd's tables that isn't of the run.
func (db *database) auditClocks(began time.Time) {
	db.t.Helper()
	for _, column := range column[string](db, `SELECT format('%I.%I', table_name, column_name) FROM information_schema.columns c JOIN information_schema.tables USING (table_schema, table_name)
		WHERE table_schema = 'dedupd' AND table_type = 'BASE TABLE' AND data_type = 'timestamp with time zone'`) {
		table, name, _ := strings.Cut(column, ".")
		if n := one[int64](db, fmt.Sprintf(`SELECT count(*) FROM dedupd.%s WHERE %s NOT BETWEEN $1::timestamptz - interval '1 minute' AND clock_timestamp() + interval '1 minute'`, table, name), began); n > 0 {
			db.t.Errorf("%d values of dedupd.%s come of a worker's clock", n, column)
		}
	}
}
