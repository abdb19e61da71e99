package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type killOptions struct {
	signal string
	all    bool
}

func newKill(d deps) *cobra.Command {
	var opts killOptions
	cmd := &cobra.Command{
		Use:   "kill [flags] SANDBOX [EXEC]",
		Short: "End a program in a sandbox, or send it a signal",
		Long: `Kill a program that was started with exec, or without EXEC the sandbox's main
process, with which the sandbox ends, and everything that it has started,
however far that has gone from it. With --signal send that signal to the program alone
instead. What it has written stays to be read with sandboxd attach. A program
that has ended is no error.`,
		Example: `  sandboxd kill work
  sandboxd kill work 3fqk2mzr7yxa
  sandboxd kill --signal HUP work 3fqk2mzr7yxa`,
		Args: cmdline.UsageArgs(cobra.RangeArgs(1, 2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			args = append(args, api.MainExec)
			return runKill(cmd.Context(), args[0], args[1], opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *killOptions) addFlags(f *pflag.FlagSet) {
	f.StringVarP(&o.signal, "signal", "s", "", "`signal` to send, such as TERM (default: kill everything)")
	f.BoolVar(&o.all, "all", false, "send it to everything that the program has started")
}

func runKill(ctx context.Context, id, exec string, opts killOptions, d deps) error {
	if opts.all && opts.signal == "" {
		return cmdline.Usagef("--all says whom a --signal is for; without one everything is killed")
	}
	req := api.ExecSignal{Signal: opts.signal, All: opts.all, Main: !opts.all}
	if opts.signal == "" {
		req = api.ExecSignal{Signal: "SIGKILL", All: true}
	}
	c := d.Client()
	defer c.Close()
	return explainMain(ctx, c, id, exec, c.SignalExec(ctx, id, exec, req), "sandboxd stop NAME ends it as a whole")
}

// explainMain returns the error of a request about an exec. If it failed because the sandbox has no
// main process, the error says so, and with instead what to do.
func explainMain(ctx context.Context, c *client.Client, id, exec string, err error, instead string) error {
	if exec != api.MainExec || !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		return err
	}
	sb, serr := c.GetSandbox(ctx, id)
	if serr != nil || len(sb.Command) > 0 {
		return err
	}
	name := cmdline.Printable(sb.Name)
	return fmt.Errorf("sandbox %s has no main process; sandboxd execs %s lists programs to name, %s", name, name, strings.ReplaceAll(instead, "NAME", name))
}
