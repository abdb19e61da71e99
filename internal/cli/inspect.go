package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type inspectOptions struct {
	kind   string
	format string
	json   bool
}

func newInspect(d deps) *cobra.Command {
	var opts inspectOptions
	cmd := &cobra.Command{
		Use:   "inspect [flags] NAME...",
		Short: "Print all that is known of objects",
		Long: `Print all that the daemon knows of sandboxes, images, snapshots, volumes, networks,
secrets (without their values), profiles and execs, by id or name, as one JSON list. A
name that several kinds of objects have is the first of them, in this order; --type
chooses.
An exec is named by its id, or SANDBOX/main for the main process of a sandbox.`,
		Example: `  sandboxd inspect work
  sandboxd inspect --format '{{.State}} {{json .Network}}' work
  sandboxd inspect --type image debian:12`,
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runInspect(cmd.Context(), args, opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *inspectOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.kind, "type", "", "`kind` of object: sandbox, image, snapshot, volume, network, secret, profile or exec")
	f.StringVarP(&o.format, "format", "f", "", formatUsage)
	f.BoolVar(&o.json, "json", false, "print the objects as a JSON list, as without --format")
}

// inspectors find an object of each kind, in the order in which they are asked.
var inspectors = []struct {
	kind string
	find func(ctx context.Context, c *client.Client, ref string) (any, error)
}{
	{"sandbox", func(ctx context.Context, c *client.Client, ref string) (any, error) { return c.GetSandbox(ctx, ref) }},
	{"image", func(ctx context.Context, c *client.Client, ref string) (any, error) { return c.Image(ctx, ref) }},
	{"snapshot", func(ctx context.Context, c *client.Client, ref string) (any, error) { return c.Snapshot(ctx, ref) }},
	{"volume", func(ctx context.Context, c *client.Client, ref string) (any, error) { return c.Volume(ctx, ref) }},
	{"network", func(ctx context.Context, c *client.Client, ref string) (any, error) { return c.NamedNetwork(ctx, ref) }},
	{"secret", inspectSecret},
	{"profile", func(ctx context.Context, c *client.Client, ref string) (any, error) { return c.Profile(ctx, ref) }},
	{"exec", inspectExec},
}

func inspectSecret(ctx context.Context, c *client.Client, name string) (any, error) {
	list, err := c.Secrets(ctx)
	if err != nil {
		return nil, err
	}
	for i := range list {
		if list[i].Name == name {
			return &list[i], nil
		}
	}
	return nil, &api.Problem{Code: api.CodeNotFound, Detail: fmt.Sprintf("secret %q: there is none of this name", name), Hint: "sandboxd secret ls lists what there is"}
}

// inspectExec finds an exec by SANDBOX/EXEC, or by its id in any sandbox.
func inspectExec(ctx context.Context, c *client.Client, ref string) (any, error) {
	if sandbox, id, ok := strings.Cut(ref, "/"); ok {
		return c.GetExec(ctx, sandbox, id)
	}
	sandboxes, err := c.ListSandboxes(ctx, client.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range sandboxes {
		x, err := c.GetExec(ctx, sandboxes[i].ID, ref)
		if err == nil {
			return x, nil
		}
		if !notFound(err) {
			return nil, err
		}
	}
	return nil, &api.Problem{Code: api.CodeNotFound, Detail: fmt.Sprintf("exec %q: there is none with this id", ref), Hint: "sandboxd execs lists those of a sandbox"}
}

func notFound(err error) bool { return errors.Is(err, &api.Problem{Code: api.CodeNotFound}) }

func runInspect(ctx context.Context, refs []string, opts inspectOptions, d deps) error {
	var kinds []string
	for _, i := range inspectors {
		kinds = append(kinds, i.kind)
	}
	if opts.kind != "" && !slices.Contains(kinds, opts.kind) {
		return cmdline.Usagef("--type %q is none of %s", opts.kind, strings.Join(kinds, ", "))
	}
	format, err := newFormat(opts.format)
	if err != nil {
		return err
	}
	if format != nil && opts.json {
		return cmdline.Usagef("--json and --format exclude each other")
	}
	c := d.Client()
	defer c.Close()
	found := []any{}
	failed := false
	for _, ref := range refs {
		object, err := inspect(ctx, c, ref, opts.kind)
		switch {
		case err == nil:
			found = append(found, object)
			continue
		case ctx.Err() != nil || len(refs) == 1:
			return err
		}
		failed = true
		cmdline.Explain(d.Stderr, err)
	}
	if format != nil {
		err = printAll(d.Stdout, format, found)
	} else {
		err = cmdline.PrintJSON(d.Stdout, found)
	}
	if err == nil && failed {
		return &cmdline.ExitError{Code: cmdline.CodeError}
	}
	return err
}

// inspect returns the object of the kind, or of the first kind that has it if kind is empty.
func inspect(ctx context.Context, c *client.Client, ref, kind string) (any, error) {
	for _, i := range inspectors {
		if kind != "" && i.kind != kind {
			continue
		}
		object, err := i.find(ctx, c, ref)
		switch {
		case err == nil:
			return object, nil
		case kind != "":
			return nil, err
		case notFound(err), errors.Is(err, &api.Problem{Code: api.CodeInvalid}): // no name of this kind
		default:
			return nil, err
		}
	}
	return nil, &api.Problem{Code: api.CodeNotFound, Detail: fmt.Sprintf("%q: there is no object of this id or name", ref), Hint: "sandboxd ps, images, snapshots, volume ls, network ls, secret ls and execs list what there is"}
}
