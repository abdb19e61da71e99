package main

import (
	"context"
	"os"
	"testing"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// TestMain makes the test binary the command itself if [cmdtest.Command] runs it.
func TestMain(m *testing.M) {
	if os.Getenv(cmdtest.AsCommand) != "" {
		os.Exit(run(os.Args[1:], cmdline.Deps{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Program: os.Executable}))
	}
	os.Exit(cmdtest.Main(m))
}

// inline runs a command line in this process, against the daemon at the socket and in a new working
// directory.
func inline(t *testing.T, socket string, args ...string) cmdtest.Outcome {
	t.Helper()
	t.Setenv("SANDBOXD_SOCKET", socket)
	t.Chdir(t.TempDir())
	return cmdtest.Inline(t, "", func(_ context.Context, stdin, stdout, stderr *os.File) int {
		return run(args, cmdline.Deps{Stdin: stdin, Stdout: stdout, Stderr: stderr, Program: os.Executable}) //nolint:contextcheck // the command has its own
	})
}

// The help texts are part of the interface: a change shows in review.
func TestHelpGolden(t *testing.T) {
	cmdtest.HelpGolden(t, func() *cobra.Command {
		return newRoot(cmdline.Deps{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr})
	})
}
