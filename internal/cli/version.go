package cli

import (
	"cmp"
	"context"
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
)

type versionOptions struct {
	json bool
}

func newVersion(d deps) *cobra.Command {
	var opts versionOptions
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this command and of the running daemon",
		Long:  "Print the version of this command, and that of the daemon where one is running.",
		Args:  usageArgs(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return runVersion(cmd.Context(), opts, d) },
	}
	opts.addFlags(cmd.Flags())
	exitStatus(cmd, exitPlain)
	return cmd
}

func (o *versionOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.json, "json", false, "print them as JSON")
}

func runVersion(ctx context.Context, opts versionOptions, d deps) error {
	c := d.client()
	defer c.Close()
	v := struct {
		Client string          `json:"client"`
		Go     string          `json:"go"`
		Daemon *api.SystemInfo `json:"daemon,omitempty"`
	}{Client: "unknown"}
	if info, ok := debug.ReadBuildInfo(); ok {
		v.Client, v.Go = cmp.Or(info.Main.Version, v.Client), info.GoVersion
	}
	if sys, err := c.System(ctx); err == nil { // otherwise there is no daemon to have a version
		v.Daemon = sys
	}
	if opts.json {
		return printJSON(d.stdout, v)
	}
	daemon := "not running"
	if v.Daemon != nil {
		daemon = v.Daemon.Version
	}
	_, err := fmt.Fprintf(d.stdout, "sandboxd %s (%s)\ndaemon   %s\n", v.Client, v.Go, printable(daemon))
	return err
}
