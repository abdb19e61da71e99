package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type imagesOptions struct {
	verify  bool
	quiet   bool
	filters []string
	format  string
	json    bool
}

func newImages(d deps) *cobra.Command {
	var opts imagesOptions
	cmd := &cobra.Command{
		Use:   "images",
		Short: "List the images that are here",
		Long: `List the images that the daemon has. SIZE is what was pulled, compressed. UNIQUE
is what an image alone takes on disk, blobs and unpacked files, and its removal
frees; SHARED is what other images need too.

--verify reads all of it. It proves that every blob has its digest, that every
layer unpacks to what its image promises, and that every file, directory and link
of a layer is in its unpacked tree with the same type, permissions, size, target
and bytes. It does not look at owners, times and extended attributes, nor for
files that are there besides; and files that only the sandboxes' own ids may read
are counted, not compared. The layers of snapshots, which have no blob, are read and
held against what they were when they were taken.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if opts.verify {
				return runVerify(cmd.Context(), opts, d)
			}
			return runImages(cmd.Context(), opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newPrune(d))
	return cmd
}

func (o *imagesOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.verify, "verify", false, "read everything that is stored and say what is damaged")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "print digests only, each once")
	f.StringArrayVar(&o.filters, "filter", nil, "only those with `key=value`: reference (with * and ?), digest or platform; may be given again")
	f.StringVar(&o.format, "format", "", formatUsage)
	f.BoolVar(&o.json, "json", false, "print the list as JSON")
}

// imageKeys compare an image with the value of a filter.
var imageKeys = map[string]func(i *api.Image, want string) bool{
	"reference": func(i *api.Image, want string) bool { return matchImage(i.Reference, want) },
	"digest":    func(i *api.Image, want string) bool { return i.Digest == want },
	"platform":  func(i *api.Image, want string) bool { return i.Platform == want },
}

func runImages(ctx context.Context, opts imagesOptions, d deps) error {
	wanted, err := parseFilters(opts.filters, imageKeys)
	if err != nil {
		return err
	}
	format, err := newFormat(opts.format)
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	images, err := c.Images(ctx)
	if err != nil {
		return err
	}
	images = slices.DeleteFunc(images, func(i api.Image) bool { return !wanted(&i) })
	switch {
	case opts.json:
		return cmdline.PrintJSON(d.Stdout, api.ImageList{Images: append([]api.Image{}, images...)})
	case opts.quiet:
		printed := []string{""} // an image has a line for each of its names; the host's may have no digest yet
		for _, i := range images {
			if slices.Contains(printed, i.Digest) {
				continue
			}
			printed = append(printed, i.Digest)
			if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(i.Digest)); err != nil {
				return err
			}
		}
		return nil
	case format != nil:
		return printAll(d.Stdout, format, images)
	}
	rows := [][]string{{"REFERENCE", "DIGEST", "PLATFORM", "LAYERS", "SIZE", "SHARED", "UNIQUE", "PULLED"}}
	for _, i := range images {
		rows = append(rows, []string{
			i.Reference, cmdline.ShortDigest(i.Digest), i.Platform, strconv.Itoa(i.Layers), sizeOf(i.Size), sizeOf(i.SharedSize), sizeOf(i.UniqueSize), since(i.PulledAt),
		})
	}
	return cmdline.Table(d.Stdout, rows)
}

func sizeOf(n int64) string { return units.HumanSize(float64(n)) }

func runVerify(ctx context.Context, opts imagesOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	v, err := c.VerifyImages(ctx)
	if err != nil {
		return err
	}
	if opts.json {
		err = cmdline.PrintJSON(d.Stdout, v)
	} else {
		for _, p := range v.Problems {
			hint := "of " + cmdline.Printable(strings.Join(p.Images, ", ")) + "; remove it with sandboxd rmi and pull it anew"
			if len(p.Images) == 0 {
				hint = "only builds have kept it; sandboxd images prune removes it"
			} else if name, ok := strings.CutPrefix(p.Images[0], "snapshot "); ok {
				hint = "of a snapshot; remove it with sandboxd snapshots rm " + cmdline.Printable(name)
			}
			fmt.Fprintf(d.Stderr, "sandboxd: %s: %s\nhint: %s\n", cmdline.Printable(p.Digest), cmdline.Printable(p.Detail), hint)
		}
		_, err = fmt.Fprintf(d.Stdout, "%d blobs (%s) read, %d trees compared, %d entries alike or told above, %d out of sight, %d layers of snapshots read; %d problems\n",
			v.Blobs, sizeOf(v.Bytes), v.Layers, v.Entries, v.Unseen, v.Snapshots, len(v.Problems))
	}
	if err == nil && len(v.Problems) > 0 {
		return &cmdline.ExitError{Code: cmdline.CodeError}
	}
	return err
}

type pruneOptions struct {
	all  bool
	json bool
}

func newPrune(d deps) *cobra.Command {
	var opts pruneOptions
	cmd := &cobra.Command{
		Use:   "prune",
		Short: "Remove images that nothing needs",
		Long: `Remove images whose tag has moved on to another one, with --all every image, the
steps that builds have kept to be quicker the next time, and what is stored
without belonging to any. What a sandbox has stays, whatever its state. Prints
what is gone and how many bytes that freed.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runPrune(cmd.Context(), opts, d) },
	}
	f := cmd.Flags()
	f.BoolVarP(&opts.all, "all", "a", false, "every image that no sandbox has")
	f.BoolVar(&opts.json, "json", false, "print what was removed as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runPrune(ctx context.Context, opts pruneOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	out, err := c.PruneImages(ctx, api.PruneImages{All: opts.all})
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, out)
	}
	return printRemoved(d, out.Removed, fmt.Sprintf("%d images, %d steps of builds, %s", len(out.Removed), out.Steps, sizeOf(out.Bytes)))
}
