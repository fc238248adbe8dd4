package main

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

func TestParse(t *testing.T) {
	o, err := parse(nil)
	if err != nil || o.messages != 100_000 || o.resend != 0.2 || o.kills != 2 || o.keep {
		t.Errorf("got %+v, %v", o, err)
	}
	for _, args := range []string{"-messages 0", "-resend 1", "-resend -0.1", "-kills -1", "-rate -1", "-timeout 0s", "more", "-unknown"} {
		if _, err := parse(strings.Fields(args)); err == nil {
			t.Errorf("%s: no error", args)
		}
	}
}

func TestDice(t *testing.T) {
	for _, c := range []struct {
		messages int
		share    float64
		resends  int
	}{{10_000, 0.2, 2000}, {10_000, 0, 0}, {100, 0.99, 99}, {1, 0.5, 0}} {
		draw := func() (drawn []order, resends, away int) {
			d := newDice(c.messages, c.share, 7)
			for range c.messages {
				o, subject, resend := d.next()
				drawn = append(drawn, o)
				if resend {
					resends++
				}
				if subject != o.home() {
					away++
					if !resend {
						t.Errorf("order %d was first sent by the other way", o)
					}
				}
			}
			return drawn, resends, away
		}
		drawn, resends, away := draw()
		if resends != c.resends {
			t.Errorf("%d messages, share %g: %d resends, want %d", c.messages, c.share, resends, c.resends)
		}
		if resends >= 1000 && (away < resends/10 || away > resends/3) {
			t.Errorf("%d of %d resends came by the other way", away, resends)
		}
		// Orders are numbered without gaps, and none is sent again before it was
		// sent at all.
		next := order(0)
		for _, o := range drawn {
			if o > next || o < 0 {
				t.Fatalf("order %d came when %d was next", o, next)
			}
			if o == next {
				next++
			}
		}
		if int(next) != c.messages-c.resends {
			t.Errorf("%d orders, want %d", next, c.messages-c.resends)
		}
		again, _, _ := draw()
		for i := range drawn {
			if drawn[i] != again[i] {
				t.Fatal("the same seed gave another order of things")
			}
		}
	}
}

func TestJudge(t *testing.T) {
	sent := truth{sent: 12, orders: 10, cents: 1000}
	good := func() (books, landed) {
		return books{
				{Source: "shop", Lane: "SHOP", Fetched: 10, Applied: 8, Duplicates: 2, Redelivered: 1, Resent: 1},
				{Source: "edge", Lane: "EDGE", Fetched: 3, Applied: 2, Duplicates: 1, CrossSource: 1},
			},
			landed{rows: 10, ids: 10, cents: 1000}
	}
	b, l := good()
	if err := judge(b, l, sent); err != nil {
		t.Errorf("all is well, and yet: %v", err)
	}
	for _, c := range []struct {
		say   string
		spoil func(b books, l *landed)
	}{
		{"9 rows landed for 10 orders", func(_ books, l *landed) { l.rows, l.ids = 9, 9 }},
		{"11 rows hold only 10", func(_ books, l *landed) { l.rows = 11 }},
		{"missing, among others: order-0000003", func(_ books, l *landed) { l.missing = []string{"order-0000003"} }},
		{"more than once, among others: order-0000004", func(_ books, l *landed) { l.twice = []string{"order-0000004"} }},
		{"worth 1,000 cents, but 999", func(_ books, l *landed) { l.cents = 999 }},
		{"shop/SHOP don't balance", func(b books, _ *landed) { b[0].Fetched++ }},
		{"edge/EDGE don't balance", func(b books, _ *landed) { b[1].CrossSource++ }},
		{"9 applied, the producer says 10", func(b books, _ *landed) { b[0].Applied, b[0].Fetched = 7, 9 }},
		{"only 11 of 12 messages were fetched", func(b books, _ *landed) { b[0] = page{Fetched: 8, Applied: 8} }},
		{"1 dead letters", func(b books, _ *landed) { b[0].Dead, b[0].Fetched = 1, 11 }},
		{"1 conflicts", func(b books, _ *landed) { b[0].Conflicts, b[0].Fetched = 1, 11 }},
	} {
		b, l := good()
		c.spoil(b, &l)
		if err := judge(b, l, sent); err == nil || !strings.Contains(err.Error(), c.say) {
			t.Errorf("want %q, got: %v", c.say, err)
		}
	}
	if err := judge(nil, landed{}, sent); err == nil {
		t.Error("nothing landed, and nobody minds")
	}
}

