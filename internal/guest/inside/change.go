package inside

import (
	"errors"
	"strings"
	"sync/atomic"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"
)

// parentOf opens the parent directory of path. Links on the way are followed; the last element need
// not exist. Paths without a last element, such as "/", are refused with errno.
func parentOf(stage guest.Stage, path string, errno unix.Errno) (dir int, base string, err error) {
	parent, base := splitPath(trimSlashes(path))
	if !named(base) {
		return -1, "", fail(stage, errno, path)
	}
	if dir, err = openPath(unix.AT_FDCWD, parent, unix.O_DIRECTORY); err != nil {
		return -1, "", fail(guest.StageOpen, err, parent)
	}
	if err := usable(dir, path); err != nil {
		_ = unix.Close(dir)
		return -1, "", err
	}
	return dir, base, nil
}

func trimSlashes(path string) string {
	if p := strings.TrimRight(path, "/"); p != "" {
		return p
	}
	return "/"
}

func (s *server) mkdir(c *conn, pkt guest.Packet, fds []int) error {
	var m guest.MkdirRequest
	if err := expect(pkt, &m, 1, fds, 0); err != nil {
		return err
	}
	path := pkt.Strs[0]
	if m.Parents {
		// With parents an existing directory will do, also behind a link.
		if fd, err := openPath(unix.AT_FDCWD, path, unix.O_DIRECTORY); err == nil {
			_ = unix.Close(fd)
			return c.reply(guest.KindDone, guest.None{})
		}
		parent, _ := splitPath(trimSlashes(path))
		fd, _, err := makeDir(parent, m.UID, m.GID)
		if err != nil {
			return fail(guest.StageWrite, err, parent)
		}
		_ = unix.Close(fd)
	}
	dir, base, err := parentOf(guest.StageWrite, path, unix.EEXIST)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	if err := unix.Mkdirat(dir, base, 0o700); err != nil {
		return fail(guest.StageWrite, err, path)
	}
	fd, err := openDir(dir, base, unix.RESOLVE_NO_XDEV)
	if err == nil {
		err = own(fd, m.UID, m.GID, m.Mode)
		_ = unix.Close(fd)
	}
	if err != nil {
		_ = unix.Unlinkat(dir, base, unix.AT_REMOVEDIR)
		return fail(guest.StageWrite, err, path)
	}
	return c.reply(guest.KindDone, guest.None{})
}

// move renames. The kernel refuses mount points, a directory into itself, and targets on another
// file system.
func (s *server) move(c *conn, pkt guest.Packet, fds []int) error {
	var m guest.MoveRequest
	if err := expect(pkt, &m, 2, fds, 0); err != nil {
		return err
	}
	from, to := pkt.Strs[0], pkt.Strs[1]
	old, oldBase, err := parentOf(guest.StageMove, from, unix.EBUSY)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(old) }()
	var have, there unix.Stat_t
	if err := unix.Fstatat(old, oldBase, &have, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fail(guest.StageOpen, err, from)
	}
	dir, base, err := parentOf(guest.StageMove, to, unix.EBUSY)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	// rename(2) does nothing if both names belong to one file, and reports success.
	err = unix.Fstatat(dir, base, &there, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && (have.Dev == there.Dev && have.Ino == there.Ino || !m.Overwrite) {
		return fail(guest.StageMove, unix.EEXIST, to)
	}
	var flags uint = unix.RENAME_NOREPLACE
	if m.Overwrite {
		flags = 0
	}
	if err := unix.Renameat2(old, oldBase, dir, base, flags); err != nil {
		return fail(guest.StageMove, err, from)
	}
	return c.reply(guest.KindDone, guest.None{})
}

const (
	// maxRemoveDepth bounds the directories that a removal has open. Deeper ones are moved up first.
	maxRemoveDepth = 64
	// maxRemovePasses bounds the passes over a directory that is not empty after one: a program writes
	// there.
	maxRemovePasses = 4
)

type removeLevel struct {
	dirReader

	name   string // name in the level above
	passes int
}

