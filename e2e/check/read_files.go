package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"
)

func (h *history) readIntents(file string) error {
	return eachLine(file, func(line []byte) error {
		var in struct {
			ID    string `json:"id"`
			Copy  int32  `json:"copy"`
			Sum   string `json:"sum"`
			Lane  string `json:"lane"`
			State string `json:"state"`
		}
		if err := json.Unmarshal(line, &in); err != nil {
			return err
		}
		if in.State != "acked" && in.State != "unknown" {
			return fmt.Errorf(`state is %q, not "acked" or "unknown"`, in.State)
		}
		n := intent{id: h.texts.add([]byte(in.ID)), sum: textSum([]byte(in.Sum)), lane: noLane, copy: in.Copy, acked: in.State == "acked"}
		if in.ID != "" && len(in.ID) <= longestID {
			n.key = keyOf([]byte(in.ID))
		}
		if in.Lane != "" {
			var err error
			if n.lane, err = h.lane("", in.Lane); err != nil {
				return err
			}
		}
		h.intents = append(h.intents, n)
		return nil
	})
}

func (h *history) readSamples(file string) error {
	err := eachLine(file, func(line []byte) error {
		s := struct {
			At     time.Time `json:"at"`
			RowAt  time.Time `json:"row_at"`
			Lane   string    `json:"lane"`
			Broker *int64    `json:"broker"` // null: it has none
			Next   int64     `json:"next"`
		}{}
		if err := json.Unmarshal(line, &s); err != nil {
			return err
		}
		id, err := h.lane("", s.Lane)
		if err != nil {
			return err
		}
		n := sample{at: s.At, rowAt: s.RowAt, lane: id, broker: -1, next: s.Next}
		if n.rowAt.IsZero() {
			n.rowAt = n.at
		}
		if s.Broker != nil {
			n.broker = *s.Broker
		}
		h.samples = append(h.samples, n)
		return nil
	})
	slices.SortStableFunc(h.samples, func(a, b sample) int { return a.at.Compare(b.at) })
	return err
}

func (h *history) readEvents(file string) error {
	return eachLine(file, func(line []byte) error {
		var e struct {
			At       time.Time `json:"at"`
			What     string    `json:"what"`
			Until    time.Time `json:"rewind_allowed_until"`
			Failover bool      `json:"failover"`
			Lane     string    `json:"cut_lane"` // whose log has lost its end, from a position on
			Position int64     `json:"cut_position"`
		}
		if err := json.Unmarshal(line, &e); err != nil {
			return err
		}
		if e.Lane != "" {
			id, err := h.lane("", e.Lane)
			if err != nil {
				return err
			}
			h.lanes[id].cuts = append(h.lanes[id].cuts, cut{e.At, e.Position})
		}
		h.events = append(h.events, event{at: e.At, what: e.What, until: e.Until, failover: e.Failover})
		return nil
	})
}

// unbearable are signs of bugs, whatever else came of a run: a panic, a race, the
// processor's own complaint; and, as errors, conflicts in SQL that a claim
// transaction must see to itself.
var (
	unbearable = regexp.MustCompile(`panic:|fatal error:|DATA RACE|bug:`)
	surfaced   = regexp.MustCompile(`SQLSTATE (40P01|40001|42P01|55P03)`)
	asError    = regexp.MustCompile(`level=ERROR|"level":"ERROR"`)
)

// readLogs looks through the workers' logs; the pattern is the shell's.
func (h *history) readLogs(pattern string) error {
	files, err := filepath.Glob(pattern)
	if err != nil {
		return fmt.Errorf("-logs %s: %w", pattern, err)
	}
	if len(files) == 0 {
		return fmt.Errorf("-logs %s: there is no such file", pattern)
	}
	for _, file := range files {
		err := eachLine(file, func(line []byte) error {
			if unbearable.Match(line) || surfaced.Match(line) && asError.Match(line) {
				h.complaints = append(h.complaints, complaint{filepath.Base(file), string(line[:min(len(line), 1000)])})
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// eachLine reads a file line by line, passing over empty ones. The line is valid
// during the call.
func eachLine(file string, use func(line []byte) error) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	r := bufio.NewReaderSize(f, 1<<20)
	var long []byte
	for number := 1; ; {
		line, err := r.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			long = append(long, line...)
			continue
		}
		if len(long) > 0 {
			long = append(long, line...)
			line = long
		}
		if len(line) > 1 || len(line) == 1 && line[0] != '\n' {
			if err := use(line); err != nil {
				return fmt.Errorf("%s, line %d: %w", file, number, err)
			}
		}
		long = long[:0]
		number++
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", file, err)
		}
	}
}
