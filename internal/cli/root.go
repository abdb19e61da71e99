// Package cli is the command line of sandboxd, one file for each command. Every command but serve talks to a daemon over
// its socket, as any other program would.
package cli

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/boot"
	"github.com/sandboxd/sandboxd/internal/doctor"
)

// Main runs one command line and returns the exit code.
func Main(ctx context.Context, args []string, version string) int {
	return run(ctx, args, deps{
		stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, version: version, serve: boot.Serve, checks: doctor.Run,
	})
}

// deps is what the commands work with. The zero socket is filled in by newRoot.
type deps struct {
	stdin, stdout, stderr *os.File
	// socket is what --socket says, once the flags are parsed; use socketPath.
	socket  *string
	version string
	// serve runs the daemon until ctx ends or a client shuts it down.
	serve func(context.Context, boot.Options) error
	// checks examines the host when no daemon is running.
	checks func(ctx context.Context, dataDir string) []api.Check
}

// socketPath is where the daemon is to be found: the flag, else SANDBOXD_SOCKET, else the usual place.
func (d deps) socketPath() string {
	if *d.socket != "" {
		return *d.socket
	}
	return client.DefaultSocket()
}

// client returns a client for the daemon, running or not. Commands that start one use daemon instead.
func (d deps) client() *client.Client { return client.New(d.socketPath()) }

// newRoot wires the commands by hand.
func newRoot(d deps) *cobra.Command {
	d.socket = new(string)
	root := &cobra.Command{
		Use:   "sandboxd",
		Short: "Run untrusted programs in sandboxes",
		Long: `sandboxd runs untrusted programs in sandboxes that start in milliseconds, without
Docker and without root. One daemon per user holds them; "sandboxd run" starts
it where none is running.

  sandboxd run -- python3 -c 'print(1)'            in an image of this host's own /usr
  sandboxd run debian:12 -- sh -c 'cat /etc/os-release'
  sandboxd doctor                                  what this host can enforce`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.PersistentFlags().StringVar(d.socket, "socket", "", "the daemon's Unix `socket` (default: $SANDBOXD_SOCKET, else in the runtime directory)")
	root.SetIn(d.stdin)
	root.SetOut(d.stdout)
	root.SetErr(d.stderr)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	root.SetUsageTemplate(root.UsageTemplate() + exitStatusTemplate)
	exitStatus(root, exitPlain)
	for _, newCommand := range []func(deps) *cobra.Command{
		newRun, newCreate, newExec, newPs, newStop, newStart, newPause, newResume, newUpdate, newStats, newDiff, newCommit, newRm, newPruneEnded, newCp, newFiles,
		newSnapshot, newSnapshots, newFork, newRollback,
		newPull, newPush, newImages, newImage, newRmi, newTag, newImport, newExport, newBuild,
		newAttach, newExecs, newKill, newTop, newLogs, newWait,
		newAgent,
		newServe, newShutdown, newDoctor, newProfiles, newDocs, newVersion,
	} {
		root.AddCommand(newCommand(d))
	}
	return root
}
