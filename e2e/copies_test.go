package e2e

import (
	"fmt"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"
)

// copies are messages of which some are sent again, by any partition. A message without an id
// has only a value, and a copy that differs has another one.
type copies struct {
	records                          []*kgo.Record
	ids, same, differing, withoutIDs int64
}

func newCopies(t *testing.T, partitions int32) *copies {
	c := &copies{ids: 8_000}
	rng := dice(t)
	send := func(id []byte, value string) {
		r := &kgo.Record{Partition: rng.Int32N(partitions), Value: []byte(value)}
		if id != nil {
			r.Headers = []kgo.RecordHeader{{Key: idHeader, Value: id}}
		}
		c.records = append(c.records, r)
	}
	for i := range c.ids {
		id, value := fmt.Appendf(nil, "message-%d", i), fmt.Sprintf(`{"n": %d}`, i)
		send(id, value)
		switch rng.IntN(6) {
		case 0:
			send(id, value)
			c.same++
		case 1:
			send(id, fmt.Sprintf(`{"n": %d, "changed": true}`, i))
			c.differing++
		case 2:
			send(nil, value)
			c.withoutIDs++
		}
	}
	return c
}

// land lands the copies under kills, with these lines of the configuration.
func (c *copies) land(t *testing.T, scope, lines string, rows int64) (*database, page) {
	const partitions = 4
	db := newDatabase(t)
	db.exec(`CREATE TABLE public.landed (id text NOT NULL, value text NOT NULL)`)
	tp := newTopic(t, scope, partitions)
	config := configFile(t, fmt.Sprintf(`scope: %s
sources:
  - kafka: {brokers: [%q], topics: [%s]}
database:
  url: %q
%s
dead_letters: {max_share: 1}
sink:
  table: {name: public.landed, columns: {id: id, value: value}}
`, scope, tp.broker.Addr(), tp.name, db.url, lines))
	landUnderKills(t, tp, db, config, c.records, "public.landed", rows, scope)
	if n := one[int64](db, `SELECT count(*) FROM public.landed`); n != rows {
		t.Errorf("%d rows landed, want %d", n, rows)
	}
	if n := one[int64](db, `SELECT count(DISTINCT id) FROM public.landed`); n != rows {
		t.Errorf("%d ids landed, want %d", n, rows)
	}
	_, sum := db.settledBooks(scope)
	if sum.Fetched != int64(len(c.records)) {
		t.Errorf("the books have %d messages, sent were %d", sum.Fetched, len(c.records))
	}
	return db, sum
}

// deadLetters counts the dead letters of a class, and fails if a place has two.
func (db *database) deadLetters(class string) int64 {
	db.t.Helper()
	if n := one[int64](db, `SELECT count(*) FROM (SELECT FROM dedupd.dead_letters GROUP BY lane_id, position HAVING count(*) > 1) d`); n != 0 {
		db.t.Errorf("%d places have several dead letters", n)
	}
	return one[int64](db, `SELECT count(*) FROM dedupd.dead_letters WHERE class = $1`, class)
}

// Raise instead of silently ignoring: what a producer sends again is a dead letter that names
// the place of the first one; what the broker delivers again is none.
func TestDuplicatesAreRaised(t *testing.T) {
	c := newCopies(t, 4)
	db, sum := c.land(t, "e2e-raised", "dedup: {on_duplicate: dead_letter, fingerprint: none}", c.ids)
	if n, want := db.deadLetters("duplicate"), c.same+c.differing; n != want {
		t.Errorf("%d duplicates are dead letters, want %d", n, want)
	}
	if n := one[int64](db, `SELECT count(*) FROM dedupd.dead_letters WHERE class = 'duplicate' AND (original_lane IS NULL OR original_position IS NULL)`); n != 0 {
		t.Errorf("%d of them don't name the first one's place", n)
	}
	if n := db.deadLetters("no_id"); n != c.withoutIDs || sum.Dead != n || sum.Resent != c.same+c.differing {
		t.Errorf("%d have no id, want %d; the books say %+v", n, c.withoutIDs, sum)
	}
}

// Same key, other content: refused. The first payload of an id lands, another one is a dead
// letter, and a copy of the same payload is a duplicate. Which payload is the first is not
// known: two partitions have no order.
func TestOtherContentIsRefused(t *testing.T) {
	c := newCopies(t, 4)
	db, sum := c.land(t, "e2e-conflicts", "dedup: {on_conflict: dead_letter}", c.ids)
	if n := db.deadLetters("conflict"); n != c.differing || sum.Conflicts != n || sum.Resent != c.same {
		t.Errorf("%d conflicts are dead letters, want %d, of %d copies; the books say %+v", n, c.differing, c.same, sum)
	}
	if n := one[int64](db, `SELECT count(*) FROM dedupd.dead_letters d JOIN public.landed l ON l.id = convert_from(d.message_id, 'UTF8') WHERE d.class = 'conflict' AND convert_from(d.value, 'UTF8') = l.value`); n != 0 {
		t.Errorf("%d conflicts have the payload that landed", n)
	}
}

// No key: every message is unique, by its place.
func TestWithoutAnIDEachMessageIsUnique(t *testing.T) {
	c := newCopies(t, 4)
	_, sum := c.land(t, "e2e-unique", "id: {missing: position}\ndedup: {fingerprint: none}", c.ids+c.withoutIDs)
	if sum.Applied != c.ids+c.withoutIDs || sum.Dead != 0 || sum.Resent != c.same+c.differing {
		t.Errorf("the books say %+v of %d ids, %d copies and %d without an id", sum, c.ids, c.same+c.differing, c.withoutIDs)
	}
}
