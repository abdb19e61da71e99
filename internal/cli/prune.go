package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type pruneEndedOptions struct {
	olderThan time.Duration
	labels    []string
	json      bool
}

func newPruneEnded(d deps) *cobra.Command {
	opts := pruneEndedOptions{olderThan: api.DefaultOlderThan * time.Second}
	cmd := &cobra.Command{
		Use:   "prune",
		Short: "Delete sandboxes that have ended",
		Long: `Delete sandboxes that are stopped or lost, with their files and logs, and print
their names. Those that have ended less than an hour ago stay, so that who waits
for one can still read how it did; "--older-than 0s" takes them too. A sandbox with
the label ` + api.LabelKeep + ` stays whatever is given; "sandboxd rm" deletes it.`,
		Example: `  sandboxd prune
  sandboxd prune --older-than 0s --label job=nightly`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runPruneEnded(cmd.Context(), opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *pruneEndedOptions) addFlags(f *pflag.FlagSet) {
	f.DurationVar(&o.olderThan, "older-than", o.olderThan, "only those that ended this long ago")
	f.StringArrayVarP(&o.labels, "label", "l", nil, "only those with this `label`: key=value; may be given again")
	f.BoolVar(&o.json, "json", false, "print what was removed as JSON")
}

func runPruneEnded(ctx context.Context, opts pruneEndedOptions, d deps) error {
	labels, err := labelsOf(opts.labels)
	if err != nil {
		return err
	}
	if opts.olderThan < 0 {
		return cmdline.Usagef("--older-than %v is negative", opts.olderThan)
	}
	age := opts.olderThan.Seconds()
	c := d.Client()
	defer c.Close()
	out, err := c.PruneSandboxes(ctx, api.PruneSandboxes{OlderThan: &age, Labels: labels})
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, out)
	}
	for _, r := range out.Removed {
		if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(r.Name)); err != nil {
			return err
		}
	}
	if out.Recent > 0 {
		_, _ = fmt.Fprintf(d.Stderr, "%d more have ended since then and stay; --older-than 0s takes them too\n", out.Recent) // a note
	}
	return nil
}

// printRemoved prints the removed names, one per line, and their sum.
func printRemoved(d deps, names []string, sum string) error {
	for _, name := range names {
		if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(name)); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintln(d.Stdout, sum)
	return err
}

func newSnapshotsPrune(d deps) *cobra.Command {
	var opts pruneEndedOptions
	cmd := &cobra.Command{
		Use:   "prune (--older-than AGE | --label KEY=VALUE)",
		Short: "Remove snapshots that no sandbox stands on",
		Long: `Remove snapshots by age, by label or by both, and print their names. Those that a
sandbox stands on stay, and those with the label ` + api.LabelKeep + `.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runSnapshotsPrune(cmd.Context(), opts, cmd.Flags().Changed("older-than"), d)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&opts.olderThan, "older-than", 0, "only those that were taken, or imported, this long ago; 0s: all")
	f.StringArrayVarP(&opts.labels, "label", "l", nil, "only those with this `label`: key=value; may be given again")
	f.BoolVar(&opts.json, "json", false, "print what was removed as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runSnapshotsPrune(ctx context.Context, opts pruneEndedOptions, aged bool, d deps) error {
	labels, err := labelsOf(opts.labels)
	if err != nil {
		return err
	}
	req := api.PruneSnapshots{Labels: labels}
	switch {
	case opts.olderThan < 0:
		return cmdline.Usagef("--older-than %v is negative", opts.olderThan)
	case aged:
		age := opts.olderThan.Seconds()
		req.OlderThan = &age
	case labels == nil:
		return cmdline.Usagef("which snapshots? give --older-than (0s: all) or --label")
	}
	c := d.Client()
	defer c.Close()
	out, err := c.PruneSnapshots(ctx, req)
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, out)
	}
	return printRemoved(d, out.Removed, fmt.Sprintf("%d snapshots, %s", len(out.Removed), sizeOf(out.Bytes)))
}
