package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newRename(d deps) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "rename [flags] SANDBOX NAME",
		Short: "Give a sandbox another name",
		Long: `Give a sandbox of any state another name, which no other one has. The hostname of a
running sandbox stays until it is started again.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runRename(cmd.Context(), args[0], args[1], asJSON, d)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the whole sandbox as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runRename(ctx context.Context, id, name string, asJSON bool, d deps) error {
	c := d.Client()
	defer c.Close()
	sb, err := c.RenameSandbox(ctx, id, name)
	if err != nil {
		return err
	}
	if asJSON {
		return cmdline.PrintJSON(d.Stdout, sb)
	}
	_, err = fmt.Fprintln(d.Stdout, cmdline.Printable(sb.Name))
	return err
}
