package cli

import (
	"context"
	"fmt"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newContext(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "context",
		Short: "Keep interpreters whose variables stay between runs of code",
		Long: `Keep contexts of a running sandbox: interpreters that run one piece of code after
another and keep its variables. "sandboxd code --in SANDBOX --context ID" runs code in
one, and "sandboxd docs contexts" explains them.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newContextCreate(d), newContextLs(d), newContextRm(d),
		newContextDo(d, "interrupt", "Interrupt the run of a context", "Send SIGINT to the run under way. If it does not end within five seconds, the context is\nrestarted. Without a run nothing happens.", (*client.Client).InterruptContext),
		newContextDo(d, "restart", "Give a context a new process", "End the processes of a context and start its interpreter anew, without its variables.", (*client.Client).RestartContext))
	return cmd
}

type contextCreateOptions struct {
	processFlags

	lang    string
	preload []string
	memory  cmdline.Size
	idle    cmdline.Seconds
	json    bool
}

func newContextCreate(d deps) *cobra.Command {
	var opts contextCreateOptions
	cmd := &cobra.Command{
		Use:   "create [flags] SANDBOX",
		Short: "Start a context and print its id",
		Long: `Start a context in a running sandbox, wait until it takes code, and print its id. It
ends with "sandboxd context rm", after --idle-timeout, or with its sandbox.`,
		Example: `  id=$(sandboxd context create work)
  echo 'x = 6' | sandboxd code --in work --context "$id" -
  echo 'x * 7' | sandboxd code --in work --context "$id" -`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runContextCreate(cmd.Context(), args[0], opts, d)
		},
	}
	f := cmd.Flags()
	opts.addFlags(f)
	f.StringVar(&opts.lang, "lang", "", "`language` (default python)")
	f.StringSliceVar(&opts.preload, "preload", nil, "`modules` that Python imports first, such as numpy,pandas; another interpreter with them is then kept ready for the next context like this one")
	f.Var(&opts.memory, "memory", "maximum address space of the interpreter, such as 1g (default: only the sandbox's limit)")
	f.Var(&opts.idle, "idle-timeout", "delete the context after this time without a run (default: never)")
	f.BoolVar(&opts.json, "json", false, "print the context as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runContextCreate(ctx context.Context, sandbox string, opts contextCreateOptions, d deps) error {
	env, err := opts.resolve(os.LookupEnv)
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	made, err := c.CreateContext(ctx, sandbox, api.CreateContext{
		Language: opts.lang, Cwd: opts.cwd, User: opts.user, Env: env, Preload: opts.preload, Memory: opts.memory.Bytes, IdleTimeout: float64(opts.idle),
	})
	if err != nil {
		return err
	}
	return printContext(made, opts.json, d)
}

// printContext prints the id of a context, or all of it as JSON.
func printContext(c *api.Context, asJSON bool, d deps) error {
	if asJSON {
		return cmdline.PrintJSON(d.Stdout, c)
	}
	_, err := fmt.Fprintln(d.Stdout, cmdline.Printable(c.ID))
	return err
}

func newContextLs(d deps) *cobra.Command {
	var quiet, asJSON bool
	cmd := &cobra.Command{
		Use:     "ls [flags] SANDBOX",
		Aliases: []string{"list"},
		Short:   "List the contexts of a sandbox",
		Long: `List the contexts of a sandbox, oldest first. A context is idle, busy while code runs
in it, or dead: then the next run starts it anew, without variables.`,
		Args: cmdline.UsageArgs(func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmdline.Usagef("no sandbox is named; contexts of Docker are daemons, which --socket or $SANDBOXD_SOCKET chooses here")
			}
			return cobra.ExactArgs(1)(cmd, args)
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runContextLs(cmd.Context(), args[0], quiet, asJSON, d)
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	f.BoolVar(&asJSON, "json", false, "print the list as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runContextLs(ctx context.Context, sandbox string, quiet, asJSON bool, d deps) error {
	c := d.Client()
	defer c.Close()
	list, err := c.ListContexts(ctx, sandbox)
	if err != nil {
		return err
	}
	if asJSON {
		return cmdline.PrintJSON(d.Stdout, api.ContextList{Contexts: append([]api.Context{}, list...)})
	}
	rows := [][]string{{"CONTEXT", "LANGUAGE", "STATE", "RUNS", "CREATED", "USED"}}
	for i := range list {
		x := &list[i]
		if quiet {
			if err := printContext(x, false, d); err != nil {
				return err
			}
			continue
		}
		rows = append(rows, []string{x.ID, x.Language, string(x.State), strconv.Itoa(x.ExecutionCount), since(x.CreatedAt), since(x.UsedAt)})
	}
	if quiet {
		return nil
	}
	return cmdline.Table(d.Stdout, rows)
}

func newContextRm(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "rm SANDBOX CONTEXT...",
		Aliases: []string{"remove"},
		Short:   "Delete contexts",
		Long:    "Delete contexts with the processes that they have started, and print their ids. Runs\nunder way fail.",
		Args:    cmdline.UsageArgs(cobra.MinimumNArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := d.Client()
			defer c.Close()
			return removeEach(cmd.Context(), args[1:], d, func(id string) (bool, error) {
				return true, c.DeleteContext(cmd.Context(), args[0], id)
			})
		},
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// newContextDo makes the command of an operation on one context.
func newContextDo(d deps, name, short, long string, do func(c *client.Client, ctx context.Context, sandbox, id string) (*api.Context, error)) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   name + " [flags] SANDBOX CONTEXT",
		Short: short,
		Long:  long,
		Args:  cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := d.Client()
			defer c.Close()
			made, err := do(c, cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return printContext(made, asJSON, d)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the context as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}
