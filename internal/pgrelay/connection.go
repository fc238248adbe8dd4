package pgrelay

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"regexp"
	"slices"
	"sync"
)

// kind is what a statement is to a claim transaction.
type kind byte

const (
	other kind = iota
	enter
	claim
	lane // dead letters and the moves of lanes: what follows the sink
	commit
	flip
	drop
	take
)

// kinds are told by a statement's text. The first that fits counts.
var kinds = []struct {
	kind    kind
	pattern *regexp.Regexp
}{
	{enter, regexp.MustCompile(`(?i)\benter"?\(`)},
	{claim, regexp.MustCompile(`(?i)^\s*(insert into|copy) \S*claims_`)},
	{lane, regexp.MustCompile(`(?i)(\badvance"?\(|^\s*insert into \S*dead_letters)`)},
	{commit, regexp.MustCompile(`(?i)^\s*commit\s*;?\s*$`)},
	{flip, regexp.MustCompile(`(?i)\brotate"?\(`)},
	{drop, regexp.MustCompile(`(?i)\bdrop_generation"?\(`)},
	{take, regexp.MustCompile(`(?is)^\s*select\b.*\bacquire_(lane|queue)"?\s*\(`)},
}

func kindOf(sql []byte) kind {
	for _, k := range kinds {
		if k.pattern.Match(sql) {
			return k.kind
		}
	}
	return other
}

// connection is one of a relay's. The fields below mu are shared by its two directions;
// the others belong to the direction to the server.
type connection struct {
	relay          *Relay
	client, server net.Conn
	once           sync.Once

	statements map[string]kind // by the name under which they are prepared
	unnamed    kind
	settled    bool   // the claims are answered: the next statement is the sink's
	asked      []kind // since the last Sync
	refuse     string

	mu sync.Mutex
	// awaited are the round trips that the server has yet to answer: what they
	// hold, if that has a point behind it.
	awaited []Point
}

// message is one of the protocol's: a type, and the body behind the length. A
// start-up message has no type.
type message struct {
	typ  byte
	body []byte
}

const longest = 1 << 30

func readMessage(r *bufio.Reader) (m message, err error) {
	if m.typ, err = r.ReadByte(); err != nil {
		return m, err
	}
	return m, m.readBody(r)
}

func (m *message) readBody(r *bufio.Reader) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := int(binary.BigEndian.Uint32(head[:]))
	if n < 4 || n > longest {
		return protocolError("a message", n)
	}
	m.body = make([]byte, n-4)
	_, err := io.ReadFull(r, m.body)
	return err
}

func (m message) write(w *bufio.Writer) error {
	if m.typ != 0 {
		_ = w.WriteByte(m.typ) // a bufio.Writer keeps its error
	}
	_, _ = w.Write(binary.BigEndian.AppendUint32(nil, uint32(len(m.body)+4)))
	_, err := w.Write(m.body)
	return err
}

// cut ends both sides.
func (r *connection) cut() {
	r.once.Do(func() {
		reset(r.client)
		reset(r.server)
	})
}

// toServer sends on what the client says, with a stop before each point.
func (r *connection) toServer(from *bufio.Reader, to *bufio.Writer) {
	defer r.cut()
	var start message
	if start.readBody(from) != nil || start.write(to) != nil || to.Flush() != nil {
		return
	}
	skipping := false // an answer was given in the server's place: till the Sync
	for {
		if from.Buffered() == 0 && to.Flush() != nil {
			return
		}
		m, err := readMessage(from)
		if err != nil {
			return
		}
		if skipping {
			if m.typ == 'S' {
				skipping = false
				if r.answer(message{'Z', []byte{'E'}}) != nil {
					return
				}
			}
			continue
		}
		points := r.points(m)
		for _, p := range points {
			if to.Flush() != nil {
				return
			}
			switch r.relay.come(r, p) {
			case Cut:
				return
			case Mute:
				_ = m.write(to)
				_ = r.drain(from, to)
				return
			}
			if r.refuse != "" {
				break
			}
		}
		if state := r.refuse; state != "" {
			r.refuse = ""
			if r.answer(errorMessage(state)) != nil {
				return
			}
			r.settled, r.asked = false, nil
			if m.typ == 'Q' {
				if r.answer(message{'Z', []byte{'E'}}) != nil {
					return
				}
			} else {
				skipping = true
			}
			continue
		}
		r.note(m)
		if m.write(to) != nil {
			return
		}
		if m.typ == 'S' || m.typ == 'Q' {
			r.relay.pause()
		}
	}
}

// drain sends on the rest of what the client has said already.
func (r *connection) drain(from *bufio.Reader, to *bufio.Writer) error {
	for from.Buffered() > 0 {
		m, err := readMessage(from)
		if err != nil {
			return err
		}
		if err := m.write(to); err != nil {
			return err
		}
	}
	return to.Flush()
}

