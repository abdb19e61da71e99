package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type rmOptions struct {
	all  bool
	json bool
}

func newRm(d deps) *cobra.Command {
	var opts rmOptions
	cmd := &cobra.Command{
		Use:   "rm [flags] SANDBOX...\n  sandboxd rm --all",
		Short: "Delete sandboxes",
		Long: `Delete sandboxes, running or not, and print their ids. When it returns, their
processes are dead and their files are gone.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case opts.all && len(args) > 0:
				return cmdline.Usagef("--all and names exclude each other")
			case !opts.all && len(args) == 0:
				return cmdline.Usagef("no sandbox is named; sandboxd ps lists them")
			}
			return runRm(cmd.Context(), args, opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *rmOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVarP(&o.all, "all", "a", false, "delete all of yours")
	f.BoolVar(&o.json, "json", false, "print what was deleted as JSON")
	addHabits(f, habit{name: "force", short: "f", bare: true, accepts: []string{"true"}})   // one that runs is deleted too
	addHabits(f, habit{name: "volumes", short: "v", bare: true, accepts: []string{"true"}}) // anonymous ones go in any case
}

func runRm(ctx context.Context, ids []string, opts rmOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	if opts.all {
		list, err := c.ListSandboxes(ctx, client.ListOptions{})
		if err != nil {
			return err
		}
		for _, s := range list {
			ids = append(ids, s.ID)
		}
	}
	deleted := []string{}
	failed := false
	for _, id := range ids {
		err := c.DeleteSandbox(ctx, id)
		switch {
		case opts.all && errors.Is(err, &api.Problem{Code: api.CodeNotFound}):
			continue // its deadline came first
		case err == nil:
			deleted = append(deleted, id)
			if !opts.json {
				if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(id)); err != nil {
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
	if opts.json {
		if err := cmdline.PrintJSON(d.Stdout, map[string][]string{"deleted": deleted}); err != nil {
			return err
		}
	}
	if failed {
		return &cmdline.ExitError{Code: cmdline.CodeError}
	}
	return nil
}

// removeEach removes one object after another, and prints the names of those that remove reports as
// removed. It continues after an error, unless the name is the only one.
func removeEach(ctx context.Context, names []string, d deps, remove func(name string) (removed bool, err error)) error {
	failed := false
	for _, name := range names {
		removed, err := remove(name)
		switch {
		case err == nil && removed:
			if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(name)); err != nil {
				return err
			}
		case err == nil:
		case ctx.Err() != nil || len(names) == 1:
			return err
		default:
			failed = true
			cmdline.Explain(d.Stderr, err)
		}
	}
	if failed {
		return &cmdline.ExitError{Code: cmdline.CodeError}
	}
	return nil
}
