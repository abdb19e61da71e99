package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// deleteTimeout limits the clean-up after a program, which continues after a signal.
const deleteTimeout = 30 * time.Second

type runOptions struct {
	sandboxFlags
	terminalFlags
	detachFlags

	keep   bool
	remove bool
	detach bool
	learn  string // file for the policy, or learnedOnStderr; empty: none is learned

	image string
	argv  []string
}

func newRun(d deps) *cobra.Command {
	var opts runOptions
	cmd := &cobra.Command{
		Use:   "run [flags] [IMAGE] -- PROGRAM [ARG]...\n  sandboxd run [flags] IMAGE [ARG]...",
		Short: "Run a program in a new sandbox and delete it afterwards",
		Long: `Run a program in a new sandbox and delete the sandbox afterwards, whatever
happens: also when this command is killed. With --workspace the sandbox stays,
for its changes. Output and exit code are the program's.
SIGINT, SIGTERM, SIGHUP and SIGQUIT go to the program; a second SIGINT within a
second kills it. With --json they kill it at once.

With -it at a terminal Ctrl-P Ctrl-Q leaves the program. The sandbox then stays as
one of --detach, with the program as its main process: sandboxd attach -i comes back
to it. Keys that only begin the sequence reach the program with the next key. With
--learn there are no such keys.

What stands behind the image replaces its CMD, and goes to its ENTRYPOINT if it
has one; without anything the image's own command runs. --entrypoint PROGRAM runs
another program.

The image is "host" unless one is named: this host's own /usr, read-only, and
nothing else of it. An image that is not here yet is pulled. Where no daemon
runs, one is started in the background and ends when it is idle.`,
		Example: `  sandboxd run -- python3 -c 'print(1)'
  sandboxd run --memory 256m --timeout 10s debian:12 -- sh -c 'echo hi; exit 3'
  sandboxd run -it debian:12
  sandboxd run --entrypoint pg_dump postgres:17 --version
  sandboxd run --learn=policy.yaml python:3 pip install requests
  id=$(sandboxd run -d --restart on-failure:3 redis:8)
  id=$(sandboxd run -d debian:12 -- make -C /src); sandboxd logs -f $id; sandboxd wait $id`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := opts.parse(args, cmd.ArgsLenAtDash()); err != nil {
				return err
			}
			if err := opts.learnFrom(cmd.Flags().Changed); err != nil {
				return err
			}
			req, err := opts.request(cmd.Context(), opts.image, cmd.Flags().Changed)
			if err != nil {
				return err
			}
			if opts.detach {
				if err := opts.main(&req, opts.argv, opts.tty, opts.interactive, true); err != nil {
					return err
				}
				req.AutoRemove = opts.remove
			} else if err := opts.detachable(&req, os.Getenv, d); err != nil {
				return err
			} else if req.HealthCheck == nil && opts.fromImage(opts.image) {
				req.HealthCheck = &api.HealthCheck{} // the image's, although the program is no main process
			}
			return runRun(cmd.Context(), opts, req, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitProgram)
	return cmd
}

func (o *runOptions) addFlags(f *pflag.FlagSet) {
	f.SetInterspersed(false) // flags after IMAGE are the program's
	o.sandboxFlags.addFlags(f)
	o.terminalFlags.addFlags(f)
	o.detachFlags.addFlags(f)
	f.BoolVar(&o.keep, "keep", false, "do not delete the sandbox afterwards")
	f.BoolVar(&o.remove, "rm", false, "delete the sandbox afterwards, as run does in any case but with --workspace; with --detach, or after the detach keys, the daemon deletes it when it has ended")
	f.BoolVarP(&o.detach, "detach", "d", false, "only create the sandbox, with PROGRAM or the image's command as its main process, and print its id")
	f.StringVar(&o.learn, "learn", "", "allow what is public, or what --network says, and print the smallest policy that sufficed, or write it to `FILE`")
	f.Lookup("learn").NoOptDefVal = learnedOnStderr
}

// detachable prepares the create request for a program that the detach keys may leave alone.
func (o *runOptions) detachable(req *api.CreateSandbox, getenv func(string) string, d deps) error {
	keys, err := o.sequence(getenv)
	if err != nil || o.learn != "" { // the lesson is complete when the program has ended
		return err
	}
	o.detachKeys, o.detachAs = keys, api.MainExec
	if len(keys) > 0 && o.tty && o.interactive && cmdline.IsTerminal(d.Stdin) {
		req.AutoRemove = o.remove
		req.Env = withTerm(req.Env) // for a later start, too
	}
	return nil
}

// parse separates image and program. dash is the number of arguments before "--", or -1; after
// IMAGE cobra leaves the "--" in place.
func (o *runOptions) parse(args []string, dash int) error {
	if err := o.check(); err != nil && !o.detach {
		return err
	}
	if dash != 0 && len(args) > 0 {
		o.image, args = args[0], args[1:]
		if o.image == "" {
			return cmdline.Usagef("the image has an empty name")
		}
		if len(args) > 0 && args[0] == "--" {
			args = args[1:]
		}
	}
	o.argv = args
	switch {
	case o.remove && o.keep:
		return cmdline.Usagef("--rm deletes the sandbox and --keep keeps it; give one of them")
	case o.remove && o.restart != "" && o.restart != "no":
		return cmdline.Usagef("--rm deletes the sandbox when its program has ended, and --restart starts it again; give one of them")
	case !o.detach && o.restart != "" && o.restart != "no":
		return cmdline.Usagef("--restart is about the main process of a sandbox that stays; give --detach")
	case o.detach && o.timeout != 0:
		return cmdline.Usagef("--detach: a main process has no --timeout of its own; the sandbox has a --lifetime")
	case !o.detach && o.imageCommand:
		return cmdline.Usagef("--image-command is about the main process of a sandbox that stays; give --detach, or name a program")
	case !o.detach && len(args) == 0 && (o.image == "" || o.image == api.HostImage):
		return cmdline.Usagef("no program is named; as in: sandboxd run %s -- PROGRAM", orHost(o.image))
	case !o.detach && len(args) > 0 && args[0] == "" && o.image == "":
		return cmdline.Usagef("the program has an empty name")
	}
	return nil
}

func orHost(image string) string {
	if image == "" {
		return api.HostImage
	}
	return image
}

func runRun(ctx context.Context, opts runOptions, req api.CreateSandbox, d deps) (err error) {
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if opts.timeout != 0 && req.Timeout == 0 {
		req.Timeout = lifetimeFor(float64(opts.timeout))
	}
	changes := req.Workspace != nil && !opts.detach && !opts.remove && !opts.keep // to be looked at afterwards
	var sb *api.Sandbox
	left := false // the program goes on
	if opts.detach || opts.keep || changes {
		sb, err = cmdline.CreateSandbox(ctx, c, req, d.Stderr)
	} else {
		var tie io.Closer
		sb, tie, err = cmdline.CreateTied(ctx, c, req, d.Stderr)
		if err == nil {
			defer tie.Close() // after the deletion
		}
	}
	if err != nil {
		return err
	}
	if opts.detach {
		return printCreated(sb, opts.json, d)
	}
	switch {
	case changes:
		defer hintChanges(sb, d)
	case opts.keep:
		fmt.Fprintf(d.Stderr, "sandboxd: the sandbox stays: %s (%s)\n", sb.ID, cmdline.Printable(sb.Name))
	default:
		defer func() {
			if left {
				return
			}
			if derr := remove(ctx, c, sb.ID); derr != nil {
				// The program's own exit code stands, but the user must know about the sandbox.
				cmdline.Explain(d.Stderr, fmt.Errorf("sandbox %s was left behind: %w", sb.ID, derr))
			}
		}()
	}
	// A signal arrived while the sandbox was created.
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if opts.learn != "" {
		lesson := listen(ctx, c, sb.ID)
		defer func() {
			switch lerr := lesson.end(ctx, c, sb.ID, opts.learn, d); {
			case err == nil:
				err = lerr
			case lerr != nil: // the program's own exit code stands
				cmdline.Explain(d.Stderr, lerr)
			}
		}()
	}
	argv, err := programOf(sb, opts.argv)
	if err != nil {
		return err
	}
	err = execute(ctx, c, sb.ID, api.ExecRequest{Argv: argv}, opts.terminalFlags, d)
	if left = errors.Is(err, client.ErrDetached); left {
		tellDetached(d.Stderr, sb.Name, api.MainExec, true)
		return nil
	}
	return err
}

// programOf returns the program of a sandbox with arguments in the place of its image's CMD.
func programOf(sb *api.Sandbox, args []string) ([]string, error) {
	if len(args) == 0 {
		args = sb.Cmd
	}
	argv := slices.Concat(sb.Entrypoint, args)
	switch {
	case len(argv) == 0:
		return nil, fmt.Errorf("image %s says no command: it has neither ENTRYPOINT nor CMD; name a program, as in: sandboxd run %s -- PROGRAM", sb.Image, sb.Image)
	case argv[0] == "":
		return nil, cmdline.Usagef("the program has an empty name")
	}
	return argv, nil
}

// lifetimeFor returns the lifetime of a sandbox whose program has a timeout. Zero, the daemon's
// default, suffices for short ones. Else it is a little longer than the timeout, so that the
// program's end is reported.
func lifetimeFor(timeout float64) float64 {
	const ample, margin = 30 * 60, 60
	if timeout <= ample {
		return 0
	}
	return timeout + margin
}

// remove deletes a sandbox even if ctx has ended. A missing sandbox is no error.
func remove(ctx context.Context, c *client.Client, id string) error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), deleteTimeout, fmt.Errorf("no answer within %v", deleteTimeout))
	defer cancel()
	err := c.DeleteSandbox(ctx, id)
	if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		return nil
	}
	return err
}

func printCreated(sb *api.Sandbox, asJSON bool, d deps) error {
	if asJSON {
		return cmdline.PrintJSON(d.Stdout, sb)
	}
	_, err := fmt.Fprintln(d.Stdout, cmdline.Printable(sb.ID))
	return err
}
