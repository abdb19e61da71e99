package main

import (
	"context"
	"strconv"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
)

type imagesOptions struct {
	json bool
}

func newImages(d deps) *cobra.Command {
	var opts imagesOptions
	cmd := &cobra.Command{
		Use:   "images",
		Short: "List the images that are here",
		Long:  "List the images that the daemon has. SIZE is what was pulled, compressed.",
		Args:  usageArgs(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return runImages(cmd.Context(), opts, d) },
	}
	opts.addFlags(cmd.Flags())
	exitStatus(cmd, exitPlain)
	return cmd
}

func (o *imagesOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.json, "json", false, "print the list as JSON")
}

func runImages(ctx context.Context, opts imagesOptions, d deps) error {
	c := d.client()
	defer c.Close()
	images, err := c.Images(ctx)
	if err != nil {
		return err
	}
	if opts.json {
		if images == nil {
			images = []api.Image{}
		}
		return printJSON(d.stdout, api.ImageList{Images: images})
	}
	rows := [][]string{{"REFERENCE", "DIGEST", "PLATFORM", "LAYERS", "SIZE", "PULLED"}}
	for _, i := range images {
		rows = append(rows, []string{
			i.Reference, shortDigest(i.Digest), i.Platform, strconv.Itoa(i.Layers), units.HumanSize(float64(i.Size)), since(i.PulledAt),
		})
	}
	return table(d.stdout, rows)
}
