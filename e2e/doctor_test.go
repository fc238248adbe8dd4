package e2e

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// finding is what doctor tells of one check.
type finding struct{ Check, Level, Text, Cure string }

// patient is what doctor examines: a scope that reads a topic and a stream.
type patient struct {
	*testing.T
	db     *database
	tp     *topic
	st     *stream
	scope  string
	config string
}

func newPatient(t *testing.T) *patient {
	t.Helper()
	p := &patient{T: t, db: newDatabase(t), scope: "e2e-doctor"}
	p.db.exec(ordersTable)
	p.tp, p.st = newTopic(t, p.scope, 2), newStream(t, "DOCTOR")
	for i := range 10 {
		s := send{n: int32(i), partition: int32(i % 2)}
		if err := p.tp.produce(record(s)); err != nil {
			t.Fatal(err)
		}
		p.st.publish(send{n: int32(i + 10)}.id(), s.body())
	}
	p.config = configFile(t, fmt.Sprintf("scope: %s\nsources:\n  - kafka: {brokers: [%q], topics: [%s]}\n  - nats: {servers: [%q], stream: DOCTOR}\ndatabase:\n  url: %q\n%s",
		p.scope, p.tp.broker.Addr(), p.tp.name, p.st.url, p.db.url, ordersSink))
	if r := command(t, nil, "run", "-c", p.config, "--until-idle", "1s"); r.code != 0 {
		t.Fatal(r.stderr)
	}
	return p
}

// findings are what doctor found.
type findings struct {
	*patient
	all []finding
}

// examine runs doctor, which must exit with the code.
func (p *patient) examine(code int) findings {
	p.Helper()
	r := command(p.T, nil, "doctor", "-c", p.config, "-o", "json")
	var all []finding
	if err := json.Unmarshal([]byte(r.stdout), &all); err != nil || r.code != code || r.stderr != "" {
		p.Fatalf("exit code %d, want %d; %v\n%s%s", r.code, code, err, r.stdout, r.stderr)
	}
	return findings{p, all}
}

// want wants one finding of a level, with all these words in its text or cure.
func (f findings) want(level, check string, words ...string) {
	f.Helper()
	if !slices.ContainsFunc(f.all, func(f finding) bool {
		return f.Level == level && f.Check == check && !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(f.Text+" -> "+f.Cure, w) })
	}) {
		f.Errorf("no %s of %s with %q among\n%+v", level, check, words, f.all)
	}
}

// What doctor finds at the brokers, and in lanes whose positions don't fit what the
// brokers have. It must find nothing where all is well.
func TestDoctor(t *testing.T) {
	p := newPatient(t)
	p.isWell()
	p.sharesGroupAndDurable()
	p.hasGap()
	p.deletesAcknowledged()
	p.hasWrongPositions()
	if err := p.tp.broker.DeleteTopic(t.Context(), p.tp.name); err != nil {
		t.Fatal(err)
	}
	p.examine(3).want("error", "source", "topic "+p.tp.name+": the broker has no such topic")
}

func (p *patient) isWell() {
	p.Helper()
	f := p.examine(0)
	f.want("ok", "database", "Postgres 1")
	f.want("ok", "schema", p.scope)
	f.want("ok", "grants")
	f.want("ok", "sink")
	f.want("ok", "source", "kafka: lanes: 2, positions at the broker: 10")
	f.want("ok", "source", "nats: lanes: 1, positions at the broker: 10")
	f.want("ok", "lane", "kafka")
	f.want("ok", "lane", "nats")
	f.want("warning", "window", "DOCTOR", "without a time limit")
	for _, f := range f.all {
		if f.Level != "ok" && f.Check != "window" {
			p.Errorf("all is well, but: %+v", f)
		}
		if (f.Level == "ok") != (f.Cure == "") {
			p.Errorf("a finding's cure: %+v", f)
		}
	}
}

// sharesGroupAndDurable examines another scope that would read by the same group and the
// same durable.
func (p *patient) sharesGroupAndDurable() {
	p.Helper()
	other := *p
	other.config = configFile(p.T, fmt.Sprintf("scope: %s-2\nsources:\n  - kafka: {brokers: [%q], topics: [%s], group: %s}\n  - nats: {servers: [%q], stream: DOCTOR, durable: %s}\ndatabase:\n  url: %q\n%s",
		p.scope, p.tp.broker.Addr(), p.tp.name, p.scope, p.st.url, p.scope, p.db.url, ordersSink))
	f := other.examine(3)
	f.want("warning", "source", "kafka: scope "+p.scope+" wrote the group's offset of "+p.tp.lane(0), "a group of its own")
	f.want("error", "source", "nats: scope "+p.scope+" reads the same durable", "a durable of its own")
	if n := len(slices.DeleteFunc(f.all, func(f finding) bool { return !strings.Contains(f.Text, "scope "+p.scope+" ") })); n != 2 {
		p.Errorf("%d findings about the other scope, want one for each source", n)
	}
}

