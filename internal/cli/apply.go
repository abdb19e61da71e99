package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/workspace"
)

type applyOptions struct {
	to        string
	yes       bool
	protected bool
}

func newApply(d deps) *cobra.Command {
	var opts applyOptions
	cmd := &cobra.Command{
		Use:   "apply [flags] SANDBOX [PATH]...",
		Short: "Bring what a sandbox has changed in its workspace into the directory",
		Long: `Bring what a sandbox has changed in its workspace into the directory, or the
changes at or below the PATHs. They are listed first, and applied after a yes; where
no terminal is there to ask at, --yes is needed.

Nothing outside of the directory is changed, and no link in it followed. These
changes are left out, and the exit code is 1:

  conflicts        the file on the host has changed since the sandbox began, or was
                   hidden from it
  protected paths  programs of the host would execute the file, such as hooks and
                   settings of git, start-up files of shells and editors, .envrc;
                   --protected applies them
  never applied    links that lead out of the directory, pipes and other special
                   files; set-id bits of files`,
		Example: `  sandboxd apply brave-otter-826
  sandboxd apply --yes brave-otter-826 src docs/guide.md
  sandboxd apply --to ../copy brave-otter-826`,
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runApply(cmd.Context(), args[0], args[1:], opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *applyOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.to, "to", "", "another `directory` to change, such as a copy; a file that differs from that of the workspace is a conflict")
	f.BoolVarP(&o.yes, "yes", "y", false, "do not ask")
	f.BoolVar(&o.protected, "protected", false, "apply protected paths too")
}

func runApply(ctx context.Context, id string, paths []string, opts applyOptions, d deps) (err error) {
	c := d.Client()
	defer c.Close()
	w, err := workspace.Compare(ctx, c, id, opts.to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	items, err := w.Select(paths)
	if err != nil {
		return err
	}
	if len(items) == 0 {
		_, err := fmt.Fprintln(d.Stderr, "nothing to apply")
		return err
	}
	if !opts.yes {
		if !cmdline.IsTerminal(d.Stdin) {
			return cmdline.Usagef("without a terminal to ask at, --yes is needed")
		}
		if err := listChanges(d.Stderr, items); err != nil {
			return err
		}
		yes, err := confirmed(ctx, d, fmt.Sprintf("Apply to %s?", cmdline.Printable(w.Name)))
		if err != nil {
			return err
		}
		if !yes {
			return errors.New("nothing was applied")
		}
	}
	left := 0
	for _, r := range w.Apply(ctx, items, opts.protected) {
		if r.Err != nil {
			left++
			_, _ = fmt.Fprintf(d.Stderr, "not applied: %s: %s\n", workspace.Quote(r.Item.Path), cmdline.Printable(r.Err.Error())) // the exit code says it too
		}
	}
	if left > 0 {
		return fmt.Errorf("%d of %d changes were not applied", left, len(items))
	}
	return nil
}
