package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/config"
)

func (c *command) claims() *cobra.Command {
	return group("claims", "Shows, forgets and imports the claims of message ids", c.why(), c.forgetClaim(), c.importClaims())
}

// Why is the JSON output of `claims why`.
type Why struct {
	ID string `json:"id"`
	dedup.ClaimAnswer
}

func (c *command) why() *cobra.Command {
	return c.withPipeline(c.withOutput(&cobra.Command{
		Use:   "why ID",
		Short: "Tells when and by which message an id was claimed, or that it wasn't",
		Long: `Tells when and by which message an id was claimed, and so why a copy of it is a
duplicate. It searches all generations in use. "Not claimed" is an answer, too, with
exit code 0; it says nothing about times before the oldest generation.

Give the message's id, byte by byte. If id.from joins several places, give the joined
text ("3:abc,2:de,"). A claim's key, as in dlq show and the view claims, works as
well.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkID(args[0]); err != nil {
				return err
			}
			return c.withClaims(cmd.Context(), func(ctx context.Context, s *dedup.Store, _ *config.Config) error {
				answer, err := s.FindClaim(ctx, args[0])
				if err != nil {
					return err
				}
				return c.showWhy(Why{args[0], answer})
			})
		},
	}))
}

// checkID refuses what no message can have as an id.
func checkID(id string) error {
	if id == "" {
		return usageError{errors.New("an id is at least 1 byte long")}
	}
	return nil
}

func (c *command) showWhy(w Why) error {
	if c.output == outputJSON {
		return writeJSON(c.stdout, w)
	}
	var b strings.Builder
	line := func(name, value string) { fmt.Fprintf(&b, "%-12s  %s\n", name, oneLine(value)) }
	line("id", w.ID)
	line("key", w.Key.String())
	if claim := w.Claim; claim != nil {
		line("found", "yes")
		line("generation", fmt.Sprintf("%d, %s", claim.Generation, claim.State))
		line("claimed", fmt.Sprintf("%s, %s ago", timestamp(&claim.ClaimedAt), age(&claim.AgeSeconds)))
		line("by", claimant(claim))
		line("fingerprint", known(claim.Fingerprint))
		line("result", resultOf(claim))
	} else {
		line("found", fmt.Sprintf("no; claims are kept since %s, and of earlier ones nothing is known", timestamp(&w.ClaimsSince)))
	}
	for _, d := range w.DeadLetters {
		line("dead letter", fmt.Sprintf("%d, %s", d.ID, d.Class))
	}
	_, err := io.WriteString(c.stdout, b.String())
	return err
}

// claimant is what claimed an id.
func claimant(claim *dedup.Claim) string {
	switch {
	case claim.LaneNumber == nil:
		return "no lane: an import, or a service that claims by itself"
	case claim.Source == nil || claim.Lane == nil:
		return fmt.Sprintf("lane number %d, which was forgotten, position %s", *claim.LaneNumber, known(claim.Position))
	}
	return fmt.Sprintf("source %s, lane %s, position %s", *claim.Source, *claim.Lane, known(claim.Position))
}

// resultOf is what a claim keeps for duplicates.
func resultOf(claim *dedup.Claim) string {
	switch r := claim.Result; {
	case r == nil:
		return "none"
	case !r.Kept:
		return fmt.Sprintf("%d bytes, too large to be kept", r.Bytes)
	default:
		return fmt.Sprintf("%d bytes", r.Bytes)
	}
}

// Forgotten is the JSON output of `claims forget`.
type Forgotten struct {
	ID    string       `json:"id"`
	Found bool         `json:"found"`
	Claim *dedup.Claim `json:"claim"`
}

func (c *command) forgetClaim() *cobra.Command {
	return c.withPipeline(c.withOutput(&cobra.Command{
		Use:   "forget ID",
		Short: "Deletes the claim of an id, so that its next copy is applied again",
		Long: `Deletes the claim of an id and its result: THE NEXT COPY OF THE MESSAGE IS APPLIED
AGAIN. Use it for an effect that was undone, or never happened. The audit records the
claim. An id that is not claimed is no error.

What the sink wrote stays as it is, and so does a dead letter. Write the id as for
claims why. This needs the rights of the schema's owner.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkID(args[0]); err != nil {
				return err
			}
			return c.withClaims(cmd.Context(), func(ctx context.Context, s *dedup.Store, _ *config.Config) error {
				claim, err := s.ForgetClaim(ctx, actor(), args[0])
				if err != nil {
					return err
				}
				return c.showForgotten(Forgotten{args[0], claim != nil, claim})
			})
		},
	}))
}

