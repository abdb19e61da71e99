package cli

import (
	"context"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type pullOptions struct {
	platform string
	insecure bool
	json     bool
}

func newPull(d deps) *cobra.Command {
	var opts pullOptions
	cmd := &cobra.Command{
		Use:   "pull [flags] REFERENCE",
		Short: "Pull an image from a registry",
		Long: `Pull an image from a registry and print its reference and digest. What is here
already is not fetched again. Progress is shown on a terminal.`,
		Example: `  sandboxd pull debian:12
  sandboxd pull localhost:5000/team/tool@sha256:…`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runPull(cmd.Context(), args[0], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *pullOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.platform, "platform", "", "`platform` such as linux/arm64 (default: this host's)")
	f.BoolVar(&o.insecure, "insecure", false, "allow plain HTTP and unverified certificates (loopback may always use HTTP)")
	f.BoolVar(&o.json, "json", false, "print the image as JSON")
}

func runPull(ctx context.Context, reference string, opts pullOptions, d deps) error {
	return transfer(ctx, d, opts.json, func(c *client.Client, progress func(api.PullEvent)) (*api.Image, error) {
		return c.Pull(ctx, api.PullImage{Reference: reference, Platform: opts.platform, Insecure: opts.insecure}, progress)
	})
}

// transfer pulls or pushes an image, shows the progress, and prints the image.
func transfer(ctx context.Context, d deps, asJSON bool, do func(*client.Client, func(api.PullEvent)) (*api.Image, error)) error {
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	p := cmdline.NewProgress(d.Stderr)
	image, err := do(c, p.Event)
	p.End()
	if err != nil {
		return err
	}
	if asJSON {
		return cmdline.PrintJSON(d.Stdout, image)
	}
	return printImage(d.Stdout, image)
}
