package cli

import (
	"context"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type commitOptions struct {
	request api.CommitSandbox
	labels  []string
	json    bool
}

func newCommit(d deps) *cobra.Command {
	var opts commitOptions
	cmd := &cobra.Command{
		Use:   "commit [flags] SANDBOX REFERENCE",
		Short: "Make an image of a sandbox",
		Long: `Make an image of a sandbox, be it running or not, and print its reference and
digest: the image that the sandbox was made of, and one layer with what it has
changed. A running sandbox stands still meanwhile where it is in a cgroup. The
flags change how the new image is run. Sandboxes of the host image cannot be
committed.`,
		Example: `  sandboxd commit build team/tool:1.0
  sandboxd commit --entrypoint python3 --entrypoint /app/main.py -w /app build team/app:1.0`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runCommit(cmd.Context(), args[0], args[1], opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *commitOptions) addFlags(f *pflag.FlagSet) {
	c := &o.request.Config
	f.StringArrayVar(&c.Entrypoint, "entrypoint", nil, "`word` of the command that is always run; once for each word")
	f.StringArrayVar(&c.Cmd, "cmd", nil, "`word` of the command, or of its arguments, that can be replaced; once for each word")
	f.StringArrayVarP(&c.Env, "env", "e", nil, "`variable` to add to the environment: NAME=value, or NAME to pass on its value here")
	f.StringVarP(&c.WorkingDir, "cwd", "w", "", "`directory` in which programs start; also --workdir")
	f.SetNormalizeFunc(normalize)
	f.StringVarP(&c.User, "user", "u", "", "`user` as whom programs run")
	f.StringArrayVarP(&o.labels, "label", "l", nil, "`key=value` to add to the labels")
	f.StringVarP(&o.request.Comment, "message", "m", "", "`text` for the image's history")
	f.BoolVar(&o.json, "json", false, "print the image as JSON")
}

// complete returns the request. Variables and labels are parsed as by run.
func (o *commitOptions) complete(reference string, lookup func(string) (string, bool)) (api.CommitSandbox, error) {
	req := o.request
	req.Reference = reference
	var err error
	if req.Config.Env, err = (&processFlags{env: req.Config.Env}).resolve(lookup); err != nil {
		return req, err
	}
	req.Config.Env = slices.DeleteFunc(req.Config.Env, func(e string) bool { return !strings.Contains(e, "=") })
	req.Config.Labels, err = labelsOf(o.labels)
	return req, err
}

func runCommit(ctx context.Context, id, reference string, opts commitOptions, d deps) error {
	req, err := opts.complete(reference, os.LookupEnv)
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	done, err := c.Commit(ctx, id, req)
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, done)
	}
	if err := printImage(d.Stdout, &done.Image); err != nil {
		return err
	}
	leftOut(d, done.Skipped, done.SkippedMore)
	return nil
}