// answer speaks to the client in the server's place. The server has nothing to
// say at that moment: it has answered all that was sent on, or it waits for a Sync
// that doesn't come.
func (r *connection) answer(m message) error {
	w := bufio.NewWriter(r.client)
	if err := m.write(w); err != nil {
		return err
	}
	return w.Flush()
}

func errorMessage(sqlstate string) message {
	var b []byte
	for _, field := range []string{"SERROR", "VERROR", "C" + sqlstate, "Mmade up by the relay"} {
		b = append(append(b, field...), 0)
	}
	return message{'E', append(b, 0)}
}

// runs is the kind of statement that a message runs: a query, or a Bind.
func (r *connection) runs(m message) (kind, bool) {
	switch m.typ {
	case 'Q':
		return kindOf(bytes.TrimRight(m.body, "\x00")), true
	case 'B':
		_, rest, _ := bytes.Cut(m.body, []byte{0}) // the portal's name
		name, _, _ := bytes.Cut(rest, []byte{0})
		if len(name) == 0 {
			return r.unnamed, true
		}
		return r.statements[string(name)], true
	}
	return other, false
}

// parsed is the statement of a Parse message.
func parsed(m message) (name string, k kind) {
	before, rest, _ := bytes.Cut(m.body, []byte{0})
	sql, _, _ := bytes.Cut(rest, []byte{0})
	return string(before), kindOf(sql)
}

// begins is the kind of statement that begins with a message. One without a name
// begins with its Parse, with which the server looks at its tables already.
func (r *connection) begins(m message) (kind, bool) {
	switch m.typ {
	case 'P':
		name, k := parsed(m)
		return k, name == ""
	case 'B':
		k, _ := r.runs(m)
		return k, !bytes.HasPrefix(m.body, []byte{0, 0})
	}
	return r.runs(m)
}

// points are those that stand before a message.
func (r *connection) points(m message) (all []Point) {
	k, begins := r.begins(m)
	if !begins {
		return nil
	}
	if r.settled && k == other {
		all = append(all, SinkBefore)
	}
	r.settled = r.settled && k == other && all == nil // once for each transaction
	switch k {
	case enter:
		return append(all, TxBefore)
	case claim:
		return append(all, ClaimBefore)
	case lane:
		if !r.has(lane) {
			return append(all, SinkAfter)
		}
	case commit:
		if r.has(lane) {
			return append(all, CommitBefore)
		}
	case flip:
		return append(all, FlipBefore)
	case drop:
		return append(all, DropBefore)
	case take:
		return append(all, TakeBefore)
	}
	return all
}

func (r *connection) has(k kind) bool { return slices.Contains(r.asked, k) }

// note follows what is sent on.
func (r *connection) note(m message) {
	switch m.typ {
	case 'P':
		if name, k := parsed(m); name == "" {
			r.unnamed = k
		} else {
			r.statements[name] = k
		}
	case 'B', 'Q':
		k, _ := r.runs(m)
		r.asked = append(r.asked, k)
	}
	switch m.typ {
	case 'S', 'Q':
		r.mu.Lock()
		defer r.mu.Unlock()
		r.awaited = append(r.awaited, r.after())
		r.asked = r.asked[:0]
	}
}

// after is the point that stands behind the answer to what was asked.
func (r *connection) after() Point {
	switch {
	case r.has(commit) && r.has(lane):
		return CommitAfter
	case r.has(claim):
		r.settled = true
		return ClaimAfter
	case r.has(flip):
		return FlipAfter
	case r.has(take):
		return TakeAfter
	}
	return ""
}

// toClient sends on what the server says. An answer with a point behind it is
// kept until it is whole.
func (r *connection) toClient(from *bufio.Reader, to *bufio.Writer) {
	defer r.cut()
	var kept []message
	for {
		if from.Buffered() == 0 && to.Flush() != nil {
			return
		}
		m, err := readMessage(from)
		if err != nil {
			_ = to.Flush()
			return
		}
		point := r.next(m)
		if point == "" {
			if m.write(to) != nil {
				return
			}
			continue
		}
		kept = append(kept, m)
		// A COPY is asked for its data in the middle of the answer.
		if m.typ != 'Z' && m.typ != 'G' {
			continue
		}
		verdict := GoOn
		if m.typ == 'Z' && !failed(kept) {
			if to.Flush() != nil {
				return
			}
			verdict = r.relay.come(r, point)
		}
		if verdict != GoOn {
			return
		}
		for _, m := range kept {
			if m.write(to) != nil {
				return
			}
		}
		kept = nil
	}
}

func failed(all []message) bool {
	for _, m := range all {
		if m.typ == 'E' {
			return true
		}
	}
	return false
}

// next is the point behind the answer that a message is part of; ReadyForQuery
// ends it.
func (r *connection) next(m message) Point {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.awaited) == 0 {
		return "" // the start, or a notice
	}
	p := r.awaited[0]
	if m.typ == 'Z' {
		r.awaited = r.awaited[1:]
	}
	return p
}
