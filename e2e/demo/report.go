package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// report counts, tells, and returns what isn't as promised.
func (d *demo) report(ctx context.Context) error {
	l, err := readLanded(ctx, d.postgres.pool, d.producer.orders.Load())
	if err != nil {
		return err
	}
	t := truth{sent: d.producer.sent.Load(), orders: d.producer.orders.Load(), cents: d.producer.cents.Load()}
	d.screen.say("")
	d.screen.say("The books, by dedupd (view dedupd.books):")
	for _, line := range ledger(d.books) {
		d.screen.say("  %s", line)
	}
	sum := d.books.sum()
	d.screen.say("")
	d.screen.say("Duplicates, %s of what was fetched:", percent(sum.Duplicates, sum.Fetched))
	for _, c := range []struct {
		n    int64
		name string
		why  string
	}{
		{sum.Resent, "resent", "the producer sent it again"},
		{sum.CrossSource, "cross source", "it came by the other stream as well"},
		{sum.Redelivered, "redelivered", "the broker delivered it again, since a killed worker couldn't acknowledge"},
	} {
		d.screen.say("  %10s  %6s  %-12s  %s", count(c.n), percent(c.n, sum.Fetched), c.name, c.why)
	}
	d.screen.say("")
	d.screen.say("The count, by SQL on public.orders, which has no unique index:")
	d.screen.say("  %10s  messages were sent: %s orders, %s resent, %s by the other stream",
		count(t.sent), count(t.orders), count(d.producer.resent.Load()), count(d.producer.otherWay.Load()))
	d.screen.say("  %10s  rows landed, with %s different ids, worth %s cents of %s",
		count(l.rows), count(l.ids), count(l.cents), count(t.cents))
	for i, k := range d.kills {
		d.screen.say("  %10s  kill %d, with %s orders landed; the next worker started after %s",
			"SIGKILL", i+1, count(k.applied), k.down.Round(time.Millisecond))
	}
	d.screen.say("")
	err = judge(d.books, l, t)
	if err == nil && len(d.kills) < d.options.kills {
		// Not a broken promise, but it proves less than was asked for.
		err = fmt.Errorf("the worker was killed %d times only, not %d: send more -messages, or at a lower -rate", len(d.kills), d.options.kills)
	}
	if err != nil {
		d.screen.say("%s", d.screen.bad("NOT as promised."))
		return err
	}
	d.screen.say("%s Every order landed exactly once, and the books balance. %s",
		d.screen.good("OK."), fmt.Sprintf("(%.1f s)", time.Since(d.began).Seconds()))
	if !d.keep {
		d.screen.say("These servers end now. To look for yourself, run it with -keep; then:  psql '%s' -c 'TABLE dedupd.books'", d.postgres.url)
	}
	d.screen.say("")
	return nil
}

// ledger is the books as a table, with a line for the sum.
func ledger(b books) []string {
	rows := [][]string{{"source", "lane", "fetched", "applied", "redelivered", "resent", "cross source", "conflicts", "dead"}}
	for _, p := range append(append(books(nil), b...), b.sum()) {
		name := p.Source
		if name == "" {
			name = "all"
		}
		rows = append(rows, []string{
			name, p.Lane, count(p.Fetched), count(p.Applied), count(p.Redelivered),
			count(p.Resent), count(p.CrossSource), count(p.Conflicts), count(p.Dead),
		})
	}
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], len(cell))
		}
	}
	lines := make([]string, len(rows))
	for r, row := range rows {
		var b strings.Builder
		for i, cell := range row {
			if i < 2 { // text
				fmt.Fprintf(&b, "%-*s  ", widths[i], cell)
			} else {
				fmt.Fprintf(&b, "%*s  ", widths[i], cell)
			}
		}
		lines[r] = strings.TrimRight(b.String(), " ")
	}
	return lines
}

// count writes a number for people: 1,234,567.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	sign := ""
	if n < 0 {
		sign, s = "-", s[1:]
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}

func percent(part, whole int64) string {
	if whole == 0 {
		return "0.0 %"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(whole))
}
