package cli

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/dirs"
	"github.com/sandboxd/sandboxd/internal/doctor"
)

type doctorOptions struct {
	dataDir    string
	attack     bool
	neighbours bool
	network    bool
	json       bool
	attacks    []string // names of attacks, or of resources, to try; none means all
}

func newDoctor(d deps) *cobra.Command {
	var opts doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor [--attack [--network] [ATTACK...] | --attack --neighbours [RESOURCE...]]",
		Short: "Say what this host can enforce, and how to get the rest",
		Long: `Say what this host can enforce, what it costs where something is missing, and how
to get it. A running daemon is asked, since it knows what it was given; without
one this command looks for itself.

With --attack it attacks sandboxes of its own on this host, each attack also where
nothing holds it, and prints by layer what stopped it; that starts a daemon where none runs.
Attacks that are named are tried alone.

With --network these sandboxes have a network whose policy allows nothing, and more
attacks try to reach something all the same, or to change the network. It needs no
Internet. As long as everything holds, no packet leaves the host.

With --neighbours it takes instead, in a sandbox, of each resource that the kernel
counts beyond the sandbox, and says what bounded that, and whether a neighbour, the
host's programs and the daemon went on. It takes at most 100 MiB of memory and 32 of
disk, and a few thousand of anything else, each for some seconds. Do not run it
where that matters.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if opts.attacks = args; len(args) > 0 && !opts.attack {
				return cmdline.Usagef("an attack is named, and --attack is not there")
			}
			if opts.neighbours && !opts.attack {
				return cmdline.Usagef("--neighbours goes with --attack")
			}
			if opts.network && (!opts.attack || opts.neighbours) {
				return cmdline.Usagef("--network goes with --attack, and not with --neighbours")
			}
			if opts.neighbours {
				return runNeighbours(cmd.Context(), opts, d)
			}
			if opts.attack {
				return runAttack(cmd.Context(), opts, d)
			}
			return runDoctor(cmd.Context(), opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, `  0    sandboxes can be started
  1    they cannot: a check marked FAIL says why; or the check went wrong; or, with
       --attack, something that should have held did not
  2    the command line is wrong`)
	return cmd
}

func (o *doctorOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.dataDir, "data-dir", "", "data `directory` to look at where no daemon runs (default: serve's)")
	f.BoolVar(&o.attack, "attack", false, "attack sandboxes of its own, and say what held")
	f.BoolVar(&o.neighbours, "neighbours", false, "with --attack: take what sandboxes share, and say who lost")
	f.BoolVar(&o.network, "network", false, "with --attack: attack sandboxes that have a network, and their policy")
	f.BoolVar(&o.json, "json", false, "print the outcome as JSON")
}

func runDoctor(ctx context.Context, opts doctorOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	checks, err := c.Checks(ctx)
	asked := "the daemon at " + c.Socket()
	if _, ok := errors.AsType[*client.NotRunning](err); ok {
		asked = "this command; no daemon is running"
		checks, err = look(ctx, opts, d)
	}
	if err != nil {
		return err
	}
	if opts.json {
		if checks == nil {
			checks = []api.Check{}
		}
		err = cmdline.PrintJSON(d.Stdout, api.CheckList{Checks: checks})
	} else {
		err = printChecks(d.Stdout, asked, checks)
	}
	if err != nil {
		return err
	}
	if !doctor.Ready(checks) {
		return &cmdline.ExitError{Code: cmdline.CodeError}
	}
	return nil
}

// look examines the host without a daemon.
func look(ctx context.Context, opts doctorOptions, d deps) ([]api.Check, error) {
	dir := opts.dataDir
	if dir == "" {
		found, err := dirs.Default()
		if err != nil {
			return nil, err
		}
		dir = found.Data
	}
	return d.checks(ctx, dir), nil
}

func printChecks(w io.Writer, asked string, checks []api.Check) error {
	ok, fatal := 0, 0
	for _, c := range checks {
		mark := "ok  "
		switch {
		case c.OK:
			ok++
		case c.Fatal:
			mark = "FAIL"
			fatal++
		default:
			mark = "lack"
		}
		if _, err := fmt.Fprintf(w, "%s  %s: %s\n", mark, cmdline.Printable(c.Name), cmdline.Printable(c.Found)); err != nil {
			return err
		}
		if c.OK {
			continue
		}
		for _, line := range []struct{ head, text string }{{"means", c.Means}, {"remedy", c.Remedy}} {
			if line.text == "" {
				continue
			}
			if _, err := fmt.Fprintf(w, "      %s: %s\n", line.head, cmdline.Printable(line.text)); err != nil {
				return err
			}
		}
	}
	verdict := "sandboxes can be started"
	if fatal > 0 {
		verdict = "no sandbox can be started"
	}
	_, err := fmt.Fprintf(w, "\n%d of %d checks are ok: %s (examined by %s)\n", ok, len(checks), verdict, asked)
	return err
}
