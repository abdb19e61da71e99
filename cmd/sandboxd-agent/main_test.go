package main

import (
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
	os.Exit(m.Run())
}

// The help texts are part of the interface: a change shows in review.
func TestHelpGolden(t *testing.T) {
	cmdtest.HelpGolden(t, func() *cobra.Command {
		return newRoot(cmdline.Deps{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr})
	})
}
