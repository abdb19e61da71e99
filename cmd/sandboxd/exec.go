package main

import (
	"context"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
)

type execOptions struct {
	processFlags
	terminalFlags

	id   string
	argv []string
}

func newExec(d deps) *cobra.Command {
	var opts execOptions
	cmd := &cobra.Command{
		Use:   "exec [flags] SANDBOX [--] PROGRAM [ARG]...",
		Short: "Execute a program in a running sandbox",
		Long: `Execute a program in a running sandbox, named by its id or name. Output and exit
code are the program's. When this command is interrupted, the program and all
that it started are killed; the sandbox stays.`,
		Example: `  sandboxd exec work -- ls -l /
  echo 'print(6*7)' | sandboxd exec -i work -- python3 -
  sandboxd exec -it work bash`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := opts.parse(args); err != nil {
				return err
			}
			env, err := opts.resolve(os.LookupEnv)
			if err != nil {
				return err
			}
			return runExec(cmd.Context(), opts, api.ExecRequest{Argv: opts.argv, Env: env, Cwd: opts.cwd, User: opts.user}, d)
		},
	}
	opts.addFlags(cmd.Flags())
	exitStatus(cmd, exitProgram)
	return cmd
}

func (o *execOptions) addFlags(f *pflag.FlagSet) {
	f.SetInterspersed(false) // flags behind SANDBOX are the program's
	o.processFlags.addFlags(f)
	o.terminalFlags.addFlags(f)
}

func (o *execOptions) parse(args []string) error {
	if err := o.check(); err != nil {
		return err
	}
	if len(args) == 0 || args[0] == "" {
		return usagef("no sandbox is named; sandboxd ps lists them")
	}
	o.id, args = args[0], args[1:]
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 || args[0] == "" {
		return usagef("no program is named; as in: sandboxd exec %s -- PROGRAM", o.id)
	}
	o.argv = args
	return nil
}

func runExec(ctx context.Context, opts execOptions, req api.ExecRequest, d deps) error {
	c := d.client()
	defer c.Close()
	return execute(ctx, c, opts.id, req, opts.terminalFlags, d)
}
