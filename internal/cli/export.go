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
		Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runExport(cmd.Context(), args[0], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	exitStatus(cmd, exitPlain)
	return cmd
}

func (o *exportOptions) addFlags(f *pflag.FlagSet) {
	f.StringVarP(&o.output, "output", "o", "", "`file` to write (default: stdout, unless that is a terminal)")
	f.StringVar(&o.format, "format", o.format, "`format`: oci or docker")
}

func runExport(ctx context.Context, reference string, opts exportOptions, d deps) error {
	if opts.format != "oci" && opts.format != "docker" {
		return usagef("--format %q: want oci or docker", opts.format)
	}
	return writeArchive(ctx, reference, opts.output, d, func(ctx context.Context, c *client.Client) (io.ReadCloser, error) {
		return c.ExportImage(ctx, reference, opts.format)
	})
}

// writeArchive writes what the daemon sends to a file, or to stdout.
func writeArchive(ctx context.Context, what, output string, d deps, open func(context.Context, *client.Client) (io.ReadCloser, error)) (err error) {
	toStdout := output == "" || output == "-"
	if toStdout && isTerminal(d.stdout) {
		return usagef("an archive does not belong on a terminal; name a file with -o")
	}
	c := d.client()
	defer c.Close()
	r, err := open(ctx, c)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // read to its end, or given up
	if toStdout {
		_, err := io.Copy(d.stdout, r)
		return brokeOff(ctx, what, err)
	}
	// A device, a pipe or a socket's file is written into: it is what the name stands for, not to be replaced.
	target := output
	if fi, err := os.Stat(target); err == nil {
		if !fi.Mode().IsRegular() {
			return exportInto(ctx, what, target, r)
		}
		// A link stays one.
		if target, err = filepath.EvalSymlinks(target); err != nil {
			return fmt.Errorf("write %s: %w", output, err)
		}
	} else if _, lerr := os.Lstat(target); lerr == nil {
		return fmt.Errorf("write %s: the link leads nowhere: %w", target, err)
	}
	// Beside, so that what stands under the name is an archive, whole.
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

// exportInto writes an archive to what is no regular file and stays what it is.
func exportInto(ctx context.Context, reference, target string, r io.Reader) (err error) {
	f, err := os.OpenFile(target, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("write: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = io.Copy(f, r)
	return brokeOff(ctx, reference, err)
}

// brokeOff explains an archive that ends too early: the daemon cannot say why once it has begun to send.
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
