package main

import (
	"fmt"
	"strings"
	"time"
)

// snapshot is what there is to show at a moment.
type snapshot struct {
	elapsed       time.Duration
	total         int64 // messages to send
	sent          int64
	orders        int64 // different ids among those sent
	books         page
	kills         int
	ofKills       int
	starts        int
	pid           int // of the worker; 0 while there is none
	note          string
	held          int     // messages the broker waits for, if known
	sending, rate float64 // messages a second, sent and taken off the broker
}

// line is the snapshot as one line of plain text.
func (s snapshot) line() string {
	b := s.books
	return fmt.Sprintf("%5.1fs  sent %s of %s  landed %s  duplicates %s (resent %s, cross source %s, redelivered %s)  %s/s  kills %d  worker %s",
		s.elapsed.Seconds(), count(s.sent), count(s.total), count(b.Applied), count(b.Duplicates),
		count(b.Resent), count(b.CrossSource), count(b.Redelivered), count(int64(s.rate)), s.kills, s.note)
}

// panel is the snapshot as lines for a terminal of that width.
func (s snapshot) panel(width int, c colours) []string {
	b := s.books
	bar := max(10, min(40, width-50))
	state := s.note
	switch {
	case s.pid != 0:
		state = c.good(s.note) + fmt.Sprintf(", pid %d", s.pid)
	case s.note == killed:
		state = c.bad(s.note)
	}
	return []string{
		fmt.Sprintf("%s  %s", c.bold("dedupd demo"), c.dim(fmt.Sprintf("%.1f s", s.elapsed.Seconds()))),
		fmt.Sprintf("  sent        %10s  %s  %s", count(s.sent), meterBar(s.sent, s.total, bar, c.dim), c.dim(perSecond(s.sending))),
		fmt.Sprintf("  landed      %10s  %s  %s", count(b.Applied), meterBar(b.Applied, s.total, bar, c.good), c.dim(perSecond(s.rate))),
		fmt.Sprintf("  duplicates  %10s  %s  %s", count(b.Duplicates), meterBar(b.Duplicates, s.total, bar, c.warn), c.dim(percent(b.Duplicates, b.Fetched))),
		c.dim(fmt.Sprintf("              resent %s, cross source %s, redelivered %s", count(b.Resent), count(b.CrossSource), count(b.Redelivered))),
		fmt.Sprintf("  worker      %10s  %s", fmt.Sprintf("no. %d", s.starts), state),
		fmt.Sprintf("  kills       %10s  %s", fmt.Sprintf("%d of %d", s.kills, s.ofKills), c.dim("by SIGKILL, in the middle of its work")),
	}
}

func perSecond(rate float64) string { return count(int64(rate)) + "/s" }

// meterBar is a share as a bar of that many cells.
func meterBar(part, whole int64, cells int, colour func(string) string) string {
	full := 0
	if whole > 0 {
		full = int(min(part, whole) * int64(cells) / whole)
	}
	return colour(strings.Repeat("█", full)) + strings.Repeat("·", cells-full)
}

// colours wrap text in what a terminal takes for colour, or leave it alone.
type colours bool

func (c colours) wrap(code, text string) string {
	if !c {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (c colours) bold(s string) string { return c.wrap("1", s) }
func (c colours) dim(s string) string  { return c.wrap("2", s) }
func (c colours) good(s string) string { return c.wrap("32", s) }
func (c colours) warn(s string) string { return c.wrap("33", s) }
func (c colours) bad(s string) string  { return c.wrap("31", s) }
