package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newRollback(d deps) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "rollback [flags] SANDBOX SNAPSHOT",
		Short: "Give a sandbox the files of a snapshot",
		Long: `Give a sandbox the files of a snapshot in the place of its own, and print its id.
What it has written since, and all that runs in it, is lost. Its id, name, labels
and limits stay, and if it ran it runs again. The snapshot may be of another
sandbox of the same image.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := d.Client()
			defer c.Close()
			sb, err := c.Rollback(cmd.Context(), args[0], api.RollbackSandbox{Snapshot: args[1]})
			if err != nil {
				return err
			}
			if asJSON {
				return cmdline.PrintJSON(d.Stdout, sb)
			}
			_, err = fmt.Fprintln(d.Stdout, cmdline.Printable(sb.ID))
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandbox as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}
