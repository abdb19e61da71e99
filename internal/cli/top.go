package cli

import (
	"context"
	"strconv"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type topOptions struct{ json bool }

func newTop(d deps) *cobra.Command {
	var opts topOptions
	cmd := &cobra.Command{
		Use:   "top [flags] SANDBOX",
		Short: "List the processes of a sandbox",
		Long: `List the processes of a sandbox by their pids inside, with what they have used and
which running program of sandboxd execs they come from. The sandbox's init says
so, which a hostile program may have taken over.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runTop(cmd.Context(), args[0], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *topOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.json, "json", false, "print the list as JSON")
}

func runTop(ctx context.Context, id string, opts topOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	processes, err := c.Processes(ctx, id)
	if err != nil {
		return err
	}
	if opts.json {
		if processes == nil {
			processes = []api.Process{}
		}
		return cmdline.PrintJSON(d.Stdout, api.ProcessList{Processes: processes})
	}
	rows := [][]string{{"PID", "PPID", "UID", "STATE", "STARTED", "CPU", "MEMORY", "EXEC", "PROGRAM"}}
	for _, p := range processes {
		exec, line := p.Exec, commandLine(p.Argv)
		if exec == "" {
			exec = "-"
		}
		if len(p.Argv) == 0 {
			line = "[" + p.Name + "]"
		}
		rows = append(rows, []string{
			strconv.Itoa(p.PID), strconv.Itoa(p.PPID), strconv.FormatUint(uint64(p.UID), 10), p.State, since(p.StartedAt),
			time.Duration(p.CPUMS * float64(time.Millisecond)).Round(10 * time.Millisecond).String(), units.BytesSize(float64(p.RSS)), exec, line,
		})
	}
	return cmdline.Table(d.Stdout, rows)
}
