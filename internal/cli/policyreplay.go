package cli

import (
	"cmp"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/netns/policy"
)

type policyTestOptions struct{ json bool }

// replayed is flows of a record that differ in addresses and times only, with the new verdict about
// the first.
type replayed struct {
	Count   int          `json:"count"`
	Kind    api.FlowKind `json:"kind"`
	Name    string       `json:"name,omitempty"`
	Address string       `json:"address,omitempty"` // where there is no name
	Port    uint16       `json:"port,omitempty"`
	Method  string       `json:"method,omitempty"`
	Path    string       `json:"path,omitempty"`
	Rule    string       `json:"rule,omitempty"`
	Reason  string       `json:"reason,omitempty"`
}

// replay is the outcome of a policy for a record.
type replay struct {
	Flows int `json:"flows"`
	// Refused were allowed, Allowed were refused.
	Refused []*replayed `json:"refused"`
	Allowed []*replayed `json:"allowed"`
	// Lookups are names that would not be resolved any more, and were never connected to.
	Lookups []*replayed `json:"lookups"`
}

func newPolicyTest(d deps) *cobra.Command {
	var opts policyTestOptions
	cmd := &cobra.Command{
		Use:   "test [flags] POLICY FLOWS",
		Short: "Say what a policy would have decided about recorded flows",
		Long: `Say which recorded flows a policy would have decided otherwise. A name that was
looked up and never connected to is shown and does not count: programs look names
up that they do not need. Of budgets, those of rules are tested, without rates.

` + policyArguments,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(_ *cobra.Command, args []string) error { return runPolicyTest(args[0], args[1], opts, d) },
	}
	cmd.Flags().BoolVar(&opts.json, "json", false, "print the outcome as JSON")
	cmdline.ExitStatus(cmd, `  0    the policy allows every flow that was allowed
  1    it refuses one, which the output shows; or an error, which stderr explains
  2    the command line is wrong`)
	return cmd
}

func runPolicyTest(file, record string, opts policyTestOptions, d deps) error {
	if file == "-" && record == "-" {
		return cmdline.Usagef("standard input is either the policy or the record")
	}
	p, err := readPolicy(file, d.Stdin)
	if err != nil {
		return err
	}
	flows, err := readFlows(record, d.Stdin)
	if err != nil {
		return err
	}
	outcome := replayFlows(p, flows)
	if opts.json {
		err = cmdline.PrintJSON(d.Stdout, outcome)
	} else {
		err = outcome.print(d.Stdout)
	}
	if err == nil && len(outcome.Refused) > 0 {
		err = &cmdline.ExitError{Code: cmdline.CodeError}
	}
	return err
}

func readFlows(arg string, stdin io.Reader) ([]api.Flow, error) {
	f, err := openInput(arg, stdin)
	if err != nil {
		return nil, fmt.Errorf("read flows: %w", err)
	}
	defer f.Close()
	return policy.ReadFlows(f)
}

// replayFlows decides about a record anew and keeps what differs, in the order of the record.
func replayFlows(p *policy.Policy, flows []api.Flow) *replay {
	out := &replay{Flows: len(flows), Refused: []*replayed{}, Allowed: []*replayed{}, Lookups: []*replayed{}}
	replay := p.Replay()
	connected := map[string]bool{}
	for _, f := range flows {
		if f.Allow && f.Kind != api.FlowQuery {
			connected[f.Name] = true
		}
	}
	type key struct {
		list *[]*replayed
		what replayed
	}
	seen := map[key]*replayed{}
	for _, f := range flows {
		v := replay.Recorded(f)
		list := &out.Refused
		switch {
		case v.Allow == f.Allow:
			continue
		case v.Allow:
			list = &out.Allowed
		case f.Kind == api.FlowQuery && !connected[f.Name]:
			list = &out.Lookups
		}
		what := replayed{Kind: f.Kind, Name: f.Name, Port: f.Port, Method: f.Method, Path: f.Path}
		if f.Kind == api.FlowQuery {
			what.Port, what.Method = 0, ""
		} else if f.Name == "" {
			what.Address = f.Address
		}
		k := key{list, what}
		if seen[k] == nil {
			what.Rule, what.Reason = v.Rule, v.Reason
			seen[k] = &what
			*list = append(*list, &what)
		}
		seen[k].Count++
	}
	return out
}

func (r *replay) print(w io.Writer) error {
	rows := [][]string{{"VERDICT", "FLOWS", "WHAT", "WHY"}}
	counts := map[string]int{}
	add := func(verdict string, all []*replayed) {
		for _, f := range all {
			why := f.Reason
			if f.Rule != "" {
				why = cmp.Or(why, "allowed") + " (rule " + f.Rule + ")"
			}
			rows = append(rows, []string{verdict, strconv.Itoa(f.Count), f.String(), why})
			counts[verdict] += f.Count
		}
	}
	add("refused", r.Refused)
	add("allowed", r.Allowed)
	add("lookup", r.Lookups)
	if len(rows) > 1 {
		if err := cmdline.Table(w, rows); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "of %d flows, %d that were allowed would be refused, and %d that were refused allowed\n", r.Flows, counts["refused"], counts["allowed"])
	return err
}

func (r *replayed) String() string {
	switch r.Kind {
	case api.FlowQuery:
		return "look up " + r.Name
	case api.FlowRequest:
		return fmt.Sprintf("%s %s on %s port %d", r.Method, r.Path, cmp.Or(r.Name, r.Address), r.Port)
	case api.FlowConnection, api.FlowRestart, api.FlowPeer:
	}
	return fmt.Sprintf("connect to %s port %d", cmp.Or(r.Name, r.Address), r.Port)
}
