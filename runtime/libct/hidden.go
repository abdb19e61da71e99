package libct

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
)

// Hidden paths of a workspace are whiteouts in a layer between the host's directory and what the
// sandbox writes. The layer is a file system in memory that Init makes in the sandbox's own
// mount namespace: no path leads to it from inside, and nothing that happens in the layer above
// takes a whiteout away. Directories on the way are seen with the attributes that they have in
// this layer, which are therefore copied.

// mountHidden makes the layer and returns its place; empty if nothing is hidden. The host's
// directory must be at launcher.WorkspaceDir.
func mountHidden(hidden []string) (string, error) {
	if len(hidden) == 0 {
		return "", nil
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("tmpfs", launcher.HiddenDir, "tmpfs", flags, "mode=0755,nr_inodes=0"); err != nil {
		return "", fmt.Errorf("mount a layer for the hidden files of the workspace: %w", err)
	}
	l := hiddenLayer{lower: launcher.WorkspaceDir, at: launcher.HiddenDir, made: make(map[string]bool)}
	for _, name := range hidden {
		if err := l.hide(name); err != nil {
			return "", fmt.Errorf("hide %q of the workspace: %w", name, err)
		}
	}
	if err := l.finish(); err != nil {
		return "", fmt.Errorf("hide files of the workspace: %w", err)
	}
	return launcher.HiddenDir, nil
}

// hiddenLayer is a layer of whiteouts that is being made.
type hiddenLayer struct {
	lower, at string
	made      map[string]bool // paths: true for a directory, false for a whiteout
	dirs      []string        // in the order of their making
	first     string          // whiteout, which the others are further names of
}

// hide makes a whiteout. If a directory on the way is missing, the whiteout stands for that:
// whatever the host has there later is hidden.
func (l *hiddenLayer) hide(name string) error {
	for i := range len(name) {
		if name[i] != '/' {
			continue
		}
		switch more, err := l.directory(name[:i]); {
		case err != nil:
			return err
		case !more:
			return nil
		}
	}
	return l.whiteout(name)
}

// directory makes a directory on the way; more is false if nothing needs to be hidden below it.
func (l *hiddenLayer) directory(name string) (more bool, err error) {
	if dir, ok := l.made[name]; ok {
		return dir, nil
	}
	var st unix.Stat_t
	switch err := unix.Lstat(filepath.Join(l.lower, name), &st); {
	case errors.Is(err, unix.ENOENT):
		return false, l.whiteout(name)
	case err != nil:
		return false, fmt.Errorf("examine %q: %w", name, err)
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return false, fmt.Errorf("%q is no directory any more; create the sandbox anew: %w", name, runtime.ErrUnenforceable)
	}
	at := filepath.Join(l.at, name)
	if err := unix.Mkdir(at, 0o700); err != nil {
		return false, fmt.Errorf("make directory: %w", err)
	}
	// An owner that the sandbox has no id for is seen as the overflow id below, too. Where there is no
	// such id either, root keeps the directory, which changes nothing on the host.
	if err := unix.Lchown(at, int(st.Uid), int(st.Gid)); err != nil && !errors.Is(err, unix.EINVAL) {
		return false, fmt.Errorf("set the owner of %q: %w", name, err)
	}
	if err := unix.Chmod(at, st.Mode&0o7777); err != nil {
		return false, fmt.Errorf("set the mode of %q: %w", name, err)
	}
	l.made[name] = true
	l.dirs = append(l.dirs, name)
	return true, nil
}

func (l *hiddenLayer) whiteout(name string) error {
	if _, ok := l.made[name]; ok {
		return nil
	}
	at := filepath.Join(l.at, name)
	var err error
	if l.first == "" {
		// Linux 5.8 and later let everyone make this one device.
		err, l.first = unix.Mknod(at, unix.S_IFCHR, 0), at
	} else {
		err = unix.Link(l.first, at)
	}
	if err != nil {
		return fmt.Errorf("make whiteout: %w", err)
	}
	l.made[name] = false
	return nil
}

// finish sets the times of the directories, which making their contents has changed.
func (l *hiddenLayer) finish() error {
	for _, name := range l.dirs {
		fi, err := os.Lstat(filepath.Join(l.lower, name))
		if err != nil {
			return fmt.Errorf("examine %q: %w", name, err)
		}
		if err := os.Chtimes(filepath.Join(l.at, name), time.Time{}, fi.ModTime()); err != nil {
			return err
		}
	}
	return nil
}

// verifyHidden reports an error if a path that is to be hidden can be seen in the mounted
// workspace. What the sandbox has made there, at an earlier start, is its own.
func verifyHidden(target string, w *workspacePlan) error {
	if len(w.Hidden) == 0 {
		return nil
	}
	seen, err := unix.Open(target, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the workspace: %w", err)
	}
	defer unix.Close(seen)
	upper, err := unix.Open(w.Upper, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the changes of the workspace: %w", err)
	}
	defer unix.Close(upper)
	for _, name := range w.Hidden {
		if there, err := has(seen, name); err != nil || !there {
			if err != nil {
				return fmt.Errorf("look for %q: %w", name, err)
			}
			continue
		}
		if own, err := has(upper, name); err != nil || !own {
			return errors.Join(fmt.Errorf("%q of the workspace is not hidden: %w", name, runtime.ErrUnenforceable), err)
		}
	}
	return nil
}

// has reports whether something is at a path below a directory, links not followed.
func has(dir int, name string) (bool, error) {
	fd, err := unix.Openat2(dir, name, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	switch {
	case err == nil:
		return true, unix.Close(fd)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return false, nil
	}
	return false, err
}

// layersOf returns the lower directories of the overlay, for mount(2).
func layersOf(hidden string) string {
	if hidden == "" {
		return launcher.WorkspaceDir
	}
	return strings.Join([]string{hidden, launcher.WorkspaceDir}, ":")
}
