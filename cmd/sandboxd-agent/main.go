// Command sandboxd-agent runs agents: it is `sandboxd agent`, which executes it, and the worker of hosted agent runs, which
// the daemon's broker starts. It has a binary of its own because model SDKs and policies are larger than all of sandboxd.
package main

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/dirs"
)

func main() {
	os.Exit(run(os.Args[1:], cmdline.Deps{
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		Program: func() (string, error) { return dirs.Program(dirs.DaemonProgram) },
	}))
}

func run(args []string, d cmdline.Deps) int {
	return cmdline.Run(context.Background(), args, newRoot(d), d.Stderr)
}

// newRoot returns the root command. It has the name of sandboxd, so that help and hints name the command that people type.
func newRoot(d cmdline.Deps) *cobra.Command {
	d, root := cmdline.NewRoot(d, &cobra.Command{Use: dirs.DaemonProgram, Short: "Run agents in sandboxes"})
	root.AddCommand(newAgent(d))
	return root
}
