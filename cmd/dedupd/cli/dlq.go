package cli

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/config"
)

func (c *command) dlq() *cobra.Command {
	return group("dlq", "Shows, replays and discards dead letters: messages that could not be applied",
		c.listDeadLetters(), c.deadLetter(), c.replay(), c.discard())
}

func (c *command) listDeadLetters() *cobra.Command {
	var chosen selection
	list := &cobra.Command{
		Use:   "list",
		Short: "Lists dead letters, the newest first",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := chosen.check()
			if err != nil {
				return err
			}
			if f.Limit < 1 || f.Limit > 10_000 {
				return usageError{errors.New("--limit must be from 1 to 10000")}
			}
			return c.withScope(cmd.Context(), func(ctx context.Context, s *dedup.Store, _ *config.Config) error {
				letters, err := s.DeadLetters(ctx, f)
				if err != nil {
					return err
				}
				return c.showDeadLetters(letters, f.Limit)
			})
		},
	}
	chosen.flags(list, 50)
	list.Flags().Int64Var(&chosen.filter.Before, "before", 0, "only those with a number below this")
	return c.withPipeline(c.withOutput(list))
}

func (c *command) deadLetter() *cobra.Command {
	return c.withPipeline(c.withOutput(&cobra.Command{
		Use:   "show ID",
		Short: "Shows one dead letter in full: why, where from, headers and payload",
		Long: `Shows one dead letter in full: why it is one, where it came from, headers and
payload. Bytes that aren't text are shown in base64.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := parseLetterID(args[0])
			if err != nil {
				return err
			}
			return c.withScope(cmd.Context(), func(ctx context.Context, s *dedup.Store, _ *config.Config) error {
				d, err := s.DeadLetter(ctx, id)
				if err != nil {
					return err
				}
				return c.showDeadLetter(newDeadLetter(d))
			})
		},
	}))
}

func parseLetterID(s string) (int64, error) {
	id, err := strconv.ParseInt(s, 10, 64)
	if err != nil || id < 1 {
		return 0, usageError{fmt.Errorf("%q is no dead letter's number; dedupd dlq list shows them", s)}
	}
	return id, nil
}

// Raw are bytes of a message: text where they are text, else base64. Exactly one
// of the two is set.
type Raw struct {
	Text   *string `json:"text,omitempty"`
	Base64 []byte  `json:"base64,omitempty"`
}

func newRaw(b []byte) *Raw {
	switch {
	case b == nil:
		return nil
	case utf8.Valid(b):
		return &Raw{Text: new(string(b))}
	}
	return &Raw{Base64: b}
}

// Header is one header of a message.
type Header struct {
	Key   *Raw `json:"key"`
	Value *Raw `json:"value"`
}

// Place is where a message is.
type Place struct {
	Source   string `json:"source"`
	Lane     string `json:"lane"`
	Position int64  `json:"position"`
}

// DeadLetter is the JSON of a message that could not be applied. Key and value are
// null if the message has none.
type DeadLetter struct {
	Summary
	Original *Place     `json:"original,omitempty"` // where the id was claimed first
	Time     *time.Time `json:"time"`               // the broker's
	ClaimKey string     `json:"claim_key"`
	Key      *Raw       `json:"key"`
	Headers  []Header   `json:"headers"`
	Value    *Raw       `json:"value"`
}

// Summary is a dead letter in a list: without its payload. Reason and sqlstate are
// those of the last attempt.
type Summary struct {
	ID        int64     `json:"id"`
	Class     string    `json:"class"`
	Attempts  int32     `json:"attempts"`
	Reason    string    `json:"reason"`
	SQLState  string    `json:"sqlstate,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	LastAt    time.Time `json:"last_at"`
	Place     Place     `json:"place"`
	Topic     *Raw      `json:"topic"`
	MessageID *Raw      `json:"message_id"`
}

func newDeadLetter(d dedup.DeadLetter) DeadLetter {
	letter := DeadLetter{
		Summary: Summary{
			ID: d.ID, Class: d.Class, Attempts: d.Attempts, Reason: d.Reason, CreatedAt: d.CreatedAt, LastAt: d.LastAt,
			Place: Place{d.Source, d.Lane, d.Position}, Topic: newRaw(d.Topic), MessageID: newRaw(d.MessageID),
		},
		Time: d.BrokerTime, ClaimKey: d.ClaimKey, Key: newRaw(d.Key), Value: newRaw(d.Value), Headers: []Header{},
	}
	if d.SQLState != nil {
		letter.SQLState = *d.SQLState
	}
	if d.OriginalLane != nil && d.OriginalSource != nil && d.OriginalPosition != nil {
		letter.Original = &Place{*d.OriginalSource, *d.OriginalLane, *d.OriginalPosition}
	}
	for i, key := range d.HeaderKeys {
		h := Header{Key: newRaw(key)}
		if i < len(d.HeaderValues) {
			h.Value = newRaw(d.HeaderValues[i])
		}
		letter.Headers = append(letter.Headers, h)
	}
	return letter
}

func (c *command) showDeadLetters(letters []dedup.DeadLetter, limit int) error {
	if c.output == outputJSON {
		all := make([]Summary, len(letters))
		for i, l := range letters {
			all[i] = newDeadLetter(l).Summary
		}
		return writeJSON(c.stdout, all)
	}
	if len(letters) == 0 {
		fmt.Fprintln(c.stdout, "no dead letters")
		return nil
	}
	if err := c.writeDeadLetters(letters); err != nil {
		return err
	}
	if len(letters) == limit {
		fmt.Fprintf(c.stderr, "there may be older ones: --before %d\n", letters[len(letters)-1].ID)
	}
	return nil
}

func (c *command) writeDeadLetters(letters []dedup.DeadLetter) error {
	t := table{columns: []column{
		right("ID"), left("CREATED"), left("LAST TRY"), right("TRIES"), left("CLASS"), left("SOURCE"), left("LANE"), right("POSITION"), left("MESSAGE ID"), left("REASON"),
	}}
	for _, l := range letters {
		d := newDeadLetter(l)
		t.add(d.ID, timestamp(&d.CreatedAt), timestamp(&d.LastAt), d.Attempts, d.Class, d.Place.Source, d.Place.Lane, d.Place.Position,
			shorten(d.MessageID.inLine(), 40), shorten(d.Reason, 100))
	}
	return t.write(c.stdout)
}

// inLine formats the bytes within a line of text.
func (r *Raw) inLine() string {
	switch {
	case r == nil:
		return "-"
	case r.Text != nil:
		return *r.Text
	}
	return "base64:" + encode(r.Base64)
}

func (c *command) showDeadLetter(d DeadLetter) error {
	if c.output == outputJSON {
		return writeJSON(c.stdout, d)
	}
	var b strings.Builder
	line := func(name, value string) { fmt.Fprintf(&b, "%-10s  %s\n", name, oneLine(value)) }
	place := func(p Place) string {
		return fmt.Sprintf("source %s, lane %s, position %d", p.Source, p.Lane, p.Position)
	}
	line("id", strconv.FormatInt(d.ID, 10))
	line("class", d.Class)
	line("reason", d.Reason)
	if d.SQLState != "" {
		line("sqlstate", d.SQLState)
	}
	line("created", timestamp(&d.CreatedAt))
	line("tries", fmt.Sprintf("%d, the last %s", d.Attempts, timestamp(&d.LastAt)))
	line("place", place(d.Place))
	if d.Original != nil {
		line("claimed by", place(*d.Original))
	}
	line("topic", d.Topic.inLine())
	line("time", timestamp(d.Time))
	line("message id", d.MessageID.inLine())
	line("claim key", d.ClaimKey)
	line("key", d.Key.inLine())
	for _, h := range d.Headers {
		line("header", h.Key.inLine()+": "+h.Value.inLine())
	}
	switch {
	case d.Value == nil:
		line("value", "none (a tombstone)")
	case d.Value.Text != nil:
		fmt.Fprintf(&b, "value, %d bytes:\n%s\n", len(*d.Value.Text), harmless(*d.Value.Text))
	default:
		fmt.Fprintf(&b, "value, %d bytes, in base64:\n%s\n", len(d.Value.Base64), encode(d.Value.Base64))
	}
	_, err := fmt.Fprint(c.stdout, b.String())
	return err
}

func encode(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

// harmless removes from a text what could control a terminal. It keeps line breaks and
// tabs.
func harmless(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && unicode.IsControl(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}
