package inside

import (
	"archive/tar"
	"bufio"
	"errors"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"
)

const (
	// maxDepth bounds the depth of an archived tree: a descriptor is open for every level.
	maxDepth = 200
	// maxLinks bounds the files that are remembered for hard links. Later ones are written as files of
	// their own.
	maxLinks     = 1 << 16
	maxLinkNames = 4 << 20 // bound of the bytes of their names
	// maxTrailer bounds the bytes after the end of an archive: tar programs pad to their block.
	maxTrailer = 1 << 20
)

// tar serves tar-out and tar-in. It owns fds, and has closed the pipe when it returns, so that a
// reader gets end of file before the answer. It stops copying when the daemon closes the
// connection.
func (s *server) tar(c *conn, pkt guest.Packet, fds []int) error {
	var m guest.TarInRequest
	var err error
	if pkt.Kind == guest.KindTarIn {
		err = expect(pkt, &m, 1, fds, 1)
	} else {
		err = expect(pkt, &guest.None{}, 1, fds, 1)
	}
	if err == nil {
		// Non-blocking, so that the runtime's poller waits for the pipe and a deadline can stop the
		// copying.
		err = unix.SetNonblock(fds[0], true)
	}
	if err != nil {
		unixmsg.CloseAll(fds)
		return err
	}
	pipe := s.poller.open(fds[0], "pipe")
	defer func() { _ = pipe.Close() }()
	settled := c.onClose(func() { _ = pipe.SetDeadline(guest.Expired) })
	if pkt.Kind == guest.KindTarIn {
		err = s.tarIn(pkt.Strs[0], pipe, m)
	} else {
		err = s.tarOut(pkt.Strs[0], pipe)
	}
	settled()
	return err
}

// A tarWriter writes one tree.
type tarWriter struct {
	s     *server
	tar   *tar.Writer
	links map[[2]uint64]string // device and inode of files with several names
	names int                  // bytes of those names
	buf   []byte
}

func (s *server) tarOut(root string, pipe io.Writer) error {
	out := bufio.NewWriterSize(pipe, 32<<10)
	w := &tarWriter{s: s, tar: tar.NewWriter(out), links: map[[2]uint64]string{}, buf: make([]byte, 32<<10)}
	handle, err := openPath(unix.AT_FDCWD, root, 0)
	if err != nil {
		return fail(guest.StageOpen, err, root)
	}
	defer func() { _ = unix.Close(handle) }()
	var st unix.Stat_t
	if err := unix.Fstat(handle, &st); err != nil {
		return fail(guest.StageStat, err, root)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if err := w.dir(s.proc, "self/fd/"+strconv.Itoa(handle), "", 0); err != nil {
			return err
		}
	} else {
		if err := notRegular(handle, root); err != nil {
			return err
		}
		fd, err := unix.Openat(s.proc, "self/fd/"+strconv.Itoa(handle), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fail(guest.StageOpen, err, root)
		}
		if err := w.file(fd, path.Base(root)); err != nil {
			return err
		}
	}
	if err := w.tar.Close(); err != nil {
		return fail(guest.StageArchive, err, root)
	}
	if err := out.Flush(); err != nil {
		return fail(guest.StageArchive, err, root)
	}
	return nil
}

// dir writes the content of a directory, a few names at a time: there may be millions.
func (w *tarWriter) dir(at int, name, prefix string, depth int) error {
	flags := unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC | unix.O_NONBLOCK
	if depth > 0 {
		flags |= unix.O_NOFOLLOW // a directory may have become a link
	}
	r, err := w.s.reader(func() (int, error) { return unix.Openat(at, name, flags, 0) })
	switch {
	case depth > 0 && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR)):
		return nil
	case err != nil:
		return fail(guest.StageRead, err, prefix)
	}
	defer r.close()
	var fsys unix.Statfs_t
	if err := unix.Fstatfs(r.fd, &fsys); err != nil {
		return fail(guest.StageRead, err, prefix)
	}
	if guest.IsKernelFS(fsys.Type) {
		return nil
	}
	if depth >= maxDepth {
		return fail(guest.StageRead, unix.ENAMETOOLONG, prefix)
	}
	for {
		name, _, err := r.next()
		if err != nil {
			return fail(guest.StageRead, err, prefix)
		}
		if name == "" {
			return nil
		}
		if err := w.entry(r.fd, name, path.Join(prefix, name), depth); err != nil {
			return err
		}
	}
}

