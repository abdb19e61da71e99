package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newVolume(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "volume",
		Short: "Keep files that several sandboxes share",
		Long: `Keep volumes: directories that sandboxes mount by name, with -v NAME:TARGET, and that
stay when the sandboxes are deleted. "sandboxd docs files" explains them.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newVolumeCreate(d), newVolumeLs(d), newVolumeInspect(d), newVolumeRm(d), newVolumePrune(d), newVolumeExport(d), newVolumeImport(d))
	return cmd
}

// volumeFlags are the properties of a new volume.
type volumeFlags struct {
	labels []string
	size   cmdline.Size
	inodes cmdline.Count
}

func (o *volumeFlags) addFlags(f *pflag.FlagSet) {
	o.size.Least = 1
	f.Var(&o.size, "size", "maximum disk space, such as 10g; sandboxes that exceed it are ended (default: no limit, or the daemon's)")
	f.Var(&o.inodes, "inodes", "maximum number of files and directories, such as 100k (default: one for each 8 KiB of --size)")
	f.StringArrayVarP(&o.labels, "label", "l", nil, "`label` to find it by: key=value; repeatable")
}

func (o *volumeFlags) request(name string) (req api.CreateVolume, err error) {
	req = api.CreateVolume{Name: name, Size: o.size.Bytes, Inodes: o.inodes.N}
	req.Labels, err = labelsOf(o.labels)
	return req, err
}

type volumeCreateOptions struct {
	volumeFlags
	name string // --name, as podman has it
	opts []string
	json bool
}

func newVolumeCreate(d deps) *cobra.Command {
	var opts volumeCreateOptions
	cmd := &cobra.Command{
		Use:   "create [flags] [NAME]",
		Short: "Make a volume",
		Long: `Make a volume and print its name. Without a name, one is made up. If there is one of
the name already, nothing changes; it is an error to ask for another size or label
than it has.`,
		Example: `  sandboxd volume create --size 2g cache
  sandboxd run -v cache:/root/.cache python:3.13 pip install requests`,
		Args: cmdline.UsageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				if opts.name = args[0]; opts.name == "" {
					return cmdline.Usagef("the volume has an empty name")
				}
			}
			return runVolumeCreate(cmd.Context(), opts, d)
		},
	}
	f := cmd.Flags()
	opts.addFlags(f)
	f.StringArrayVarP(&opts.opts, "opt", "o", nil, "set a property by `name=value`, as in Docker: size=SIZE, o=size=SIZE or inodes=NUMBER; repeatable")
	f.BoolVar(&opts.json, "json", false, "print the volume as JSON")
	addHabits(f, habit{name: "driver", short: "d", accepts: []string{"local"}, why: "volumes are directories of the daemon's; there are no drivers"})
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// setOpt applies an option of Docker's local driver.
func (o *volumeFlags) setOpt(text string) error {
	name, value, ok := strings.Cut(text, "=")
	if size, mount := strings.CutPrefix(text, "o=size="); mount {
		name, value = "size", size
	}
	var err error
	switch {
	case !ok:
		err = errors.New("want name=value")
	case name == "size":
		err = o.size.Set(value)
	case name == "inodes":
		err = o.inodes.Set(value)
	case name == "type" || name == "device" || name == "o":
		err = errors.New("a volume is no file system of its own; use --tmpfs for one in memory, and -v DIR:TARGET for a directory of the host")
	default:
		err = errors.New("there are size and inodes")
	}
	if err != nil {
		return cmdline.Usagef("--opt %q: %w", text, err)
	}
	return nil
}

func runVolumeCreate(ctx context.Context, opts volumeCreateOptions, d deps) error {
	for _, o := range opts.opts {
		if err := opts.setOpt(o); err != nil {
			return err
		}
	}
	req, err := opts.request(opts.name)
	if err != nil {
		return err
	}
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	v, err := c.CreateVolume(ctx, req)
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, v)
	}
	_, err = fmt.Fprintln(d.Stdout, cmdline.Printable(v.Name))
	return err
}

type volumeLsOptions struct {
	quiet   bool
	filters []string
	format  string
	json    bool
}

func newVolumeLs(d deps) *cobra.Command {
	var opts volumeLsOptions
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List volumes",
		Long: `List your volumes. LIMIT is the disk space that one may take; "sandboxd system df"
shows the space that they take.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runVolumeLs(cmd.Context(), opts, d) },
	}
	f := cmd.Flags()
	f.BoolVarP(&opts.quiet, "quiet", "q", false, "print names only")
	f.StringArrayVarP(&opts.filters, "filter", "f", nil, "only those with `key=value`: name (with * and ?), label, dangling (true: no sandbox has it), sandbox or driver; may be given again")
	f.StringVar(&opts.format, "format", "", formatUsage)
	f.BoolVar(&opts.json, "json", false, "print the list as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// volumeKeys compare a volume with the value of a filter. Docker's name is any part of the name.
var volumeKeys = map[string]func(v *api.Volume, want string) bool{
	"name": func(v *api.Volume, want string) bool {
		return matchName(v.Name, want) || strings.Contains(v.Name, want)
	},
	"label":    func(v *api.Volume, want string) bool { return matchLabel(v.Labels, want) },
	"dangling": func(v *api.Volume, want string) bool { return matchBool(len(v.Sandboxes) == 0, want) },
	"sandbox": func(v *api.Volume, want string) bool {
		return slices.ContainsFunc(v.Sandboxes, func(s api.SandboxRef) bool { return s.ID == want || s.Name == want })
	},
	"driver": func(_ *api.Volume, want string) bool { return want == "local" },
}

func runVolumeLs(ctx context.Context, opts volumeLsOptions, d deps) error {
	wanted, err := parseFilters(opts.filters, volumeKeys)
	if err != nil {
		return err
	}
	format, err := newFormat(opts.format)
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	list, err := c.Volumes(ctx, nil)
	if err != nil {
		return err
	}
	list = slices.DeleteFunc(list, func(v api.Volume) bool { return !wanted(&v) })
	switch {
	case opts.json:
		return cmdline.PrintJSON(d.Stdout, api.VolumeList{Volumes: append([]api.Volume{}, list...)})
	case format != nil:
		return printAll(d.Stdout, format, list)
	case opts.quiet:
		for _, v := range list {
			if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(v.Name)); err != nil {
				return err
			}
		}
		return nil
	}
	rows := [][]string{{"NAME", "LIMIT", "FILES", "SANDBOXES", "CREATED"}}
	for _, v := range list {
		limit, inodes := "-", "-"
		if v.Size > 0 {
			limit = units.BytesSize(float64(v.Size))
		}
		if v.Inodes > 0 {
			inodes = strconv.FormatInt(v.Inodes, 10)
		}
		var names []string
		for _, s := range v.Sandboxes {
			names = append(names, s.Name)
		}
		rows = append(rows, []string{v.Name, limit, inodes, cmp.Or(strings.Join(names, ","), "-"), since(v.CreatedAt)})
	}
	return cmdline.Table(d.Stdout, rows)
}

