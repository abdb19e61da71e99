package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type attachOptions struct {
	detachFlags

	interactive bool
	json        bool
}

func newAttach(d deps) *cobra.Command {
	var opts attachOptions
	cmd := &cobra.Command{
		Use:   "attach [flags] SANDBOX [EXEC]",
		Short: "Follow a detached program",
		Long: `Print what a program started with exec --detach, or without EXEC the sandbox's main
process, has written and goes on to write,
until it ends, and exit with its code. Of a program that has ended, print what
is kept. What is kept no more is counted on stderr.

Ctrl-C leaves the program alone and ends this command only; sandboxd kill ends
the program. With -i and a terminal on both sides every key goes to the program,
Ctrl-C included, but for the detach keys: Ctrl-P Ctrl-Q ends this command only, with
exit code 0. What may begin them reaches the program with the next key.`,
		Example: `  id=$(sandboxd exec -d work -- sh -c 'make all')
  sandboxd attach work $id
  sandboxd attach -i work $(sandboxd exec -dit work bash)`,
		Args: cmdline.UsageArgs(cobra.RangeArgs(1, 2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			args = append(args, api.MainExec)
			return runAttach(cmd.Context(), args[0], args[1], opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitProgram)
	return cmd
}

func (o *attachOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVarP(&o.interactive, "interactive", "i", false, "pass stdin on to the program; its end ends the program's")
	o.detachFlags.addFlags(f)
	f.BoolVar(&o.json, "json", false, "print the events as JSON, one a line")
}

func runAttach(ctx context.Context, id, exec string, opts attachOptions, d deps) error {
	if opts.json && opts.interactive {
		return cmdline.Usagef("--json cannot be combined with --interactive")
	}
	keys, err := opts.sequence(os.Getenv)
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	x, err := c.GetExec(ctx, id, exec)
	if err != nil {
		return explainMain(ctx, c, id, exec, err, "sandboxd exec -it NAME sh starts one")
	}
	t := terminalFlags{tty: x.TTY, interactive: opts.interactive, detachKeys: keys}
	var end *client.End
	if opts.json {
		lines := json.NewEncoder(d.Stdout)
		end, err = c.AttachStream(ctx, id, exec, 0, func(e api.ExecEvent) error { return lines.Encode(e) })
	} else {
		end, err = follow(ctx, c, x, t, d)
	}
	_, interrupted := errors.AsType[cmdline.Signalled](context.Cause(ctx))
	detached := errors.Is(err, client.ErrDetached)
	if detached || interrupted && err != nil {
		tellDetached(d.Stderr, id, exec, opts.interactive)
	}
	if detached {
		return nil
	}
	if err != nil {
		return err
	}
	return ending(end.Exit, t, d.Stderr)
}

// follow connects the terminal to a running program until it ends.
func follow(ctx context.Context, c *client.Client, x *api.Exec, t terminalFlags, d deps) (_ *client.End, err error) {
	if size, ok := windowSize(d); ok && x.TTY && x.State == api.ExecRunning {
		if err := c.ResizeExec(ctx, x.Sandbox, x.ID, size); err != nil {
			return nil, err
		}
	}
	var s client.Streams
	var stop func()
	s.Stdout, s.Stderr, stop, err = interruptibleOutput(ctx, d)
	if err != nil {
		return nil, err
	}
	defer stop()
	undo, err := connect(&s, t, d)
	if err != nil {
		return nil, err
	}
	defer undo()
	return c.Attach(ctx, x.Sandbox, x.ID, 0, s, func(n int64) {
		fmt.Fprintf(d.Stderr, "sandboxd: %d bytes of output before this are kept no more\n", n)
	})
}
