package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newNetwork(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "network",
		Short: "Keep networks in which sandboxes reach each other",
		Long: `Keep networks in which sandboxes reach each other by name. One that is made stays until
it is removed; others exist while a sandbox names them (--network net:NAME).
"sandboxd docs networks" explains it.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newNetworkCreate(d), newNetworkLs(d), newNetworkInspect(d), newNetworkRm(d), newNetworkPrune(d), newNetworkConnect(d), newNetworkDisconnect(d))
	return cmd
}

type networkCreateOptions struct {
	labels   []string
	internal bool
	json     bool
}

func newNetworkCreate(d deps) *cobra.Command {
	var opts networkCreateOptions
	cmd := &cobra.Command{
		Use:   "create [flags] NAME",
		Short: "Make a network",
		Long: `Make a network that stays while no sandbox is in it, and print its name. It is an error
if one of the name was made before.`,
		Example: `  sandboxd network create back
  sandboxd run -d --name db --network net:back --network-alias sql postgres:17`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runNetworkCreate(cmd.Context(), args[0], opts, d)
		},
	}
	f := cmd.Flags()
	f.StringArrayVarP(&opts.labels, "label", "l", nil, "`label` to find it by: key=value; repeatable")
	f.BoolVar(&opts.internal, "internal", false, "sandboxes that are in internal networks only reach each other and nothing else")
	f.BoolVar(&opts.json, "json", false, "print the network as JSON")
	const noSubnets = "addresses are chosen by the daemon; sandboxes find each other by name"
	addHabits(f,
		habit{name: "driver", short: "d", accepts: []string{"bridge"}, why: "the daemon connects sandboxes itself; there are no drivers"},
		habit{name: "subnet", why: noSubnets}, habit{name: "gateway", why: noSubnets}, habit{name: "ip-range", why: noSubnets},
		habit{name: "ipv6", bare: true, why: "sandboxes reach each other over IPv4"},
		habit{name: "opt", short: "o", why: "a network has no options of a driver"})
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runNetworkCreate(ctx context.Context, name string, opts networkCreateOptions, d deps) error {
	labels, err := labelsOf(opts.labels)
	if err != nil {
		return err
	}
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	n, err := c.CreateNetwork(ctx, api.CreateNetwork{Name: name, Labels: labels, Internal: opts.internal})
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, n)
	}
	_, err = fmt.Fprintln(d.Stdout, cmdline.Printable(n.Name))
	return err
}

type networkLsOptions struct {
	quiet   bool
	filters []string
	format  string
	json    bool
}

func newNetworkLs(d deps) *cobra.Command {
	var opts networkLsOptions
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List named networks, and the sandboxes in them",
		Long: `List your named networks with a line for each sandbox in them: its state, and the
address at which the others reach it while it runs.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runNetworkLs(cmd.Context(), opts, d) },
	}
	f := cmd.Flags()
	f.BoolVarP(&opts.quiet, "quiet", "q", false, "print names of networks only")
	f.StringArrayVarP(&opts.filters, "filter", "f", nil, "only those with `key=value`: name (with * and ?), label, dangling (true: no sandbox is in it), sandbox or driver; may be given again")
	f.StringVar(&opts.format, "format", "", formatUsage)
	f.BoolVar(&opts.json, "json", false, "print the list as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// networkKeys compare a network with the value of a filter. Docker's name is any part of the name.
var networkKeys = map[string]func(n *api.NamedNetwork, want string) bool{
	"name": func(n *api.NamedNetwork, want string) bool {
		return matchName(n.Name, want) || strings.Contains(n.Name, want)
	},
	"label":    func(n *api.NamedNetwork, want string) bool { return matchLabel(n.Labels, want) },
	"dangling": func(n *api.NamedNetwork, want string) bool { return matchBool(len(n.Sandboxes) == 0, want) },
	"sandbox": func(n *api.NamedNetwork, want string) bool {
		return slices.ContainsFunc(n.Sandboxes, func(m api.NetworkMember) bool { return m.ID == want || m.Name == want })
	},
	"driver": func(_ *api.NamedNetwork, want string) bool { return want == "bridge" },
}

func runNetworkLs(ctx context.Context, opts networkLsOptions, d deps) error {
	wanted, err := parseFilters(opts.filters, networkKeys)
	if err != nil {
		return err
	}
	format, err := newFormat(opts.format)
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	list, err := c.NamedNetworks(ctx)
	if err != nil {
		return err
	}
	list = slices.DeleteFunc(list, func(n api.NamedNetwork) bool { return !wanted(&n) })
	switch {
	case opts.json:
		return cmdline.PrintJSON(d.Stdout, api.NetworkList{Networks: append([]api.NamedNetwork{}, list...)})
	case format != nil:
		return printAll(d.Stdout, format, list)
	case opts.quiet:
		for _, n := range list {
			if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(n.Name)); err != nil {
				return err
			}
		}
		return nil
	}
	rows := [][]string{{"NETWORK", "SANDBOX", "STATE", "ADDRESS"}}
	for _, n := range list {
		for _, m := range n.Sandboxes {
			rows = append(rows, []string{n.Name, m.Name, string(m.State), cmp.Or(m.Address, "-")})
		}
		if len(n.Sandboxes) == 0 {
			rows = append(rows, []string{n.Name, "-", "-", "-"})
		}
	}
	return cmdline.Table(d.Stdout, rows)
}

