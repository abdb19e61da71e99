package cli

import (
	"context"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type createOptions struct {
	sandboxFlags

	tty         bool
	interactive bool
	json        bool
}

func newCreate(d deps) *cobra.Command {
	var opts createOptions
	cmd := &cobra.Command{
		Use:   "create [flags] [IMAGE] [-- PROGRAM [ARG]...]",
		Short: "Create a sandbox to execute programs in",
		Long: `Create a sandbox and print its id. It runs, idle, until "sandboxd rm" deletes it,
its lifetime ends, or nothing has been asked of it for its idle timeout.

With a PROGRAM that is its main process, by the image's ENTRYPOINT if it has one:
the sandbox ends with it, keeps its exit code and its output ("sandboxd wait",
"sandboxd logs"), and runs it again when it is started again. "sandboxd attach
SANDBOX" connects to it.

The image is "host" unless one is named. One that is not here yet is pulled.
Where no daemon runs, one is started in the background.`,
		Example: `  id=$(sandboxd create --name work debian:12)
  sandboxd exec $id -- ls /
  sandboxd create --name web debian:12 -- python3 -m http.server`,
		RunE: func(cmd *cobra.Command, args []string) error {
			image, argv, err := imageAndProgram(args, cmd.ArgsLenAtDash())
			if err != nil {
				return err
			}
			req, err := opts.request(cmd.Context(), image, cmd.Flags().Changed)
			if err != nil {
				return err
			}
			if err := opts.main(&req, argv, opts.tty, opts.interactive, false); err != nil {
				return err
			}
			return runCreate(cmd.Context(), opts, req, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// imageAndProgram tells the two apart by the "--" that stood behind dash arguments; -1: there was
// none.
func imageAndProgram(args []string, dash int) (image string, argv []string, err error) {
	if dash >= 0 {
		args, argv = args[:dash], args[dash:]
	}
	switch {
	case len(args) > 1:
		return "", nil, cmdline.Usagef("%q stands behind the image; a program stands behind \"--\"", args[1])
	case len(args) == 1 && args[0] == "":
		return "", nil, cmdline.Usagef("the image has an empty name")
	case len(args) == 1:
		image = args[0]
	}
	return image, argv, nil
}

func (o *createOptions) addFlags(f *pflag.FlagSet) {
	o.sandboxFlags.addFlags(f)
	f.BoolVarP(&o.tty, "tty", "t", false, "give the main process a terminal")
	f.BoolVarP(&o.interactive, "interactive", "i", false, "keep the main process's stdin open, for attach")
	f.BoolVar(&o.json, "json", false, "print the whole sandbox as JSON")
}

func runCreate(ctx context.Context, opts createOptions, req api.CreateSandbox, d deps) error {
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	sb, err := cmdline.CreateSandbox(ctx, c, req, d.Stderr)
	if err != nil {
		return err
	}
	return printCreated(sb, opts.json, d)
}
