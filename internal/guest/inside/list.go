package inside

import (
	"bytes"
	"encoding/binary"
	"errors"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"
)

// A dirReader reads a directory a few names at a time: there may be millions. It owns its
// descriptor, which server.reader has counted.
type dirReader struct {
	s    *server
	fd   int
	buf  []byte // 8 KiB, allocated by the first read
	left []byte // unread part of buf
}

// next returns the next name and its type, DT_UNKNOWN if the file system has none. An empty name is
// the end.
func (d *dirReader) next() (name string, typ byte, err error) {
	for {
		for len(d.left) == 0 {
			if d.buf == nil {
				d.buf = make([]byte, 8<<10)
			}
			n, err := unix.Getdents(d.fd, d.buf)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if errors.Is(err, unix.ENOENT) { // the directory itself has been removed, so it is empty
				return "", 0, nil
			}
			if err != nil || n <= 0 {
				return "", 0, err
			}
			d.left = d.buf[:n]
		}
		// struct linux_dirent64: inode, offset, the record's length, type, name with NUL and padding.
		const head = 8 + 8 + 2 + 1
		if len(d.left) < head {
			return "", 0, unix.EIO
		}
		size := int(binary.NativeEndian.Uint16(d.left[16:]))
		if size < head || size > len(d.left) {
			return "", 0, unix.EIO
		}
		rec := d.left[:size]
		d.left = d.left[size:]
		b, _, _ := bytes.Cut(rec[head:], []byte{0})
		if name := string(b); named(name) {
			return name, rec[18], nil
		}
	}
}

// again starts from the first name.
func (d *dirReader) again() error {
	d.left = nil
	_, err := unix.Seek(d.fd, 0, 0)
	return err
}

func (d *dirReader) close() {
	_ = unix.Close(d.fd)
	d.s.dirs.Add(-1)
}

// reader returns a reader of the directory that open opens, if the budget has room for one more.
func (s *server) reader(open func() (int, error)) (dirReader, error) {
	if s.dirs.Add(1) > s.maxDirs {
		s.dirs.Add(-1)
		return dirReader{}, unix.EMFILE
	}
	fd, err := open()
	if err != nil {
		s.dirs.Add(-1)
		return dirReader{}, err
	}
	return dirReader{s: s, fd: fd}, nil
}

// openDir opens a directory below another one for reading, through no link. Resolve may add
// restrictions (RESOLVE_NO_XDEV: no mount point either).
func openDir(at int, name string, resolve uint64) (int, error) {
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH | resolve,
	}
	for {
		fd, err := unix.Openat2(at, name, &how)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

// swapped reports whether an error of openDir means that the directory was removed or replaced a
// moment ago.
func swapped(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR)
}

// A lister sends the entries of a tree, parents first. It holds one packet and the directories on
// the way down.
type lister struct {
	s    *server
	c    *conn
	list []guest.EntryAnswer
	strs []string
	size int
	sent bool
	more bool
}

type listLevel struct {
	dirReader

	prefix string
}

func (s *server) list(c *conn, pkt guest.Packet, fds []int) error {
	var m guest.ListRequest
	if err := expect(pkt, &m, 1, fds, 0); err != nil {
		return err
	}
	path := pkt.Strs[0]
	if m.Depth < 1 || m.Depth > guest.MaxListDepth {
		return fail(guest.StageRequest, unix.EINVAL, path)
	}
	handle, err := openPath(unix.AT_FDCWD, path, unix.O_DIRECTORY)
	if err != nil {
		return fail(guest.StageOpen, err, path)
	}
	root, err := s.reader(func() (int, error) { return s.reopen(handle, unix.O_RDONLY|unix.O_DIRECTORY) })
	_ = unix.Close(handle)
	if err != nil {
		return fail(guest.StageRead, err, path)
	}
	l := &lister{s: s, c: c}
	stack := []*listLevel{{dirReader: root}}
	defer func() {
		for _, level := range stack {
			level.close()
		}
	}()
	for len(stack) > 0 {
		top := stack[len(stack)-1]
		name, _, err := top.next()
		if err != nil || name == "" {
			if err != nil && len(stack) == 1 {
				return fail(guest.StageRead, err, path)
			}
			l.more = l.more || err != nil
			top.close()
			stack = stack[:len(stack)-1]
			continue
		}
		below, err := l.entry(top, name, len(stack) < m.Depth)
		if err != nil {
			return err
		}
		if below != nil {
			stack = append(stack, below)
		}
		if m.Depth == guest.MaxListDepth && len(stack) == guest.MaxListDepth {
			l.more = true // perhaps it is empty: it was not opened
		}
	}
	if len(l.list) > 0 || !l.sent {
		if err := l.flush(); err != nil {
			return err
		}
	}
	return c.reply(guest.KindListed, guest.ListedAnswer{More: l.more})
}

// entry adds one entry, and opens it if it is a directory above the list's depth.
func (l *lister) entry(at *listLevel, name string, descend bool) (*listLevel, error) {
	full := at.prefix + name
	if len(full) >= guest.MaxPath {
		l.more = true // no request could name it
		return nil, nil
	}
	var st unix.Stat_t
	if err := unix.Fstatat(at.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		l.more = l.more || !errors.Is(err, unix.ENOENT)
		return nil, nil
	}
	e := guest.EntryAnswer{InfoAnswer: infoOf(&st)}
	var link string
	var below *listLevel
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		var err error
		if link, err = readLink(at.fd, name); err != nil || link == "" || len(link) >= guest.MaxPath {
			l.more = l.more || !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) // removed or replaced
			return nil, nil
		}
	case unix.S_IFDIR:
		if !descend {
			break
		}
		r, err := l.s.reader(func() (int, error) { return openDir(at.fd, name, 0) })
		if err == nil {
			var fsys unix.Statfs_t
			if err = unix.Fstatfs(r.fd, &fsys); err == nil && !guest.IsKernelFS(fsys.Type) {
				below = &listLevel{dirReader: r, prefix: full + "/"}
			} else {
				r.close()
			}
		}
		if err != nil && !swapped(err) {
			e.Errno = int(fail(guest.StageRead, err, full).Errno)
		}
	}
	l.list = append(l.list, e)
	l.strs = append(l.strs, full, link)
	l.size += len(full) + len(link)
	if len(l.list) == guest.MaxBatch || l.size > guest.MaxBatchBytes {
		if err := l.flush(); err != nil {
			if below != nil {
				below.close()
			}
			return nil, err
		}
	}
	return below, nil
}

// flush sends the entries so far, and waits for the daemon to read them.
func (l *lister) flush() error {
	p, err := guest.Encode(guest.KindEntries, guest.EntriesAnswer{List: l.list}, l.strs...)
	if err == nil {
		err = l.c.Send(p)
	}
	l.list, l.strs, l.size, l.sent = l.list[:0], l.strs[:0], 0, true
	return err
}
