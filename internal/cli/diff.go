package cli

import (
	"context"
	"fmt"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type diffOptions struct {
	json bool
}

func newDiff(d deps) *cobra.Command {
	var opts diffOptions
	cmd := &cobra.Command{
		Use:   "diff SANDBOX",
		Short: "Show what a sandbox has changed of its image",
		Long: `Show what a sandbox, be it running or not, has changed of its image: A for what it
has added, C for what it has changed, D for what it has deleted, and the sizes of
files. Of a directory that is deleted, what was in it is not shown.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runDiff(cmd.Context(), args[0], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *diffOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.json, "json", false, "print the changes as JSON")
}

func runDiff(ctx context.Context, id string, opts diffOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	diff, err := c.Diff(ctx, id)
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, diff)
	}
	letters := map[api.ChangeKind]string{api.Added: "A", api.Changed: "C", api.Deleted: "D"}
	for _, change := range diff.Changes {
		line := letters[change.Kind] + " " + cmdline.Printable(change.Path)
		if change.Type == "file" {
			line += "  " + units.HumanSize(float64(change.Size))
		}
		if _, err := fmt.Fprintln(d.Stdout, line); err != nil {
			return err
		}
	}
	if diff.More {
		_, _ = fmt.Fprintln(d.Stderr, "there are more changes than can be shown")
	}
	leftOut(d, diff.Skipped, diff.SkippedMore)
	return nil
}

// leftOut prints the paths that a commit leaves out.
func leftOut(d deps, skipped []string, more int64) {
	for _, s := range skipped {
		_, _ = fmt.Fprintln(d.Stderr, "left out of an image: "+cmdline.Printable(s)) // a note that cannot be printed is no failure
	}
	if more > 0 {
		_, _ = fmt.Fprintf(d.Stderr, "and %d more\n", more) // see above
	}
}
