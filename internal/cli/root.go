// Package cli is the command line of sandboxd, one file for each command. Every command but serve
// is a client of the daemon's socket, like any other program.
package cli

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/boot"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/doctor"
)

// Main runs one command line and returns the exit code.
func Main(ctx context.Context, args []string, version string) int {
	if err := checkWatches(); err != nil {
		cmdline.Explain(os.Stderr, err)
		return cmdline.CodeOurs
	}
	return run(ctx, args, deps{
		Deps:    cmdline.Deps{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Program: os.Executable},
		version: version, serve: boot.Serve, checks: doctor.Run,
	})
}

func run(ctx context.Context, args []string, d deps) int {
	root := newRoot(d) //nolint:contextcheck // cobra gives the commands their context
	if forAgent(root, args) {
		cmdline.Explain(d.Stderr, execAgent(args))
		return cmdline.CodeOurs
	}
	if err := explainCommand(root, args); err != nil {
		cmdline.Explain(d.Stderr, err)
		return cmdline.CodeUsage
	}
	return cmdline.Run(ctx, args, root, d.Stderr)
}

// deps holds what the commands work with.
type deps struct {
	cmdline.Deps

	version string
	// serve runs the daemon until ctx ends or a client shuts it down.
	serve func(context.Context, boot.Options) error
	// checks examines the host when no daemon is running.
	checks func(ctx context.Context, dataDir string) []api.Check
}

// newRoot assembles the commands.
func newRoot(d deps) *cobra.Command {
	var root *cobra.Command
	d.Deps, root = cmdline.NewRoot(d.Deps, &cobra.Command{
		Use:   "sandboxd",
		Short: "Run untrusted programs in sandboxes",
		Long: `sandboxd runs untrusted programs in sandboxes that start in milliseconds, without
Docker and without root. One daemon per user holds them; "sandboxd run" starts
it where none is running.

  sandboxd run -- python3 -c 'print(1)'            in an image of this host's own /usr
  sandboxd run debian:12 -- sh -c 'cat /etc/os-release'
  sandboxd doctor                                  what this host can enforce`,
	})
	for _, newCommand := range []func(deps) *cobra.Command{
		newRun, newCode, newContext, newCreate, newExec, newPs, newStop, newStart, newPause, newResume, newUpdate, newStats, newSystem, newRename, newInspect, newDiff, newChanges, newApply, newCommit, newRm, newPruneEnded, newCp, newFiles,
		newSnapshot, newSnapshots, newFork, newRollback,
		newPull, newPush, newImages, newImage, newRmi, newTag, newImport, newExport, newBuild,
		newAttach, newExecs, newKill, newTop, newLogs, newEvents, newFlows, newPort, newOpen, newNetwork, newVolume, newSecret, newWait,
		newAgent,
		newServe, newFace, newConfig, newShutdown, newDoctor, newProfiles, newPolicy, newDocs, newVersion,
	} {
		root.AddCommand(newCommand(d))
	}
	root.SetFlagErrorFunc(explainFlag)
	addCompletion(root, d)
	return root
}
