package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type execOptions struct {
	processFlags
	terminalFlags
	detachFlags

	detach    bool
	createCwd bool
	rlimits   []string

	id   string
	argv []string
}

func newExec(d deps) *cobra.Command {
	var opts execOptions
	cmd := &cobra.Command{
		Use:   "exec [flags] SANDBOX [--] PROGRAM [ARG]...",
		Short: "Execute a program in a running sandbox",
		Long: `Execute a program in a running sandbox, named by its id or name. Output and exit
code are the program's. SIGINT, SIGTERM, SIGHUP and SIGQUIT go to the program; a
second SIGINT within a second kills it and all that it started, as does the end of
this command. With --json every signal does. The sandbox stays.

With --detach the program's id is printed as soon as it has started, and it goes
on by itself, whatever becomes of this command or the daemon: see sandboxd
attach, execs and kill. The latest 1 MiB of its output is kept. While it runs
the sandbox is not idle.

With -it at a terminal Ctrl-P Ctrl-Q leaves the program, which then goes on as with
--detach: sandboxd attach -i comes back to it. Keys that only begin the sequence
reach the program with the next key.`,
		Example: `  sandboxd exec work -- ls -l /
  echo 'print(6*7)' | sandboxd exec -i work -- python3 -
  sandboxd exec -it work bash
  sandboxd exec -d work -- sh -c 'make all'`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := opts.parse(args); err != nil {
				return err
			}
			env, err := opts.resolve(os.LookupEnv)
			if err != nil {
				return err
			}
			limits, err := rlimitsOf(opts.rlimits)
			if err != nil {
				return err
			}
			if opts.detachKeys, err = opts.sequence(os.Getenv); err != nil {
				return err
			}
			opts.detachAs = api.DetachExec
			return runExec(cmd.Context(), opts, api.ExecRequest{
				Argv: opts.argv, Env: env, Cwd: opts.cwd, User: opts.user, CwdCreate: opts.createCwd, Rlimits: limits,
			}, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitProgram)
	return cmd
}

func (o *execOptions) addFlags(f *pflag.FlagSet) {
	f.SetInterspersed(false) // flags after SANDBOX are the program's
	o.processFlags.addFlags(f)
	o.terminalFlags.addFlags(f)
	o.detachFlags.addFlags(f)
	f.BoolVarP(&o.detach, "detach", "d", false, "print the program's id and leave it alone; with -i its stdin stays open")
	f.BoolVar(&o.createCwd, "create-cwd", false, "make what is missing of the working directory")
	f.StringArrayVar(&o.rlimits, "rlimit", nil, "lower a `limit` of each process: as, core, cpu, data, fsize, memlock, nofile, nproc or stack, such as nofile=64")
}

func rlimitsOf(list []string) (map[string]uint64, error) {
	var limits map[string]uint64
	for _, l := range list {
		name, value, ok := strings.Cut(l, "=")
		n, err := strconv.ParseUint(value, 10, 64)
		if !ok || name == "" || err != nil {
			return nil, cmdline.Usagef("--rlimit %q is not name=number", l)
		}
		if limits == nil {
			limits = map[string]uint64{}
		}
		limits[name] = n
	}
	return limits, nil
}

func (o *execOptions) parse(args []string) error {
	if !o.detach { // with --detach, --json does not wait for the program
		if err := o.check(); err != nil {
			return err
		}
	}
	if len(args) == 0 || args[0] == "" {
		return cmdline.Usagef("no sandbox is named; sandboxd ps lists them")
	}
	o.id, args = args[0], args[1:]
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 || args[0] == "" {
		return cmdline.Usagef("no program is named; as in: sandboxd exec %s -- PROGRAM", o.id)
	}
	o.argv = args
	return nil
}

func runExec(ctx context.Context, opts execOptions, req api.ExecRequest, d deps) error {
	c := d.Client()
	defer c.Close()
	if opts.detach {
		req.Timeout, req.TTY, req.StdinOpen = float64(opts.timeout), opts.tty, opts.interactive
		if opts.tty {
			req.Env = withTerm(req.Env)
		}
		x, err := c.Detach(ctx, opts.id, req)
		if err != nil {
			return err
		}
		if opts.json {
			return cmdline.PrintJSON(d.Stdout, x)
		}
		_, err = fmt.Fprintln(d.Stdout, cmdline.Printable(x.ID))
		return err
	}
	err := execute(ctx, c, opts.id, req, opts.terminalFlags, d)
	if left, ok := errors.AsType[*client.DetachedError](err); ok {
		tellDetached(d.Stderr, opts.id, left.Exec, true)
		return nil
	}
	return err
}
