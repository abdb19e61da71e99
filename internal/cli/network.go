package cli

import (
	"cmp"
	"context"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newNetwork(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "network",
		Short: "See the networks in which sandboxes reach each other",
		Long: `See the networks in which sandboxes reach each other by name. A network exists while
a sandbox names it (--network net:NAME). "sandboxd docs networks" explains it.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newNetworkLs(d))
	return cmd
}

func newNetworkLs(d deps) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List named networks, and the sandboxes in them",
		Long: `List your named networks with a line for each sandbox in them: its state, and the
address at which the others reach it while it runs.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runNetworkLs(cmd.Context(), asJSON, d) },
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the list as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runNetworkLs(ctx context.Context, asJSON bool, d deps) error {
	c := d.Client()
	defer c.Close()
	list, err := c.NamedNetworks(ctx)
	if err != nil {
		return err
	}
	if asJSON {
		return cmdline.PrintJSON(d.Stdout, api.NetworkList{Networks: append([]api.NamedNetwork{}, list...)})
	}
	rows := [][]string{{"NETWORK", "SANDBOX", "STATE", "ADDRESS"}}
	for _, n := range list {
		for _, m := range n.Sandboxes {
			rows = append(rows, []string{n.Name, m.Name, string(m.State), cmp.Or(m.Address, "-")})
		}
	}
	return cmdline.Table(d.Stdout, rows)
}
