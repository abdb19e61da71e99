package workspace

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Dir is a directory of the host. Names are looked up from its descriptor.
type Dir struct {
	f *os.File
}

// Open opens a directory. Links on the way to it are the user's own and are followed.
func Open(name string) (*Dir, error) {
	f, err := os.OpenFile(name, unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("open directory: %w", err)
	}
	return &Dir{f}, nil
}

// Is reports whether the directory has this device and inode.
func (d *Dir) Is(device, inode uint64) (bool, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(d.f.Fd()), &st); err != nil {
		return false, fmt.Errorf("examine directory %s: %w", d.f.Name(), err)
	}
	return st.Dev == device && st.Ino == inode, nil
}

// Close closes the descriptor.
func (d *Dir) Close() error { return d.f.Close() }

// state is what a directory of the host has at a name.
type state struct {
	kind  kind
	mode  fs.FileMode
	size  int64
	ino   uint64
	uid   uint32
	gid   uint32
	mtime time.Time
	ctime time.Time
}

// beneath are the rules by which every name is looked up.
const beneath = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// errChanged reports a file of the host that the plan is not about.
var errChanged = errors.New("changed on the host")

// open opens a name below the directory; "." is the directory itself.
func (d *Dir) open(name string, flags int) (int, error) {
	for {
		fd, err := unix.Openat2(int(d.f.Fd()), name, &unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC | unix.O_NOFOLLOW), Resolve: beneath}) //nolint:gosec // G115: flags
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue // a rename somewhere on the host
		}
		return fd, err
	}
}

// parent opens the directory of a name.
func (d *Dir) parent(name string) (int, error) {
	return d.open(path.Dir(name), unix.O_PATH|unix.O_DIRECTORY)
}

// stat returns what is at a name. A name below a link, a file or another mount is nothing that can
// be changed, and an error.
func (d *Dir) stat(name string) (state, error) {
	dir, err := d.parent(name)
	if errors.Is(err, unix.ENOENT) {
		return state{}, nil
	}
	if err != nil {
		return state{}, fmt.Errorf("directory of %s: %w", Quote(name), err)
	}
	defer unix.Close(dir)
	return statAt(dir, path.Base(name))
}

func statAt(dir int, base string) (state, error) {
	var st unix.Stat_t
	switch err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW); {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return state{}, nil
	case err != nil:
		return state{}, fmt.Errorf("examine %s: %w", Quote(base), err)
	}
	s := state{
		mode: fs.FileMode(st.Mode & 0o777), size: st.Size, ino: st.Ino, uid: st.Uid, gid: st.Gid,
		mtime: time.Unix(st.Mtim.Unix()), ctime: time.Unix(st.Ctim.Unix()),
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		s.kind = file
	case unix.S_IFDIR:
		s.kind = directory
	case unix.S_IFLNK:
		s.kind = link
	default:
		s.kind = special
	}
	return s, nil
}

// same reports whether a second look at a name found the same file with the same content. The time
// of the last change of status does not count: a rename of our own sets it.
func (s *state) same(now *state) bool {
	return s.kind == now.kind && s.ino == now.ino && s.size == now.size && s.mtime.Equal(now.mtime) && s.mode == now.mode
}

// read opens a regular file.
func (d *Dir) read(name string) (*os.File, error) {
	fd, err := d.open(name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", Quote(name), err)
	}
	f := os.NewFile(uintptr(fd), name)
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = errChanged
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", Quote(name), err), f.Close())
	}
	return f, nil
}

// readlink returns the target of a link.
func (d *Dir) readlink(name string) (string, error) {
	dir, err := d.parent(name)
	if err != nil {
		return "", fmt.Errorf("read link %s: %w", Quote(name), err)
	}
	defer unix.Close(dir)
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(dir, path.Base(name), buf)
	if err != nil {
		return "", fmt.Errorf("read link %s: %w", Quote(name), err)
	}
	return string(buf[:n]), nil
}

// list returns the names in a directory, sorted.
func (d *Dir) list(name string) ([]string, error) {
	fd, err := d.open(name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", Quote(name), err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close() // only read
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", Quote(name), err)
	}
	slices.Sort(names)
	return names, nil
}

// equal reports whether two readers have the same bytes.
func equal(a, b io.Reader) (bool, error) {
	bufA, bufB := make([]byte, 64<<10), make([]byte, 64<<10)
	for {
		n, errA := io.ReadFull(a, bufA)
		m, errB := io.ReadFull(b, bufB)
		if n != m || string(bufA[:n]) != string(bufB[:m]) {
			return false, nil
		}
		endA := errors.Is(errA, io.EOF) || errors.Is(errA, io.ErrUnexpectedEOF)
		endB := errors.Is(errB, io.EOF) || errors.Is(errB, io.ErrUnexpectedEOF)
		switch {
		case errA != nil && !endA:
			return false, errA
		case errB != nil && !endB:
			return false, errB
		case endA || endB:
			return endA == endB, nil
		}
	}
}

// leadsOut reports whether a symbolic link at a name may lead out of the directory. Steps up come
// first, at most as many as there are directories above the link, so that no other link matters.
func leadsOut(name, target string) bool {
	if target == "" || strings.HasPrefix(target, "/") || strings.ContainsRune(target, 0) {
		return true
	}
	up, down := 0, false
	for part := range strings.SplitSeq(target, "/") {
		switch part {
		case "", ".":
		case "..":
			if down {
				return true
			}
			up++
		default:
			down = true
		}
	}
	return up > strings.Count(name, "/")
}
