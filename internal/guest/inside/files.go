package inside

import (
	"encoding/hex"
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"
)

// Init resolves paths here, inside the sandbox, where there is nothing to escape from. Magic links
// of /proc are not followed all the same: they would lead to init's own descriptors.

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

// notRegular returns the reason why a file must not be read or written; nil if it may be.
func notRegular(fd int, path string) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fail(guest.StageOpen, err, path)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFDIR:
		return fail(guest.StageOpen, unix.EISDIR, path)
	default:
		return fail(guest.StageType, unix.EINVAL, path)
	}
	var fsys unix.Statfs_t
	if err := unix.Fstatfs(fd, &fsys); err != nil {
		return fail(guest.StageOpen, err, path)
	}
	if guest.IsKernelFS(fsys.Type) {
		return fail(guest.StageType, unix.EINVAL, path)
	}
	return nil
}

func (s *server) open(c *conn, pkt guest.Packet, fds []int) error {
	if err := expect(pkt, &guest.None{}, 1, fds, 0); err != nil {
		return err
	}
	return s.handOver(c, pkt.Strs[0], unix.O_RDONLY)
}

// hand sends a file to the daemon.
func (c *conn) hand(k guest.Kind, fd int, path string) error {
	if err := c.reply(k, guest.None{}, fd); err != nil {
		return fail(guest.StageOpen, err, path)
	}
	return nil
}

// reopen opens the file that a handle refers to. Non-blocking because of leases (F_SETLEASE), by
// which the sandbox could block init for 45 s.
func (s *server) reopen(handle, flags int) (int, error) {
	return unix.Openat(s.proc, "self/fd/"+strconv.Itoa(handle), flags|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
}

func (s *server) stat(c *conn, pkt guest.Packet, fds []int) error {
	var m guest.StatRequest
	if err := expect(pkt, &m, 1, fds, 0); err != nil {
		return err
	}
	path := pkt.Strs[0]
	flags := unix.O_NOFOLLOW
	if m.Follow {
		flags = 0
	}
	fd, err := openPath(unix.AT_FDCWD, path, flags)
	if err != nil {
		return fail(guest.StageStat, err, path)
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fail(guest.StageStat, err, path)
	}
	var link string
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		if link, err = readLink(fd, ""); err != nil {
			return fail(guest.StageStat, err, path)
		}
	}
	p, err := guest.Encode(guest.KindInfo, infoOf(&st), link)
	if err != nil {
		return err
	}
	return c.Send(p)
}

func infoOf(st *unix.Stat_t) guest.InfoAnswer {
	return guest.InfoAnswer{Size: st.Size, Mode: st.Mode, MTime: st.Mtim.Sec, NSec: st.Mtim.Nsec, UID: st.Uid, GID: st.Gid}
}

