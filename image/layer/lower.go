package layer

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// lower is what the layers below show, as overlayfs would: the highest layer that has a name decides, an opaque directory hides
// what is further down, and a link is a link. A layer's author chooses how often this is asked and how deep, so an answer
// costs a few calls for each layer that has the directory, and nothing for the others: what was found out about the
// directories above the last one is kept, as entries mostly come sorted.
type lower struct {
	roots []*os.File // highest first

	path   string  // the directory last entered
	levels []level // of the root, and of each directory on the way there
	// That directory in the layers of the last level, if it was entered to the end.
	fds     []int
	entered bool
}

// level says which layers overlayfs merges in a directory.
type level struct {
	layers []int
	// unknown says that one could not be looked at. It then may have any name, which keeps a whiteout or costs a default.
	unknown bool
}

// below is a name as the layers below show it.
type below struct {
	there bool
	stat  *unix.Stat_t // nil where nothing is there or it is unknown what
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
	// Overlayfs does not look whether roots are opaque.
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

// leave closes the directory that was entered.
func (l *lower) leave() {
	for _, fd := range l.fds {
		_ = unix.Close(fd)
	}
	l.fds, l.entered = nil, false
}

// look finds what stands at a resolved path.
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
			return below{there: true}, nil //nolint:nilerr // what cannot be looked at may be anything
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
	// The levels that both paths have.
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
		l.leave() // at the directories on the way it is only looked whether they are there
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

// open opens one directory in those layers of a level that have it: of its own level, once more, or of the one above.
func (l *lower) open(path string, in level, again bool) (here level, fds []int, err error) {
	here.unknown = in.unknown
	for _, i := range in.layers {
		// In one call, whatever the depth. A layer that is complete does not change, and has neither links nor mounts here.
		fd, err := unix.Openat2(int(l.roots[i].Fd()), path, &unix.OpenHow{
			Flags: openDir, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
		})
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			break // a file, a link or a whiteout hides what is further down
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

// isOpaque reports whether overlayfs takes the directory for all there is.
func isOpaque(fd int) bool {
	var value [2]byte
	n, err := unix.Fgetxattr(fd, opaqueXattr, value[:])
	return err == nil && n == 1 && value[0] == 'y'
}

const opaqueXattr = "user.overlay.opaque"
