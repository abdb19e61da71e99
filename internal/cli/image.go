package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newImage(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "image",
		Short: "Look at one image",
		Args:  cmdline.UsageArgs(cobra.NoArgs),
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newImageInspect(d), newImageHistory(d))
	return cmd
}

func newImageInspect(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "inspect REFERENCE",
		Short: "Print all that is known of an image as JSON",
		Long: `Print all that is known of a stored image as JSON: its names, the sandboxes that
have it, its configuration, its layers with the images that share them, and its
history. Configuration and history are what the image's maker says.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := d.Client()
			defer c.Close()
			detail, err := c.Image(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return cmdline.PrintJSON(d.Stdout, detail)
		},
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func newImageHistory(d deps) *cobra.Command {
	var json bool
	cmd := &cobra.Command{
		Use:   "history REFERENCE",
		Short: "Print how an image was made",
		Long: `Print the steps in which an image was made, the last one first, as its maker
tells them. SIZE is that of the step's layer, compressed.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runImageHistory(cmd.Context(), args[0], json, d) },
	}
	cmd.Flags().BoolVar(&json, "json", false, "print the steps as JSON, the first one first")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runImageHistory(ctx context.Context, reference string, json bool, d deps) error {
	c := d.Client()
	defer c.Close()
	detail, err := c.Image(ctx, reference)
	if err != nil {
		return err
	}
	if json {
		return cmdline.PrintJSON(d.Stdout, detail.History)
	}
	rows := [][]string{{"CREATED", "SIZE", "CREATED BY"}}
	for _, h := range slices.Backward(detail.History) {
		by := strings.Join(strings.Fields(h.CreatedBy+" "+h.Comment), " ")
		if len(by) > 100 {
			by = strings.ToValidUTF8(by[:100], "") + "..."
		}
		rows = append(rows, []string{since(h.Created), sizeOf(h.Size), by})
	}
	if len(detail.History) == 0 {
		_, err := fmt.Fprintln(d.Stdout, "its maker does not say")
		return err
	}
	return cmdline.Table(d.Stdout, rows)
}
