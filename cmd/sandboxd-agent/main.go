// Command sandboxd-agent runs agents and serves MCP: `sandboxd agent` and `sandboxd mcp` execute
// it, and the daemon's broker starts it as the worker of a hosted run and as the MCP face. It is a
// binary of its own because the SDKs of models and of MCP, and policies, are larger than sandboxd.
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

// newRoot returns the root command. Its name is sandboxd, so that help and hints show the command
// that people type.
func newRoot(d cmdline.Deps) *cobra.Command {
	d, root := cmdline.NewRoot(d, &cobra.Command{Use: dirs.DaemonProgram, Short: "Run agents in sandboxes, and serve MCP"})
	root.AddCommand(newAgent(d), newMCP(d))
	return root
}
