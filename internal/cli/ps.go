package cli

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type psOptions struct {
	all     bool
	quiet   bool
	labels  []string
	filters []string
	format  string
	noTrunc bool
	json    bool
}

func newPs(d deps) *cobra.Command {
	var opts psOptions
	cmd := &cobra.Command{
		Use:   "ps",
		Short: "List sandboxes",
		Long: `List your sandboxes of all states, oldest first. ENDS is what ends a sandbox first:
its lifetime, or its idle timeout if nothing uses it before.

Filters are KEY=VALUE with the key state (or status), health (starting, healthy,
unhealthy or none), name, id, label, image, profile or network (a mode, or the name
of a network). Several of one key select sandboxes
with any of the values, but for labels, of which all must be there. A name may have
the wildcards * and ?.

Besides the fields of --json, templates of --format have .Names, .Status, .RunningFor,
.Ends and .Published.`,
		Example: `  sandboxd ps --filter state=stopped --filter name='job-*'
  sandboxd ps --format 'table {{.ID}}\t{{.Name}}\t{{.Status}}'`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runPs(cmd.Context(), opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *psOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVarP(&o.all, "all", "a", false, "of all states, which is the default")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "print ids only")
	f.StringArrayVarP(&o.labels, "label", "l", nil, "only those with this `label`: key=value; may be given again")
	f.StringArrayVar(&o.filters, "filter", nil, "only those with `key=value`; may be given again")
	f.StringVar(&o.format, "format", "", formatUsage)
	f.BoolVar(&o.noTrunc, "no-trunc", false, "print long reasons whole")
	f.BoolVar(&o.json, "json", false, "print the list as JSON")
}

func runPs(ctx context.Context, opts psOptions, d deps) error {
	for _, l := range opts.labels {
		if key, _, ok := strings.Cut(l, "="); !ok || key == "" {
			return cmdline.Usagef("--label %q is not key=value", l)
		}
	}
	if err := checkStates(opts.filters); err != nil {
		return err
	}
	wanted, err := parseFilters(opts.filters, psKeys)
	if err != nil {
		return err
	}
	format, err := newFormat(opts.format)
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	sandboxes, err := c.ListSandboxes(ctx, client.ListOptions{Labels: opts.labels})
	if err != nil {
		return err
	}
	rows := []psRow{}
	sandboxes = slices.DeleteFunc(sandboxes, func(s api.Sandbox) bool { return !wanted(&s) })
	for _, s := range sandboxes {
		rows = append(rows, psRow{s})
	}
	switch {
	case opts.json:
		return cmdline.PrintJSON(d.Stdout, api.SandboxList{Sandboxes: append([]api.Sandbox{}, sandboxes...)})
	case opts.quiet:
		for _, s := range sandboxes {
			if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(s.ID)); err != nil {
				return err
			}
		}
		return nil
	case format != nil:
		return printAll(d.Stdout, format, rows)
	}
	table := [][]string{{"ID", "NAME", "IMAGE", "STATE", "CREATED", "ENDS"}}
	for _, r := range rows {
		state := r.Status()
		if !opts.noTrunc && len([]rune(state)) > maxStatus {
			state = truncate(state, maxStatus-3) + "..."
		}
		table = append(table, []string{r.ID, r.Name, r.Image, state, r.RunningFor(), r.Ends()})
	}
	return cmdline.Table(d.Stdout, table)
}

// states are the values of the filters state and status. Docker's names of two of them are known.
var states = map[string]api.SandboxState{
	"creating": api.StateCreating, "running": api.StateRunning, "paused": api.StatePaused, "stopped": api.StateStopped, "lost": api.StateLost,
	"exited": api.StateStopped, "dead": api.StateLost,
}

func hasState(s *api.Sandbox, want string) bool { return s.State == states[want] }

// checkStates refuses filters for states that no sandbox has: their list would always be empty.
func checkStates(filters []string) error {
	for _, f := range filters {
		if key, value, _ := strings.Cut(f, "="); (key == "state" || key == "status") && states[value] == "" {
			return cmdline.Usagef("--filter %q: the state must be one of creating, running, paused, stopped (or exited), lost (or dead)", f)
		}
	}
	return nil
}

// maxStatus is the width of a state with its reason in the list, in characters.
const maxStatus = 80

// psRow is a sandbox as templates see it. What it adds are methods, so that {{json .}} is what the
// API answers.
type psRow struct{ api.Sandbox }

// Names returns the name: docker's templates use this field.
func (r psRow) Names() string { return r.Name }

// Status returns the state with its reason or its health.
func (r psRow) Status() string {
	switch running := r.State == api.StateRunning || r.State == api.StatePaused; {
	case r.Reason != "" && r.Reason != string(r.State):
		return string(r.State) + " (" + r.Reason + ")"
	case running && r.Health != nil && r.Health.Status == api.HealthStarting:
		return string(r.State) + " (health: starting)"
	case running && r.Health != nil:
		return string(r.State) + " (" + string(r.Health.Status) + ")"
	}
	return string(r.State)
}

// RunningFor returns the time since the creation, in words.
func (r psRow) RunningFor() string { return since(r.CreatedAt) }

// Ends returns what ends the sandbox first, and when.
func (r psRow) Ends() string {
	switch {
	case r.State == api.StateStopped || r.State == api.StateLost:
		return "-"
	case !r.IdleDeadline.IsZero() && (r.Deadline.IsZero() || r.IdleDeadline.Before(r.Deadline)):
		return until(r.IdleDeadline) + " (idle)"
	}
	return until(r.Deadline)
}

// Published returns the published ports.
func (r psRow) Published() string {
	var out []string
	for _, p := range r.Ports {
		at := p.Socket
		if at == "" {
			at = net.JoinHostPort(p.Address, strconv.Itoa(int(p.HostPort)))
		}
		out = append(out, at+"->"+strconv.Itoa(int(p.Port)))
	}
	return strings.Join(out, ", ")
}

// healthOf returns the health of a sandbox as filters have it: none without a health check.
func healthOf(s *api.Sandbox) string {
	if s.Health == nil {
		return "none"
	}
	return string(s.Health.Status)
}

// psKeys compare a sandbox with the value of a filter.
var psKeys = map[string]func(s *api.Sandbox, want string) bool{
	"id":      func(s *api.Sandbox, want string) bool { return s.ID == want },
	"name":    func(s *api.Sandbox, want string) bool { return matchName(s.Name, want) },
	"state":   hasState,
	"status":  hasState,
	"health":  func(s *api.Sandbox, want string) bool { return healthOf(s) == want },
	"image":   func(s *api.Sandbox, want string) bool { return matchImage(s.Image, want) || s.ImageDigest == want },
	"profile": func(s *api.Sandbox, want string) bool { return s.Profile == want },
	"network": func(s *api.Sandbox, want string) bool {
		return string(s.Network.Mode) == want || slices.Contains(s.Network.Join, want) || s.Network.Mode == "" && want == string(api.NetworkNone)
	},
	"label": func(s *api.Sandbox, want string) bool { return matchLabel(s.Labels, want) },
}
