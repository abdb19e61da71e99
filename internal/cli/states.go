package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// This file has the commands that change the state of sandboxes.

type stopOptions struct {
	grace  float64
	signal string
	main   bool
	json   bool
}

func newStop(d deps) *cobra.Command {
	var opts stopOptions
	cmd := &cobra.Command{
		Use:   "stop [flags] SANDBOX...",
		Short: "End what runs in sandboxes and keep their files",
		Long: `End every process of sandboxes and print their ids. The files are kept:
"sandboxd start" runs such a sandbox again, "sandboxd rm" deletes it.

Processes get SIGTERM; those that ignore it, as interactive shells do, SIGHUP too.
What has not ended after the grace is killed. With --main only a sandbox's main
process is asked, as docker stop does; the rest is killed when it has ended.`,
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !(opts.grace >= 0) { // rejects NaN too
				return cmdline.Usagef("--grace %v is not a number of seconds", opts.grace)
			}
			return runTransition(cmd.Context(), args, opts.json, d, func(ctx context.Context, c *client.Client, id string) (*api.Sandbox, error) {
				return c.StopSandbox(ctx, id, api.StopSandbox{Grace: &opts.grace, Signal: opts.signal, Main: opts.main})
			})
		},
	}
	cmd.Flags().Float64VarP(&opts.grace, "grace", "t", api.DefaultGrace, "kill what has not ended after so many `seconds`")
	cmd.Flags().StringVarP(&opts.signal, "signal", "s", "", "`signal` to send first (default: the sandbox's --stop-signal)")
	cmd.Flags().BoolVar(&opts.main, "main", false, "ask the main process alone")
	cmd.Flags().BoolVar(&opts.json, "json", false, "print the sandboxes as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

type startOptions struct {
	lifetime lifetime
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
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runTransition(cmd.Context(), args, opts.json, d, func(ctx context.Context, c *client.Client, id string) (*api.Sandbox, error) {
				return c.StartSandbox(ctx, id, api.StartSandbox{Timeout: float64(opts.lifetime), Idle: opts.idle})
			})
		},
	}
	cmd.Flags().Var(&opts.lifetime, "lifetime", "stop the sandbox after this time, whatever it does (default: as it was created with)")
	cmd.Flags().BoolVar(&opts.idle, "idle", false, "do not start the main process: to look at the files, for example")
	cmd.Flags().BoolVar(&opts.json, "json", false, "print the sandboxes as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
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
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runTransition(cmd.Context(), args, asJSON, d, func(ctx context.Context, c *client.Client, id string) (*api.Sandbox, error) {
				return c.PauseSandbox(ctx, id)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandboxes as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func newResume(d deps) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "resume [flags] SANDBOX...",
		Aliases: []string{"unpause"},
		Short:   "Let paused sandboxes go on",
		Long:    "Let paused sandboxes go on, and print their ids. Their idle time begins anew.",
		Args:    cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runTransition(cmd.Context(), args, asJSON, d, func(ctx context.Context, c *client.Client, id string) (*api.Sandbox, error) {
				return c.ResumeSandbox(ctx, id)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandboxes as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// runTransition applies transition to one sandbox after another, and prints their ids.
func runTransition(ctx context.Context, ids []string, asJSON bool, d deps, transition func(context.Context, *client.Client, string) (*api.Sandbox, error)) error {
	return eachSandbox(ctx, ids, asJSON, d, func(c *client.Client, ctx context.Context, id string) (*api.Sandbox, error) {
		return transition(ctx, c, id)
	},
		func(sb *api.Sandbox) string { return sb.ID })
}

// eachSandbox applies do to one sandbox after another, and prints a line for each. It continues
// after an error.
func eachSandbox(ctx context.Context, ids []string, asJSON bool, d deps, do func(*client.Client, context.Context, string) (*api.Sandbox, error),
	line func(*api.Sandbox) string,
) error {
	c := d.Client()
	defer c.Close()
	done := api.SandboxList{Sandboxes: []api.Sandbox{}}
	failed := false
	for _, id := range ids {
		sb, err := do(c, ctx, id)
		switch {
		case err == nil:
			done.Sandboxes = append(done.Sandboxes, *sb)
			if !asJSON {
				if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(line(sb))); err != nil {
					return err
				}
			}
			continue
		case ctx.Err() != nil || len(ids) == 1:
			return err
		}
		failed = true
		cmdline.Explain(d.Stderr, err)
	}
	if asJSON {
		if err := cmdline.PrintJSON(d.Stdout, done); err != nil {
			return err
		}
	}
	if failed {
		return &cmdline.ExitError{Code: cmdline.CodeError}
	}
	return nil
}
