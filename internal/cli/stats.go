package cli

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type statsOptions struct {
	json bool
}

func newStats(d deps) *cobra.Command {
	var opts statsOptions
	cmd := &cobra.Command{
		Use:   "stats SANDBOX",
		Short: "Show what a running sandbox uses",
		Long: `Show what the kernel counts of a running sandbox, its init included: memory,
processor time, processes, input and output, and how long it waited for them.
What the kernel does not tell on this host is not shown.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runStats(cmd.Context(), args[0], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *statsOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.json, "json", false, "print all of it as JSON")
}

func runStats(ctx context.Context, id string, opts statsOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	st, err := c.Stats(ctx, id)
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, st)
	}
	rows := [][]string{{"WHAT", "NOW"}}
	add := func(what, value string) {
		if value != "" {
			rows = append(rows, []string{what, value})
		}
	}
	add("running for", span(&st.WallMS))
	if m := st.Memory; m != nil {
		add("memory", inBytes(m.Current))
		add("memory, at most", inBytes(m.Peak))
		add("swap", inBytes(m.Swap))
		add("killed for want of memory", count(m.OOMKills))
	}
	if c := st.CPU; c != nil {
		add("processor time", span(c.UsageMS))
		add("of it for programs", span(c.UserMS))
		add("of it in the kernel", span(c.SystemMS))
		add("held back for", span(c.ThrottledMS))
	}
	if p := st.Pids; p != nil {
		add("processes and threads", count(p.Current))
		add("refused to start", count(p.Refused))
	}
	for _, io := range st.IO {
		add("disk "+io.Device+" read", fmt.Sprintf("%s in %d", units.BytesSize(float64(io.ReadBytes)), io.ReadOps))
		add("disk "+io.Device+" written", fmt.Sprintf("%s in %d", units.BytesSize(float64(io.WriteBytes)), io.WriteOps))
	}
	if n := st.Network; n != nil {
		add("network sent", fmt.Sprintf("%s in %d connections", units.BytesSize(float64(n.BytesOut)), n.Connections))
		add("network received", units.BytesSize(float64(n.BytesIn)))
		add("names resolved", strconv.FormatInt(n.Queries, 10))
		add("refused by the network", strconv.FormatInt(n.Refused, 10))
	}
	for _, resource := range []string{"cpu", "memory", "io"} {
		if p := st.Pressure[resource]; p.Some != nil {
			add("waited for "+resource, pressure(p.Some))
		}
	}
	return cmdline.Table(d.Stdout, rows)
}

func pressure(l *api.PressureLine) string {
	return fmt.Sprintf("%.1f %% of 10 s, %.1f %% of 1 min, %.1f %% of 5 min", l.Avg10, l.Avg60, l.Avg300)
}

func inBytes(n *int64) string {
	if n == nil {
		return ""
	}
	return units.BytesSize(float64(*n))
}

func count(n *int64) string {
	if n == nil {
		return ""
	}
	return strconv.FormatInt(*n, 10)
}

func span(ms *float64) string {
	if ms == nil {
		return ""
	}
	return time.Duration(*ms * float64(time.Millisecond)).Round(time.Millisecond).String()
}
