package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type importOptions struct {
	platform string
	rootfs   bool
	config   api.ImageConfig
	json     bool
}

func newImport(d deps) *cobra.Command {
	var opts importOptions
	cmd := &cobra.Command{
		Use:   "import [flags] FILE|DIRECTORY|- [REFERENCE]",
		Short: "Import images from an archive",
		Long: `Import the images of an archive and print their references and digests: an OCI
layout, as a directory or a tar; what docker save writes; or, with --rootfs, a
tar of a root file system. "-" is stdin. Archives may be compressed with gzip or
zstd. Images are called REFERENCE, else as the archive says. Progress is shown on
a terminal.`,
		Example: `  skopeo copy docker://debian:12 oci-archive:debian.tar:debian:12
  sandboxd import debian.tar
  mmdebstrap bookworm - | sandboxd import --rootfs --cmd bash - tools/base:1.0`,
		Args: cmdline.UsageArgs(cobra.RangeArgs(1, 2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			reference := ""
			if len(args) == 2 {
				reference = args[1]
			}
			return runImport(cmd.Context(), args[0], reference, opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *importOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.platform, "platform", "", "`platform` such as linux/arm64 (default: this host's)")
	f.BoolVar(&o.rootfs, "rootfs", false, "the archive is a root file system; the next flags say how it is run")
	f.StringArrayVar(&o.config.Entrypoint, "entrypoint", nil, "`word` of the command that is always run; once for each word")
	f.StringArrayVar(&o.config.Cmd, "cmd", nil, "`word` of the command, or of its arguments, that can be replaced; once for each word")
	f.StringArrayVarP(&o.config.Env, "env", "e", nil, "`NAME=value` of the environment")
	f.StringVarP(&o.config.WorkingDir, "cwd", "w", "", "`directory` in which programs start; also --workdir")
	f.SetNormalizeFunc(normalize)
	f.StringVarP(&o.config.User, "user", "u", "", "`user` as whom programs run")
	f.BoolVar(&o.json, "json", false, "print the images as JSON")
}

func (o *importOptions) check(reference string) error {
	c := o.config
	configured := len(c.Entrypoint)+len(c.Cmd)+len(c.Env) > 0 || c.WorkingDir != "" || c.User != ""
	switch {
	case !o.rootfs && configured:
		return cmdline.Usagef("--entrypoint, --cmd, --env, --cwd and --user are for --rootfs; an image brings its own")
	case o.rootfs && reference == "":
		return cmdline.Usagef("a root file system has no name; give a REFERENCE, like tools/base:1.0")
	}
	return nil
}

func runImport(ctx context.Context, source, reference string, opts importOptions, d deps) (err error) {
	if err := opts.check(reference); err != nil {
		return err
	}
	r, wait, err := opts.open(source, d)
	if err != nil {
		return err
	}
	c, err := d.Daemon(ctx)
	if err != nil {
		return errors.Join(err, r.Close())
	}
	defer c.Close()
	p := cmdline.NewProgress(d.Stderr)
	images, err := c.ImportImages(ctx, r, client.ImportOptions{
		Reference: reference, Platform: opts.platform, Rootfs: opts.rootfs, Config: opts.config, Progress: p.Event,
	})
	p.End()
	_ = r.Close() // read to its end, or no longer needed
	if perr := wait(); perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
		return perr
	}
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, api.ImagesImported{Images: images})
	}
	for i := range images {
		if err := printImage(d.Stdout, &images[i]); err != nil {
			return err
		}
	}
	return nil
}

// open opens the source as a stream. Call wait when the reader is done.
func (o *importOptions) open(source string, d deps) (io.ReadCloser, func() error, error) {
	nothing := func() error { return nil }
	if source == "-" {
		if cmdline.IsTerminal(d.Stdin) {
			return nil, nil, cmdline.Usagef("an archive is expected on stdin, which is a terminal")
		}
		return io.NopCloser(d.Stdin), nothing, nil
	}
	fi, err := os.Stat(source)
	if err != nil {
		return nil, nil, err
	}
	if !fi.IsDir() {
		f, err := os.Open(source)
		return f, nothing, err
	}
	if o.rootfs {
		return nil, nil, cmdline.Usagef("%s is a directory; give a root file system as a tar, which knows its owners: tar -C %s -c . | sandboxd import --rootfs - REFERENCE", source, source)
	}
	if _, err := os.Stat(filepath.Join(source, "index.json")); err != nil {
		return nil, nil, fmt.Errorf("%s is not an OCI layout: %w", source, err)
	}
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := pack(w, filepath.Clean(source), fi, ".", d.Stderr)
		_ = w.CloseWithError(err) // nil is io.EOF
		done <- err
	}()
	return r, func() error { return <-done }, nil
}