func (w *tarWriter) entry(at int, name, full string, depth int) error {
	var st unix.Stat_t
	err := unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT): // gone meanwhile
		return nil
	case err != nil:
		return fail(guest.StageStat, err, full)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		h := header(&st, full+"/", tar.TypeDir)
		if err := w.tar.WriteHeader(h); err != nil {
			return fail(guest.StageArchive, err, full)
		}
		return w.dir(at, name, full, depth+1)
	case unix.S_IFLNK:
		link, err := readLink(at, name)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) { // removed or replaced
			return nil
		}
		if err != nil {
			return fail(guest.StageRead, err, full)
		}
		h := header(&st, full, tar.TypeSymlink)
		h.Linkname = link
		if err := w.tar.WriteHeader(h); err != nil {
			return fail(guest.StageArchive, err, full)
		}
		return nil
	case unix.S_IFREG:
		fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return fail(guest.StageRead, err, full)
		}
		return w.file(fd, full)
	}
	return nil
}

// file writes a file that may change meanwhile: as many bytes as it had at first, padded with zeros
// if it has become shorter. It closes fd.
func (w *tarWriter) file(fd int, full string) error {
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fail(guest.StageStat, err, full)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil // it was a regular file when it was examined
	}
	h := header(&st, full, tar.TypeReg)
	if st.Nlink > 1 {
		id := [2]uint64{st.Dev, st.Ino}
		if first, ok := w.links[id]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
		} else if len(w.links) < maxLinks && w.names+len(full) <= maxLinkNames {
			w.links[id] = full
			w.names += len(full)
		}
	}
	if err := w.tar.WriteHeader(h); err != nil {
		return fail(guest.StageArchive, err, full)
	}
	for left := h.Size; left > 0; {
		n, err := unix.Read(fd, w.buf[:min(left, int64(len(w.buf)))])
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fail(guest.StageRead, err, full)
		case n == 0:
			n = int(min(left, int64(len(w.buf))))
			clear(w.buf[:n])
		}
		if _, err := w.tar.Write(w.buf[:n]); err != nil {
			return fail(guest.StageArchive, err, full)
		}
		left -= int64(n)
	}
	return nil
}

func header(st *unix.Stat_t, name string, typ byte) *tar.Header {
	h := &tar.Header{
		Typeflag: typ, Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()),
	}
	if typ == tar.TypeReg {
		h.Size = st.Size
	}
	return h
}

// A tarReader extracts one stream. Everything goes through an os.Root, which follows no link out of
// it.
type tarReader struct {
	root     *os.Root
	dir      int // of root, for system calls that os.Root lacks
	uid, gid int
	owners   bool   // entries keep the archive's
	made     string // parent that was made last
}

func (s *server) tarIn(dest string, pipe io.Reader, m guest.TarInRequest) error {
	handle, _, err := makeDir(dest, m.UID, m.GID)
	if err != nil {
		return fail(guest.StageWrite, err, dest)
	}
	defer func() { _ = unix.Close(handle) }()
	var fsys unix.Statfs_t
	if err := unix.Fstatfs(handle, &fsys); err != nil {
		return fail(guest.StageOpen, err, dest)
	}
	if guest.IsKernelFS(fsys.Type) {
		return fail(guest.StageType, unix.EINVAL, dest)
	}
	root, err := os.OpenRoot("/proc/self/fd/" + strconv.Itoa(handle))
	if err != nil {
		return fail(guest.StageOpen, err, dest)
	}
	defer func() { _ = root.Close() }()
	x := &tarReader{root: root, dir: handle, uid: int(m.UID), gid: int(m.GID), owners: m.Owners, made: "."}
	in := bufio.NewReaderSize(pipe, 32<<10)
	tr := tar.NewReader(in)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fail(guest.StageArchive, malformed(err), "")
		}
		if err := x.entry(h, tr); err != nil {
			return err
		}
	}
	// Padding follows. If it stayed unread, its writer would get an error.
	n, err := io.CopyN(io.Discard, in, maxTrailer+1)
	if n > maxTrailer {
		return fail(guest.StageArchive, unix.EBADMSG, "")
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return fail(guest.StageArchive, malformed(err), "")
	}
	return nil
}

// malformed gives an errno to an error of archive/tar.
func malformed(err error) error {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return errno
	}
	return unix.EBADMSG
}

// local returns an entry's name below the destination; "." is the destination itself.
func local(name string) (string, bool) {
	name = strings.TrimRight(name, "/")
	if name == "" || name[0] == '/' || strings.IndexByte(name, 0) >= 0 {
		return "", false
	}
	for e := range strings.SplitSeq(name, "/") {
		if e == ".." {
			return "", false
		}
	}
	return path.Clean(name), true
}

