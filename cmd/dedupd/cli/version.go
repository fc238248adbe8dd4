package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/internal/app"
)

func (c *command) version() *cobra.Command {
	return c.withOutput(&cobra.Command{
		Use:   "version",
		Short: "Shows what this binary was built from",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			b := app.ReadBuild()
			if c.output == outputJSON {
				return writeJSON(c.stdout, b)
			}
			revision := b.Revision
			if b.Modified {
				revision += " with changes"
			}
			fmt.Fprintf(c.stdout, "dedupd %s\n", b.Version)
			for _, row := range [][2]string{{"revision", revision}, {"time", b.Time}, {"go", b.Go}, {"platform", b.Platform}, {"sinks", strings.Join(b.Sinks, ", ")}} {
				if row[1] != "" {
					fmt.Fprintf(c.stdout, "%-9s %s\n", row[0], row[1])
				}
			}
			return nil
		},
	})
}
