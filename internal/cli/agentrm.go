package cli

import (
	"context"
	"fmt"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/agent"
)

func newAgentRm(d deps) *cobra.Command {
	var opts agentRunFlags
	snapshots := false
	cmd := &cobra.Command{
		Use:   "rm [flags] RUN...",
		Short: "Remove runs with their snapshots",
		Long: `Remove runs: their directories, the snapshots that --snapshot_turns has taken of
their turns, and sandboxes that an interrupt or a crash has left. RUN is a run's directory, or its
name below OUTPUT_DIR. A run that is still going on is not removed.

Snapshots stay when a run ends, for resume and fork. With --snapshots they are all
that is removed: record and output stay, and a fork does the turns again.`,
		Args: usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return agentError(runAgentRm(cmd.Context(), args, snapshots, opts, d))
		},
	}
	opts.addFlags(cmd.Flags(), "what was removed")
	cmd.Flags().BoolVar(&snapshots, "snapshots", false, "remove the snapshots only")
	exitStatus(cmd, exitPlain)
	return cmd
}

func runAgentRm(ctx context.Context, refs []string, snapshots bool, opts agentRunFlags, d deps) error {
	c, err := d.daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	all := []*agent.Removed{}
	for _, ref := range refs {
		dir, err := agent.FindRun(opts.outputDir, ref)
		if err != nil {
			return err
		}
		done, err := agent.RemoveRun(ctx, c, dir, snapshots)
		if err != nil {
			return err
		}
		all = append(all, done)
		if opts.json {
			continue
		}
		if _, err := fmt.Fprintf(d.stdout, "%s: %d snapshots, %s\n", printable(done.Run), len(done.Snapshots), units.BytesSize(float64(done.Size))); err != nil {
			return err
		}
	}
	if opts.json {
		return printJSON(d.stdout, map[string]any{"removed": all})
	}
	return nil
}
