package cli

import (
	"context"
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
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
		Args:  cmdline.UsageArgs(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return runVersion(cmd.Context(), opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *versionOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.json, "json", false, "print them as JSON")
}

func runVersion(ctx context.Context, opts versionOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	v := struct {
		Client string          `json:"client"`
		Go     string          `json:"go"`
		Daemon *api.SystemInfo `json:"daemon,omitempty"`
	}{Client: d.version}
	if info, ok := debug.ReadBuildInfo(); ok {
		v.Client, v.Go = buildVersion(d.version, info), info.GoVersion
	}
	if sys, err := c.System(ctx); err == nil { // without a daemon there is no second version
		v.Daemon = sys
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, v)
	}
	daemon := "not running"
	if v.Daemon != nil {
		daemon = v.Daemon.Version
	}
	_, err := fmt.Fprintf(d.Stdout, "sandboxd %s (%s)\ndaemon   %s\n", v.Client, v.Go, cmdline.Printable(daemon))
	return err
}

// buildVersion returns the version that the linker has set, or that of the module, or the commit.
func buildVersion(linked string, info *debug.BuildInfo) string {
	if linked != "" && linked != unknownVersion {
		return linked
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	var commit, dirty string
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			commit = s.Value[:min(len(s.Value), 12)]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "-dirty"
		}
	}
	if commit == "" {
		return unknownVersion
	}
	return commit + dirty
}

// unknownVersion is the version of a build that nothing tells.
const unknownVersion = "unknown"
