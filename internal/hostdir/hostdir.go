// Package hostdir opens directories and files of the host for sandboxes, as mounts that are
// attached nowhere.
//
// A source lies below one of the operator's roots. It is opened without following any link, and the
// mount is a copy of the one below the open descriptor: after that no path is resolved again.
//
// Only a process with CAP_SYS_ADMIN over its mount namespace can copy a mount. A broker that is
// root of the host does it itself, and maps the ids of the copy. The broker of an ordinary user
// starts this program once more in a user namespace and a mount namespace of its own ([Main]).
package hostdir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/runtime"
)

// Config bounds the openings. All paths are absolute and without links.
type Config struct {
	// Roots are the directories below which sources lie.
	Roots []string `json:"roots,omitempty"`
	// Own are directories of the daemon: no source is in one, or contains one.
	Own []string `json:"own,omitempty"`
	// Kept are the directories of the daemon's socket and config files. No source contains one, and no
	// file in one is a source; other directories in it may be.
	Kept []string `json:"kept,omitempty"`
}

// Root returns the path of a root in the form of [Config]. "/" is refused.
func Root(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("mount root %s: %w", path, err)
	}
	abs, err = filepath.EvalSymlinks(abs)
	if err != nil {
		return "", fmt.Errorf("mount root: %w", err)
	}
	fi, err := os.Stat(abs)
	switch {
	case err != nil:
		return "", fmt.Errorf("mount root: %w", err)
	case !fi.IsDir():
		return "", fmt.Errorf("mount root %s: not a directory", abs)
	case abs == "/":
		return "", errors.New("mount root /: it contains everything of the host; name the directories that sandboxes may have")
	}
	return abs, nil
}

// Refusal is an error about a source that may not be mounted, of the class [runtime.ErrMount]. Its
// text is for the client.
type Refusal struct{ Reason string }

func (e *Refusal) Error() string { return e.Reason }

// Unwrap returns the class.
func (e *Refusal) Unwrap() error { return runtime.ErrMount }

func refuse(format string, args ...any) error { return &Refusal{fmt.Sprintf(format, args...)} }

const beneath = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// Open returns a handle (O_PATH) on a source, a directory or a regular file.
func (c *Config) Open(source string) (_ *os.File, err error) {
	if !filepath.IsAbs(source) || filepath.Clean(source) != source || strings.ContainsRune(source, 0) {
		return nil, refuse("mount %q: not an absolute path in its shortest form", source)
	}
	root, rel := c.rootOf(source)
	if root == "" {
		if len(c.Roots) == 0 {
			return nil, refuse("mount %s: this daemon gives no directory of the host to sandboxes; start it with --mount-root DIR to allow those below DIR", source)
		}
		return nil, refuse("mount %s: it is not below a directory that the daemon may give to sandboxes; those are %s (serve --mount-root)",
			source, strings.Join(c.Roots, ", "))
	}
	at, err := openat2(unix.AT_FDCWD, root, unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_NO_MAGICLINKS)
	if err != nil {
		return nil, fmt.Errorf("open mount root %s: %w", root, err)
	}
	defer at.Close() // only a handle
	f, err := openat2(int(at.Fd()), rel, 0, beneath)
	switch {
	case errors.Is(err, unix.ELOOP):
		return nil, refuse("mount %s: a part of the path is a symbolic link; name the place that it leads to", source)
	case errors.Is(err, unix.EXDEV):
		return nil, refuse("mount %s: it leads out of %s", source, root)
	case err != nil:
		return nil, refuse("mount %s: %v", source, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("look at %s: %w", source, err)
	}
	dir := f
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
	case unix.S_IFREG:
		if dir, err = openat2(int(at.Fd()), filepath.Dir(rel), unix.O_DIRECTORY, beneath); err != nil {
			return nil, refuse("mount %s: %v", source, err)
		}
		defer dir.Close() // only a handle
	default:
		return nil, refuse("mount %s: neither a directory nor a regular file", source)
	}
	if err := c.Apart(source, dir, dir == f); err != nil {
		return nil, err
	}
	return f, nil
}

// Check fails if a source cannot be mounted. With create it makes missing directories of the source
// first, with mode 0755. It makes none outside of the roots, none behind a link, and none in
// directories of sandboxd.
func (c *Config) Check(source string, create bool) error {
	if create {
		if err := c.makeDirs(source); err != nil {
			return err
		}
	}
	f, err := c.Open(source)
	if err != nil {
		return err
	}
	return f.Close()
}

