package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type rmiOptions struct {
	force bool
	json  bool
}

func newRmi(d deps) *cobra.Command {
	var opts rmiOptions
	cmd := &cobra.Command{
		Use:   "rmi [flags] REFERENCE...",
		Short: "Remove images",
		Long: `Take away names of images and print them. With its last name an image goes, and
with it what no other image needs. One that a sandbox has, running or not, is
refused.`,
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runRmi(cmd.Context(), args, opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *rmiOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVarP(&o.force, "force", "f", false, "take the name away although a sandbox has the image, which then waits for prune")
	f.BoolVar(&o.json, "json", false, "print what was removed as JSON")
}

func runRmi(ctx context.Context, references []string, opts rmiOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	all := api.ImagesRemoved{Removed: []string{}}
	failed := false
	for _, ref := range references {
		out, err := c.RemoveImage(ctx, ref, opts.force)
		if err != nil {
			if ctx.Err() != nil || len(references) == 1 {
				return err
			}
			failed = true
			cmdline.Explain(d.Stderr, err)
			continue
		}
		all.Removed, all.Untagged = append(all.Removed, out.Removed...), append(all.Untagged, out.Untagged...)
		all.Bytes += out.Bytes
		if opts.json {
			continue
		}
		for _, name := range append(out.Removed, out.Untagged...) {
			if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(name)); err != nil {
				return err
			}
		}
	}
	if opts.json {
		if err := cmdline.PrintJSON(d.Stdout, all); err != nil {
			return err
		}
	}
	if failed {
		return &cmdline.ExitError{Code: cmdline.CodeError}
	}
	return nil
}

func newTag(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "tag REFERENCE NAME",
		Short: "Give an image one more name",
		Long: `Give a stored image one more name. An image that has the name loses it. Nothing
is copied.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := d.Client()
			defer c.Close()
			image, err := c.TagImage(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return printImage(d.Stdout, image)
		},
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}