func newVolumeInspect(d deps) *cobra.Command {
	opts := inspectOptions{kind: "volume"}
	cmd := &cobra.Command{
		Use:   "inspect [flags] VOLUME...",
		Short: "Print all that is known of volumes",
		Long:  `Print all that the daemon knows of volumes, as one JSON list. Their files are counted.`,
		Args:  cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE:  func(cmd *cobra.Command, args []string) error { return runInspect(cmd.Context(), args, opts, d) },
	}
	cmd.Flags().StringVarP(&opts.format, "format", "f", "", formatUsage)
	cmd.Flags().BoolVar(&opts.json, "json", false, "print the volumes as a JSON list, as without --format")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func newVolumeRm(d deps) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:     "rm [flags] VOLUME...",
		Aliases: []string{"remove"},
		Short:   "Remove volumes",
		Long: `Remove volumes with their files, and print their names. One that a sandbox has,
running or not, stays: delete the sandbox first.`,
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runVolumeRm(cmd.Context(), args, force, d) },
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "a volume that does not exist is no error")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runVolumeRm(ctx context.Context, names []string, force bool, d deps) error {
	c := d.Client()
	defer c.Close()
	return removeEach(ctx, names, d, func(name string) (bool, error) {
		err := c.RemoveVolume(ctx, name)
		if force && notFound(err) {
			return false, nil
		}
		return true, err
	})
}

type volumePruneOptions struct {
	all, force bool
	labels     []string
	filters    []string
	json       bool
}

