package cli

import (
	"context"
	"fmt"
	"strconv"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newSystem(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "system",
		Short: "See what everything together uses",
		Long:  `See what everything together uses.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			if why := foreignSystem[args[0]]; why != "" {
				return cmdline.Usagef("there is no command \"system %s\": %s", args[0], why)
			}
			return cmdline.Usagef("there is no command \"system %s\"; there is sandboxd system df", args[0])
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newSystemDf(d))
	return cmd
}

// foreignSystem are commands of docker system that are none here, with what to type instead.
var foreignSystem = map[string]string{
	"prune":  "sandboxd prune removes ended sandboxes, sandboxd images prune images",
	"info":   "sandboxd version and sandboxd doctor describe the daemon and this host",
	"events": "sandboxd events shows them",
}

type dfOptions struct {
	verbose bool
	format  string
	json    bool
}

func newSystemDf(d deps) *cobra.Command {
	var opts dfOptions
	cmd := &cobra.Command{
		Use:   "df",
		Short: "Show disk space by kind of object",
		Long: `Show the disk space of your images, build cache, snapshots, sandboxes, volumes and
logs. Layers that several share are counted once. RECLAIMABLE goes when what is not
in use is removed: "sandboxd images prune --all", "sandboxd snapshots prune",
"sandboxd volume prune --all" and "sandboxd prune" remove it.

The space of a sandbox is that of the files that its programs have written or changed;
the daemon reads their names and sizes, and a sparse file counts with its holes.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runDf(cmd.Context(), opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *dfOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVarP(&o.verbose, "verbose", "v", false, "list each image, snapshot, sandbox and volume, too")
	f.StringVar(&o.format, "format", "", formatUsage)
	f.BoolVar(&o.json, "json", false, "print all of it as JSON")
}

// dfRow is a kind of object as templates see it.
type dfRow struct {
	Type string
	api.DiskShare
}

// TotalCount and Size are the fields of docker's templates.
func (r dfRow) TotalCount() int { return r.Count }

// Size returns the bytes in words.
func (r dfRow) Size() string { return units.HumanSize(float64(r.Bytes)) }

// Freeable returns the reclaimable bytes in words, and in percent.
func (r dfRow) Freeable() string {
	text := units.HumanSize(float64(r.Reclaimable))
	if r.Bytes > 0 {
		text += fmt.Sprintf(" (%d%%)", 100*r.Reclaimable/r.Bytes)
	}
	return text
}

func runDf(ctx context.Context, opts dfOptions, d deps) error {
	format, err := newFormat(opts.format)
	if err != nil {
		return err
	}
	if format != nil && opts.verbose {
		return cmdline.Usagef("--format prints a line for each kind of object, and --verbose each object; give one of them")
	}
	c := d.Client()
	defer c.Close()
	u, err := c.DiskUsage(ctx)
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, u)
	}
	rows := []dfRow{{"Images", u.Images}, {"Sandboxes", u.Sandboxes}, {"Snapshots", u.Snapshots}, {"Volumes", u.Volumes}, {"Logs", u.Logs}, {"Build cache", u.BuildCache}}
	if format != nil {
		return printAll(d.Stdout, format, rows)
	}
	table := [][]string{{"TYPE", "TOTAL", "ACTIVE", "SIZE", "RECLAIMABLE"}}
	for _, r := range rows {
		table = append(table, []string{r.Type, strconv.Itoa(r.Count), strconv.Itoa(r.Active), r.Size(), r.Freeable()})
	}
	if err := cmdline.Table(d.Stdout, table); err != nil || !opts.verbose {
		return err
	}
	return listUsage(ctx, c, u, d)
}

// listUsage prints a table for each kind of object.
func listUsage(ctx context.Context, c *client.Client, u *api.DiskUsage, d deps) error {
	images, err := c.Images(ctx)
	if err != nil {
		return err
	}
	snapshots, err := c.Snapshots(ctx, "")
	if err != nil {
		return err
	}
	size := func(n int64) string { return units.HumanSize(float64(n)) }
	ofImages := [][]string{{"IMAGE", "DIGEST", "SHARED SIZE", "UNIQUE SIZE", "SIZE"}}
	for _, i := range images {
		ofImages = append(ofImages, []string{i.Reference, i.Digest, size(i.SharedSize), size(i.UniqueSize), size(i.SharedSize + i.UniqueSize)})
	}
	ofSnapshots := [][]string{{"SNAPSHOT", "NAME", "CREATED", "SIZE"}}
	for _, s := range snapshots {
		ofSnapshots = append(ofSnapshots, []string{s.ID, s.Name, since(s.CreatedAt), size(s.Size)})
	}
	ofSandboxes := [][]string{{"SANDBOX", "NAME", "STATE", "FILES", "SIZE", "LOG"}}
	for _, f := range u.Files {
		row := []string{f.ID, f.Name, string(f.State), strconv.FormatInt(f.Files, 10), size(f.Bytes), size(f.Log)}
		if f.Unknown != "" {
			row[3], row[4] = unknown, unknown
		}
		ofSandboxes = append(ofSandboxes, row)
	}
	ofVolumes := [][]string{{"VOLUME", "SANDBOXES", "FILES", "SIZE"}}
	for _, v := range u.VolumeFiles {
		row := []string{v.Name, strconv.Itoa(v.Sandboxes), strconv.FormatInt(v.Inodes, 10), size(v.Bytes)}
		if v.Unknown != "" {
			row[2], row[3] = unknown, unknown
		}
		ofVolumes = append(ofVolumes, row)
	}
	for _, table := range [][][]string{ofImages, ofSandboxes, ofSnapshots, ofVolumes} {
		if _, err := fmt.Fprintln(d.Stdout); err != nil {
			return err
		}
		if err := cmdline.Table(d.Stdout, table); err != nil {
			return err
		}
	}
	return nil
}
