package cli

import (
	"context"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type pushOptions struct {
	platform string
	insecure bool
	json     bool
}

func newPush(d deps) *cobra.Command {
	var opts pushOptions
	cmd := &cobra.Command{
		Use:   "push [flags] REFERENCE",
		Short: "Push an image to a registry",
		Long: `Push a stored image to the registry of its name and print its reference and
digest. To push it under another name, tag it first. What the registry has already
is not sent again. Of an image for several platforms, the one that is stored is
pushed. Logins are those of docker login or podman login. Progress is shown on a
terminal.`,
		Example: `  sandboxd tag debian:12 registry.example:5000/team/base:1.0
  sandboxd push registry.example:5000/team/base:1.0`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runPush(cmd.Context(), args[0], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *pushOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.platform, "platform", "", "`platform` that is to be pushed, such as linux/arm64, if it is the one stored")
	f.BoolVar(&o.insecure, "insecure", false, "allow plain HTTP and unverified certificates (loopback may always use HTTP)")
	f.BoolVar(&o.json, "json", false, "print the image as JSON")
}

func runPush(ctx context.Context, reference string, opts pushOptions, d deps) error {
	return transfer(ctx, d, opts.json, func(c *client.Client, progress func(api.PullEvent)) (*api.Image, error) {
		return c.Push(ctx, api.PushImage{Reference: reference, Platform: opts.platform, Insecure: opts.insecure}, progress)
	})
}
