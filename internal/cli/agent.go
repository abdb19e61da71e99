package cli

import (
	"fmt"
	"os"
	"slices"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/dirs"
)

// newAgent lists the commands of sandboxd-agent as one.
func newAgent(deps) *cobra.Command {
	return &cobra.Command{
		Use:   agentName,
		Short: "Let a language model work in a sandbox",
		Run:   func(*cobra.Command, []string) {}, // run executes sandboxd-agent before
	}
}

const agentName = "agent"

// forAgent reports whether a command line is for sandboxd-agent, which alone links model SDKs and
// policies. Help and shell completion of its commands are.
func forAgent(root *cobra.Command, args []string) bool {
	switch {
	case len(args) > 1 && args[0] == "help":
		args = args[1:]
	case len(args) > 1 && slices.Contains([]string{cobra.ShellCompRequestCmd, cobra.ShellCompNoDescRequestCmd}, args[0]):
		args = args[1 : len(args)-1] // the last one is being completed
	}
	cmd, _, err := root.Find(args)
	return err == nil && cmd.Name() == agentName
}

// execAgent executes sandboxd-agent in the place of this process, with the same arguments. It
// returns only on error.
func execAgent(args []string) error {
	path, err := dirs.Program(dirs.AgentProgram)
	if err == nil {
		err = &os.PathError{Op: "execute", Path: path, Err: syscall.Exec(path, append([]string{path}, args...), os.Environ())} //nolint:gosec // G204: our own program
	}
	return fmt.Errorf("start the agent: %w", err)
}