func newVolumePrune(d deps) *cobra.Command {
	var opts volumePruneOptions
	cmd := &cobra.Command{
		Use:   "prune",
		Short: "Remove volumes that no sandbox has",
		Long: `Remove the volumes that no sandbox has, running or not, and whose name was made up;
with --all those with a name of their own too. Print their names. Volumes with the
label ` + api.LabelKeep + ` stay. With --all it asks at a terminal, and needs --force without one.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runVolumePrune(cmd.Context(), opts, d) },
	}
	f := cmd.Flags()
	f.BoolVarP(&opts.all, "all", "a", false, "remove volumes with a name of their own too")
	f.BoolVarP(&opts.force, "force", "f", false, "do not ask")
	f.StringArrayVarP(&opts.labels, "label", "l", nil, "only those with this `label`: key=value; may be given again")
	f.StringArrayVar(&opts.filters, "filter", nil, "only those with `key=value`: label=KEY=VALUE, or all=true")
	f.BoolVar(&opts.json, "json", false, "print what was removed as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runVolumePrune(ctx context.Context, opts volumePruneOptions, d deps) error {
	for _, f := range opts.filters {
		key, value, _ := strings.Cut(f, "=")
		switch {
		case key == "label":
			opts.labels = append(opts.labels, value)
		case key == "all" && (value == "true" || value == "1"):
			opts.all = true
		default:
			return cmdline.Usagef("--filter %q: there are label=KEY=VALUE and all=true", f)
		}
	}
	labels, err := labelsOf(opts.labels)
	if err != nil {
		return err
	}
	if opts.all && !opts.force {
		if !cmdline.IsTerminal(d.Stdin) {
			return cmdline.Usagef("--all removes files that somebody gave a name; without a terminal to ask at, give --force")
		}
		yes, err := confirmed(ctx, d, "Remove all volumes that no sandbox has, with their files?")
		if err != nil || !yes {
			return err
		}
	}
	c := d.Client()
	defer c.Close()
	out, err := c.PruneVolumes(ctx, api.PruneVolumes{All: opts.all, Labels: labels})
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, out)
	}
	return printRemoved(d, out.Removed, fmt.Sprintf("%d volumes, %s", len(out.Removed), sizeOf(out.Bytes)))
}

func newVolumeExport(d deps) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "export [flags] VOLUME",
		Short: "Write the files of a volume to a tar",
		Long: `Write the files of a volume to a tar, with the owners that sandboxes see. The file
appears whole or not at all. Sandboxes may write meanwhile; if a file changes while
it is read, it is an error: stop or pause them first.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return writeArchive(cmd.Context(), args[0], output, d, func(ctx context.Context, c *client.Client) (io.ReadCloser, error) {
				return c.ExportVolume(ctx, args[0])
			})
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "`file` to write (default: stdout, unless that is a terminal)")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

type volumeImportOptions struct {
	volumeFlags
	json bool
}

func newVolumeImport(d deps) *cobra.Command {
	var opts volumeImportOptions
	cmd := &cobra.Command{
		Use:   "import [flags] NAME [FILE|-]",
		Short: "Fill a volume with the files of a tar",
		Long: `Fill a volume with the files of a tar, plain or compressed with gzip or zstd, and print
its name. The volume is made, or has no files and no running sandbox. All files are
unpacked, or none. FILE "-", or none, is stdin. Devices and sockets are left out.`,
		Example: `  sandboxd volume export cache | sandboxd volume import copy
  tar c -C site . | sandboxd volume import site`,
		Args: cmdline.UsageArgs(cobra.RangeArgs(1, 2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "" {
				return cmdline.Usagef("the volume has an empty name")
			}
			return runVolumeImport(cmd.Context(), args[0], append(args, "-")[1], opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmd.Flags().BoolVar(&opts.json, "json", false, "print the volume as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runVolumeImport(ctx context.Context, name, file string, opts volumeImportOptions, d deps) error {
	req, err := opts.request(name)
	if err != nil {
		return err
	}
	if file == "-" && cmdline.IsTerminal(d.Stdin) {
		return cmdline.Usagef("a tar is expected on stdin, which is a terminal")
	}
	in, err := openInput(file, d.Stdin)
	if err != nil {
		return err
	}
	defer in.Close()
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	v, err := c.ImportVolume(ctx, in, req)
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, v)
	}
	printGaps(d, true, v.Skipped, v.SkippedMore)
	_, err = fmt.Fprintln(d.Stdout, cmdline.Printable(v.Name))
	return err
}
