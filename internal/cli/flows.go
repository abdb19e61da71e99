package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type flowsOptions struct {
	follow  bool
	tail    int
	refused bool
	exec    string
	json    bool
}

func newFlows(d deps) *cobra.Command {
	var opts flowsOptions
	cmd := &cobra.Command{
		Use:   "flows [flags] SANDBOX",
		Short: "Print the record of a sandbox's network",
		Long: `Print each connection, HTTP request and DNS question of a sandbox, and each refusal
with its reason, and its process where that is known. A connection is printed when
it has ended. About the last 2 MiB are kept, until the sandbox is deleted.`,
		Example: `  sandboxd flows -f work
  sandboxd flows --refused work
  sandboxd flows --exec geqh5ngzciwm work
  sandboxd flows --json work > flows.jsonl`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runFlows(cmd.Context(), args[0], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *flowsOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVarP(&o.follow, "follow", "f", false, "go on until the sandbox ends")
	f.IntVarP(&o.tail, "tail", "n", -1, "print only so many `flows` from the end (default all)")
	f.BoolVar(&o.refused, "refused", false, "print only refusals")
	f.StringVar(&o.exec, "exec", "", "print only flows that are known to be of this `exec`")
	f.BoolVar(&o.json, "json", false, "print the flows as JSON, one a line")
}

func runFlows(ctx context.Context, id string, opts flowsOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	lines := json.NewEncoder(d.Stdout)
	return c.Flows(ctx, id, opts.follow, opts.tail, func(f api.Flow) error {
		switch {
		case opts.refused && f.Allow, opts.exec != "" && (f.Process == nil || f.Process.Exec != opts.exec):
			return nil
		case opts.json:
			return lines.Encode(f) //nolint:gosec // G117: it has a secret's name
		}
		if f.Lost > 0 {
			fmt.Fprintf(d.Stderr, "sandboxd: %d flows before this are not kept\n", f.Lost)
		}
		_, err := fmt.Fprintln(d.Stdout, flowLine(&f))
		return err
	})
}

// flowLine is one line for people. Names and paths come from inside the sandbox.
func flowLine(f *api.Flow) string {
	verdict := "allow"
	if !f.Allow {
		verdict = "refuse"
	}
	words := []string{f.Time.Local().Format(time.TimeOnly), verdict}
	where := f.Name
	if f.Port != 0 {
		host := f.Name
		if host == "" {
			host = f.Address
		}
		where = net.JoinHostPort(host, strconv.Itoa(int(f.Port)))
	}
	switch f.Kind {
	case api.FlowRequest:
		words = append(words, f.Method, where+f.Path)
		if f.Status != 0 {
			words = append(words, strconv.Itoa(f.Status))
		}
	case api.FlowQuery:
		words = append(words, "dns", where, f.Method)
	case api.FlowRestart:
		words = append(words, "gateway restarted")
	case api.FlowPeer:
		words = append(words, "from", f.Name, "("+f.Address+")", "to port", strconv.Itoa(int(f.Port)))
	case api.FlowConnection:
		words = append(words, f.Protocol, where)
		if f.Name != "" && f.Address != "" {
			words = append(words, "("+f.Address+")")
		}
	}
	if f.Out > 0 || f.In > 0 {
		words = append(words, fmt.Sprintf("out %s in %s", units.BytesSize(float64(f.Out)), units.BytesSize(float64(f.In))))
	}
	if f.Rule != "" {
		words = append(words, "rule "+strconv.Quote(f.Rule))
	}
	if f.Reason != "" {
		words = append(words, "("+f.Reason+")")
	}
	if p := f.Process; p != nil {
		words = append(words, fmt.Sprintf("by %s[%d]", p.Name, p.PID))
		if p.Exec != "" {
			words = append(words, "exec "+p.Exec)
		}
		if p.Sandbox != "" {
			words = append(words, "sandbox "+p.Sandbox)
		}
	}
	return cmdline.Printable(strings.Join(words, " "))
}
