package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type statsOptions struct {
	all      bool
	noStream bool
	noTrunc  bool
	format   string
	json     bool
}

// statsInterval is the time between two samples. CPU % is of the time between them.
const statsInterval = time.Second

func newStats(d deps) *cobra.Command {
	var opts statsOptions
	cmd := &cobra.Command{
		Use:   "stats [flags] [SANDBOX]...",
		Short: "Show what running sandboxes use",
		Long: `Show what the kernel counts of running and paused sandboxes, their inits included, a
line each. On a terminal the table is renewed each second until it is interrupted;
elsewhere it is printed once. CPU % is of one core, over the last second.

Of a single SANDBOX, without --no-stream or --format, more is shown, once: how long it
waited for memory, processor and disk, too. What the kernel does not tell on this host
is not shown; a limit is only shown where the kernel enforces it.

Besides the fields of --json, templates of --format have .CPUPerc, .MemUsage, .MemPerc,
.NetIO, .BlockIO and .PIDs.`,
		Example: `  sandboxd stats
  sandboxd stats --no-stream --format 'table {{.Name}}\t{{.CPUPerc}}\t{{.MemUsage}}'`,
		Args: cmdline.UsageArgs(cobra.ArbitraryArgs),
		RunE: func(cmd *cobra.Command, args []string) error {
			tick := time.NewTicker(statsInterval)
			defer tick.Stop()
			return runStats(cmd.Context(), args, opts, tick.C, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *statsOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVarP(&o.all, "all", "a", false, "accepted; an ended sandbox uses nothing, and is left out")
	f.BoolVar(&o.noStream, "no-stream", false, "print the table once")
	f.BoolVar(&o.noTrunc, "no-trunc", false, "accepted; nothing is cut off")
	f.StringVar(&o.format, "format", "", formatUsage)
	f.BoolVar(&o.json, "json", false, "print all of it as JSON, once")
}

// runStats samples at once, and then at each tick.
func runStats(ctx context.Context, ids []string, opts statsOptions, tick <-chan time.Time, d deps) error {
	format, err := newFormat(opts.format)
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	single := len(ids) == 1 && !opts.noStream && format == nil
	switch {
	case single:
		return showStats(ctx, c, ids[0], opts.json, d)
	case opts.json:
		list, err := c.AllStats(ctx, ids...)
		if err != nil {
			return err
		}
		return cmdline.PrintJSON(d.Stdout, api.StatsList{Sandboxes: append([]api.SandboxStats{}, list...)})
	}
	live := !opts.noStream && cmdline.IsTerminal(d.Stdout)
	var before []api.SandboxStats
	for {
		now, err := c.AllStats(ctx, ids...)
		if err != nil {
			return err
		}
		if live || before != nil {
			if err := printStats(d.Stdout, statsRows(before, now), format, live); err != nil || !live {
				return err
			}
		}
		before = append([]api.SandboxStats{}, now...)
		select {
		case <-tick:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// clearScreen moves the cursor to the top left corner and erases everything below.
const clearScreen = "\x1b[H\x1b[J"

// printStats prints a table in one write, so that a terminal does not flicker.
func printStats(w io.Writer, rows []statsRow, f *format, live bool) error {
	var b bytes.Buffer
	if live {
		b.WriteString(clearScreen)
	}
	var err error
	if f != nil {
		err = printAll(&b, f, rows)
	} else {
		table := [][]string{{"ID", "NAME", "CPU %", "MEM USAGE / LIMIT", "MEM %", "NET I/O", "BLOCK I/O", "PIDS"}}
		for _, r := range rows {
			table = append(table, []string{r.ID, r.Name, r.CPUPerc(), r.MemUsage(), r.MemPerc(), r.NetIO(), r.BlockIO(), r.PIDs()})
		}
		err = cmdline.Table(&b, table)
	}
	if err == nil {
		_, err = w.Write(b.Bytes())
	}
	return err
}

// statsRow is a sandbox's counters as templates see them.
type statsRow struct {
	api.SandboxStats

	before *api.SandboxStats // an earlier sample; nil if there is none
}

// statsRows pairs each sandbox's counters with those of the sample before.
func statsRows(before, now []api.SandboxStats) []statsRow {
	var rows []statsRow
	for _, st := range now {
		row := statsRow{SandboxStats: st}
		if i := slices.IndexFunc(before, func(b api.SandboxStats) bool { return b.ID == st.ID }); i >= 0 {
			row.before = &before[i]
		}
		rows = append(rows, row)
	}
	return rows
}

const unknown = "--"

// Container returns the name: docker's templates use this field.
func (r statsRow) Container() string { return r.Name }

// CPUPerc returns the processor time since the sample before, in percent of one core.
func (r statsRow) CPUPerc() string {
	if r.before == nil || r.CPU == nil || r.CPU.UsageMS == nil || r.before.CPU == nil || r.before.CPU.UsageMS == nil {
		return unknown
	}
	used, passed := *r.CPU.UsageMS-*r.before.CPU.UsageMS, float64(r.At.Sub(r.before.At))/float64(time.Millisecond)
	if used < 0 || passed <= 0 {
		return unknown // it was started again
	}
	return fmt.Sprintf("%.2f%%", 100*used/passed)
}

// MemUsage returns the memory in use and the limit that holds.
func (r statsRow) MemUsage() string {
	if r.Memory == nil || r.Memory.Current == nil {
		return unknown
	}
	limit := unknown
	if r.Memory.Limit != nil {
		limit = inBytes(r.Memory.Limit)
	}
	return inBytes(r.Memory.Current) + " / " + limit
}

// MemPerc returns the memory in use in percent of the limit that holds.
func (r statsRow) MemPerc() string {
	if r.Memory == nil || r.Memory.Current == nil || r.Memory.Limit == nil || *r.Memory.Limit <= 0 {
		return unknown
	}
	return fmt.Sprintf("%.2f%%", 100*float64(*r.Memory.Current)/float64(*r.Memory.Limit))
}

// NetIO returns the bytes received and sent.
func (r statsRow) NetIO() string {
	if r.Network == nil {
		return unknown
	}
	return units.HumanSize(float64(r.Network.BytesIn)) + " / " + units.HumanSize(float64(r.Network.BytesOut))
}

// BlockIO returns the bytes read and written, of all devices.
func (r statsRow) BlockIO() string {
	if r.IO == nil {
		return unknown
	}
	var read, written int64
	for _, io := range r.IO {
		read, written = read+io.ReadBytes, written+io.WriteBytes
	}
	return units.HumanSize(float64(read)) + " / " + units.HumanSize(float64(written))
}

// PIDs returns the number of processes and threads.
func (r statsRow) PIDs() string {
	if r.Pids == nil || r.Pids.Current == nil {
		return unknown
	}
	return count(r.Pids.Current)
}

// showStats prints all counters of one sandbox.
func showStats(ctx context.Context, c *client.Client, id string, asJSON bool, d deps) error {
	st, err := c.Stats(ctx, id)
	if err != nil {
		return err
	}
	if asJSON {
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
		add("memory, limit", inBytes(m.Limit))
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
	if u := st.Disk; u != nil {
		add("disk space", units.BytesSize(float64(u.Bytes)))
		add("files", strconv.FormatInt(u.Inodes, 10))
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
