package cli

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// stream is the name of stdin or stdout as one side of a copy.
const stream = "-"

// tarIn extracts the archive on stdin in a sandbox, which checks every name itself.
func tarIn(ctx context.Context, c *client.Client, to place, d deps) error {
	if cmdline.IsTerminal(d.Stdin) {
		return cmdline.Usagef("a tar archive is expected on stdin, which is a terminal")
	}
	target := path.Clean(to.path)
	there, err := probe(ctx, c, to.sandbox, target)
	if err != nil {
		return err
	}
	if there == file {
		return fmt.Errorf("%s:%s exists and is not a directory", to.sandbox, target)
	}
	in, err := newInterruptible(d.Stdin)
	if err != nil {
		return err
	}
	defer in.interrupt()
	defer context.AfterFunc(ctx, in.interrupt)()
	return c.ArchiveIn(ctx, to.sandbox, target, io.MultiReader(in, untilInterrupted{ctx}))
}

// untilInterrupted ends a stream: with an error if ctx has ended, so that an archive that was cut
// off is not taken for a whole one.
type untilInterrupted struct {
	ctx context.Context //nolint:containedctx // io.Reader has no room for it
}

func (u untilInterrupted) Read([]byte) (int, error) {
	if err := context.Cause(u.ctx); err != nil {
		return 0, err
	}
	return 0, io.EOF
}

// tarOut writes an archive of a file or tree to stdout.
func tarOut(ctx context.Context, c *client.Client, from place, opts cpOptions, d deps) error {
	if cmdline.IsTerminal(d.Stdout) {
		return cmdline.Usagef("a tar archive does not go to a terminal; connect stdout to a file or a program")
	}
	source := path.Clean(from.path)
	what, err := probe(ctx, c, from.sandbox, source)
	if err != nil {
		return err
	}
	r, err := c.ArchiveOut(ctx, from.sandbox, source)
	if err != nil {
		return err
	}
	defer r.Close()
	top := path.Base(source)
	if from.contents() {
		top = "."
	}
	stdout, _, stop, err := interruptibleOutput(ctx, d)
	if err != nil {
		return err
	}
	defer stop()
	out := tar.NewWriter(stdout)
	if what != file {
		err = topEntry(ctx, c, out, from.sandbox, source, top)
	}
	if err == nil {
		err = retop(out, r, top, what == file, opts.max.Bytes)
	}
	if err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("copy %s:%s: %w", from.sandbox, source, err)
	}
	return nil
}

// topEntry writes the entry of the directory itself, which the daemon's archives lack.
func topEntry(ctx context.Context, c *client.Client, out *tar.Writer, id, source, top string) error {
	dir, err := c.StatFile(ctx, id, source, true)
	if err != nil {
		return err
	}
	mode, err := strconv.ParseInt(dir.Mode, 8, 16)
	if err != nil {
		return fmt.Errorf("mode %q: %w", cmdline.Printable(dir.Mode), err)
	}
	return out.WriteHeader(&tar.Header{
		Typeflag: tar.TypeDir, Name: top + "/", Mode: mode, ModTime: dir.MTime.Truncate(time.Second), Uid: int(dir.UID), Gid: int(dir.GID),
	})
}

// maxLinks bounds what retop remembers of an archive.
const maxLinks = 1 << 20

// retop copies an archive with names below top instead of relative ones. The archive of a file has
// one entry, which gets the name top. Devices and their like are left out. Names that lead out, or
// through a link of the archive, are refused: who extracts the copy may use a program that follows
// them. So is content of more than most bytes.
func retop(out *tar.Writer, r io.Reader, top string, file bool, most int64) error {
	in := tar.NewReader(r)
	links := map[string]bool{}
	below := func(name string) (string, error) {
		local, err := localName(name)
		if file || err != nil {
			return top, err
		}
		return path.Join(top, local), nil
	}
	for {
		hdr, err := in.Next()
		if errors.Is(err, io.EOF) {
			return out.Close()
		}
		if err != nil {
			return fmt.Errorf("read the archive: %w", err)
		}
		if !slices.Contains([]byte{tar.TypeReg, tar.TypeDir, tar.TypeLink, tar.TypeSymlink}, hdr.Typeflag) {
			continue
		}
		if most -= hdr.Size; most < 0 {
			return errors.New("it is larger than --max allows")
		}
		name, err := below(hdr.Name)
		if err != nil {
			return err
		}
		for p := name; p != "." && p != "/"; p = path.Dir(p) {
			if links[p] {
				return fmt.Errorf("the archive has %q twice, or below a link", cmdline.Printable(name))
			}
		}
		if hdr.Typeflag == tar.TypeSymlink {
			if links[name] = true; len(links) > maxLinks {
				return fmt.Errorf("it has more than %d symbolic links", maxLinks)
			}
		}
		if hdr.Name = name; hdr.Typeflag == tar.TypeDir {
			hdr.Name += "/"
		}
		if hdr.Typeflag == tar.TypeLink {
			if hdr.Linkname, err = below(hdr.Linkname); err != nil {
				return err
			}
		}
		hdr.Format = tar.FormatPAX // the names may need it, and parts of seconds do
		if err := out.WriteHeader(hdr); err != nil {
			return fmt.Errorf("write %s: %w", hdr.Name, err)
		}
		if _, err := io.Copy(out, in); err != nil { //nolint:gosec // nothing is decompressed, and nothing kept
			return fmt.Errorf("write %s: %w", hdr.Name, err)
		}
	}
}
