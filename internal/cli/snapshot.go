package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type snapshotOptions struct {
	labels  []string
	comment string
	json    bool
}

func newSnapshot(d deps) *cobra.Command {
	var opts snapshotOptions
	cmd := &cobra.Command{
		Use:   "snapshot [flags] SANDBOX [NAME]",
		Short: "Keep what a sandbox has in its files",
		Long: `Keep what a sandbox, be it running or not, has in its files, and print the
snapshot's id. Only what the sandbox has written is copied. A running sandbox
stands still meanwhile where it is in a cgroup; elsewhere the snapshot is said
not to be consistent. Processes are not kept.

"sandboxd create --snapshot" makes a sandbox of it.`,
		Example: `  sandboxd snapshot build ready
  sandboxd run --snapshot ready -- make test`,
		Args: cmdline.UsageArgs(cobra.RangeArgs(1, 2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) == 2 {
				if name = args[1]; name == "" {
					return cmdline.Usagef("the snapshot has an empty name")
				}
			}
			return runSnapshot(cmd.Context(), args[0], name, opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *snapshotOptions) addFlags(f *pflag.FlagSet) {
	f.StringArrayVarP(&o.labels, "label", "l", nil, "`label` to find it by: key=value")
	f.StringVarP(&o.comment, "message", "m", "", "`text` to remember it by")
	f.BoolVar(&o.json, "json", false, "print the snapshot as JSON")
}

func runSnapshot(ctx context.Context, id, name string, opts snapshotOptions, d deps) error {
	labels, err := labelsOf(opts.labels)
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	snap, err := c.TakeSnapshot(ctx, id, api.TakeSnapshot{Name: name, Labels: labels, Comment: opts.comment})
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, snap)
	}
	if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(snap.ID)); err != nil {
		return err
	}
	printGaps(d, snap.Consistent, snap.Skipped, snap.SkippedMore)
	return nil
}

// printGaps prints the parts that a copy of a sandbox's files lacks.
func printGaps(d deps, consistent bool, skipped []string, more int64) {
	// A note that cannot be printed is no failure.
	if !consistent {
		_, _ = fmt.Fprintln(d.Stderr, "not consistent: the sandbox could not be held, and what it wrote meanwhile may be there in part")
	}
	for _, s := range skipped {
		_, _ = fmt.Fprintln(d.Stderr, "left out: "+cmdline.Printable(s))
	}
	if more > 0 {
		_, _ = fmt.Fprintf(d.Stderr, "and %d more\n", more)
	}
}

type snapshotsOptions struct {
	json bool
}

func newSnapshots(d deps) *cobra.Command {
	var opts snapshotsOptions
	cmd := &cobra.Command{
		Use:   "snapshots [SANDBOX]",
		Short: "List snapshots",
		Long: `List the snapshots that are here, or those of one sandbox. SIZE is what the files
of a snapshot's own layer have; SHARED is what it stands on that other snapshots
and sandboxes may stand on too.`,
		Args: cmdline.UsageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			id := ""
			if len(args) == 1 {
				if id = args[0]; id == "" {
					return cmdline.Usagef("the sandbox has an empty name")
				}
			}
			return runSnapshots(cmd.Context(), id, opts, d)
		},
	}
	cmd.Flags().BoolVar(&opts.json, "json", false, "print the list as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newSnapshotsRm(d), newSnapshotsPrune(d), newSnapshotsExport(d), newSnapshotsImport(d))
	return cmd
}

func runSnapshots(ctx context.Context, id string, opts snapshotsOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	list, err := c.Snapshots(ctx, id)
	if err != nil {
		return err
	}
	if opts.json {
		if list == nil {
			list = []api.Snapshot{}
		}
		return cmdline.PrintJSON(d.Stdout, api.SnapshotList{Snapshots: list})
	}
	rows := [][]string{{"ID", "NAME", "SANDBOX", "IMAGE", "LAYERS", "SIZE", "SHARED", "CONSISTENT", "CREATED"}}
	for i := range list {
		s := &list[i]
		consistent := "no"
		if s.Consistent {
			consistent = "yes"
		}
		rows = append(rows, []string{
			s.ID, s.Name, s.SandboxName, s.Image, strconv.Itoa(s.Layers), sizeOf(s.Size), sizeOf(s.SharedSize), consistent, since(s.CreatedAt),
		})
	}
	return cmdline.Table(d.Stdout, rows)
}

func newSnapshotsRm(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rm SNAPSHOT...",
		Short: "Remove snapshots",
		Long: `Remove snapshots and print their names as they were given. Sandboxes that were
made of one go on; what they stand on goes when the last of them has gone.`,
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runSnapshotsRm(cmd.Context(), args, d) },
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runSnapshotsRm(ctx context.Context, refs []string, d deps) error {
	c := d.Client()
	defer c.Close()
	return removeEach(ctx, refs, d, func(ref string) (bool, error) {
		_, err := c.RemoveSnapshot(ctx, ref)
		return true, err
	})
}

func newSnapshotsExport(d deps) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "export [flags] SNAPSHOT",
		Short: "Write a snapshot to a file",
		Long: `Write a snapshot to a file: a tar with its layers, and the name and digest of its
image, which is not in it. The file appears whole or not at all.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return writeArchive(cmd.Context(), args[0], output, d, func(ctx context.Context, c *client.Client) (io.ReadCloser, error) {
				return c.ExportSnapshot(ctx, args[0])
			})
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "`file` to write (default: stdout, unless that is a terminal)")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func newSnapshotsImport(d deps) *cobra.Command {
	var name string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "import [flags] FILE|-",
		Short: "Read a snapshot from a file",
		Long: `Read a snapshot from a file that "sandboxd snapshots export" has written, and print
its id. "-" is stdin. The image that it needs must be stored.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runSnapshotsImport(cmd.Context(), args[0], name, asJSON, d)
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "`name` of the snapshot (default: the one that it has)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the snapshot as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runSnapshotsImport(ctx context.Context, file, name string, asJSON bool, d deps) error {
	in := d.Stdin
	if file == "-" {
		if cmdline.IsTerminal(d.Stdin) {
			return cmdline.Usagef("a snapshot is expected on stdin, which is a terminal")
		}
	} else {
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	snap, err := c.ImportSnapshot(ctx, in, name)
	if err != nil {
		return err
	}
	if asJSON {
		return cmdline.PrintJSON(d.Stdout, snap)
	}
	_, err = fmt.Fprintln(d.Stdout, cmdline.Printable(snap.ID))
	return err
}