func sample() snapshot {
	return snapshot{
		elapsed: 3 * time.Second, total: 100_000, sent: 50_000, orders: 40_000,
		books: page{Fetched: 45_000, Applied: 36_000, Duplicates: 9000, Resent: 7000, CrossSource: 1800, Redelivered: 200},
		kills: 1, ofKills: 2, starts: 2, pid: 4711, note: "running",
	}
}

func TestPlainLine(t *testing.T) {
	var out bytes.Buffer
	s := &screen{out: &out, width: func() int { return 0 }, every: time.Hour}
	s.show(sample())
	s.show(sample()) // too soon
	s.last(sample())
	want := "  3.0s  sent 50,000 of 100,000  landed 36,000  duplicates 9,000 (resent 7,000, cross source 1,800, redelivered 200)  0/s  kills 1  worker running\n"
	if got := out.String(); got != want+want {
		t.Errorf("got\n%swant\n%s", got, want+want)
	}
}

func TestPanel(t *testing.T) {
	for _, width := range []int{20, 80, 200} {
		for _, colour := range []colours{false, true} {
			var out bytes.Buffer
			s := &screen{out: &out, colours: colour, width: func() int { return width }}
			s.show(sample())
			first := out.String()
			s.show(sample())
			s.say("after")
			if !strings.HasSuffix(out.String(), "\x1b[?25hafter\n") {
				t.Error("the cursor isn't there again")
			}
			if !strings.Contains(out.String()[len(first):], "\x1b[7A\r") {
				t.Error("the panel isn't drawn where it stood")
			}
			if got := strings.Contains(first, "\x1b[32m"); got != bool(colour) {
				t.Errorf("colour %t, want %t", got, colour)
			}
			if got := strings.Count(first, "\x1b[0m"); bool(colour) && got != strings.Count(first, "\x1b[1m")+
				strings.Count(first, "\x1b[2m")+strings.Count(first, "\x1b[32m")+strings.Count(first, "\x1b[33m") {
				t.Error("a colour is left on")
			}
			for _, line := range sample().panel(width, false) {
				if got := len([]rune(cut(line, width-1))); got > width-1 {
					t.Errorf("a line of %d columns on a terminal of %d", got, width)
				}
			}
		}
	}
}

func TestWords(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -1234: "-1,234"} {
		if got := count(n); got != want {
			t.Errorf("count(%d) = %q, want %q", n, got, want)
		}
	}
	if percent(1, 0) != "0.0 %" || percent(1, 8) != "12.5 %" {
		t.Error(percent(1, 0), percent(1, 8))
	}
	lines := ledger(books{{Source: "shop", Lane: "SHOP", Fetched: 1234}})
	if len(lines) != 3 || !strings.Contains(lines[1], "1,234") || !strings.HasPrefix(lines[2], "all") {
		t.Errorf("%q", lines)
	}
}

func needServices(t *testing.T) {
	if testing.Short() {
		t.Skip("needs real servers")
	}
}

