package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// The commands that bring sandboxes from one state into another.

type stopOptions struct {
	grace float64
	json  bool
}

func newStop(d deps) *cobra.Command {
	var opts stopOptions
	cmd := &cobra.Command{
		Use:   "stop [flags] SANDBOX...",
		Short: "End what runs in sandboxes and keep their files",
		Long: `End every process of sandboxes and print their ids. The files are kept:
"sandboxd start" runs such a sandbox again, "sandboxd rm" deletes it.

Processes get SIGTERM; those that ignore it, as interactive shells do, SIGHUP too.
What has not ended after the grace is killed.`,
		Args: usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !(opts.grace >= 0) { // NaN too
				return usagef("--grace %v is not a number of seconds", opts.grace)
			}
			return runTurn(cmd.Context(), args, opts.json, d, func(ctx context.Context, c *client.Client, id string) (*api.Sandbox, error) {
				return c.StopSandbox(ctx, id, api.StopSandbox{Grace: &opts.grace})
			})
		},
	}
	cmd.Flags().Float64VarP(&opts.grace, "grace", "t", api.DefaultGrace, "kill what has not ended after so many `seconds`")
	cmd.Flags().BoolVar(&opts.json, "json", false, "print the sandboxes as JSON")
	exitStatus(cmd, exitPlain)
	return cmd
}

type startOptions struct {
	lifetime seconds
	idle     bool
	json     bool
}

func newStart(d deps) *cobra.Command {
	var opts startOptions
	cmd := &cobra.Command{
		Use:   "start [flags] SANDBOX...",
		Short: "Run sandboxes that have ended again, with their files",
		Long: `Run sandboxes again that are stopped or lost, and print their ids. Each has its own
files, name, labels and limits, and its lifetime begins anew. Of what ran in it
before, its main process is started, if it has one.`,
		Args: usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runTurn(cmd.Context(), args, opts.json, d, func(ctx context.Context, c *client.Client, id string) (*api.Sandbox, error) {
				return c.StartSandbox(ctx, id, api.StartSandbox{Timeout: float64(opts.lifetime), Idle: opts.idle})
			})
		},
	}
	cmd.Flags().Var(&opts.lifetime, "lifetime", "stop the sandbox after this time, whatever it does (default: as it was created with)")
	cmd.Flags().BoolVar(&opts.idle, "idle", false, "do not start the main process: to look at the files, for example")
	cmd.Flags().BoolVar(&opts.json, "json", false, "print the sandboxes as JSON")
	exitStatus(cmd, exitPlain)
	return cmd
}

func newPause(d deps) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "pause [flags] SANDBOX...",
		Short: "Make everything in sandboxes stand still",
		Long: `Make every process of sandboxes stand still until "sandboxd resume", and print their
ids. They keep their memory. Nothing can be executed or copied meanwhile; their
lifetime goes on, their idle timeout does not.

Without a cgroup v2 of the sandbox's own the processes are stopped by SIGSTOP, which
programs can see, and which one that wants to can get around.`,
		Args: usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runTurn(cmd.Context(), args, asJSON, d, func(ctx context.Context, c *client.Client, id string) (*api.Sandbox, error) {
				return c.PauseSandbox(ctx, id)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandboxes as JSON")
	exitStatus(cmd, exitPlain)
	return cmd
}

func newResume(d deps) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "resume [flags] SANDBOX...",
		Short: "Let paused sandboxes go on",
		Long:  "Let paused sandboxes go on, and print their ids. Their idle time begins anew.",
		Args:  usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runTurn(cmd.Context(), args, asJSON, d, func(ctx context.Context, c *client.Client, id string) (*api.Sandbox, error) {
				return c.ResumeSandbox(ctx, id)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandboxes as JSON")
	exitStatus(cmd, exitPlain)
	return cmd
}

// runTurn does turn to one sandbox after another, and prints their ids.
func runTurn(ctx context.Context, ids []string, asJSON bool, d deps, turn func(context.Context, *client.Client, string) (*api.Sandbox, error)) error {
	return eachSandbox(ctx, ids, asJSON, d, func(c *client.Client, ctx context.Context, id string) (*api.Sandbox, error) { return turn(ctx, c, id) },
		func(sb *api.Sandbox) string { return sb.ID })
}

// eachSandbox does something with one sandbox after another, and prints what line makes of each. One that fails does not keep the
// next from being tried.
func eachSandbox(ctx context.Context, ids []string, asJSON bool, d deps, do func(*client.Client, context.Context, string) (*api.Sandbox, error),
	line func(*api.Sandbox) string,
) error {
	c := d.client()
	defer c.Close()
	done := api.SandboxList{Sandboxes: []api.Sandbox{}}
	failed := false
	for _, id := range ids {
		sb, err := do(c, ctx, id)
		switch {
		case err == nil:
			done.Sandboxes = append(done.Sandboxes, *sb)
			if !asJSON {
				if _, err := fmt.Fprintln(d.stdout, printable(line(sb))); err != nil {
					return err
				}
			}
			continue
		case ctx.Err() != nil || len(ids) == 1:
			return err
		}
		failed = true
		explain(d.stderr, err)
	}
	if asJSON {
		if err := printJSON(d.stdout, done); err != nil {
			return err
		}
	}
	if failed {
		return &exitError{code: codeError}
	}
	return nil
}
