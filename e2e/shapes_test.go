package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/dedupd/dedupd/e2e/shape"
)

// underKills has two workers, one of which is killed again and again, land what a shape's
// producers send, by each broker that the shape can have. The judge says what came of it.
func underKills(t *testing.T, s *shape.Shape) {
	t.Run("kafka", func(t *testing.T) {
		tp := newTopic(t, "shape-"+s.Name, 4)
		landShape(t, s, &shapeSource{
			yaml:  fmt.Sprintf("name: main\n    kafka: {brokers: [%q], topics: [%s]}", tp.broker.Addr(), tp.name),
			judge: []string{"-kafka", tp.broker.Addr(), "-topic", tp.name},
			send: func(all []shape.Message) error {
				var records []*kgo.Record
				for _, m := range all {
					records = append(records, &kgo.Record{Partition: int32(m.Partition), Value: m.Value, Headers: []kgo.RecordHeader{{Key: idHeader, Value: []byte(m.ID)}}})
				}
				return tp.produce(records...)
			},
			evict: func() { tp.evict("shape") },
		})
	})
	if s.Ordered {
		return
	}
	t.Run("nats", func(t *testing.T) {
		st := newStream(t, "SHAPE")
		landShape(t, s, &shapeSource{
			yaml:  fmt.Sprintf("name: main\n    nats: {servers: [%q], stream: %s}", st.url, st.name),
			judge: []string{"-nats", st.url, "-stream", st.name, "-source", "main"},
			send: func(all []shape.Message) error {
				for _, m := range all {
					if _, err := st.js.PublishMsgAsync(st.message(int32(m.Partition), m.ID, m.Value)); err != nil {
						return err
					}
				}
				<-st.js.PublishAsyncComplete()
				return nil
			},
			evict: func() {}, // a durable has no members
		})
	})
}

// shapeSource is a broker to a shape.
type shapeSource struct {
	yaml  string
	judge []string // arguments that lead the judge to the log
	send  func([]shape.Message) error
	evict func() // the dead from the consumer group
}

func landShape(t *testing.T, s *shape.Shape, from *shapeSource) {
	t.Helper()
	const messages = 20_000
	rng, db := dice(t), newDatabase(t)
	config := configFile(t, fmt.Sprintf("scope: shape\nsources:\n  - %s\ndatabase:\n  url: %q\n%s", from.yaml, db.url, s.Worker))
	mustRun := func(args ...string) {
		t.Helper()
		if r := command(t, nil, append(args, "-c", config)...); r.code != 0 {
			t.Fatalf("%s: exit code %d, stderr:\n%s", args[0], r.code, r.stderr)
		}
	}
	mustRun("migrate", "up")
	if out, err := exec.Command(build(t, "./e2e/check"), "prepare", "-database", db.url).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	db.exec(s.Setup())

	plan := newShapePlan(t, s, rng, messages)
	f := newFleet(t, rng, 2, config)
	for _, w := range f.workers {
		w.mayRetry = s.Retries
	}
	stop := plan.beside(s, rand.New(rand.NewPCG(rng.Uint64(), 0)), db)
	f.killThrough(db, strategyKills, func(part int) error { return plan.send(from, part) }, from.evict)
	stop()
	await(t, "all has been read", time.Minute, func() error {
		if n := db.fetched(); n < int64(len(plan.all)) {
			return fmt.Errorf("%d of %d messages", n, len(plan.all))
		}
		return nil
	})
	f.end()
	mustRun("run", "--until-idle", "500ms") // what was left
	plan.judge(s, db, from)
}

// shapePlan is what a shape's producers send, and the notes of that for the judge.
type shapePlan struct {
	all     []shape.Message
	sent    atomic.Int64 // of those, without copies
	intents string       // file
}

func newShapePlan(t *testing.T, s *shape.Shape, rng *rand.Rand, messages int) *shapePlan {
	t.Helper()
	p := &shapePlan{intents: filepath.Join(t.TempDir(), "intents")}
	file, err := os.Create(p.intents)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines := json.NewEncoder(file)
	for next := s.Draw(rng, 4); len(p.all) < messages; {
		for _, m := range next() {
			p.all = append(p.all, m)
			if err := lines.Encode(map[string]any{"id": m.ID, "copy": m.Copy, "sum": fmt.Sprintf("%x", sha256.Sum256(m.Value)), "state": "acked"}); err != nil {
				t.Fatal(err)
			}
		}
	}
	return p
}

// send sends one of as many parts as there are kills.
func (p *shapePlan) send(to *shapeSource, part int) error {
	end := (part + 1) * len(p.all) / strategyKills
	for at := part * len(p.all) / strategyKills; at < end; {
		batch := p.all[at:min(at+100, end)]
		if err := to.send(batch); err != nil {
			return err
		}
		for i := range batch {
			if batch[i].Copy == 0 {
				p.sent.Add(1)
			}
		}
		at += len(batch)
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}

// beside writes to the table as the shape's application does, until stop.
func (p *shapePlan) beside(s *shape.Shape, rng *rand.Rand, db *database) (stop func()) {
	if s.Beside == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(db.t.Context())
	ended := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			if _, err := db.pool.Exec(db.t.Context(), s.Beside(rng, int(p.sent.Load()))); err != nil {
				ended <- err
				return
			}
			time.Sleep(time.Millisecond)
		}
		ended <- nil
	}()
	return func() {
		cancel()
		if err := <-ended; err != nil {
			db.t.Fatal("the application beside the workers: ", err)
		}
	}
}

// judge has the judge say what came of the run.
func (p *shapePlan) judge(s *shape.Shape, db *database, from *shapeSource) {
	db.t.Helper()
	empty := filepath.Join(db.t.TempDir(), "empty") // no samples, and no events
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		db.t.Fatal(err)
	}
	args := append([]string{"run", "-database", db.url, "-scope", "shape", "-shape", s.Name, "-intents", p.intents, "-samples", empty, "-events", empty, "-settled"}, from.judge...)
	out, err := exec.CommandContext(db.t.Context(), build(db.t, "./e2e/check"), args...).CombinedOutput()
	if err != nil {
		db.t.Errorf("%v\n%s", err, out)
		return
	}
	db.t.Logf("%s", out)
}
