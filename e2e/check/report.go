package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

// The verdicts, by the exit code that tells them.
const (
	valid   = 0
	invalid = 1
	unknown = 2
)

var verdicts = [...]string{valid: "valid", invalid: "invalid", unknown: "unknown"}

// report is what a judgement came to.
type report struct {
	Verdict string `json:"verdict"`
	// Reason says why the verdict is unknown.
	Reason     string    `json:"reason,omitempty"`
	Scope      string    `json:"scope"`
	Seed       uint64    `json:"seed"`
	Seconds    float64   `json:"seconds"`
	Seen       seen      `json:"seen"`
	Invariants []promise `json:"invariants,omitempty"`
	// Broker are faults of the broker, which don't count against the product.
	Broker *promise `json:"broker,omitempty"`

	code int
}

// seen counts what the verdict rests on: one that rests on nothing is none.
type seen struct {
	Lanes       int `json:"lanes"`
	Messages    int `json:"messages"`
	Intents     int `json:"intents"`
	Effects     int `json:"effects"`
	Claims      int `json:"claims"`
	DeadLetters int `json:"dead_letters"`
	Moves       int `json:"moves"`
	Samples     int `json:"samples"`
	Events      int `json:"events"`
}

// promise is what became of one.
type promise struct {
	Invariant  string   `json:"invariant"`
	Promise    string   `json:"promise"`
	Violations int      `json:"violations"`
	First      []string `json:"first,omitempty"`
	Witness    *witness `json:"witness,omitempty"`
}

// judge makes the report of a history, or of why there is none.
func judge(h *history, t terms, seed uint64, began time.Time, err error) report {
	r := report{Scope: h.scope, Seed: seed, Seen: count(h)}
	switch {
	case err != nil:
		r.code, r.Reason = unknown, err.Error()
	case r.Seen.Messages == 0:
		r.code, r.Reason = unknown, "the log is empty: there is nothing to judge the run by"
	default:
		r.Broker = new(lostByBroker(h).promised()) // before the verdict, which may give messages other keys
		for _, f := range verdict(h, t) {
			r.Invariants = append(r.Invariants, f.promised())
			if f.count > 0 {
				r.code = invalid
			}
		}
	}
	r.Verdict, r.Seconds = verdicts[r.code], time.Since(began).Seconds()
	return r
}

func count(h *history) seen {
	s := seen{
		Lanes: len(h.lanes), Intents: len(h.intents), Effects: len(h.effects), Claims: len(h.claims),
		DeadLetters: len(h.letters), Moves: len(h.moves), Samples: len(h.samples), Events: len(h.events),
	}
	for i := range h.lanes {
		s.Messages += len(h.lanes[i].log)
	}
	return s
}

func (f finding) promised() promise {
	p := promise{Invariant: f.invariant, Promise: f.promise, Violations: f.count}
	for _, v := range f.first {
		p.First = append(p.First, v.what)
	}
	if f.count > 0 && len(f.witness.Events) > 0 {
		p.Witness = &f.witness
	}
	return p
}

func (r *report) writeJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// writeTable writes it for people.
func (r *report) writeTable(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: scope %s, seed %d, judged in %.1f s\n", strings.ToUpper(r.Verdict), r.Scope, r.Seed, r.Seconds)
	if r.Reason != "" {
		fmt.Fprintf(&b, "%s\n", r.Reason)
	}
	fmt.Fprintf(&b, "seen: %d messages in %d lanes, %d intents, %d effects, %d claims, %d dead letters, %d moves, %d samples, %d events\n",
		r.Seen.Messages, r.Seen.Lanes, r.Seen.Intents, r.Seen.Effects, r.Seen.Claims, r.Seen.DeadLetters, r.Seen.Moves, r.Seen.Samples, r.Seen.Events)
	all := r.Invariants
	if r.Broker != nil {
		all = append(all[:len(all):len(all)], *r.Broker)
	}
	if len(all) > 0 {
		t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		fmt.Fprintf(t, "\nINVARIANT\tPROMISE\tVIOLATIONS\n")
		for _, p := range all {
			fmt.Fprintf(t, "%s\t%s\t%d\n", p.Invariant, p.Promise, p.Violations)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	for _, p := range all {
		p.write(&b)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (p *promise) write(b *strings.Builder) {
	if p.Violations == 0 {
		return
	}
	fmt.Fprintf(b, "\n%s, %s:\n", p.Invariant, p.Promise)
	for _, what := range p.First {
		fmt.Fprintf(b, "  %s\n", oneLine(what))
	}
	if more := p.Violations - len(p.First); more > 0 {
		fmt.Fprintf(b, "  and %d more\n", more)
	}
	if p.Witness == nil {
		return
	}
	fmt.Fprintf(b, "  All that is known of the first")
	if p.Witness.Key != "" {
		fmt.Fprintf(b, " (id %s, key %s)", oneLine(p.Witness.ID), p.Witness.Key)
	}
	fmt.Fprintf(b, ":\n")
	for _, e := range p.Witness.Events {
		fmt.Fprintf(b, "    %-12s %s\n", e.Kind, oneLine(e.What))
	}
}

// oneLine keeps what a message brought along from commanding the terminal.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
}
