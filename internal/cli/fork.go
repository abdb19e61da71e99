package cli

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type forkOptions struct {
	count    int
	names    []string
	labels   []string
	env      []string
	lifetime lifetime
	idle     cmdline.Seconds
	json     bool
}

func newFork(d deps) *cobra.Command {
	var opts forkOptions
	cmd := &cobra.Command{
		Use:   "fork [flags] SANDBOX",
		Short: "Make new sandboxes with the files that one has",
		Long: `Make new sandboxes with the files that one, be it running or not, has now, and
with its image, limits, profile, environment, user, directory and labels, and
print their ids: all of them or, if one cannot be made, none. What the sandbox
has written is copied once, however many there are. Processes are not copied.`,
		Example: `  for id in $(sandboxd fork -n 4 work); do sandboxd exec $id -- ./try & done`,
		Args:    cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("count") && opts.count < 1 {
				return cmdline.Usagef("--count %d is less than 1", opts.count)
			}
			return runFork(cmd.Context(), args[0], opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *forkOptions) addFlags(f *pflag.FlagSet) {
	f.IntVarP(&o.count, "count", "n", 0, "how many, a `number` up to 100 (default: one, or as many as there are names)")
	f.StringArrayVar(&o.names, "name", nil, "`name` of a new sandbox; once for each (default: made up)")
	f.StringArrayVarP(&o.labels, "label", "l", nil, "`label` to add to the sandbox's: key=value")
	f.StringArrayVarP(&o.env, "env", "e", nil, "`variable` to add to the sandbox's: KEY=value, or KEY to pass on its value here")
	f.Var(&o.lifetime, "lifetime", "stop the new sandboxes after this time, whatever they do (default: the daemon's)")
	f.Var(&o.idle, "idle-timeout", "stop them after this time without a request (default: the sandbox's)")
	f.BoolVar(&o.json, "json", false, "print the new sandboxes as JSON")
}

func runFork(ctx context.Context, id string, opts forkOptions, d deps) error {
	req := api.ForkSandbox{Count: opts.count, Names: opts.names, Timeout: float64(opts.lifetime), IdleTimeout: float64(opts.idle)}
	var err error
	if req.Labels, err = labelsOf(opts.labels); err != nil {
		return err
	}
	if req.Env, err = (&processFlags{env: opts.env}).resolve(os.LookupEnv); err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	// Do not interrupt the request: the caller would not know which sandboxes to delete.
	out, err := c.Fork(context.WithoutCancel(ctx), id, req)
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, out)
	}
	for _, s := range out.Sandboxes {
		if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(s.ID)); err != nil {
			return err
		}
	}
	printGaps(d, out.Consistent, out.Skipped, out.SkippedMore)
	return nil
}
