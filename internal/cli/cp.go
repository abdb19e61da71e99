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
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type cpOptions struct {
	max cmdline.Size
}

func newCp(d deps) *cobra.Command {
	opts := cpOptions{max: cmdline.Size{Given: true, Bytes: 16 * units.GiB, Least: 1}}
	cmd := &cobra.Command{
		Use:   "cp [flags] SOURCE SANDBOX:PATH\n  sandboxd cp [flags] SANDBOX:PATH DESTINATION",
		Short: "Copy files into or out of a sandbox",
		Long: `Copy a file or a directory tree into a sandbox or out of it. PATH starts at the
sandbox's root. Where the destination is a directory or ends with "/", the copy is
put into it under the source's name; a source that ends with "/." stands for what
is in the directory. Symbolic links are copied as they are; devices, sockets and pipes are
left out. A local file with a colon in its name is written as ./a:b. From a sandbox
that has ended files are copied too; to copy into it, start it (--idle runs nothing).

Instead of a local name, "-" means a tar archive: of stdin, put into the directory
PATH, or to stdout, with names that begin with the last part of PATH.

What a sandbox sends is not trusted: nothing is ever written outside the
destination, whatever names and links it makes up.`,
		Example: `  sandboxd cp main.py work:/app/
  sandboxd cp work:/app/out ./results
  sandboxd cp src/. work:/app
  sandboxd cp work:/var/log - | tar tv
  tar c src | sandboxd cp - work:/app`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error { return runCp(cmd.Context(), args[0], args[1], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *cpOptions) addFlags(f *pflag.FlagSet) {
	f.Var(&o.max, "max", "maximum size to copy out of a sandbox")
}

// place is one side of a copy.
type place struct {
	sandbox string // empty: the local file system
	path    string // as given on the command line
}

// parsePlace parses ID:PATH or a local name, which has no colon before its first slash.
func parsePlace(arg string) (place, error) {
	if arg == "" {
		return place{}, cmdline.Usagef("a source or destination has an empty name")
	}
	if strings.ContainsRune(arg, 0) {
		return place{}, cmdline.Usagef("%q contains a NUL byte", arg)
	}
	id, p, ok := strings.Cut(arg, ":")
	if !ok || strings.ContainsRune(id, '/') || strings.HasPrefix(arg, ".") {
		return place{path: arg}, nil
	}
	if id == "" {
		return place{}, cmdline.Usagef("%q names no sandbox before the colon", arg)
	}
	if p == "" {
		return place{}, cmdline.Usagef("%q names no path after the colon", arg)
	}
	if !strings.HasPrefix(p, "/") {
		p = "/" + p
	}
	return place{sandbox: id, path: p}, nil
}

// contents reports whether the place ends with "/.", which means the entries of the directory.
func (p place) contents() bool {
	return p.path == "." || path.Clean(p.path) == "/" || strings.HasSuffix(p.path, "/.")
}

// directory reports whether the place can only be a directory.
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
	c := d.Client()
	defer c.Close()
	switch {
	case from.sandbox == "" && to.sandbox != "" && from.path == stream:
		return hintIdle(ctx, c, to.sandbox, tarIn(ctx, c, to, d))
	case from.sandbox != "" && to.sandbox == "" && to.path == stream:
		return tarOut(ctx, c, from, opts, d)
	case from.sandbox == "" && to.sandbox != "":
		return hintIdle(ctx, c, to.sandbox, copyIn(ctx, c, from, to, d))
	case from.sandbox != "" && to.sandbox == "":
		return copyOut(ctx, c, from, to, opts, d)
	case from.sandbox == "":
		return cmdline.Usagef("neither %q nor %q is in a sandbox: write SANDBOX:PATH", source, destination)
	}
	return cmdline.Usagef("both %q and %q are in a sandbox: copy through a local directory", source, destination)
}

// hintIdle says how to copy into a sandbox that does not run, if that is why a copy was refused.
func hintIdle(ctx context.Context, c *client.Client, id string, err error) error {
	p, ok := errors.AsType[*api.Problem](err)
	if !ok || p.Code != api.CodeConflict {
		return err
	}
	sb, serr := c.GetSandbox(ctx, id)
	if serr != nil || sb.State != api.StateStopped && sb.State != api.StateLost {
		return err
	}
	hinted, name := *p, cmdline.Printable(sb.Name)
	hinted.Hint = fmt.Sprintf("files go into a sandbox that runs: sandboxd start --idle %s leaves its main process out; then copy, and sandboxd stop %s", name, name)
	return &hinted
}

// copyIn sends a local file or tree.
func copyIn(ctx context.Context, c *client.Client, from, to place, d deps) error {
	name := filepath.Clean(from.path)
	fi, err := os.Lstat(name)
	if err == nil && from.directory() && fi.Mode().Type() == fs.ModeSymlink {
		fi, err = os.Stat(name) // "link/" means the link's target
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
	// Extract the archive below a directory, so that a file and a tree are alike.
	below, top := path.Dir(target), path.Base(target)
	switch {
	case there == file && (fi.IsDir() || to.directory()):
		return fmt.Errorf("%s:%s exists and is not a directory", to.sandbox, target)
	case from.contents():
		below, top = target, "."
	case there == other || to.directory():
		abs, err := filepath.Abs(name) // ".." has a real name
		if err != nil {
			return err
		}
		below, top = target, filepath.Base(abs)
	}
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := pack(w, name, fi, top, d.Stderr)
		_ = w.CloseWithError(err) // nil is io.EOF
		done <- err
	}()
	err = c.ArchiveIn(ctx, to.sandbox, below, r)
	_ = r.CloseWithError(errStopped) // the reader is gone
	if perr := <-done; perr != nil && !errors.Is(perr, errStopped) {
		return perr
	}
	return err
}

var errStopped = errors.New("the receiver has stopped")

// kind is the type of a path in a sandbox, as far as copying needs it.
type kind int

const (
	missing kind = iota
	file
	other // a directory, or a path that the daemon refuses with a better reason
)

// probe determines the kind by opening the path as a file, which fails for anything else.
func probe(ctx context.Context, c *client.Client, id, p string) (kind, error) {
	r, err := c.ReadFile(ctx, id, p)
	switch {
	case err == nil:
		return file, r.Close()
	case errors.Is(err, &api.Problem{Code: api.CodeInvalid}):
		return other, nil
	case errors.Is(err, &api.Problem{Code: api.CodeNotFound}):
		// Tell a missing path from a missing sandbox before sending anything.
		_, gerr := c.GetSandbox(ctx, id)
		return missing, gerr
	}
	return missing, err
}

// copyOut receives a file or a tree.
func copyOut(ctx context.Context, c *client.Client, from, to place, opts cpOptions, d deps) error {
	source := path.Clean(from.path)
	// The named destination is trusted, including its links. Entries below it are not: a link from an
	// earlier copy must not lead this one out.
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
	default: // a new name, or a file to replace
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
	u := unpacker{root: root, maxBytes: opts.max.Bytes, notes: d.Stderr}
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
