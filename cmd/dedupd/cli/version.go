package cli

import (
	"cmp"
	"fmt"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/internal/app"
	"github.com/dedupd/dedupd/sinks"
)

// build says what this binary is.
type build struct {
	app.VersionInfo
	Platform string   `json:"platform"`
	Sinks    []string `json:"sinks"` // the kinds it has
}

func (c *command) version() *cobra.Command {
	return c.withOutput(&cobra.Command{
		Use:   "version",
		Short: "Shows what this binary was built from",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			b := build{app.Version(), runtime.GOOS + "/" + runtime.GOARCH, sinks.Default.Kinds()}
			if c.output == outputJSON {
				return writeJSON(c.stdout, b)
			}
			_, err := fmt.Fprintf(c.stdout, "dedupd %s\nrevision  %s\ngo        %s\nplatform  %s\nsinks     %s\n",
				b.Version, cmp.Or(b.Revision, "unknown"), b.Go, b.Platform, strings.Join(b.Sinks, ", "))
			return err
		},
	})
}
