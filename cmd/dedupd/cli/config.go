package cli

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/sinks"
)

// load reads the configuration that -c names, and checks its sink's part.
func (c *command) load() (*config.Config, []config.Problem, error) {
	if c.file == "" {
		return nil, nil, usageError{errors.New("which configuration? give it with -c FILE")}
	}
	return config.Load(c.file, config.Options{Environ: os.Environ(), Sinks: &sinks.Default})
}

// loadOne is loadAndWarn for commands about one scope.
func (c *command) loadOne() (*config.Config, *slog.Logger, error) {
	cfg, logger, err := c.loadAndWarn()
	if err != nil {
		return nil, nil, err
	}
	if cfg, err = cfg.Pick(c.scope); err != nil {
		return nil, nil, usageError{err}
	}
	return cfg, logger, nil
}

// picked are the configurations of the file that a command for all of them is about: one,
// if --scope names it.
func (c *command) picked(cfg *config.Config) ([]*config.Config, error) {
	if c.scope == "" {
		return cfg.All(), nil
	}
	one, err := cfg.Pick(c.scope)
	if err != nil {
		return nil, usageError{err}
	}
	return []*config.Config{one}, nil
}

// loadAndWarn is load for commands that use the configuration. It logs warnings.
func (c *command) loadAndWarn() (*config.Config, *slog.Logger, error) {
	cfg, warnings, err := c.load()
	if err != nil {
		return nil, nil, err
	}
	logger := newLogger(cfg.Log, c.stderr)
	for _, w := range warnings {
		logger.Warn(w.String())
	}
	return cfg, logger, nil
}

func newLogger(l config.Log, w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(l.Level)) // slog knows all of them
	options := &slog.HandlerOptions{Level: level}
	if l.Format == config.LogJSON {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

func (c *command) config() *cobra.Command {
	return group("config", "Checks and shows configuration files",
		c.withFile(c.withOutput(&cobra.Command{
			Use:   "check",
			Short: "Finds everything that is wrong with a configuration file, with its line",
			Long: `Finds everything that is wrong with a configuration file. It connects to nothing. Each
problem is one line, FILE:LINE:COLUMN: KEY: MESSAGE, or an object of a JSON array. If
there is any, the exit code is 2.`,
			Args: cobra.NoArgs,
			RunE: func(*cobra.Command, []string) error { return c.configCheck() },
		})),
		c.withPipeline(&cobra.Command{
			Use:   "print",
			Short: "Prints a configuration with its defaults, and where each value came from",
			Long: `Prints a configuration as YAML, with defaults, expanded variables, and the origin of
each value. It redacts secrets. With --scope it prints a pipeline as a file of its own.`,
			Args: cobra.NoArgs,
			RunE: func(*cobra.Command, []string) error {
				cfg, _, err := c.loadAndWarn()
				if err != nil {
					return err
				}
				if c.scope != "" {
					if cfg, err = cfg.Pick(c.scope); err != nil {
						return usageError{err}
					}
				}
				return cfg.Print(c.stdout)
			},
		}),
		&cobra.Command{
			Use:   "schema",
			Short: "Prints the JSON Schema of configuration files, for editors",
			Args:  cobra.NoArgs,
			RunE: func(*cobra.Command, []string) error {
				_, err := c.stdout.Write(config.Schema)
				return err
			},
		},
	)
}

func (c *command) configCheck() error {
	_, warnings, err := c.load()
	var problems config.Problems
	if err != nil && !errors.As(err, &problems) {
		return err
	}
	if c.output == outputJSON {
		if err := writeJSON(c.stdout, append(append([]config.Problem{}, problems...), warnings...)); err != nil {
			return err
		}
	} else {
		c.writeProblems(problems, warnings)
	}
	if len(problems) > 0 {
		return exitError{code: exitUsage}
	}
	return nil
}

func (c *command) writeProblems(problems, warnings []config.Problem) {
	for _, p := range problems {
		fmt.Fprintln(c.stdout, p)
		if p.Excerpt != "" && isTerminal(c.stdout) {
			fmt.Fprintln(c.stdout, "    "+strings.ReplaceAll(p.Excerpt, "\n", "\n    "))
		}
	}
	for _, w := range warnings {
		fmt.Fprintln(c.stdout, "warning: "+w.String())
	}
	verdict := "no problems"
	if len(problems) > 0 {
		verdict = count(len(problems), "problem")
	}
	if len(warnings) > 0 {
		verdict += ", " + count(len(warnings), "warning")
	}
	fmt.Fprintf(c.stdout, "%s: %s\n", c.file, verdict)
}
