package cli

import (
	"context"
	"fmt"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
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
		Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runDiff(cmd.Context(), args[0], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	exitStatus(cmd, exitPlain)
	return cmd
}

func (o *diffOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.json, "json", false, "print the changes as JSON")
}

func runDiff(ctx context.Context, id string, opts diffOptions, d deps) error {
	c := d.client()
	defer c.Close()
	diff, err := c.Diff(ctx, id)
	if err != nil {
		return err
	}
	if opts.json {
		return printJSON(d.stdout, diff)
	}
	letters := map[api.ChangeKind]string{api.Added: "A", api.Changed: "C", api.Deleted: "D"}
	for _, change := range diff.Changes {
		line := letters[change.Kind] + " " + printable(change.Path)
		if change.Type == "file" {
			line += "  " + units.HumanSize(float64(change.Size))
		}
		if _, err := fmt.Fprintln(d.stdout, line); err != nil {
			return err
		}
	}
	if diff.More {
		_, _ = fmt.Fprintln(d.stderr, "there are more changes than can be shown")
	}
	leftOut(d, diff.Skipped, diff.SkippedMore)
	return nil
}

// leftOut tells what a commit leaves out.
func leftOut(d deps, skipped []string, more int64) {
	for _, s := range skipped {
		_, _ = fmt.Fprintln(d.stderr, "left out of an image: "+printable(s)) // a remark that cannot be shown is no reason to fail
	}
	if more > 0 {
		_, _ = fmt.Fprintf(d.stderr, "and %d more\n", more) // as above
	}
}
