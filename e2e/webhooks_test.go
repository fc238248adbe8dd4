package e2e

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// delivery is one webhook as GitHub sends it.
type delivery struct {
	ID      string          `json:"delivery"`
	Event   string          `json:"event"`
	Payload json.RawMessage `json:"payload"`
}

// readDeliveries reads real payloads from a file beside the repository. They
// aren't the project's own, so a checkout may be without them.
func readDeliveries(t *testing.T) (all []delivery) {
	t.Helper()
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(filepath.Join(root, "..", "shared", "data", "github-webhooks.ndjson.gz"))
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("the file with real webhooks isn't there: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	text, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(text)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var d delivery
		if err := json.Unmarshal(lines.Bytes(), &d); err != nil {
			t.Fatalf("line %d: %v", len(all)+1, err)
		}
		all = append(all, d)
	}
	if err := lines.Err(); err != nil || len(all) < 100 {
		t.Fatalf("%d deliveries, %v", len(all), err)
	}
	return all
}

func webhook(d delivery, partition int32) *kgo.Record {
	return &kgo.Record{Partition: partition, Value: d.Payload, Headers: []kgo.RecordHeader{
		{Key: "X-GitHub-Delivery", Value: []byte(d.ID)}, {Key: "X-GitHub-Event", Value: []byte(d.Event)},
	}}
}

// GitHub's real webhooks, some of them delivered again, land by the sample
// configuration as it is.
func TestGitHubWebhooks(t *testing.T) {
	needServices(t)
	deliveries := readDeliveries(t)
	rng := dice(t)
	db := newDatabase(t)
	db.exec(`CREATE TABLE public.github_events (delivery uuid PRIMARY KEY, event text NOT NULL, action text, repository text, sender text,
		payload jsonb NOT NULL, received_at timestamptz NOT NULL)`)
	tp := newTopic(t, "github-webhooks", 2)
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(root, "configs", "github-webhooks.yaml")
	env := []string{"KAFKA_BROKERS=" + tp.broker.Addr(), "DATABASE_URL=" + db.url}

	// The first delivery comes again with another payload, which GitHub never
	// does: a gateway's bug, say. It stands behind the original in one partition,
	// and none of the first's resends crosses to the other partition, where it
	// could be claimed before the original is.
	other := delivery{deliveries[0].ID, deliveries[0].Event, json.RawMessage(`{"action":"forged","sender":{"login":"mallory"}}`)}
	var records []*kgo.Record
	for i, d := range deliveries {
		partition := int32(i % 2)
		records = append(records, webhook(d, partition))
		for range []int{0, 0, 0, 1, 2}[rng.IntN(5)] {
			if i > 0 && rng.IntN(4) == 0 {
				partition = 1 - partition
			}
			records = append(records, webhook(d, partition))
		}
	}
	records = append(records, webhook(other, 0))
	began := time.Now().Add(-time.Minute)
	if err := tp.produce(records...); err != nil {
		t.Fatal(err)
	}

	r := command(t, env, "run", "-c", config, "--until-idle", "1s")
	if r.code != 0 {
		t.Fatalf("exit code %d: %s", r.code, r.stderr)
	}
	t.Logf("%d deliveries in %d messages: %s", len(deliveries), len(records), r.stdout)
	if n := one[int64](db, "SELECT count(*) FROM public.github_events"); n != int64(len(deliveries)) {
		t.Errorf("%d rows for %d deliveries", n, len(deliveries))
	}
	without := 0
	for _, d := range deliveries {
		without += db.checkDelivery(d, began)
	}
	if without == 0 {
		t.Error("every payload has an action, a repository and a sender: nothing shows what becomes of NULLs")
	}

	duplicates := int64(len(records) - len(deliveries) - 1)
	var stats struct {
		Scope  string
		Lanes  []struct{ Source, Lane string }
		Totals struct {
			Fetched, Applied, Duplicates, Resent, Conflicts, Dead int64
			Lag                                                   *int64
		}
		DeadLetters int64 `json:"dead_letters"`
	}
	query(t, env, &stats, "stats", "-c", config)
	got := stats.Totals
	if stats.Scope != "github" || len(stats.Lanes) != 2 || got.Fetched != int64(len(records)) || got.Applied != int64(len(deliveries)) ||
		got.Duplicates != duplicates || got.Resent != duplicates || got.Conflicts != 1 || got.Dead != 0 || stats.DeadLetters != 1 || got.Lag == nil || *got.Lag != 0 {
		t.Errorf("stats: %+v; want %d fetched, %d applied, %d duplicates, 1 conflict", stats, len(records), len(deliveries), duplicates)
	}
	checkConflict(t, tp, env, config, other)
}