// makeDirs makes the missing directories of a source. What [Config.Open] refuses is left to it.
func (c *Config) makeDirs(source string) error {
	root, rel := c.rootOf(source)
	if root == "" || !filepath.IsAbs(source) || filepath.Clean(source) != source || strings.ContainsRune(source, 0) {
		return nil
	}
	at, err := openat2(unix.AT_FDCWD, root, unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_NO_MAGICLINKS)
	if err != nil {
		return fmt.Errorf("open mount root %s: %w", root, err)
	}
	defer func() { _ = at.Close() }() // only a handle
	for name := range strings.SplitSeq(rel, "/") {
		next, err := openat2(int(at.Fd()), name, unix.O_DIRECTORY, beneath)
		if errors.Is(err, unix.ENOENT) {
			if err := c.Apart(source, at, false); err != nil {
				return err
			}
			if err := unix.Mkdirat(int(at.Fd()), name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
				return refuse("mount %s: make %s: %v", source, name, err)
			}
			next, err = openat2(int(at.Fd()), name, unix.O_DIRECTORY, beneath)
		}
		if err != nil {
			return nil // Open refuses it, in its words
		}
		_ = at.Close()
		at = next
	}
	return nil
}

// rootOf returns the longest root that a source is, or lies below, and the rest of the path.
func (c *Config) rootOf(source string) (root, rel string) {
	for _, r := range c.Roots {
		if len(r) <= len(root) {
			continue
		}
		if source == r {
			root, rel = r, "."
		} else if rest, ok := strings.CutPrefix(source, r+"/"); ok {
			root, rel = r, rest
		}
	}
	return root, rel
}

// inode identifies a directory, whatever path led to it.
type inode struct{ dev, ino uint64 }

// Apart refuses a directory in one of the daemon's own, and, if the directory is whole, the source
// itself and not what a file lies in, one that contains them. It compares inodes: the same
// directory may have other names by bind mounts. A refusal is a [Refusal].
func (c *Config) Apart(source string, dir *os.File, whole bool) error {
	above, err := ancestors(dir)
	if err != nil {
		return fmt.Errorf("look at what %s lies in: %w", source, err)
	}
	for i, own := range append(append([]string{}, c.Own...), c.Kept...) {
		d, err := openat2(unix.AT_FDCWD, own, unix.O_DIRECTORY, 0)
		var ours []inode
		if err == nil {
			ours, err = ancestors(d)
			err = errors.Join(err, d.Close())
		}
		switch {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EACCES) && i >= len(c.Own):
			continue // /etc/sandboxd of another user: what contains it is not the caller's either
		case err != nil:
			return fmt.Errorf("look at what %s lies in: %w", own, err)
		}
		for _, a := range above {
			if i < len(c.Own) && a == ours[0] {
				return refuse("mount %s: it lies in %s, which is sandboxd's own", source, own)
			}
		}
		if !whole && above[0] == ours[0] {
			return refuse("mount %s: it lies beside sandboxd's socket or config file, in %s", source, own)
		}
		for _, a := range ours {
			if whole && a == above[0] {
				return refuse("mount %s: it contains %s, which is sandboxd's own; name directories beside that", source, own)
			}
		}
	}
	return nil
}

// maxDepth bounds the climb to the root of the file tree.
const maxDepth = 1000

// ancestors returns a directory and all above it, up to the root of the process.
func ancestors(dir *os.File) ([]inode, error) {
	var all []inode
	fd := int(dir.Fd())
	defer func() {
		if fd != int(dir.Fd()) {
			_ = unix.Close(fd)
		}
	}()
	for range maxDepth {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return nil, err
		}
		here := inode{st.Dev, st.Ino}
		if len(all) > 0 && all[len(all)-1] == here {
			return all, nil // "/" is its own parent
		}
		all = append(all, here)
		up, err := unix.Openat(fd, "..", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		if fd != int(dir.Fd()) {
			_ = unix.Close(fd)
		}
		fd = up
	}
	return nil, unix.ENAMETOOLONG
}

// openat2 opens a handle, again where a rename anywhere on the host has disturbed a bounded
// resolution (openat2(2), EAGAIN).
func openat2(at int, path string, flags, resolve uint64) (*os.File, error) {
	how := unix.OpenHow{Flags: flags | unix.O_PATH | unix.O_CLOEXEC, Resolve: resolve}
	for range 32 {
		fd, err := unix.Openat2(at, path, &how)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return os.NewFile(uintptr(fd), path), nil
	}
	return nil, unix.EAGAIN
}