func (x *tarReader) entry(h *tar.Header, r io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, ok := local(h.Name)
	if !ok {
		return fail(guest.StageArchive, unix.EXDEV, h.Name)
	}
	if name == "." {
		if h.Typeflag != tar.TypeDir {
			return fail(guest.StageArchive, unix.EISDIR, h.Name)
		}
		return nil // it exists, and keeps its mode as every existing directory
	}
	if err := x.parents(path.Dir(name)); err != nil {
		return x.fail(guest.StageWrite, err, path.Dir(name))
	}
	if x.owners {
		if h.Uid < 0 || h.Gid < 0 || h.Uid > math.MaxInt32 || h.Gid > math.MaxInt32 {
			return fail(guest.StageArchive, unix.EINVAL, h.Name)
		}
		uid, gid := x.uid, x.gid
		x.uid, x.gid = h.Uid, h.Gid
		defer func() { x.uid, x.gid = uid, gid }()
	}
	var err error
	switch h.Typeflag {
	case tar.TypeDir:
		err = x.mkdir(name, fs.FileMode(h.Mode&0o777))
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		err = x.file(name, h, r)
	case tar.TypeSymlink:
		if err = x.remove(name); err == nil {
			err = x.symlink(h.Linkname, name)
		}
	case tar.TypeLink:
		old, ok := local(h.Linkname)
		if !ok {
			return fail(guest.StageArchive, unix.EXDEV, h.Linkname)
		}
		if old == name {
			return nil
		}
		if err = x.remove(name); err == nil {
			err = x.root.Link(old, name)
		}
	default:
		return fail(guest.StageType, unix.EINVAL, h.Name)
	}
	if err != nil {
		return x.fail(guest.StageWrite, err, h.Name)
	}
	return nil
}

// fail tells an error of the sandbox's files from an error of the stream, and from a refusal of
// os.Root.
func (x *tarReader) fail(stage guest.Stage, err error, name string) error {
	if e, ok := errors.AsType[*guest.Error](err); ok {
		return e
	}
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return fail(stage, errno, name)
	}
	// os.Root does not export its error, but has no other without an errno.
	return fail(guest.StageArchive, unix.EXDEV, name)
}

func (x *tarReader) mkdir(name string, mode fs.FileMode) error {
	err := x.root.Mkdir(name, 0o700)
	if errors.Is(err, fs.ErrExist) {
		fi, err := x.root.Stat(name)
		if err != nil {
			return err
		}
		if !fi.IsDir() {
			return unix.ENOTDIR
		}
		return nil
	}
	if err != nil {
		return err
	}
	return x.ownDir(name, uint32(mode))
}

// symlink makes a link and sets its owner. By then its name may belong to another file, for example
// of root's.
func (x *tarReader) symlink(target, name string) error {
	if err := x.root.Symlink(target, name); err != nil {
		return err
	}
	fd, err := x.open(name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return x.ownLink(fd)
}

func (x *tarReader) ownLink(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return unix.ELOOP // the errno for a swapped directory
	}
	return unix.Fchownat(fd, "", x.uid, x.gid, unix.AT_EMPTY_PATH)
}

// open opens the file of a name below the destination.
func (x *tarReader) open(name string, flags uint64) (int, error) {
	how := unix.OpenHow{Flags: flags, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS} // as os.Root: links within it may lead there
	fd, err := -1, error(unix.EAGAIN)
	// EAGAIN: something on the host was renamed while a link with ".." was followed.
	for try := 0; try < 100 && (errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR)); try++ {
		fd, err = unix.Openat2(x.dir, name, &how)
	}
	return fd, err
}

// ownDir sets owner and mode of a new directory. By its name os.Root would change the target of a
// link that a program has put there meanwhile: for example a file of root's, which every user could
// then read.
func (x *tarReader) ownDir(name string, mode uint32) error {
	fd, err := x.open(name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return own(fd, uint32(x.uid), uint32(x.gid), mode) //nolint:gosec // they came as such
}

// parents makes the parent directories of an entry.
func (x *tarReader) parents(dir string) error {
	if dir == x.made || dir == "." {
		return nil
	}
	if err := x.parents(path.Dir(dir)); err != nil {
		return err
	}
	if err := x.mkdir(dir, 0o755); err != nil {
		return err
	}
	x.made = dir
	return nil
}

// remove makes room for an entry. A directory is in the way.
func (x *tarReader) remove(name string) error {
	fi, err := x.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case fi.IsDir():
		return unix.EISDIR
	}
	return x.root.Remove(name)
}

func (x *tarReader) file(name string, h *tar.Header, r io.Reader) (err error) {
	if err := x.remove(name); err != nil {
		return err
	}
	// O_EXCL: not through a file that a program has put there meanwhile.
	f, err := x.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	if _, err := io.Copy(fileOnly{f}, r); err != nil {
		var pe *fs.PathError
		if errors.As(err, &pe) && pe.Path == f.Name() {
			return err
		}
		return fail(guest.StageArchive, malformed(err), h.Name)
	}
	if err := f.Chown(x.uid, x.gid); err != nil {
		return err
	}
	if err := f.Chmod(fs.FileMode(h.Mode & 0o777)); err != nil {
		return err
	}
	return x.root.Chtimes(name, h.ModTime, h.ModTime)
}

// fileOnly hides ReadFrom, which would only come back to io.Copy.
type fileOnly struct{ io.Writer }