func newNetworkInspect(d deps) *cobra.Command {
	opts := inspectOptions{kind: "network"}
	cmd := &cobra.Command{
		Use:   "inspect [flags] NETWORK...",
		Short: "Print all that is known of networks",
		Long:  `Print all that the daemon knows of networks, as one JSON list.`,
		Args:  cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE:  func(cmd *cobra.Command, args []string) error { return runInspect(cmd.Context(), args, opts, d) },
	}
	cmd.Flags().StringVarP(&opts.format, "format", "f", "", formatUsage)
	cmd.Flags().BoolVar(&opts.json, "json", false, "print the networks as a JSON list, as without --format")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func newNetworkRm(d deps) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:     "rm [flags] NETWORK...",
		Aliases: []string{"remove"},
		Short:   "Remove networks",
		Long: `Remove networks, and print their names. One that a sandbox is in, running or not, stays:
delete the sandbox first, or disconnect it.`,
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := d.Client()
			defer c.Close()
			return removeEach(cmd.Context(), args, d, func(name string) (bool, error) {
				err := c.RemoveNetwork(cmd.Context(), name)
				if force && notFound(err) {
					return false, nil
				}
				return true, err
			})
		},
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "a network that does not exist is no error")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

type networkPruneOptions struct {
	labels  []string
	filters []string
	json    bool
}

func newNetworkPrune(d deps) *cobra.Command {
	var opts networkPruneOptions
	cmd := &cobra.Command{
		Use:   "prune",
		Short: "Remove networks that no sandbox is in",
		Long: `Remove the networks that no sandbox is in, running or not, and print their names.
Networks with the label ` + api.LabelKeep + ` stay.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runNetworkPrune(cmd.Context(), opts, d) },
	}
	f := cmd.Flags()
	f.StringArrayVarP(&opts.labels, "label", "l", nil, "only those with this `label`: key=value; may be given again")
	f.StringArrayVar(&opts.filters, "filter", nil, "only those with `key=value`: label=KEY=VALUE")
	f.BoolVar(&opts.json, "json", false, "print what was removed as JSON")
	addHabits(f, habit{name: "force", short: "f", bare: true, accepts: []string{"true"}, why: "nothing is asked"})
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runNetworkPrune(ctx context.Context, opts networkPruneOptions, d deps) error {
	for _, f := range opts.filters {
		label, ok := strings.CutPrefix(f, "label=")
		if !ok {
			return cmdline.Usagef("--filter %q: there is label=KEY=VALUE", f)
		}
		opts.labels = append(opts.labels, label)
	}
	labels, err := labelsOf(opts.labels)
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	out, err := c.PruneNetworks(ctx, api.PruneNetworks{Labels: labels})
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, out)
	}
	return printRemoved(d, out.Removed, fmt.Sprintf("%d networks", len(out.Removed)))
}

func newNetworkConnect(d deps) *cobra.Command {
	var aliases []string
	cmd := &cobra.Command{
		Use:   "connect [flags] NETWORK SANDBOX",
		Short: "Put a sandbox into a network",
		Long: `Put a sandbox into a network. The sandbox does not run, or it runs with a network: one
that was started without any cannot get one while it runs. In a network that it is in,
--alias replaces its aliases.`,
		Example: `  sandboxd network connect --alias sql back db`,
		Args:    cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := d.Client()
			defer c.Close()
			return c.ConnectNetwork(cmd.Context(), args[0], api.ConnectNetwork{Sandbox: args[1], Aliases: aliases})
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&aliases, "alias", nil, "`name` by which the others in the network find it, too; repeatable")
	addHabits(f, habit{name: "ip", why: noAddresses}, habit{name: "ip6", why: noAddresses}, habit{name: "link", why: "sandboxes in one network find each other by name"})
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func newNetworkDisconnect(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "disconnect [flags] NETWORK SANDBOX",
		Short: "Take a sandbox out of a network",
		Long: `Take a sandbox out of a network. If it runs, connections from and to the sandboxes with
which it shares no other network are reset.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := d.Client()
			defer c.Close()
			return c.DisconnectNetwork(cmd.Context(), args[0], api.DisconnectNetwork{Sandbox: args[1]})
		},
	}
	addHabits(cmd.Flags(), habit{name: "force", short: "f", bare: true, accepts: []string{"true"}, why: "connections are reset in any case"})
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// withAliases gives a sandbox aliases in all its named networks.
func withAliases(net *api.Network, aliases []string) error {
	if len(aliases) == 0 {
		return nil
	}
	if len(net.Join) == 0 {
		return cmdline.Usagef("--network-alias is for networks in which sandboxes find each other; see --network net:NAME")
	}
	net.Aliases = make(map[string][]string)
	for _, name := range net.Join {
		net.Aliases[name] = aliases
	}
	return nil
}