func readLink(dir int, name string) (string, error) {
	var buf [guest.MaxPath]byte
	n, err := unix.Readlinkat(dir, name, buf[:])
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// splitPath cuts the last element off. It does not clean the rest: ".." has a meaning only after
// links have been followed.
func splitPath(path string) (dir, base string) {
	i := strings.LastIndexByte(path, '/')
	dir, base = path[:i+1], path[i+1:]
	if dir == "" {
		dir = "."
	}
	return dir, base
}

func named(base string) bool { return base != "" && base != "." && base != ".." }

// makeDir opens a directory. It makes missing ones, owned by uid and gid, and returns their names,
// outermost first. After an error none of them is left.
func makeDir(path string, uid, gid uint32) (fd int, made []string, err error) {
	path = strings.TrimRight(path, "/")
	if path == "" {
		path = "/"
	}
	fd, err = openPath(unix.AT_FDCWD, path, unix.O_DIRECTORY)
	if !errors.Is(err, unix.ENOENT) {
		return fd, nil, err
	}
	dir, base := splitPath(path)
	if !named(base) {
		return -1, nil, err
	}
	parent, made, err := makeDir(dir, uid, gid)
	if err != nil {
		return -1, nil, err
	}
	defer func() {
		if err != nil {
			unmakeDir(parent, made)
			made = nil
		}
		_ = unix.Close(parent)
	}()
	err = unix.Mkdirat(parent, base, 0o755)
	switch {
	case err == nil:
		if err = unix.Fchownat(parent, base, int(uid), int(gid), unix.AT_SYMLINK_NOFOLLOW); err == nil {
			fd, err = openPath(parent, base, unix.O_DIRECTORY|unix.O_NOFOLLOW) // a link put there by now leads to foreign files
		}
		if err != nil {
			_ = unix.Unlinkat(parent, base, unix.AT_REMOVEDIR)
			return -1, made, err
		}
		return fd, append(made, base), nil
	case !errors.Is(err, unix.EEXIST): // a dangling link, or another process was faster
		return -1, made, err
	}
	if fd, err = openPath(parent, base, unix.O_DIRECTORY); err == nil {
		made = nil // they lead to a directory of another process, which keeps them
	}
	return fd, made, err
}

// unmakeDir removes the new directories down to dir, as far as they are empty.
func unmakeDir(dir int, made []string) {
	at := dir
	for _, name := range slices.Backward(made) {
		up, err := openPath(at, "..", unix.O_DIRECTORY)
		if err == nil {
			var here, there unix.Stat_t
			// The directory may have been moved, and its name taken by another.
			err = errors.Join(unix.Fstat(at, &here), unix.Fstatat(up, name, &there, unix.AT_SYMLINK_NOFOLLOW))
			if err == nil && (here.Dev != there.Dev || here.Ino != there.Ino) {
				err = unix.EEXIST
			}
		}
		if at != dir {
			_ = unix.Close(at)
		}
		at = up
		if err == nil {
			err = unix.Unlinkat(up, name, unix.AT_REMOVEDIR)
		}
		if err != nil {
			break
		}
	}
	if at != dir && at >= 0 {
		_ = unix.Close(at)
	}
}

// target finds the directory and the name for a file that is written to path. A link's target is
// replaced, not the link. Made are the directories that were made for it; after an error none of
// them is left.
func target(path string, uid, gid uint32) (dir int, base string, made []string, err error) {
	for range 40 { // the kernel's own limit of links
		var parent string
		parent, base = splitPath(path)
		if !named(base) {
			return -1, "", nil, fail(guest.StageOpen, unix.EISDIR, path)
		}
		if dir, made, err = makeDir(parent, uid, gid); err != nil {
			return -1, "", nil, fail(guest.StageWrite, err, parent)
		}
		var st unix.Stat_t
		err = unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case errors.Is(err, unix.ENOENT):
			if err = usable(dir, path); err == nil {
				return dir, base, made, nil
			}
		case err != nil:
			err = fail(guest.StageOpen, err, path)
		case st.Mode&unix.S_IFMT == unix.S_IFREG:
			if err = usable(dir, path); err == nil {
				return dir, base, made, nil
			}
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			err = fail(guest.StageOpen, unix.EISDIR, path)
		case st.Mode&unix.S_IFMT != unix.S_IFLNK:
			err = fail(guest.StageType, unix.EINVAL, path)
		}
		link := ""
		if err == nil {
			link, err = readLink(dir, base)
		}
		unmakeDir(dir, made)
		_ = unix.Close(dir)
		if err != nil {
			return -1, "", nil, err
		}
		if strings.HasPrefix(link, "/") {
			path = link
		} else {
			path = parent + "/" + link
		}
		if len(path) >= guest.MaxPath {
			return -1, "", nil, fail(guest.StageOpen, unix.ENAMETOOLONG, "")
		}
	}
	return -1, "", nil, fail(guest.StageOpen, unix.ELOOP, path)
}

// append opens an existing file for writing at its end. For a missing one the daemon requests
// create. Mode and owner in the request are for an init of an earlier version, which made the file
// itself.
func (s *server) append(c *conn, pkt guest.Packet, fds []int) error {
	if err := expect(pkt, &guest.CreateRequest{}, 1, fds, 0); err != nil {
		return err
	}
	return s.handOver(c, pkt.Strs[0], unix.O_WRONLY|unix.O_APPEND)
}

