package layer

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// lower is the merged view of the layers below, as overlayfs merges them: the highest layer that
// has a name decides, an opaque directory hides everything further down, and links are not
// followed. A layer's author chooses the number and depth of lookups, so a lookup costs a few calls
// for each layer that has the directory, and nothing for the others. Results for the directories
// above the last one are cached, as entries are mostly sorted.
type lower struct {
	roots []*os.File // highest first

	path   string  // the last opened directory
	levels []level // of the root, and of each directory on the way there
	// That directory in the layers of the last level, if it was reached.
	fds     []int
	entered bool
}

// level holds the layers that overlayfs merges in a directory.
type level struct {
	layers []int
	// unknown is true if one layer could not be read. It may have any name, which keeps a whiteout or
	// costs a default.
	unknown bool
}

// below is a name in the view of the layers below.
type below struct {
	there bool
	stat  *unix.Stat_t // nil if absent or of unknown kind
}

func openLower(roots []*os.Root) (*lower, error) {
	l := &lower{path: "."}
	all := level{}
	for i, r := range roots {
		dir, err := r.Open(".")
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open a layer below: %w", err), l.close())
		}
		l.roots = append(l.roots, dir)
		all.layers = append(all.layers, i)
	}
	// Overlayfs ignores opaque marks on roots.
	l.levels = []level{all}
	return l, nil
}

func (l *lower) close() error {
	l.leave()
	var errs []error
	for _, r := range l.roots {
		errs = append(errs, r.Close())
	}
	return errors.Join(errs...)
}

// leave closes the last opened directory.
func (l *lower) leave() {
	for _, fd := range l.fds {
		_ = unix.Close(fd)
	}
	l.fds, l.entered = nil, false
}

// look finds the entry at a resolved path.
func (l *lower) look(path string) (below, error) {
	dir, base := split(path)
	if path == "." {
		base = "."
	}
	if err := l.enter(dir); err != nil {
		return below{}, err
	}
	for _, fd := range l.fds {
		var st unix.Stat_t
		err := unix.Fstatat(fd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case errors.Is(err, unix.ENOENT):
			continue
		case err != nil:
			return below{there: true}, nil //nolint:nilerr // an unreadable entry may be anything
		case isWhiteout(&st):
			return below{}, nil
		}
		return below{there: true, stat: &st}, nil
	}
	return below{there: l.levels[len(l.levels)-1].unknown}, nil
}

// enter opens a directory in all layers that overlayfs merges there.
func (l *lower) enter(dir string) error {
	if l.entered && dir == l.path {
		return nil
	}
	l.leave()
	// The levels that both paths share.
	common := 0 // bytes of dir
	keep := 1
	if dir != "." && l.path != "." {
		for i := 0; i <= len(dir) && i <= len(l.path); i++ {
			atEnd, atEndBefore := i == len(dir) || dir[i] == '/', i == len(l.path) || l.path[i] == '/'
			if atEnd && atEndBefore {
				common, keep = i, keep+1
			}
			if i == len(dir) || i == len(l.path) || dir[i] != l.path[i] {
				break
			}
		}
	}
	l.levels = l.levels[:keep]
	if l.path = dir[:common]; common == 0 {
		l.path = "."
	}
	if dir == "." || common == len(dir) {
		_, fds, err := l.open(dir, l.levels[keep-1], true)
		if err != nil {
			return err
		}
		l.path, l.fds, l.entered = dir, fds, true
		return nil
	}
	for end := common; end < len(dir); {
		l.leave() // directories on the way are only tested for existence
		start := end
		if start > 0 {
			start++ // the slash
		}
		end = len(dir)
		if i := strings.IndexByte(dir[start:], '/'); i >= 0 {
			end = start + i
		}
		here, fds, err := l.open(dir[:end], l.levels[len(l.levels)-1], false)
		if err != nil {
			return err
		}
		l.levels, l.path, l.fds = append(l.levels, here), dir[:end], fds
	}
	l.entered = true
	return nil
}

// open opens one directory in those layers of a level that have it: of its own level, again, or of
// the one above.
func (l *lower) open(path string, in level, again bool) (here level, fds []int, err error) {
	here.unknown = in.unknown
	for _, i := range in.layers {
		// In one call, whatever the depth. A complete layer does not change, and has neither links nor
		// mounts here.
		fd, err := unix.Openat2(int(l.roots[i].Fd()), path, &unix.OpenHow{
			Flags: openDir, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
		})
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			break // a file, a link or a whiteout hides everything further down
		}
		if errors.Is(err, unix.EACCES) {
			here.unknown = true
			break
		}
		if err != nil {
			for _, fd := range fds {
				_ = unix.Close(fd)
			}
			return level{}, nil, fmt.Errorf("look at %q in a layer below: %w", short(path), err)
		}
		here.layers, fds = append(here.layers, i), append(fds, fd)
		if !again && isOpaque(fd) {
			here.unknown = false
			break
		}
	}
	return here, fds, nil
}

// isOpaque reports whether overlayfs ignores the layers below the directory.
func isOpaque(fd int) bool {
	var value [2]byte
	n, err := unix.Fgetxattr(fd, opaqueXattr, value[:])
	return err == nil && n == 1 && value[0] == 'y'
}

const opaqueXattr = "user.overlay.opaque"
