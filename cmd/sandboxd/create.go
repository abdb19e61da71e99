package main

import (
	"context"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
)

type createOptions struct {
	sandboxFlags

	json bool
}

func newCreate(d deps) *cobra.Command {
	var opts createOptions
	cmd := &cobra.Command{
		Use:   "create [flags] [IMAGE]",
		Short: "Create a sandbox to execute programs in",
		Long: `Create a sandbox and print its id. It runs, idle, until "sandboxd rm" deletes it,
its lifetime ends, or nothing has been asked of it for its idle timeout.

The image is "host" unless one is named. One that is not here yet is pulled.
Where no daemon runs, one is started in the background.`,
		Example: `  id=$(sandboxd create --name work debian:12)
  sandboxd exec $id -- ls /`,
		Args: usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			image := ""
			if len(args) == 1 {
				if image = args[0]; image == "" {
					return usagef("the image has an empty name")
				}
			}
			req, err := opts.request(image, cmd.Flags().Changed)
			if err != nil {
				return err
			}
			return runCreate(cmd.Context(), opts, req, d)
		},
	}
	opts.addFlags(cmd.Flags())
	exitStatus(cmd, exitPlain)
	return cmd
}

func (o *createOptions) addFlags(f *pflag.FlagSet) {
	o.sandboxFlags.addFlags(f)
	f.BoolVar(&o.json, "json", false, "print the whole sandbox as JSON")
}

func runCreate(ctx context.Context, opts createOptions, req api.CreateSandbox, d deps) error {
	c, err := d.daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	sb, err := create(ctx, c, req, d)
	if err != nil {
		return err
	}
	return printCreated(sb, opts.json, d)
}