// handOver opens a regular file and sends it to the daemon.
func (s *server) handOver(c *conn, path string, flags int) error {
	// First without opening it: to open a FIFO or a device has effects.
	handle, err := openPath(unix.AT_FDCWD, path, 0)
	if err != nil {
		return fail(guest.StageOpen, err, path)
	}
	defer func() { _ = unix.Close(handle) }()
	if err := notRegular(handle, path); err != nil {
		return err
	}
	fd, err := s.reopen(handle, flags)
	if err != nil {
		return fail(guest.StageOpen, err, path)
	}
	defer func() { _ = unix.Close(fd) }()
	return c.hand(guest.KindOpened, fd, path)
}

// own sets owner and mode of a new file or directory.
func own(fd int, uid, gid, mode uint32) error {
	if err := unix.Fchown(fd, int(uid), int(gid)); err != nil {
		return err
	}
	return unix.Fchmod(fd, mode&0o777) // after chown, which may clear bits
}

// usable refuses changes in file systems of the kernel's.
func usable(dir int, path string) error {
	var fsys unix.Statfs_t
	if err := unix.Fstatfs(dir, &fsys); err != nil {
		return fail(guest.StageOpen, err, path)
	}
	if guest.IsKernelFS(fsys.Type) {
		return fail(guest.StageType, unix.EINVAL, path)
	}
	return nil
}

// create makes the file, sends it to the daemon and waits for commit or abort.
func (s *server) create(c *conn, pkt guest.Packet, fds []int) error {
	var m guest.CreateRequest
	if err := expect(pkt, &m, 1, fds, 0); err != nil {
		return err
	}
	path := pkt.Strs[0]
	tmp, err := tempName()
	if err != nil {
		return fail(guest.StageOpen, err, path)
	}
	var dir, fd int
	var base string
	var made []string
	for range 4 {
		if dir, base, made, err = target(path, m.UID, m.GID); err != nil {
			return err
		}
		fd, err = unix.Openat(dir, tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err == nil {
			break
		}
		unmakeDir(dir, made)
		_ = unix.Close(dir)
		if !errors.Is(err, unix.ENOENT) { // another writer made the directory, and removed it when its file was aborted
			break
		}
	}
	if err != nil {
		return fail(guest.StageOpen, err, path)
	}
	defer func() { _ = unix.Close(dir) }()
	committed := false
	undo := func() error {
		committed = true
		err := unix.Unlinkat(dir, tmp, 0)
		unmakeDir(dir, made)
		return err
	}
	defer func() {
		if !committed {
			_ = undo()
		}
	}()
	if err = own(fd, m.UID, m.GID, m.Mode); err == nil {
		err = c.hand(guest.KindCreated, fd, path)
	} else {
		err = fail(guest.StageWrite, err, path)
	}
	_ = unix.Close(fd)
	if err != nil {
		return err
	}

	pkt, fds, err = c.Recv()
	unixmsg.CloseAll(fds)
	switch {
	case err != nil:
		return nil // the daemon has closed the connection, or is gone
	case pkt.Kind == guest.KindCommit:
		var m guest.CommitRequest
		if err := expect(pkt, &m, 0, fds, 0); err != nil {
			return err
		}
		var flags uint
		if m.New {
			flags = unix.RENAME_NOREPLACE
		}
		if err := unix.Renameat2(dir, tmp, dir, base, flags); err != nil {
			return fail(guest.StageCommit, err, path)
		}
		committed = true
	case pkt.Kind == guest.KindAbort:
		if err := undo(); err != nil { // before the answer, so that the file is gone by then
			return fail(guest.StageWrite, err, path)
		}
	default:
		return fail(guest.StageRequest, unix.ENOSYS, pkt.Kind)
	}
	return c.reply(guest.KindDone, guest.None{})
}

// tempName returns a random name, whose beginning tells people where it comes from.
func tempName() (string, error) {
	var b [8]byte
	if _, err := unix.Getrandom(b[:], 0); err != nil {
		return "", err
	}
	return ".sandboxd-" + hex.EncodeToString(b[:]), nil
}