func (c *command) showForgotten(f Forgotten) error {
	switch {
	case c.output == outputJSON:
		return writeJSON(c.stdout, f)
	case !f.Found:
		fmt.Fprintln(c.stdout, "there was nothing to forget: the id is not claimed")
	default:
		fmt.Fprintf(c.stdout, "forgotten: claimed %s by %s\nThe next copy of the message is applied again.\n", timestamp(&f.Claim.ClaimedAt), oneLine(claimant(f.Claim)))
	}
	return nil
}

// ImportResult is the JSON output of `claims import`.
type ImportResult struct {
	dedup.Imported
	Seconds float64 `json:"seconds"`
}

func (c *command) importClaims() *cobra.Command {
	var query, file string
	cmd := &cobra.Command{
		Use:   "import",
		Short: "Claims ids that were applied before, from a query or a file",
		Long: `Claims ids that were applied before dedupd came: a message that carries one of them
is then a duplicate, and IS NOT APPLIED. The ids are the first column of a query on
the same database, as text, or the lines of a file. Each must be what id.from finds
in a message, byte by byte, blanks and case included. If id.from joins several
places, write the joined text ("3:abc,2:de,").

The import claims ids in transactions of 20,000; workers may run. If it ends early,
run it again as a whole: it then finds what it has claimed. Imported claims expire
like all others, but not before retention.window has passed from now. If the server
refuses the query, the exit code is 2.

This needs the rights of the schema's owner.`,
		Example: `  dedupd claims import -c orders.yaml --query "SELECT id FROM public.orders"
  zcat ids.gz | dedupd claims import -c orders.yaml --file -`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if (query == "") == (file == "") {
				return usageError{errors.New("give the ids with either --query SQL or --file FILE (- for the standard input)")}
			}
			return c.withClaims(cmd.Context(), func(ctx context.Context, s *dedup.Store, cfg *config.Config) error {
				show := newProgress(c.stderr, "ids")
				im := dedup.Import{Actor: actor(), MaxBytes: int(cfg.ID.MaxBytes), Told: func(n dedup.Imported) { show.update(n.Read) }}
				if query != "" {
					im.Input, im.Unit = query, "row"
					im.IDs = s.QueryIDs(ctx, query, show.expect)
					return c.runImport(ctx, s, im, show)
				}
				in, err := openInput(file, cmd.InOrStdin())
				if err != nil {
					return err
				}
				defer in.Close()
				im.Input, im.Unit = file, "line"
				im.IDs = lines(show.measure(in), im.MaxBytes)
				return c.runImport(ctx, s, im, show)
			})
		},
	}
	cmd.Flags().StringVar(&query, "query", "", "import the first column of this `SQL` query")
	cmd.Flags().StringVar(&file, "file", "", "import the lines of `FILE`, - for the standard input")
	_ = cmd.MarkFlagFilename("file")
	return c.withPipeline(c.withOutput(cmd))
}

func openInput(file string, stdin io.Reader) (io.ReadCloser, error) {
	if file == "-" {
		return io.NopCloser(stdin), nil
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, usageError{fmt.Errorf("--file: %w", err)}
	}
	return f, nil
}

func (c *command) runImport(ctx context.Context, s *dedup.Store, im dedup.Import, show *progress) error {
	start := time.Now()
	n, err := s.Import(ctx, im)
	show.end()
	if err != nil {
		return err
	}
	result := ImportResult{n, time.Since(start).Seconds()}
	if c.output == outputJSON {
		return writeJSON(c.stdout, result)
	}
	fmt.Fprintf(c.stdout, "read %d, new %d, known %d, twice in the input %d; %.1f s, %.0f ids/s\n",
		n.Read, n.New, n.Known, n.Repeated, result.Seconds, float64(n.Read)/result.Seconds)
	return nil
}

// lines are a file's lines, with the line ends of Unix or Windows. A line longer than
// an id may be is an error.
func lines(r io.Reader, longest int) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		scanner := bufio.NewScanner(r)
		scanner.Buffer(make([]byte, 0, 64<<10), longest+3) // \r, \n, and one that is too many
		number := 1
		for ; scanner.Scan(); number++ {
			line := scanner.Bytes()
			if number == 1 {
				line = bytes.TrimPrefix(line, []byte("\ufeff")) // as Windows begins a text
			}
			if !yield(string(line), nil) {
				return
			}
		}
		switch err := scanner.Err(); {
		case errors.Is(err, bufio.ErrTooLong):
			yield("", fmt.Errorf("line %d is longer than an id may be, id.max_bytes: %d", number, longest))
		case err != nil:
			yield("", fmt.Errorf("line %d: %w", number, err))
		}
	}
}
