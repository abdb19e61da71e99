package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/docker/go-units"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/boot"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/seccomp"
)

type profilesOptions struct{ json bool }

func newProfiles(d deps) *cobra.Command {
	var opts profilesOptions
	cmd := &cobra.Command{
		Use:   "profiles [flags]",
		Short: "List the security profiles that a sandbox can have",
		Long: `List the security profiles that a sandbox can have: "run --profile NAME". A running
daemon is asked, since it may have more than sandboxd brings along (serve
--profiles); without one those are listed.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runProfiles(cmd.Context(), opts, d) },
	}
	cmd.Flags().BoolVar(&opts.json, "json", false, "print the list as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newProfilesShow(d))
	return cmd
}

func runProfiles(ctx context.Context, opts profilesOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	profiles, err := c.Profiles(ctx)
	if _, ok := errors.AsType[*client.NotRunning](err); ok {
		profiles, err = embeddedProfiles()
		for i := range profiles {
			profiles[i].Seccomp = nil
		}
	}
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, api.ProfileList{Profiles: profiles})
	}
	rows := [][]string{{"NAME", "CAPABILITIES", "SYSCALLS", "USER", "ROOT", "FOR"}}
	for _, p := range profiles {
		root := "writable"
		if p.ReadOnlyRoot {
			root = "read-only"
		}
		rows = append(rows, []string{
			p.Name, strconv.Itoa(len(p.Capabilities)), strconv.Itoa(p.Syscalls), cmp.Or(p.User, "any"), root, strings.TrimPrefix(p.Description, "for "),
		})
	}
	return cmdline.Table(d.Stdout, rows)
}

func newProfilesShow(d deps) *cobra.Command {
	var opts profilesOptions
	cmd := &cobra.Command{
		Use:   "show [flags] NAME",
		Short: "Print a security profile whole",
		Long: `Print a security profile whole: what a sandbox with it is held by, and what its
filter answers to every system call that it names.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runProfilesShow(cmd.Context(), args[0], opts, d) },
	}
	cmd.Flags().BoolVar(&opts.json, "json", false, "print the profile as JSON, with the filter in the form of the OCI runtime specification")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runProfilesShow(ctx context.Context, name string, opts profilesOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	p, err := c.Profile(ctx, name)
	if _, ok := errors.AsType[*client.NotRunning](err); ok {
		p, err = embeddedProfile(name)
	}
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, p)
	}
	return printProfile(d.Stdout, p)
}

func printProfile(w io.Writer, p *api.Profile) error {
	filter := new(specs.LinuxSeccomp)
	if err := json.Unmarshal(p.Seccomp, filter); err != nil {
		return fmt.Errorf("read the filter of profile %q: %w", p.Name, err)
	}
	var b strings.Builder
	line := func(what, value string) {
		fmt.Fprintf(&b, "%-16s %s\n", what, cmp.Or(cmdline.Printable(value), "none"))
	}
	line("profile", p.Name)
	line("for", strings.TrimPrefix(p.Description, "for "))
	line("source", cmp.Or(p.Source, "sandboxd brings it along"))
	line("capabilities", strings.Join(p.Capabilities, " "))
	line("user", cmp.Or(p.User, "any")+map[bool]string{true: "; nothing runs as root"}[p.NonRoot])
	line("directory", cmp.Or(p.Cwd, "the image's"))
	line("environment", strings.Join(p.Env, " "))
	line("root", map[bool]string{true: "read-only", false: "writable"}[p.ReadOnlyRoot])
	for _, m := range p.Mounts {
		line("writable", fmt.Sprintf("%s, %s in memory, mode %04o, owner %d:%d", m.Path, units.BytesSize(float64(m.Size)), m.Mode, m.UID, m.GID))
	}
	line("masked", strings.Join(p.MaskedPaths, " "))
	line("read-only", strings.Join(p.ReadonlyPaths, " "))
	line("memory", units.BytesSize(float64(p.Limits.Memory)))
	line("processes", strconv.FormatInt(p.Limits.Pids, 10))
	line("descriptors", strconv.FormatUint(p.Limits.Nofile, 10))
	line("system calls", strconv.Itoa(p.Syscalls))
	b.WriteString("\n" + seccomp.Text(filter))
	_, err := io.WriteString(w, b.String())
	return err
}

// embeddedProfiles returns the profiles that are part of this program, on this kernel.
func embeddedProfiles() ([]api.Profile, error) {
	_, shown, err := boot.OpenProfiles("")
	return shown, err
}

func embeddedProfile(name string) (*api.Profile, error) {
	all, err := embeddedProfiles()
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(all))
	for _, p := range all {
		if p.Name == name {
			return &p, nil
		}
		names = append(names, p.Name)
	}
	return nil, fmt.Errorf("profile %q: no daemon is running, and sandboxd brings along %s", name, strings.Join(names, ", "))
}
