package guest

import (
	"encoding/hex"
	"errors"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Paths are resolved here, inside the sandbox, where there is nothing to escape from. Magic links of /proc are not followed
// all the same: they would lead to init's own descriptors.

func openPath(dir int, path string, flags int) (int, error) {
	how := unix.OpenHow{
		Flags:   uint64(unix.O_PATH | unix.O_CLOEXEC | flags), //nolint:gosec // flags are constants of ours
		Resolve: unix.RESOLVE_NO_MAGICLINKS,
	}
	for {
		fd, err := unix.Openat2(dir, path, &how)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

// notRegular tells why a file is not to be read or written; nil if it may be.
func notRegular(fd int, path string) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fail(StageOpen, err, path)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFDIR:
		return fail(StageOpen, unix.EISDIR, path)
	default:
		return fail(StageType, unix.EINVAL, path)
	}
	var fsys unix.Statfs_t
	if err := unix.Fstatfs(fd, &fsys); err != nil {
		return fail(StageOpen, err, path)
	}
	if pseudo(fsys.Type) {
		return fail(StageType, unix.EINVAL, path)
	}
	return nil
}

func (s *server) open(c *conn, pkt packet, fds []int) error {
	if err := expect(pkt, &none{}, 1, fds, 0); err != nil {
		return err
	}
	path := pkt.strs[0]
	// First without opening it: to open a FIFO or a device does something to it.
	handle, err := openPath(unix.AT_FDCWD, path, 0)
	if err != nil {
		return fail(StageOpen, err, path)
	}
	defer func() { _ = unix.Close(handle) }()
	if err := notRegular(handle, path); err != nil {
		return err
	}
	fd, err := s.reopen(handle, unix.O_RDONLY)
	if err != nil {
		return fail(StageOpen, err, path)
	}
	defer func() { _ = unix.Close(fd) }()
	return c.reply(kindOpened, none{}, fd)
}

// reopen opens the very file that a handle is of. Non-blocking because of leases (F_SETLEASE): the sandbox could hold us for
// 45 s.
func (s *server) reopen(handle, flags int) (int, error) {
	return unix.Openat(s.proc, "self/fd/"+strconv.Itoa(handle), flags|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
}

func (s *server) stat(c *conn, pkt packet, fds []int) error {
	var m statRequest
	if err := expect(pkt, &m, 1, fds, 0); err != nil {
		return err
	}
	path := pkt.strs[0]
	flags := unix.O_NOFOLLOW
	if m.Follow {
		flags = 0
	}
	fd, err := openPath(unix.AT_FDCWD, path, flags)
	if err != nil {
		return fail(StageStat, err, path)
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fail(StageStat, err, path)
	}
	var link string
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		if link, err = readLink(fd, ""); err != nil {
			return fail(StageStat, err, path)
		}
	}
	p, err := encode(kindInfo, infoOf(&st), link)
	if err != nil {
		return err
	}
	return c.send(p)
}

func infoOf(st *unix.Stat_t) infoAnswer {
	return infoAnswer{Size: st.Size, Mode: st.Mode, MTime: st.Mtim.Sec, NSec: st.Mtim.Nsec, UID: st.Uid, GID: st.Gid}
}

func readLink(dir int, name string) (string, error) {
	var buf [maxPath]byte
	n, err := unix.Readlinkat(dir, name, buf[:])
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// splitPath cuts the last element off. It does not clean the rest: what ".." means is known only after links have been
// followed.
func splitPath(path string) (dir, base string) {
	i := strings.LastIndexByte(path, '/')
	dir, base = path[:i+1], path[i+1:]
	if dir == "" {
		dir = "."
	}
	return dir, base
}

func named(base string) bool { return base != "" && base != "." && base != ".." }

// makeDir opens a directory. What is missing of it is made, and belongs to uid and gid.
func makeDir(path string, uid, gid uint32) (int, error) {
	path = strings.TrimRight(path, "/")
	if path == "" {
		path = "/"
	}
	fd, err := openPath(unix.AT_FDCWD, path, unix.O_DIRECTORY)
	if !errors.Is(err, unix.ENOENT) {
		return fd, err
	}
	dir, base := splitPath(path)
	if !named(base) {
		return -1, err
	}
	parent, err := makeDir(dir, uid, gid)
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(parent) }()
	err = unix.Mkdirat(parent, base, 0o755)
	switch {
	case err == nil:
		if err := unix.Fchownat(parent, base, int(uid), int(gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return -1, err
		}
	case !errors.Is(err, unix.EEXIST): // a dangling link, or somebody was faster
		return -1, err
	}
	return openPath(parent, base, unix.O_DIRECTORY)
}

// target finds the directory and the name that a file written to path is to have. A link is replaced where it points to, not
// itself.
func target(path string, uid, gid uint32) (dir int, base string, err error) {
	for range 40 { // as many links as the kernel follows
		var parent string
		parent, base = splitPath(path)
		if !named(base) {
			return -1, "", fail(StageOpen, unix.EISDIR, path)
		}
		if dir, err = makeDir(parent, uid, gid); err != nil {
			return -1, "", fail(StageWrite, err, parent)
		}
		var st unix.Stat_t
		err = unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case errors.Is(err, unix.ENOENT):
			return dir, base, nil
		case err != nil:
			err = fail(StageOpen, err, path)
		case st.Mode&unix.S_IFMT == unix.S_IFREG:
			return dir, base, nil
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			err = fail(StageOpen, unix.EISDIR, path)
		case st.Mode&unix.S_IFMT != unix.S_IFLNK:
			err = fail(StageType, unix.EINVAL, path)
		}
		link := ""
		if err == nil {
			link, err = readLink(dir, base)
		}
		_ = unix.Close(dir)
		if err != nil {
			return -1, "", err
		}
		if strings.HasPrefix(link, "/") {
			path = link
		} else {
			path = parent + "/" + link
		}
		if len(path) >= maxPath {
			return -1, "", fail(StageOpen, unix.ENAMETOOLONG, "")
		}
	}
	return -1, "", fail(StageOpen, unix.ELOOP, path)
}

// append opens the file for writing at its end. A file that is not there is made.
func (s *server) append(c *conn, pkt packet, fds []int) error {
	var m createRequest
	if err := expect(pkt, &m, 1, fds, 0); err != nil {
		return err
	}
	path := pkt.strs[0]
	dir, base, err := target(path, m.UID, m.GID)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	if err := usable(dir, path); err != nil {
		return err
	}
	fd, err := s.appendTo(dir, base, path, m)
	for range 3 { // others make and remove it just then
		if !errors.Is(err, unix.EEXIST) {
			break
		}
		fd, err = s.appendTo(dir, base, path, m)
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return c.reply(kindOpened, none{}, fd)
}

// appendTo opens the file that is there, and otherwise makes one: EEXIST where it is there after all.
func (s *server) appendTo(dir int, base, path string, m createRequest) (int, error) {
	handle, err := openPath(dir, base, unix.O_NOFOLLOW)
	var fd int
	if errors.Is(err, unix.ENOENT) {
		if fd, err = unix.Openat(dir, base, unix.O_WRONLY|unix.O_APPEND|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600); err == nil {
			if err = own(fd, m.UID, m.GID, m.Mode); err != nil {
				_ = unix.Close(fd)
				_ = unix.Unlinkat(dir, base, 0)
				return -1, fail(StageWrite, err, path)
			}
		}
	} else if err == nil {
		defer func() { _ = unix.Close(handle) }()
		if err := notRegular(handle, path); err != nil { // a link that has become one meanwhile is none either
			return -1, err
		}
		fd, err = s.reopen(handle, unix.O_WRONLY|unix.O_APPEND)
	}
	if err != nil {
		return -1, fail(StageOpen, err, path)
	}
	return fd, nil
}

// own gives a new file or directory away.
func own(fd int, uid, gid, mode uint32) error {
	if err := unix.Fchown(fd, int(uid), int(gid)); err != nil {
		return err
	}
	return unix.Fchmod(fd, mode&0o777) // after chown, which may clear bits
}

// usable refuses what is to be changed in a file system of the kernel's.
func usable(dir int, path string) error {
	var fsys unix.Statfs_t
	if err := unix.Fstatfs(dir, &fsys); err != nil {
		return fail(StageOpen, err, path)
	}
	if pseudo(fsys.Type) {
		return fail(StageType, unix.EINVAL, path)
	}
	return nil
}

// create makes the file, gives it to the daemon and waits for what is to become of it.
func (s *server) create(c *conn, pkt packet, fds []int) error {
	var m createRequest
	if err := expect(pkt, &m, 1, fds, 0); err != nil {
		return err
	}
	path := pkt.strs[0]
	dir, base, err := target(path, m.UID, m.GID)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	if err := usable(dir, path); err != nil {
		return err
	}
	tmp, err := tempName()
	if err != nil {
		return fail(StageOpen, err, path)
	}
	fd, err := unix.Openat(dir, tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fail(StageOpen, err, path)
	}
	committed := false
	defer func() {
		if !committed {
			_ = unix.Unlinkat(dir, tmp, 0)
		}
	}()
	if err = own(fd, m.UID, m.GID, m.Mode); err == nil {
		err = c.reply(kindCreated, none{}, fd)
	} else {
		err = fail(StageWrite, err, path)
	}
	_ = unix.Close(fd)
	if err != nil {
		return err
	}

	pkt, fds, err = c.recv()
	closeAll(fds)
	switch {
	case err != nil:
		return nil // the daemon has closed the connection, or is gone
	case pkt.kind == kindCommit:
		if err := unix.Renameat(dir, tmp, dir, base); err != nil {
			return fail(StageCommit, err, path)
		}
		committed = true
	case pkt.kind == kindAbort:
		committed = true // removed here, so that it is gone before the answer
		if err := unix.Unlinkat(dir, tmp, 0); err != nil {
			return fail(StageWrite, err, path)
		}
	default:
		return fail(StageRequest, unix.ENOSYS, pkt.kind)
	}
	return c.reply(kindDone, none{})
}

// tempName is a name that nobody has. Its beginning tells a person whose it is.
func tempName() (string, error) {
	var b [8]byte
	if _, err := unix.Getrandom(b[:], 0); err != nil {
		return "", err
	}
	return ".sandboxd-" + hex.EncodeToString(b[:]), nil
}
