package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/sinks"
)

// release is set by the linker for releases; other builds say what they are
// made of.
var release string

// Build says what this binary was built from.
type Build struct {
	Version  string   `json:"version"`
	Revision string   `json:"revision"` // of the checkout; empty: not known
	Modified bool     `json:"modified"` // the checkout had changes
	Time     string   `json:"time"`     // of the revision
	Go       string   `json:"go"`
	Platform string   `json:"platform"`
	Sinks    []string `json:"sinks"` // the kinds this binary has
}

// ReadBuild is this binary's.
func ReadBuild() Build {
	b := Build{Version: release, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH, Sinks: sinks.Default.Kinds()}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if b.Version == "" {
		b.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		case "vcs.time":
			b.Time = s.Value
		}
	}
	return b
}

func (c *command) version() *cobra.Command {
	return c.withOutput(&cobra.Command{
		Use:   "version",
		Short: "Shows what this binary was built from",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			b := ReadBuild()
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
