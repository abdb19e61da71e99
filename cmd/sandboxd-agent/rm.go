package main

import (
	"context"
	"fmt"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newRm(d cmdline.Deps) *cobra.Command {
	var opts runFlags
	snapshots := false
	cmd := &cobra.Command{
		Use:   "rm [flags] RUN...",
		Short: "Remove runs with their snapshots",
		Long: `Remove runs: their directories, the snapshots that --snapshot_turns has taken of
their turns, and sandboxes that an interrupt or a crash has left. RUN is a run's directory, or its
name below OUTPUT_DIR, or the id of a run that the daemon hosts. A run that is still
going on is not removed.

Snapshots stay when a run ends, for resume and fork. With --snapshots they are all
that is removed: record and output stay, and a fork does the turns again.`,
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runRm(cmd.Context(), args, snapshots, opts, d)
		},
	}
	opts.addFlags(cmd.Flags(), "what was removed")
	cmd.Flags().BoolVar(&snapshots, "snapshots", false, "remove the snapshots only")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runRm(ctx context.Context, refs []string, snapshots bool, opts runFlags, d cmdline.Deps) error {
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	all := []*agent.Removed{}
	for _, ref := range refs {
		done, err := removeRun(ctx, c, opts.outputDir, ref, snapshots)
		if err != nil {
			return err
		}
		all = append(all, done)
		if opts.json {
			continue
		}
		if done.Hosted {
			if _, err := fmt.Fprintf(d.Stdout, "%s: removed\n", cmdline.Printable(done.Run)); err != nil {
				return err
			}
			continue
		}
		if _, err := fmt.Fprintf(d.Stdout, "%s: %d snapshots, %s\n", cmdline.Printable(done.Run), len(done.Snapshots), units.BytesSize(float64(done.Size))); err != nil {
			return err
		}
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, map[string]any{"removed": all})
	}
	return nil
}

func removeRun(ctx context.Context, c *client.Client, outputDir, ref string, snapshots bool) (*agent.Removed, error) {
	dir, hosted, err := findRun(ctx, outputDir, ref, c)
	switch {
	case err != nil:
		return nil, err
	case hosted == nil:
		return agent.RemoveRun(ctx, c, dir, snapshots)
	case snapshots:
		return nil, fmt.Errorf("remove the snapshots of %s: the daemon hosts this run, and removes it as a whole: leave out --snapshots", hosted.ID)
	}
	return &agent.Removed{Run: hosted.ID, Dir: hosted.Dir, Snapshots: []string{}, Hosted: true}, c.DeleteAgentRun(ctx, hosted.ID)
}
