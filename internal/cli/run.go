package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// deleteTimeout bounds the cleaning up after a program, which goes on when the user has asked us to stop.
const deleteTimeout = 30 * time.Second

type runOptions struct {
	sandboxFlags
	terminalFlags

	keep   bool
	detach bool

	image string
	argv  []string
}

func newRun(d deps) *cobra.Command {
	var opts runOptions
	cmd := &cobra.Command{
		Use:   "run [flags] [IMAGE] -- PROGRAM [ARG]...\n  sandboxd run [flags] IMAGE PROGRAM [ARG]...",
		Short: "Run a program in a new sandbox and delete it afterwards",
		Long: `Run a program in a new sandbox and delete the sandbox afterwards, whatever
happens. Output and exit code are the program's.

The image is "host" unless one is named: this host's own /usr, read-only, and
nothing else of it. An image that is not here yet is pulled. Where no daemon
runs, one is started in the background and ends when it is idle.`,
		Example: `  sandboxd run -- python3 -c 'print(1)'
  sandboxd run --memory 256m --timeout 10s debian:12 -- sh -c 'echo hi; exit 3'
  sandboxd run -it debian:12 bash
  id=$(sandboxd run -d debian:12)
  id=$(sandboxd run -d debian:12 -- make -C /src); sandboxd logs -f $id; sandboxd wait $id`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := opts.parse(args, cmd.ArgsLenAtDash()); err != nil {
				return err
			}
			req, err := opts.request(opts.image, cmd.Flags().Changed)
			if err != nil {
				return err
			}
			if opts.detach {
				if err := opts.main(&req, opts.argv, opts.tty, opts.interactive); err != nil {
					return err
				}
			}
			return runRun(cmd.Context(), opts, req, d)
		},
	}
	opts.addFlags(cmd.Flags())
	exitStatus(cmd, exitProgram)
	return cmd
}

func (o *runOptions) addFlags(f *pflag.FlagSet) {
	f.SetInterspersed(false) // flags behind IMAGE are the program's
	o.sandboxFlags.addFlags(f)
	o.terminalFlags.addFlags(f)
	f.BoolVar(&o.keep, "keep", false, "do not delete the sandbox afterwards")
	f.BoolVarP(&o.detach, "detach", "d", false, "only create the sandbox, with PROGRAM as its main process if one is named, and print its id, as create does")
}

// parse tells image and program apart. dash is how many arguments stood before "--", or -1; behind IMAGE cobra leaves
// the "--" in place.
func (o *runOptions) parse(args []string, dash int) error {
	if err := o.check(); err != nil && !o.detach {
		return err
	}
	if dash != 0 && len(args) > 0 {
		o.image, args = args[0], args[1:]
		if o.image == "" {
			return usagef("the image has an empty name")
		}
		if len(args) > 0 && args[0] == "--" {
			args = args[1:]
		}
	}
	o.argv = args
	switch {
	case o.detach && o.timeout != 0:
		return usagef("--detach: a main process has no --timeout of its own; the sandbox has a --lifetime")
	case !o.detach && o.imageCommand:
		return usagef("--image-command is about the main process of a sandbox that stays; give --detach, or name a program")
	case !o.detach && len(args) == 0:
		return usagef("no program is named; as in: sandboxd run %s -- PROGRAM", orHost(o.image))
	case !o.detach && args[0] == "":
		return usagef("the program has an empty name")
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
	c, err := d.daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if opts.timeout != 0 && req.Timeout == 0 {
		req.Timeout = lifetimeFor(float64(opts.timeout))
	}
	sb, err := create(ctx, c, req, d)
	if err != nil {
		return err
	}
	if opts.detach {
		return printCreated(sb, opts.json, d)
	}
	if opts.keep {
		fmt.Fprintf(d.stderr, "sandboxd: the sandbox stays: %s (%s)\n", sb.ID, printable(sb.Name))
	} else {
		defer func() {
			if derr := remove(ctx, c, sb.ID); derr != nil {
				// The program's own outcome stands; the user must know all the same.
				explain(d.stderr, fmt.Errorf("sandbox %s was left behind: %w", sb.ID, derr))
			}
		}()
	}
	// A signal that came while the sandbox was made.
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return execute(ctx, c, sb.ID, api.ExecRequest{Argv: opts.argv}, opts.terminalFlags, d)
}

// lifetimeFor is the lifetime of a sandbox whose one program has a timeout: the daemon's default where that is enough
// in any case, else a little longer than the program may take, so that it is the program's end that is reported.
func lifetimeFor(timeout float64) float64 {
	const ample, margin = 30 * 60, 60
	if timeout <= ample {
		return 0
	}
	return timeout + margin
}

// create makes a sandbox, and pulls its image first where the daemon does not have it.
//
// A signal does not interrupt the request: it takes milliseconds, and half-way out nobody would know whether there is a
// sandbox to delete.
func create(ctx context.Context, c *client.Client, req api.CreateSandbox, d deps) (*api.Sandbox, error) {
	sb, err := c.CreateSandbox(context.WithoutCancel(ctx), req)
	if !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) || req.Image == "" || req.Image == api.HostImage {
		return sb, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	p := newProgress(d.stderr)
	_, perr := c.Pull(ctx, api.PullImage{Reference: req.Image}, p.event)
	p.end()
	if perr != nil {
		return nil, perr
	}
	return c.CreateSandbox(context.WithoutCancel(ctx), req)
}

// remove deletes a sandbox even when ctx has ended. One that is not there any more is fine.
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
		return printJSON(d.stdout, sb)
	}
	_, err := fmt.Fprintln(d.stdout, printable(sb.ID))
	return err
}
