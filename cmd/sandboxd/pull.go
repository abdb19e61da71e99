package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
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
		Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runPull(cmd.Context(), args[0], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	exitStatus(cmd, exitPlain)
	return cmd
}

func (o *pullOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.platform, "platform", "", "`platform` such as linux/arm64 (default: this host's)")
	f.BoolVar(&o.insecure, "insecure", false, "allow plain HTTP and unverified certificates (loopback may always use HTTP)")
	f.BoolVar(&o.json, "json", false, "print the image as JSON")
}

func runPull(ctx context.Context, reference string, opts pullOptions, d deps) error {
	c, err := d.daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	p := newProgress(d.stderr)
	image, err := c.Pull(ctx, api.PullImage{Reference: reference, Platform: opts.platform, Insecure: opts.insecure}, p.event)
	p.end()
	if err != nil {
		return err
	}
	if opts.json {
		return printJSON(d.stdout, image)
	}
	_, err = fmt.Fprintf(d.stdout, "%s %s\n", printable(image.Reference), printable(image.Digest))
	return err
}
