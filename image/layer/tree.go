package layer

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Flags for making and opening directories. A final symbolic link is an error, and a FIFO or
	// device does not block.
	openDir = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	// workMode is the mode of every directory during the extraction; its own is set at the end.
	workMode = 0o700

	maxLinks = 40   // as the kernel's MAXSYMLINKS
	maxSteps = 4096 // components looked at to resolve one name
)

// dirMeta is set on a directory at the end, when nothing more is written into it: a mode that may
// forbid writing, times that writing would change. Owners are set at once.
type dirMeta struct {
	mode     uint32
	mtime    time.Time
	implicit bool // no entry describes it
}

// tree is the directory of the extraction.
type tree struct {
	root     *os.Root
	dir      *os.File // opened root
	lower    *lower
	singleID bool
	limits   Limits
	// metas is keyed by resolved path: without symbolic links.
	metas map[string]dirMeta
	held  int64 // bytes of the names in metas, and of whiteouts
	// Headers in the stream, and directories without one: a name may ask for many.
	entries int64
	// The last directory and the name that led there, as entries are mostly sorted. With an empty name
	// the descriptor is still to be closed, but the name may mean another directory by now.
	cached     *handle
	cachedName string
}

// handle is an open directory of the tree and its resolved path.
type handle struct {
	fd   int
	path string
}

// join returns the resolved path of base in the directory.
func (h handle) join(base string) string {
	if h.path == "." {
		return base
	}
	return h.path + "/" + base
}

var errAbsent = errors.New("not in this layer")

// directory opens the directory at the clean path name. It follows symbolic links of this layer on
// the way as in a chroot. With create, it makes missing directories; without, they are errAbsent.
// The handle is valid until the next call of directory or forget.
func (t *tree) directory(name string, create bool) (handle, error) {
	if t.cached != nil && t.cachedName == name {
		return *t.cached, nil
	}
	t.forget()
	h, err := t.resolve(name, create)
	if err != nil {
		return handle{}, err
	}
	t.cached, t.cachedName = &h, name
	return h, nil
}

// errReplaced means that another entry has replaced a directory of this layer.
var errReplaced = errors.New("it was replaced in this layer")

// still opens a directory that was made at a resolved path, if no link is on the way there since. A
// missing one is errReplaced; any other error is the host's.
func (t *tree) still(path string) (handle, error) {
	h, err := t.directory(path, false)
	if errors.Is(err, errAbsent) || errors.Is(err, ErrInvalid) || isReplaced(err) || err == nil && h.path != path {
		return handle{}, errReplaced
	}
	return h, err
}

// isReplaced reports whether opening a directory failed because there is none.
func isReplaced(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}

// forget closes the cached directory.
func (t *tree) forget() {
	if t.cached != nil {
		_ = unix.Close(t.cached.fd)
	}
	t.cached, t.cachedName = nil, ""
}

