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

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type exportOptions struct {
	output string
	format string
}

func newExport(d deps) *cobra.Command {
	opts := exportOptions{format: "oci"}
	cmd := &cobra.Command{
		Use:   "export [flags] REFERENCE",
		Short: "Write an image to an archive",
		Long: `Write a stored image to an archive: a tar of an OCI layout, which has the very
blobs that were pulled, or what docker load reads. The same image is always the
same archive. The file appears whole or not at all; a device or a pipe is written
into.`,
		Example: `  sandboxd export -o debian.tar debian:12
  skopeo inspect oci-archive:debian.tar`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runExport(cmd.Context(), args[0], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *exportOptions) addFlags(f *pflag.FlagSet) {
	f.StringVarP(&o.output, "output", "o", "", "`file` to write (default: stdout, unless that is a terminal)")
	f.StringVar(&o.format, "format", o.format, "`format`: oci or docker")
}

func runExport(ctx context.Context, reference string, opts exportOptions, d deps) error {
	if opts.format != "oci" && opts.format != "docker" {
		return cmdline.Usagef("--format %q: want oci or docker", opts.format)
	}
	return writeArchive(ctx, reference, opts.output, d, func(ctx context.Context, c *client.Client) (io.ReadCloser, error) {
		return c.ExportImage(ctx, reference, opts.format)
	})
}

// writeArchive writes an archive from the daemon to a file, or to stdout.
func writeArchive(ctx context.Context, what, output string, d deps, open func(context.Context, *client.Client) (io.ReadCloser, error)) (err error) {
	toStdout := output == "" || output == "-"
	if toStdout && cmdline.IsTerminal(d.Stdout) {
		return cmdline.Usagef("an archive does not belong on a terminal; name a file with -o")
	}
	c := d.Client()
	defer c.Close()
	r, err := open(ctx, c)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // read to its end, or abandoned
	if toStdout {
		_, err := io.Copy(d.Stdout, r)
		return brokeOff(ctx, what, err)
	}
	// Write into a device, pipe or socket instead of replacing it.
	target := output
	if fi, err := os.Stat(target); err == nil {
		if !fi.Mode().IsRegular() {
			return exportInto(ctx, what, target, r)
		}
		// Keep a link, and replace its target.
		if target, err = filepath.EvalSymlinks(target); err != nil {
			return fmt.Errorf("write %s: %w", output, err)
		}
	} else if _, lerr := os.Lstat(target); lerr == nil {
		return fmt.Errorf("write %s: the link leads nowhere: %w", target, err)
	}
	// Write beside the target and rename, so that the name never has a partial archive.
	f, err := os.CreateTemp(filepath.Dir(target), ".sandboxd-export-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", output, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if _, err := io.Copy(f, r); err != nil {
		return errors.Join(brokeOff(ctx, what, err), f.Close())
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", output, err)
	}
	return os.Rename(f.Name(), target)
}

// exportInto writes an archive into a device or pipe.
func exportInto(ctx context.Context, reference, target string, r io.Reader) (err error) {
	f, err := os.OpenFile(target, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("write: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = io.Copy(f, r)
	return brokeOff(ctx, reference, err)
}

// brokeOff explains an archive that ends early: the daemon cannot report an error once it has begun
// to send.
func brokeOff(ctx context.Context, reference string, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("export %s: the daemon broke off; its log says why, and sandboxd images --verify whether the image is damaged", reference)
	}
	return err
}
