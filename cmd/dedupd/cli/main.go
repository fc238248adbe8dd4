// Package cli is dedupd's command line, one file per command. A custom binary calls
// Main.
//
// Data goes to stdout, logs and errors to stderr.
package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"
)

// Main runs the command line in args, which lack the program's name, and returns the
// exit code. `run` handles SIGINT and SIGTERM; a second signal ends the process within
// Main.
func Main(args []string, stdout, stderr io.Writer) int {
	c := &command{stdout: stdout, stderr: stderr}
	root := c.root()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(context.Background())
	if err == nil {
		return exitOK
	}
	if !c.started {
		// Cobra's own: an unknown command or flag, or arguments that don't fit.
		err = usageError{err}
	}
	return c.report(err)
}

// command is what the commands share.
type command struct {
	stdout, stderr io.Writer
	// started: the arguments were right and a command began its work.
	started bool
	file    string // -c
	scope   string // --scope
	output  string // --output
}

func (c *command) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "dedupd",
		Short: "Lands Kafka and NATS JetStream topics in Postgres, each message id once",
		Long: `Lands Kafka and NATS JetStream topics in Postgres, each message id once.

Exit codes: 0 done; 1 failed at run time; 2 bad configuration or usage; 3 a server
is missing or not as it must be; 128+n ended by a second signal n.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		PersistentPreRun: func(*cobra.Command, []string) {
			c.started = true
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveDefault)
	root.AddCommand(c.run(), c.migrate(), c.config(), c.doctor(), c.size(), c.stats(), c.top(), c.lanes(), c.claims(), c.marks(), c.dlq(), c.retention(), c.version())
	return root
}

// group is a command that only contains others.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	g := &cobra.Command{
		Use:   use,
		Short: short,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usageError{fmt.Errorf("%s needs one of its commands; see %s --help", cmd.CommandPath(), cmd.CommandPath())}
		},
	}
	g.AddCommand(commands...)
	return g
}

// withFile adds the flag for the configuration file.
func (c *command) withFile(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().StringVarP(&c.file, "config", "c", "", "the configuration `FILE`")
	_ = cmd.MarkFlagFilename("config", "yaml", "yml")
	return cmd
}

// withPipeline is withFile with the flag for one of the file's pipelines.
func (c *command) withPipeline(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().StringVar(&c.scope, "scope", "", "the `SCOPE`, if the file has several pipelines")
	return c.withFile(cmd)
}

// withOutput adds the flag for the output's form.
func (c *command) withOutput(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().StringVarP(&c.output, "output", "o", outputTable, "the form of the output, `table|json`")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{outputTable, outputJSON}, cobra.ShellCompDirectiveNoFileComp))
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if c.output != outputTable && c.output != outputJSON {
			return usageError{fmt.Errorf("--output %q is neither table nor json", c.output)}
		}
		return run(cmd, args)
	}
	return cmd
}