// remove removes a file or, if asked, a tree. Only the first path is resolved. Each directory is
// opened in its parent, which is open, and is neither a link nor a mount point: a program that
// swaps them meanwhile redirects nothing.
func (s *server) remove(c *conn, pkt guest.Packet, fds []int) error {
	var m guest.RemoveRequest
	if err := expect(pkt, &m, 1, fds, 0); err != nil {
		return err
	}
	path := pkt.Strs[0]
	dir, base, err := parentOf(guest.StageRemove, path, unix.EBUSY)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	err = unix.Unlinkat(dir, base, 0)
	if errors.Is(err, unix.EISDIR) {
		if m.Recursive {
			err = s.removeTree(c, dir, base, path)
		} else {
			err = unix.Unlinkat(dir, base, unix.AT_REMOVEDIR)
		}
	}
	if err != nil {
		if e, ok := errors.AsType[*guest.Error](err); ok {
			return e
		}
		return fail(guest.StageRemove, err, path)
	}
	return c.reply(guest.KindDone, guest.None{})
}

// removeTree removes a directory, level by level. It stops when the daemon closes the connection.
func (s *server) removeTree(c *conn, dir int, base, path string) error {
	var given atomic.Bool
	settled := c.onClose(func() { given.Store(true) })
	defer settled()

	var stack []*removeLevel
	defer func() {
		for _, level := range stack {
			level.close()
		}
	}()
	// where returns the path of an error.
	where := func(name string) string {
		names := []string{trimSlashes(path)}
		for _, level := range stack[min(1, len(stack)):] {
			names = append(names, level.name)
		}
		if name != "" {
			names = append(names, name)
		}
		return strings.Join(names, "/")
	}
	enter := func(at int, name string) error {
		r, err := s.reader(func() (int, error) { return openDir(at, name, unix.RESOLVE_NO_XDEV) })
		if err == nil {
			stack = append(stack, &removeLevel{dirReader: r, name: name})
		}
		if errors.Is(err, unix.EXDEV) {
			return unix.EBUSY // a mount point
		}
		return err
	}
	if err := enter(dir, base); err != nil {
		return err
	}
	moved := false
	for len(stack) > 0 {
		if given.Load() {
			return fail(guest.StageRemove, unix.ECANCELED, path)
		}
		top := stack[len(stack)-1]
		name, _, err := top.next()
		if err != nil {
			return fail(guest.StageRead, err, where(""))
		}
		if name == "" {
			above := dir
			if len(stack) > 1 {
				above = stack[len(stack)-2].fd
			}
			err := unix.Unlinkat(above, top.name, unix.AT_REMOVEDIR)
			if errors.Is(err, unix.ENOTEMPTY) {
				if len(stack) == 1 && moved {
					moved, top.passes = false, 0
				}
				if top.passes++; top.passes < maxRemovePasses {
					if err := top.again(); err != nil {
						return fail(guest.StageRead, err, where(""))
					}
					continue
				}
			}
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return fail(guest.StageRemove, err, where(""))
			}
			top.close()
			stack = stack[:len(stack)-1]
			continue
		}
		switch err := unix.Unlinkat(top.fd, name, 0); {
		case err == nil, errors.Is(err, unix.ENOENT):
			continue
		case !errors.Is(err, unix.EISDIR):
			return fail(guest.StageRemove, err, where(name))
		}
		if len(stack) == maxRemoveDepth {
			tmp, err := tempName()
			if err == nil {
				err = unix.Renameat2(top.fd, name, stack[0].fd, tmp, unix.RENAME_NOREPLACE)
			}
			switch {
			case err == nil:
				moved = true
			case errors.Is(err, unix.EXDEV): // a directory of the image, which overlays do not rename
				return fail(guest.StageRemove, unix.ENAMETOOLONG, where(name))
			case !errors.Is(err, unix.ENOENT):
				return fail(guest.StageRemove, err, where(name))
			}
			continue
		}
		// An entry that was swapped meanwhile is removed in the next pass.
		if err := enter(top.fd, name); err != nil && !swapped(err) {
			return fail(guest.StageRemove, err, where(name))
		}
	}
	return nil
}