// checkDelivery compares a row with what the JSON says, read by another parser
// than the worker's, and reports whether it has NULLs.
func (db *database) checkDelivery(d delivery, since time.Time) (nulls int) {
	db.t.Helper()
	var want struct {
		Action     *string
		Repository *struct {
			FullName *string `json:"full_name"`
		}
		Sender *struct{ Login *string }
	}
	if err := json.Unmarshal(d.Payload, &want); err != nil {
		db.t.Fatalf("%s: %v", d.ID, err)
	}
	var repository, sender *string
	if want.Repository != nil {
		repository = want.Repository.FullName
	}
	if want.Sender != nil {
		sender = want.Sender.Login
	}
	var event string
	var action, repositoryIs, senderIs *string
	var same bool
	var at time.Time
	err := db.pool.QueryRow(db.t.Context(), `SELECT event, action, repository, sender, payload = $2::jsonb, received_at
		FROM public.github_events WHERE delivery = $1`, d.ID, string(d.Payload)).Scan(&event, &action, &repositoryIs, &senderIs, &same, &at)
	if err != nil {
		db.t.Errorf("%s (%s): %v", d.ID, d.Event, err)
		return 0
	}
	for _, c := range []struct {
		column    string
		got, want *string
	}{{"event", &event, &d.Event}, {"action", action, want.Action}, {"repository", repositoryIs, repository}, {"sender", senderIs, sender}} {
		if text(c.got) != text(c.want) {
			db.t.Errorf("%s (%s): %s is %s, want %s", d.ID, d.Event, c.column, text(c.got), text(c.want))
		}
		if c.want == nil {
			nulls = 1
		}
	}
	if !same {
		db.t.Errorf("%s (%s): the payload is another", d.ID, d.Event)
	}
	if at.Before(since) || at.After(time.Now().Add(time.Minute)) {
		db.t.Errorf("%s (%s): received at %s", d.ID, d.Event, at)
	}
	return nulls
}

func text(s *string) string {
	if s == nil {
		return "NULL"
	}
	return strconv.Quote(*s)
}

// raw is how the commands show bytes that are text.
type raw struct{ Text *string }

func checkConflict(t *testing.T, tp *topic, env []string, config string, other delivery) {
	t.Helper()
	var list []struct {
		ID        int64
		Class     string
		MessageID *raw `json:"message_id"`
		Place     struct {
			Lane     string
			Position int64
		}
	}
	query(t, env, &list, "dlq", "list", "-c", config)
	if len(list) != 1 || list[0].Class != "conflict" || list[0].MessageID == nil || text(list[0].MessageID.Text) != strconv.Quote(other.ID) || list[0].Place.Lane != tp.lane(0) {
		t.Fatalf("dlq list: %+v; want the conflict of %s", list, other.ID)
	}
	var letter struct {
		Class    string
		Value    *raw
		Topic    *raw
		Original *struct {
			Lane     string
			Position int64
		}
		Headers []struct{ Key, Value *raw }
	}
	number := fmt.Sprint(list[0].ID)
	query(t, env, &letter, "dlq", "show", number, "-c", config)
	switch {
	case letter.Class != "conflict", letter.Value == nil || text(letter.Value.Text) != strconv.Quote(string(other.Payload)),
		letter.Topic == nil || text(letter.Topic.Text) != strconv.Quote(tp.name),
		letter.Original == nil || letter.Original.Position != 0 || letter.Original.Lane != tp.lane(0), len(letter.Headers) != 2:
		t.Errorf("dlq show %s: %+v; want the payload that came second, and where the first stands", number, letter)
	}
	if r := command(t, env, "dlq", "show", "999", "-c", config); r.code == 0 {
		t.Error("dlq show of a number that isn't there exits 0")
	}
}
