package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

type cpOptions struct {
	max size
}

func newCp(d deps) *cobra.Command {
	opts := cpOptions{max: size{set: true, bytes: 16 * units.GiB, least: 1}}
	cmd := &cobra.Command{
		Use:   "cp [flags] SOURCE SANDBOX:PATH\n  sandboxd cp [flags] SANDBOX:PATH DESTINATION",
		Short: "Copy files into or out of a sandbox",
		Long: `Copy a file or a directory tree into a sandbox or out of it. PATH starts at the
sandbox's root. Where the destination is a directory or ends with "/", the copy is
put into it under the source's name; a source that ends with "/." stands for what
is in the directory. Symbolic links are copied as they are; devices, sockets and pipes are
left out. A local file with a colon in its name is written as ./a:b.

What a sandbox sends is not trusted: nothing is ever written outside the
destination, whatever names and links it makes up.`,
		Example: `  sandboxd cp main.py work:/app/
  sandboxd cp work:/app/out ./results
  sandboxd cp src/. work:/app`,
		Args: usageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error { return runCp(cmd.Context(), args[0], args[1], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	exitStatus(cmd, exitPlain)
	return cmd
}

func (o *cpOptions) addFlags(f *pflag.FlagSet) {
	f.Var(&o.max, "max", "most that is copied out of a sandbox")
}

// place is one side of a copy.
type place struct {
	sandbox string // empty: the local file system
	path    string // as given
}

// parsePlace tells ID:PATH from a local name: a colon before any slash makes the difference.
func parsePlace(arg string) (place, error) {
	if arg == "" {
		return place{}, usagef("a source or destination has an empty name")
	}
	if strings.ContainsRune(arg, 0) {
		return place{}, usagef("%q contains a NUL byte", arg)
	}
	id, p, ok := strings.Cut(arg, ":")
	if !ok || strings.ContainsRune(id, '/') || strings.HasPrefix(arg, ".") {
		return place{path: arg}, nil
	}
	if id == "" {
		return place{}, usagef("%q names no sandbox before the colon", arg)
	}
	if p == "" {
		return place{}, usagef("%q names no path after the colon", arg)
	}
	if !strings.HasPrefix(p, "/") {
		p = "/" + p
	}
	return place{sandbox: id, path: p}, nil
}

// contents says that the place ends with "/.": not the directory is meant but what is in it.
func (p place) contents() bool {
	return p.path == "." || p.path == "/" || strings.HasSuffix(p.path, "/.")
}

// directory says that the place can be a directory only.
func (p place) directory() bool { return strings.HasSuffix(p.path, "/") || p.contents() }

func runCp(ctx context.Context, source, destination string, opts cpOptions, d deps) error {
	from, err := parsePlace(source)
	if err != nil {
		return err
	}
	to, err := parsePlace(destination)
	if err != nil {
		return err
	}
	c := d.client()
	defer c.Close()
	switch {
	case from.sandbox == "" && to.sandbox != "":
		return copyIn(ctx, c, from, to, d)
	case from.sandbox != "" && to.sandbox == "":
		return copyOut(ctx, c, from, to, opts, d)
	case from.sandbox == "":
		return usagef("neither %q nor %q is in a sandbox: write SANDBOX:PATH", source, destination)
	}
	return usagef("both %q and %q are in a sandbox: copy through a local directory", source, destination)
}

// copyIn sends a local file or tree.
func copyIn(ctx context.Context, c *client.Client, from, to place, d deps) error {
	name := filepath.Clean(from.path)
	fi, err := os.Lstat(name)
	if err == nil && from.directory() && fi.Mode().Type() == fs.ModeSymlink {
		fi, err = os.Stat(name) // "link/" is what the link points to
	}
	if err != nil {
		return err
	}
	if from.directory() && !fi.IsDir() {
		return fmt.Errorf("%s is not a directory", from.path)
	}
	target := path.Clean(to.path)
	there, err := probe(ctx, c, to.sandbox, target)
	if err != nil {
		return err
	}
	// The archive is extracted below a directory, so that one file and a tree look alike.
	below, top := path.Dir(target), path.Base(target)
	switch {
	case there == file && (fi.IsDir() || to.directory()):
		return fmt.Errorf("%s:%s exists and is not a directory", to.sandbox, target)
	case from.contents():
		below, top = target, "."
	case there == other || to.directory():
		abs, err := filepath.Abs(name) // the name of ".." is not ".."
		if err != nil {
			return err
		}
		below, top = target, filepath.Base(abs)
	}
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := pack(w, name, fi, top, d.stderr)
		_ = w.CloseWithError(err) // nil is io.EOF
		done <- err
	}()
	err = c.ArchiveIn(ctx, to.sandbox, below, r)
	_ = r.CloseWithError(errStopped) // nobody reads any more
	if perr := <-done; perr != nil && !errors.Is(perr, errStopped) {
		return perr
	}
	return err
}

var errStopped = errors.New("the receiver has stopped")

// kind is what stands at a path in a sandbox, as far as copying must know.
type kind int

const (
	missing kind = iota
	file
	other // a directory, or what the daemon will refuse with a better reason than we could give
)

// probe finds out by opening the path as a file: that is refused where it is anything else.
func probe(ctx context.Context, c *client.Client, id, p string) (kind, error) {
	r, err := c.ReadFile(ctx, id, p)
	switch {
	case err == nil:
		return file, r.Close()
	case errors.Is(err, &api.Problem{Code: api.CodeInvalid}):
		return other, nil
	case errors.Is(err, &api.Problem{Code: api.CodeNotFound}):
		// The path or the sandbox: the difference matters before anything is sent.
		_, gerr := c.GetSandbox(ctx, id)
		return missing, gerr
	}
	return missing, err
}

// copyOut receives a file or a tree.
func copyOut(ctx context.Context, c *client.Client, from, to place, opts cpOptions, d deps) error {
	source := path.Clean(from.path)
	// The destination that the user named is trusted, links and all. Everything below it is not: a link that an earlier
	// copy brought along must not lead the next one away.
	rootDir, top := filepath.Clean(to.path), path.Base(source)
	fi, err := os.Stat(rootDir)
	switch {
	case err == nil && fi.IsDir():
		if from.contents() {
			top = "."
		}
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case err == nil && to.directory():
		return fmt.Errorf("%s is not a directory", to.path)
	case err != nil && to.directory():
		return fmt.Errorf("%s does not exist", to.path)
	default: // a new name, or a file that is replaced
		rootDir, top = filepath.Dir(rootDir), filepath.Base(rootDir)
	}
	what, err := probe(ctx, c, from.sandbox, source)
	if err != nil {
		return err
	}
	r, err := c.ArchiveOut(ctx, from.sandbox, source)
	if err != nil {
		return err
	}
	defer r.Close()
	root, err := os.OpenRoot(rootDir)
	if err != nil {
		return err
	}
	defer root.Close()
	u := unpacker{root: root, maxBytes: opts.max.bytes, notes: d.stderr}
	unpack := u.tree
	if what == file {
		unpack = u.file
	}
	if err := unpack(r, top); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("copy %s:%s: %w", from.sandbox, source, err)
	}
	return nil
}
