package e2e

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

// finding is what doctor tells of one check.
type finding struct{ Check, Level, Text, Cure string }

// What doctor finds at the brokers, and in lanes whose positions don't fit what the
// brokers have. It must find nothing where all is well.
func TestDoctor(t *testing.T) {
	db := newDatabase(t)
	db.exec(ordersTable)
	const scope = "e2e-doctor"
	tp := newTopic(t, scope, 2)
	st := newStream(t, "DOCTOR")
	for i := range 10 {
		s := send{n: int32(i), partition: int32(i % 2)}
		if err := tp.produce(record(s)); err != nil {
			t.Fatal(err)
		}
		st.publish(send{n: int32(i + 10)}.id(), s.body())
	}
	config := configFile(t, fmt.Sprintf("scope: %s\nsources:\n  - kafka: {brokers: [%q], topics: [%s]}\n  - nats: {servers: [%q], stream: DOCTOR}\ndatabase:\n  url: %q\n%s",
		scope, tp.broker.Addr(), tp.name, st.url, db.url, ordersSink))
	examine := func(code int) []finding {
		t.Helper()
		r := command(t, nil, "doctor", "-c", config, "-o", "json")
		var all []finding
		if err := json.Unmarshal([]byte(r.stdout), &all); err != nil || r.code != code || r.stderr != "" {
			t.Fatalf("exit code %d, want %d; %v\n%s%s", r.code, code, err, r.stdout, r.stderr)
		}
		return all
	}
	// finds wants one finding of a level, with all these words in its text or cure.
	finds := func(all []finding, level, check string, words ...string) {
		t.Helper()
		if !slices.ContainsFunc(all, func(f finding) bool {
			return f.Level == level && f.Check == check && !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(f.Text+" -> "+f.Cure, w) })
		}) {
			t.Errorf("no %s of %s with %q among\n%+v", level, check, words, all)
		}
	}

	if r := command(t, nil, "run", "-c", config, "--until-idle", "1s"); r.code != 0 {
		t.Fatal(r.stderr)
	}
	all := examine(0)
	finds(all, "ok", "database", "Postgres 1")
	finds(all, "ok", "schema", scope)
	finds(all, "ok", "grants")
	finds(all, "ok", "sink")
	finds(all, "ok", "source", "kafka: lanes: 2, positions at the broker: 10")
	finds(all, "ok", "source", "nats: lanes: 1, positions at the broker: 10")
	finds(all, "ok", "lane", "kafka")
	finds(all, "ok", "lane", "nats")
	finds(all, "warning", "window", "DOCTOR", "without a time limit")
	for _, f := range all {
		if f.Level != "ok" && f.Check != "window" {
			t.Errorf("all is well, but: %+v", f)
		}
		if (f.Level == "ok") != (f.Cure == "") {
			t.Errorf("a finding's cure: %+v", f)
		}
	}

	// Another scope that would read by the same group and the same durable.
	other := configFile(t, fmt.Sprintf("scope: %s-2\nsources:\n  - kafka: {brokers: [%q], topics: [%s], group: %s}\n  - nats: {servers: [%q], stream: DOCTOR, durable: %s}\ndatabase:\n  url: %q\n%s",
		scope, tp.broker.Addr(), tp.name, scope, st.url, scope, db.url, ordersSink))
	first := config
	config = other
	all = examine(3)
	finds(all, "warning", "source", "kafka: scope "+scope+" wrote the group's offset of "+tp.lane(0), "a group of its own")
	finds(all, "error", "source", "nats: scope "+scope+" reads the same durable", "a durable of its own")
	if n := len(slices.DeleteFunc(all, func(f finding) bool { return !strings.Contains(f.Text, "scope "+scope+" ") })); n != 2 {
		t.Errorf("%d findings about the other scope, want one for each source", n)
	}
	config = first

	// A stream that has discarded what was not read.
	s, err := st.js.Stream(t.Context(), "DOCTOR")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	queue := ` WHERE scope = 'e2e-doctor' AND source = 'nats'`
	db.exec(`UPDATE dedupd.lanes SET next_position = 5` + queue)
	finds(examine(3), "error", "lane", "nats queue: data is lost: the queue is at 5, the stream has only 11 and above", "on_gap")
	db.exec(`INSERT INTO dedupd.gaps (lane, first, next) SELECT id, 5, 11 FROM dedupd.lanes` + queue)
	finds(examine(3), "error", "lane", "nats queue: data is lost: the stream has discarded positions 5 to 10", "dedupd lanes set-position nats queue 11 -c "+config)
	db.exec(`DELETE FROM dedupd.gaps`)
	db.exec(`UPDATE dedupd.lanes SET next_position = 11` + queue)

	// A stream that deletes what is acknowledged, and a database without a standby.
	interest := s.CachedInfo().Config
	interest.Retention = jetstream.InterestPolicy
	if _, err := st.js.UpdateStream(t.Context(), interest); err != nil {
		t.Fatal(err)
	}
	finds(examine(0), "warning", "source", "nats: the stream deletes what is acknowledged", "--accept-loss-on-failover")

	set := func(sql string) {
		t.Helper()
		db.exec(`UPDATE dedupd.lanes SET ` + sql + ` WHERE scope = 'e2e-doctor' AND lane = 'e2e-doctor/1'`)
	}
	lane, cure := "kafka "+tp.lane(1), "dedupd lanes set-position kafka "+tp.lane(1)+" "
	set("next_position = 9")
	finds(examine(3), "error", "lane", lane, "but the partition ends at", cure+"5 -c "+config)
	set("next_position = 5, cut_at = 4")
	finds(examine(3), "error", "lane", lane, "was cut at 4", cure+"4")
	set("cut_at = NULL, log_id = 'another'")
	finds(examine(3), "error", "lane", lane, "created anew", "another", cure+"0")
	set("log_id = NULL, next_position = 2, broker_position = 2")
	finds(examine(0), "warning", "lane", lane, "the group is at 5", "lost commits")
	set("next_position = 5, broker_position = 6")
	finds(examine(0), "warning", "lane", lane, "moved back to 5, from 6", "on_group_reset")
	set("next_position = 1, broker_position = 5")
	if err := tp.broker.DeleteRecords(t.Context(), tp.name, 1, 3); err != nil {
		t.Fatal(err)
	}
	finds(examine(3), "error", "lane", lane, "data is lost", "only 3 and above", "on_gap")
	set("next_position = 5, lane = 'e2e-doctor/7'")
	finds(examine(0), "warning", "lane", tp.lane(7), "no such lane", "dedupd lanes forget kafka "+tp.lane(7))

	if err := tp.broker.DeleteTopic(t.Context(), tp.name); err != nil {
		t.Fatal(err)
	}
	finds(examine(3), "error", "source", "topic "+tp.name+": the broker has no such topic")
}
