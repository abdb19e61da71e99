package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type psOptions struct {
	quiet  bool
	labels []string
	json   bool
}

func newPs(d deps) *cobra.Command {
	var opts psOptions
	cmd := &cobra.Command{
		Use:   "ps",
		Short: "List sandboxes",
		Long:  "List your sandboxes, oldest first, with their state and when they end.",
		Args:  cmdline.UsageArgs(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return runPs(cmd.Context(), opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *psOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVarP(&o.quiet, "quiet", "q", false, "print ids only")
	f.StringArrayVarP(&o.labels, "label", "l", nil, "only those with this `label`: key=value; may be given again")
	f.BoolVar(&o.json, "json", false, "print the list as JSON")
}

func runPs(ctx context.Context, opts psOptions, d deps) error {
	for _, l := range opts.labels {
		if key, _, ok := strings.Cut(l, "="); !ok || key == "" {
			return cmdline.Usagef("--label %q is not key=value", l)
		}
	}
	c := d.Client()
	defer c.Close()
	sandboxes, err := c.ListSandboxes(ctx, client.ListOptions{Labels: opts.labels})
	if err != nil {
		return err
	}
	switch {
	case opts.json:
		if sandboxes == nil {
			sandboxes = []api.Sandbox{}
		}
		return cmdline.PrintJSON(d.Stdout, api.SandboxList{Sandboxes: sandboxes})
	case opts.quiet:
		for _, s := range sandboxes {
			if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(s.ID)); err != nil {
				return err
			}
		}
		return nil
	}
	rows := [][]string{{"ID", "NAME", "IMAGE", "STATE", "CREATED", "ENDS"}}
	for _, s := range sandboxes {
		state, ends := string(s.State), until(s.Deadline)
		if s.Reason != "" && s.Reason != state {
			state += " (" + s.Reason + ")"
		}
		if s.State == api.StateStopped || s.State == api.StateLost {
			ends = "-"
		}
		rows = append(rows, []string{s.ID, s.Name, s.Image, state, since(s.CreatedAt), ends})
	}
	return cmdline.Table(d.Stdout, rows)
}
