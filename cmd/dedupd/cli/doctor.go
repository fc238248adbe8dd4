package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/internal/app"
	"github.com/dedupd/dedupd/sinks"
)

func (c *command) doctor() *cobra.Command {
	return c.withPipeline(c.withOutput(&cobra.Command{
		Use:   "doctor",
		Short: "Connects to everything, says what is wrong and how to cure it",
		Long: `Connects to the database and the brokers as a worker would, and changes nothing. It
checks the server and its settings, the schema, the role's rights, the sink's target,
the brokers, each lane's position against what the broker has, the window against how
long the broker keeps messages, what holds up expiry, and dead letters. Each finding
comes with its cure. The exit code is 3 if a worker couldn't start, or a lane would
stand still; warnings don't change it. If the file has several pipelines, it checks all
of them, unless --scope names one.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.examine(cmd.Context()) },
	}))
}

func (c *command) examine(ctx context.Context) error {
	cfg, warnings, err := c.load()
	if err != nil {
		return err
	}
	all, err := c.picked(cfg)
	if err != nil {
		return err
	}
	findings, err := app.Examine(ctx, all, &sinks.Default)
	if err != nil {
		return err
	}
	for _, w := range warnings {
		findings = append(findings, app.Finding{Check: "configuration", Level: app.FindingWarning, Text: w.String()})
	}
	for i := range findings {
		findings[i].Cure = strings.ReplaceAll(findings[i].Cure, "-c FILE", "-c "+c.file)
	}
	if c.output == outputJSON {
		err = writeJSON(c.stdout, findings)
	} else {
		err = c.writeFindings(findings)
	}
	if err != nil {
		return err
	}
	for _, f := range findings {
		if f.Level == app.FindingError {
			return exitError{code: exitServer}
		}
	}
	return nil
}

// writeFindings writes a line for each finding, and its cure below.
func (c *command) writeFindings(findings []app.Finding) error {
	colour := map[string]string{app.FindingOK: "32", app.FindingWarning: "33", app.FindingError: "31"}
	counts := map[string]int{}
	var b strings.Builder
	for _, f := range findings {
		counts[f.Level]++
		level := fmt.Sprintf("%-7s", f.Level)
		if colourful(c.stdout) {
			level = "\x1b[" + colour[f.Level] + "m" + level + "\x1b[0m"
		}
		fmt.Fprintf(&b, "%s  %-13s  %s\n", level, f.Check, oneLine(f.Text))
		if f.Cure != "" {
			fmt.Fprintf(&b, "%-7s  %-13s  -> %s\n", "", "", oneLine(f.Cure))
		}
	}
	fmt.Fprintf(&b, "\n%s, %s\n", count(counts[app.FindingError], "error"), count(counts[app.FindingWarning], "warning"))
	_, err := fmt.Fprint(c.stdout, b.String())
	return err
}