func (p *patient) stream() jetstream.Stream {
	p.Helper()
	s, err := p.st.js.Stream(p.Context(), "DOCTOR")
	if err != nil {
		p.Fatal(err)
	}
	return s
}

// hasGap has the stream discard what was not read.
func (p *patient) hasGap() {
	p.Helper()
	if err := p.stream().Purge(p.Context()); err != nil {
		p.Fatal(err)
	}
	queue := ` WHERE scope = 'e2e-doctor' AND source = 'nats'`
	p.db.exec(`UPDATE dedupd.lanes SET next_position = 5` + queue)
	p.examine(3).want("error", "lane", "nats queue: data is lost: the queue is at 5, the stream has only 11 and above", "on_gap")
	p.db.exec(`INSERT INTO dedupd.gaps (lane, first, next) SELECT id, 5, 11 FROM dedupd.lanes` + queue)
	p.examine(3).want("error", "lane", "nats queue: data is lost: the stream has discarded positions 5 to 10", "dedupd lanes set-position nats queue 11 -c "+p.config)
	p.db.exec(`DELETE FROM dedupd.gaps`)
	p.db.exec(`UPDATE dedupd.lanes SET next_position = 11` + queue)
}

// deletesAcknowledged has the stream delete what is acknowledged, while the database has
// no standby.
func (p *patient) deletesAcknowledged() {
	p.Helper()
	interest := p.stream().CachedInfo().Config
	interest.Retention = jetstream.InterestPolicy
	if _, err := p.st.js.UpdateStream(p.Context(), interest); err != nil {
		p.Fatal(err)
	}
	p.examine(0).want("warning", "source", "nats: the stream deletes what is acknowledged", "--accept-loss-on-failover")
}

// hasWrongPositions examines a lane whose row doesn't fit its partition.
func (p *patient) hasWrongPositions() {
	p.Helper()
	set := func(sql string) {
		p.Helper()
		p.db.exec(`UPDATE dedupd.lanes SET ` + sql + ` WHERE scope = 'e2e-doctor' AND lane = 'e2e-doctor/1'`)
	}
	lane, cure := "kafka "+p.tp.lane(1), "dedupd lanes set-position kafka "+p.tp.lane(1)+" "
	set("next_position = 9")
	p.examine(3).want("error", "lane", lane, "but the partition ends at", cure+"5 -c "+p.config)
	set("next_position = 5, cut_at = 4")
	p.examine(3).want("error", "lane", lane, "was cut at 4", cure+"4")
	set("cut_at = NULL, log_id = 'another'")
	p.examine(3).want("error", "lane", lane, "created anew", "another", cure+"0")
	set("log_id = NULL, next_position = 2, broker_position = 2")
	p.examine(0).want("warning", "lane", lane, "the group is at 5", "lost commits")
	set("next_position = 5, broker_position = 6")
	p.examine(0).want("warning", "lane", lane, "moved back to 5, from 6", "on_group_reset")
	set("next_position = 1, broker_position = 5")
	if err := p.tp.broker.DeleteRecords(p.Context(), p.tp.name, 1, 3); err != nil {
		p.Fatal(err)
	}
	p.examine(3).want("error", "lane", lane, "data is lost", "only 3 and above", "on_gap")
	set("next_position = 5, lane = 'e2e-doctor/7'")
	p.examine(0).want("warning", "lane", p.tp.lane(7), "no such lane", "dedupd lanes forget kafka "+p.tp.lane(7))
}

// The scopes of a process share what their role may have.
func TestDoctorSumsConnections(t *testing.T) {
	db := newDatabase(t)
	tp := newTopic(t, "e2e-doctor-sums", 1)
	db.exec(`CREATE TABLE public.orders (id text PRIMARY KEY)`)
	role := fmt.Sprintf("few_%d", time.Now().UnixNano())
	db.exec(`CREATE ROLE ` + role + ` LOGIN CONNECTION LIMIT 7 PASSWORD 'few'`)
	defer db.exec(`DROP ROLE ` + role)
	u, err := url.Parse(db.url)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(role, "few")
	scopes := []string{"sums-1", "sums-2"}
	t.Setenv(bouncerEnv, "") // which logs in as a role of its own
	config := configFile(t, fmt.Sprintf("sources:\n  - kafka: {brokers: [%q], topics: [%s]}\ndatabase:\n  url: %q\nsink: {table: {name: public.orders, columns: {id: id}}}\npipelines: [{scope: %s}, {scope: %s}]\n",
		tp.broker.Addr(), tp.name, u.String(), scopes[0], scopes[1]))
	if r := command(t, nil, "doctor", "-c", config); !strings.Contains(r.stdout, "role "+role+" may have 7 connections, and one worker wants up to 8") {
		t.Errorf("doctor of two scopes with 4 connections each:\n%s%s", r.stdout, r.stderr)
	}
	if r := command(t, nil, "doctor", "-c", config, "--scope", scopes[0]); strings.Contains(r.stdout, "may have 7 connections") {
		t.Errorf("doctor of one of them:\n%s%s", r.stdout, r.stderr)
	}
}