// resolve is directory without the cache; the caller closes the handle. No system call here follows
// a link: a link is read, and its target put before the remaining components.
func (t *tree) resolve(name string, create bool) (_ handle, err error) {
	// Mostly the directory exists without links on the way, which the kernel checks in one call. All
	// other cases are walked step by step, where errors show.
	fast, err := unix.Openat2(int(t.dir.Fd()), name, &unix.OpenHow{
		Flags: openDir, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err == nil {
		return handle{fast, name}, nil
	}
	todo := strings.Split(name, "/")
	var done []string
	fd, err := t.openRoot()
	if err != nil {
		return handle{}, err
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	restart := func() error {
		top, err := t.openRoot()
		if err != nil {
			return err
		}
		_ = unix.Close(fd)
		fd, done = top, nil
		return nil
	}
	links := 0
	for steps := 0; len(todo) > 0; steps++ {
		if steps > maxSteps {
			return handle{}, invalidf("symbolic links make the name too long to resolve")
		}
		part := todo[0]
		todo = todo[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			// Only a link's target has "..". Done has no links in it, so the parent is the one before. The
			// root's parent is the root.
			up := done[:max(len(done)-1, 0)]
			todo = append(append([]string(nil), up...), todo...)
			if err := restart(); err != nil {
				return handle{}, err
			}
			continue
		}
		here := handle{fd, pathOf(done)}
		// One more comes below the directory.
		if len(done)+1 >= t.limits.Depth {
			return handle{}, ExceededDepth.Errorf("the name resolves to more than %d directories", t.limits.Depth)
		}
		next, err := unix.Openat(fd, part, openDir, 0)
		switch {
		case err == nil:
		case errors.Is(err, unix.ENOENT):
			if !create {
				return handle{}, errAbsent
			}
			if err := t.mkdirImplicit(here, part); err != nil {
				return handle{}, err
			}
		case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
			var st unix.Stat_t
			if err := unix.Fstatat(fd, part, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				return handle{}, fmt.Errorf("stat %q: %w", here.join(part), err)
			}
			switch {
			case st.Mode&unix.S_IFMT == unix.S_IFLNK:
				if links++; links > maxLinks {
					return handle{}, invalidf("more than %d symbolic links on the way", maxLinks)
				}
				target, err := readlinkat(fd, part)
				if err != nil {
					return handle{}, fmt.Errorf("read link %q: %w", here.join(part), err)
				}
				todo = append(strings.Split(target, "/"), todo...)
				if strings.HasPrefix(target, "/") {
					if err := restart(); err != nil {
						return handle{}, err
					}
				}
				continue
			case isWhiteout(&st) && !create:
				return handle{}, errAbsent
			case isWhiteout(&st):
				// The layer deleted it and now puts a directory there: nothing of the one below may show
				// through.
				if err := unix.Unlinkat(fd, part, 0); err != nil {
					return handle{}, fmt.Errorf("remove whiteout %q: %w", here.join(part), err)
				}
				if err := t.mkdirImplicit(here, part); err != nil {
					return handle{}, err
				}
				if err := t.setOpaque(here, part); err != nil {
					return handle{}, err
				}
			default:
				return handle{}, invalidf("%q is not a directory in this layer", short(here.join(part)))
			}
		default:
			return handle{}, fmt.Errorf("open directory %q: %w", short(here.join(part)), err)
		}
		if next < 0 {
			if next, err = unix.Openat(fd, part, openDir, 0); err != nil {
				return handle{}, fmt.Errorf("open new directory %q: %w", short(here.join(part)), err)
			}
		}
		_ = unix.Close(fd)
		fd = next
		done = append(slices.Clip(done), part)
	}
	return handle{fd, pathOf(done)}, nil
}

func pathOf(parts []string) string {
	if len(parts) == 0 {
		return "."
	}
	return strings.Join(parts, "/")
}

func (t *tree) openRoot() (int, error) {
	fd, err := unix.Openat(int(t.dir.Fd()), ".", openDir, 0)
	if err != nil {
		return -1, fmt.Errorf("open the layer's root: %w", err)
	}
	return fd, nil
}

func readlinkat(fd int, base string) (string, error) {
	buf := make([]byte, maxPath+1)
	n, err := unix.Readlinkat(fd, base, buf)
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// isWhiteout reports whether st is one of ours: no other device is ever made.
func isWhiteout(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

// mkdir makes a directory that can be worked in; its mode and times are set by finish.
func (t *tree) mkdir(h handle, base string, meta dirMeta, uid, gid int) error {
	path := h.join(base)
	if err := unix.Mkdirat(h.fd, base, workMode); err != nil {
		return fmt.Errorf("make directory %q: %w", short(path), err)
	}
	return t.describe(h, base, meta, uid, gid)
}

// describe gives an existing directory its owner and records the rest for finish.
func (t *tree) describe(h handle, base string, meta dirMeta, uid, gid int) error {
	path := h.join(base)
	// Again, because the umask may have removed bits.
	if err := unix.Fchmodat(h.fd, base, workMode, 0); err != nil {
		return fmt.Errorf("change mode of %q: %w", short(path), err)
	}
	if err := t.chown(h, base, uid, gid); err != nil {
		return err
	}
	if base == "." {
		path = "."
	}
	if _, known := t.metas[path]; !known {
		if err := t.hold(path); err != nil {
			return err
		}
	}
	t.metas[path] = meta
	return nil
}

func (t *tree) chown(h handle, base string, uid, gid int) error {
	if t.singleID {
		return nil
	}
	if err := unix.Fchownat(h.fd, base, uid, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("change owner of %q to %d:%d: %w", short(h.join(base)), uid, gid, err)
	}
	return nil
}

// count counts one more entry, or a directory without one.
func (t *tree) count() error {
	if t.entries++; t.entries > t.limits.Entries-t.limits.Below.Entries {
		return ExceededEntries.Errorf("more than %d entries, with the directories that they are in%s", t.limits.Entries, t.limits.Below.with())
	}
	return nil
}

// hold counts a path that is kept to the end.
func (t *tree) hold(path string) error {
	if t.held += int64(len(path)) + perName; t.held > maxHeld {
		return invalidf("names of directories and whiteouts take more than %d bytes", maxHeld)
	}
	return nil
}

// mkdirImplicit makes a directory that no entry has described yet. If none does in the end, it
// becomes like the one in the next layer below that has it; that layer may still be on its way.
func (t *tree) mkdirImplicit(h handle, base string) error {
	if err := t.count(); err != nil {
		return err
	}
	return t.mkdir(h, base, byDefault, 0, 0)
}

// byDefault describes a directory that neither this layer nor one below describes.
var byDefault = dirMeta{mode: 0o755, mtime: epoch, implicit: true}

// inherited returns the metadata of the directory at path in the layers below, or the default.
func (t *tree) inherited(path string) (meta dirMeta, uid, gid int, err error) {
	found, err := t.lower.look(path)
	if err != nil {
		return dirMeta{}, 0, 0, err
	}
	if st := found.stat; st != nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return dirMeta{mode: st.Mode & 0o7777, mtime: time.Unix(st.Mtim.Unix()).UTC()}, int(st.Uid), int(st.Gid), nil
	}
	return byDefault, 0, 0, nil
}

// whiteout hides the entry of the layers below at base, where this layer has none.
func (t *tree) whiteout(h handle, base string) error {
	if err := unix.Mknodat(h.fd, base, unix.S_IFCHR, 0); err != nil {
		return fmt.Errorf("make whiteout %q: %w", short(h.join(base)), err)
	}
	return t.chown(h, base, 0, 0)
}

// holdsNothing reports whether the directory at the resolved path has no entry and holds only
// whiteouts and directories for them.
func (t *tree) holdsNothing(path string) (bool, error) {
	if !t.metas[path].implicit {
		return false, nil
	}
	// Not by a descriptor of ours: the cached one would have to be read from its beginning.
	dir, err := t.root.Open(path)
	if err != nil {
		return false, fmt.Errorf("list %q: %w", short(path), err)
	}
	defer dir.Close()
	if isOpaque(int(dir.Fd())) {
		return false, nil // described, or examined before: repeated searches would take long
	}
	for {
		names, err := dir.Readdirnames(1000)
		if errors.Is(err, io.EOF) {
			return true, nil
		}
		if err != nil {
			return false, fmt.Errorf("list %q: %w", short(path), err)
		}
		h := handle{int(dir.Fd()), path}
		for _, name := range names {
			what, err := t.kind(h, name)
			if err != nil {
				return false, err
			}
			nothing := what == whiteout
			if what == directory {
				if nothing, err = t.holdsNothing(h.join(name)); err != nil {
					return false, err
				}
			}
			if !nothing {
				return false, nil
			}
		}
	}
}

// setOpaque hides the content of the directory in the layers below.
func (t *tree) setOpaque(h handle, base string) error {
	return t.setxattr(h, base, opaqueXattr, []byte("y"))
}

// setxattr sets an xattr on a regular file or directory that this layer made.
func (t *tree) setxattr(h handle, base, name string, value []byte) error {
	fd, err := unix.Openat(h.fd, base, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("open %q for an xattr: %w", short(h.join(base)), err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Fsetxattr(fd, name, value, 0); err != nil {
		return fmt.Errorf("set xattr %s of %q: %w", short(name), short(h.join(base)), err)
	}
	return nil
}

// kind is the kind of entry at a place of the layer.
type kind int

const (
	absent kind = iota
	directory
	whiteout
	other // file, link, FIFO
)

func (t *tree) kind(h handle, base string) (kind, error) {
	var st unix.Stat_t
	err := unix.Fstatat(h.fd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return absent, nil
	case err != nil:
		return absent, fmt.Errorf("stat %q: %w", short(h.join(base)), err)
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return directory, nil
	case isWhiteout(&st):
		return whiteout, nil
	}
	return other, nil
}

// remove removes this layer's entry at base, with everything below it. The handle stays valid.
func (t *tree) remove(h handle, base string, what kind) error {
	// The removed entry may be a link on the path of the cached name.
	if what != absent {
		t.cachedName = ""
	}
	switch what {
	case absent:
		return nil
	case directory:
		// The path has no links in it, and os.Root would stop one that leads out.
		if err := t.root.RemoveAll(h.join(base)); err != nil {
			return fmt.Errorf("replace directory %q: %w", short(h.join(base)), err)
		}
	case whiteout, other:
		if err := unix.Unlinkat(h.fd, base, 0); err != nil {
			return fmt.Errorf("replace %q: %w", short(h.join(base)), err)
		}
	}
	return nil
}

// chtimes sets both times of the entry at base, not following a link.
func (t *tree) chtimes(h handle, base string, mtime time.Time) error {
	ts, err := unix.TimeToTimespec(mtime)
	if err != nil {
		return invalidf("modification time %s cannot be stored", mtime.UTC()) // see epoch
	}
	if err := unix.UtimesNanoAt(h.fd, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set times of %q: %w", short(h.join(base)), err)
	}
	return nil
}