// What the producer says it sent is what stands in the streams.
func TestProducer(t *testing.T) {
	needServices(t)
	b, err := startBroker(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.stop)
	const messages = 3000
	p := &producer{js: b.js, dice: newDice(messages, 0.2, 1)}
	if err := p.run(t.Context(), messages); err != nil {
		t.Fatal(err)
	}
	if p.sent.Load() != messages || p.orders.Load() != 2400 || p.resent.Load()+p.otherWay.Load() != 600 {
		t.Errorf("sent %d, orders %d, resent %d, by the other way %d", p.sent.Load(), p.orders.Load(), p.resent.Load(), p.otherWay.Load())
	}
	bodies := map[string]string{}
	ways := map[string]map[string]bool{}
	total := 0
	for _, stream := range []string{shopStream, edgeStream} {
		c, err := b.js.CreateConsumer(t.Context(), stream, jetstream.ConsumerConfig{AckPolicy: jetstream.AckNonePolicy})
		if err != nil {
			t.Fatal(err)
		}
		got, err := c.FetchNoWait(messages)
		if err != nil {
			t.Fatal(err)
		}
		for m := range got.Messages() {
			total++
			id := m.Headers().Get(idHeader)
			if before, ok := bodies[id]; ok && before != string(m.Data()) {
				t.Errorf("%s has two bodies: %s and %s", id, before, m.Data())
			}
			bodies[id] = string(m.Data())
			if ways[id] == nil {
				ways[id] = map[string]bool{}
			}
			ways[id][stream] = true
		}
	}
	both := 0
	for _, w := range ways {
		if len(w) == 2 {
			both++
		}
	}
	if total != messages || len(bodies) != 2400 || both == 0 {
		t.Errorf("%d messages with %d ids, %d of them by both ways", total, len(bodies), both)
	}
	held, err := b.held(t.Context())
	if err != nil || held != messages {
		t.Errorf("the broker holds %d (%v), want %d", held, err, messages)
	}
}

func TestProducerEndsWithItsContext(t *testing.T) {
	needServices(t)
	b, err := startBroker(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.stop)
	p := &producer{js: b.js, dice: newDice(1_000_000, 0.2, 1), rate: 1000}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	began := time.Now()
	if err := p.run(ctx, 1_000_000); err == nil || time.Since(began) > 2*time.Second {
		t.Errorf("ended after %s with %v", time.Since(began), err)
	}
	if n := p.sent.Load(); n < 50 || n > 1000 {
		t.Errorf("%d messages in 0.3 s at 1,000 a second", n)
	}
}

// A killed worker's messages come again at once, not after its ack wait.
func TestHurry(t *testing.T) {
	needServices(t)
	ctx := t.Context()
	b, err := startBroker(ctx, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.stop)
	p := &producer{js: b.js, dice: newDice(2000, 0, 1)}
	if err := p.run(ctx, 2000); err != nil {
		t.Fatal(err)
	}
	config := jetstream.ConsumerConfig{Durable: scope, AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Minute, MaxAckPending: 10_000}
	c, err := b.js.CreateConsumer(ctx, shopStream, config)
	if err != nil {
		t.Fatal(err)
	}
	fetch := func() int {
		got, err := c.Fetch(500, jetstream.FetchMaxWait(300*time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		redelivered := 0
		for m := range got.Messages() {
			if meta, err := m.Metadata(); err == nil && meta.NumDelivered > 1 {
				redelivered++
			}
		}
		return redelivered
	}
	if n := fetch(); n != 0 {
		t.Fatalf("%d redelivered at first", n)
	}
	if err := b.hurry(ctx); err != nil {
		t.Fatal(err)
	}
	// As the next worker does at its start.
	if _, err := b.js.UpdateConsumer(ctx, shopStream, config); err != nil {
		t.Fatal(err)
	}
	if n := fetch(); n != 500 {
		t.Errorf("%d of 500 were redelivered", n)
	}
}

func TestPostgres(t *testing.T) {
	needServices(t)
	ctx := t.Context()
	var out bytes.Buffer
	p, err := startPostgres(ctx, "", &screen{out: &out, width: func() int { return 0 }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.stop(); err != nil {
			t.Error(err)
		}
	})
	if b, err := readBooks(ctx, p.pool); err != nil || b != nil {
		t.Errorf("before there are books: %v, %v", b, err)
	}
	_, err = p.pool.Exec(ctx, `INSERT INTO public.orders
		SELECT 'order-' || to_char(n, 'FM0000000'), 'c', 100, 's', now() FROM unnest('{0,1,1,3}'::int[]) n`)
	if err != nil {
		t.Fatal(err)
	}
	l, err := readLanded(ctx, p.pool, 4)
	if err != nil {
		t.Fatal(err)
	}
	if l.rows != 4 || l.ids != 3 || l.cents != 400 ||
		strings.Join(l.missing, " ") != order(2).id() || strings.Join(l.twice, " ") != order(1).id() {
		t.Errorf("%+v", l)
	}
}
