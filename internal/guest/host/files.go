package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"
)

// A FileInfo describes a file of the sandbox.
type FileInfo struct {
	Name     string // last element of the path
	Size     int64
	Mode     fs.FileMode // type and permissions
	ModTime  time.Time
	IsDir    bool
	Link     string // target of a symbolic link
	UID, GID uint32 // ids of the sandbox
}

// checkPath refuses invalid paths. Init resolves dots and links, inside the sandbox.
func checkPath(p string) error {
	switch {
	case p == "" || p[0] != '/', strings.IndexByte(p, 0) >= 0:
		return &guest.Error{Stage: guest.StageRequest, Errno: unix.EINVAL, Path: p}
	case len(p) >= guest.MaxPath:
		return &guest.Error{Stage: guest.StageRequest, Errno: unix.ENAMETOOLONG, Path: p[:32] + "…"}
	}
	return nil
}

// file sends a request for one path that is answered by one packet with nfds descriptors.
func (c *Client) file(ctx context.Context, k guest.Kind, msg any, p string, want guest.Kind, nfds int) (*conn, guest.Packet, []int, error) {
	if err := checkPath(p); err != nil {
		return nil, guest.Packet{}, nil, err
	}
	req, err := guest.Encode(k, msg, p)
	if err != nil {
		return nil, guest.Packet{}, nil, err
	}
	return c.request(ctx, replyTimeout, req, nil, want, nfds)
}

// Open opens a regular file of the sandbox for reading, as the sandbox's root. FIFOs, devices,
// sockets and files of /proc are refused ([guest.ErrNotRegular]) without being opened.
func (c *Client) Open(ctx context.Context, path string) (*os.File, error) {
	conn, pkt, fds, err := c.file(ctx, guest.KindOpen, guest.None{}, path, guest.KindOpened, 1)
	if err != nil {
		return nil, err
	}
	_ = conn.Close()
	f, _, err := regular(fds[0], path, unix.O_RDONLY)
	if err == nil {
		if err = pkt.Into(&guest.None{}, 0); err != nil {
			_ = f.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open %q: %w: %w", path, ErrLost, err)
	}
	return f, nil
}

// regular takes over a descriptor that init reports to be a regular file open for access. On error
// it has closed it.
func regular(fd int, name string, access int) (*os.File, *unix.Stat_t, error) {
	st := new(unix.Stat_t)
	var fsys unix.Statfs_t
	err := unix.Fstat(fd, st)
	if err == nil {
		err = unix.Fstatfs(fd, &fsys)
	}
	var flags int
	if err == nil {
		flags, err = unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	}
	switch {
	case err != nil:
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		err = guest.ErrNotRegular
	// The content of these depends on the reader: init must not read or write them through the daemon.
	case guest.IsKernelFS(fsys.Type):
		err = errors.New("the file lies in a file system of the kernel's")
	case flags&unix.O_PATH != 0 || flags&(unix.O_ACCMODE|unix.O_APPEND) != access:
		err = errors.New("the file is not open as asked")
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, nil, fmt.Errorf("check descriptor: %w", err)
	}
	return os.NewFile(uintptr(fd), name), st, nil
}

// A PendingFile is a file that is being written. The sandbox sees it under its name once Commit has
// succeeded, and never half written. Without Commit or Abort, init removes it when the daemon is
// gone.
type PendingFile struct {
	File *os.File // write here; closed by Commit and Abort

	client *Client
	conn   *conn
	once   sync.Once
}

// Create makes a file beside path that Commit renames to path, with this mode and owner. Missing
// parents are made with the same owner and mode 0755; Commit keeps them. If path is a link, its
// target is replaced. Directories, FIFOs, devices and sockets are refused.
func (c *Client) Create(ctx context.Context, path string, mode fs.FileMode, uid, gid uint32) (*PendingFile, error) {
	if uid == math.MaxUint32 || gid == math.MaxUint32 { // "no change" to the kernel
		return nil, &guest.Error{Stage: guest.StageRequest, Errno: unix.EINVAL, Path: path}
	}
	msg := guest.CreateRequest{Mode: uint32(mode.Perm()), UID: uid, GID: gid}
	conn, pkt, fds, err := c.file(ctx, guest.KindCreate, msg, path, guest.KindCreated, 1)
	if err != nil {
		return nil, err
	}
	f, st, err := regular(fds[0], path, unix.O_WRONLY)
	if err == nil {
		if err = pkt.Into(&guest.None{}, 0); err == nil && (st.Size != 0 || st.Nlink != 1) {
			err = errors.New("the file is not new")
		}
		if err != nil {
			_ = f.Close()
		}
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("create %q: %w: %w", path, ErrLost, err)
	}
	return &PendingFile{File: f, client: c, conn: conn}, nil
}

// Commit puts the file in its place. After an error the file is gone.
func (p *PendingFile) Commit() error {
	err := fs.ErrClosed
	p.once.Do(func() {
		if err = p.File.Close(); err != nil {
			err = errors.Join(err, p.end(guest.KindAbort, guest.None{}))
			return
		}
		err = p.end(guest.KindCommit, guest.CommitRequest{})
	})
	if err != nil {
		return fmt.Errorf("commit %q: %w", p.File.Name(), err)
	}
	return nil
}

// publish puts the file in its place if the name is free, and leaves it open. After an error the
// file is gone.
func (p *PendingFile) publish() error {
	err := fs.ErrClosed
	p.once.Do(func() { err = p.end(guest.KindCommit, guest.CommitRequest{New: true}) })
	if err != nil {
		return fmt.Errorf("make %q: %w", p.File.Name(), err)
	}
	return nil
}

// Abort removes the file. After Commit it does nothing, so it can be deferred.
func (p *PendingFile) Abort() error {
	var err error
	p.once.Do(func() {
		err = errors.Join(p.File.Close(), p.end(guest.KindAbort, guest.None{}))
	})
	if err != nil {
		return fmt.Errorf("abort %q: %w", p.File.Name(), err)
	}
	return nil
}

// end sends the last request, receives the answer and closes the connection.
func (p *PendingFile) end(k guest.Kind, msg any) error {
	defer func() { _ = p.conn.Close() }()
	req, err := guest.Encode(k, msg)
	if err != nil {
		return err
	}
	if err := p.conn.SetDeadline(time.Now().Add(replyTimeout)); err != nil {
		return err
	}
	if err := p.conn.Send(req); err != nil {
		return lost("ask init", err)
	}
	pkt, fds, err := p.client.await(nil, p.conn, replyTimeout)
	if err != nil {
		return lost("await init's answer", err)
	}
	unixmsg.CloseAll(fds)
	switch {
	case len(fds) != 0:
		return fmt.Errorf("await init's answer: %w: %d descriptors instead of none", ErrLost, len(fds))
	case pkt.Kind == guest.KindError:
		return refusal(pkt)
	case pkt.Kind != guest.KindDone:
		return fmt.Errorf("await init's answer: %w: %q instead of %s", ErrLost, pkt.Kind, guest.KindDone)
	}
	return nil
}

// An AppendedFile is a regular file of the sandbox that is open for writing at its end. A missing
// file is made by the first write; if that is refused, or Abort comes first, nothing is left.
type AppendedFile struct {
	client *Client
	ctx    context.Context //nolint:containedctx // lives as long as one request
	path   string
	msg    guest.CreateRequest
	file   *os.File
	made   *PendingFile // until it has its name
}

// Append opens a regular file of the sandbox. A missing one will be made like those of
// [Client.Create], with its parents.
func (c *Client) Append(ctx context.Context, path string, mode fs.FileMode, uid, gid uint32) (*AppendedFile, error) {
	if uid == math.MaxUint32 || gid == math.MaxUint32 {
		return nil, &guest.Error{Stage: guest.StageRequest, Errno: unix.EINVAL, Path: path}
	}
	a := &AppendedFile{client: c, ctx: ctx, path: path, msg: guest.CreateRequest{Mode: uint32(mode.Perm()), UID: uid, GID: gid}}
	if err := a.open(); err != nil {
		return nil, err
	}
	return a, nil
}

// open opens the existing file, or begins a new one.
func (a *AppendedFile) open() (err error) {
	a.file, err = a.client.openAtEnd(a.ctx, a.path, a.msg)
	if e, ok := errors.AsType[*guest.Error](err); !ok || e.Errno != unix.ENOENT {
		return err
	}
	a.made, err = a.client.Create(a.ctx, a.path, fs.FileMode(a.msg.Mode), a.msg.UID, a.msg.GID)
	if err != nil {
		return err
	}
	a.file = a.made.File
	if _, err := unix.FcntlInt(a.file.Fd(), unix.F_SETFL, unix.O_APPEND); err != nil {
		return errors.Join(fmt.Errorf("append to %q: %w", a.path, err), a.made.Abort())
	}
	return nil
}

func (c *Client) openAtEnd(ctx context.Context, path string, msg guest.CreateRequest) (*os.File, error) {
	conn, pkt, fds, err := c.file(ctx, guest.KindAppend, msg, path, guest.KindOpened, 1)
	if err != nil {
		return nil, err
	}
	_ = conn.Close()
	f, _, err := regular(fds[0], path, unix.O_WRONLY|unix.O_APPEND)
	if err == nil {
		if err = pkt.Into(&guest.None{}, 0); err != nil {
			_ = f.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("append to %q: %w: %w", path, ErrLost, err)
	}
	return f, nil
}

// Write appends p with one write, if the file system takes all of it.
func (a *AppendedFile) Write(p []byte) (n int, err error) {
	// Others may make the file meanwhile, which then gets the bytes, or remove it again.
	for range 4 {
		if n, err = a.file.Write(p); err != nil {
			return n, err
		}
		if err = a.publish(); !errors.Is(err, unix.EEXIST) {
			break
		}
		if err := a.open(); err != nil {
			return 0, err
		}
	}
	if err != nil {
		return 0, err
	}
	return n, nil
}

// publish gives a new file its name. After an error the file is gone.
func (a *AppendedFile) publish() error {
	if a.made == nil {
		return nil
	}
	made := a.made
	a.made = nil
	if err := made.publish(); err != nil {
		return errors.Join(err, a.file.Close())
	}
	return nil
}

// Close ends the writing. A new file without a write is empty.
func (a *AppendedFile) Close() error {
	if a.made != nil {
		if _, err := a.Write(nil); err != nil {
			return errors.Join(err, a.Abort())
		}
	}
	return a.file.Close()
}

// Abort ends the writing. Bytes that were written stay.
func (a *AppendedFile) Abort() error {
	if a.made != nil {
		return a.made.Abort()
	}
	if a.file == nil { // another process's file, which is gone again
		return nil
	}
	if err := a.file.Close(); !errors.Is(err, fs.ErrClosed) {
		return err
	}
	return nil
}

// Stat describes the file at a path. With follow, a link in the last place is followed.
func (c *Client) Stat(ctx context.Context, name string, follow bool) (FileInfo, error) {
	conn, pkt, _, err := c.file(ctx, guest.KindStat, guest.StatRequest{Follow: follow}, name, guest.KindInfo, 0)
	if err != nil {
		return FileInfo{}, err
	}
	_ = conn.Close()
	var a guest.InfoAnswer
	if err := pkt.Into(&a, 1); err != nil {
		return FileInfo{}, fmt.Errorf("stat %q: %w: %w", name, ErrLost, err)
	}
	fi, ok := fileInfo(&a, path.Base(name), pkt.Strs[0])
	if !ok {
		return FileInfo{}, fmt.Errorf("stat %q: %w: attributes that cannot be", name, ErrLost)
	}
	return fi, nil
}

// fileInfo validates init's description of a file.
func fileInfo(a *guest.InfoAnswer, name, link string) (FileInfo, bool) {
	fi := FileInfo{
		Name: name, Size: a.Size, Mode: fs.FileMode(a.Mode & 0o777), ModTime: time.Unix(a.MTime, a.NSec),
		Link: link, UID: a.UID, GID: a.GID,
	}
	switch a.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFDIR:
		fi.Mode |= fs.ModeDir
		fi.IsDir = true
	case unix.S_IFLNK:
		fi.Mode |= fs.ModeSymlink
	case unix.S_IFIFO:
		fi.Mode |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		fi.Mode |= fs.ModeSocket
	case unix.S_IFCHR:
		fi.Mode |= fs.ModeDevice | fs.ModeCharDevice
	case unix.S_IFBLK:
		fi.Mode |= fs.ModeDevice
	default:
		return FileInfo{}, false
	}
	for _, b := range []struct {
		bit  uint32
		mode fs.FileMode
	}{{unix.S_ISUID, fs.ModeSetuid}, {unix.S_ISGID, fs.ModeSetgid}, {unix.S_ISVTX, fs.ModeSticky}} {
		if a.Mode&b.bit != 0 {
			fi.Mode |= b.mode
		}
	}
	switch {
	case a.Mode>>16 != 0, a.Size < 0, a.NSec < 0 || a.NSec >= 1e9,
		(fi.Mode&fs.ModeSymlink != 0) != (link != ""), len(link) >= guest.MaxPath:
		return FileInfo{}, false
	// Times beyond RFC 3339 would make encoding/json and others fail.
	case fi.ModTime.UTC().Year() < 0 || fi.ModTime.UTC().Year() > 9999:
		fi.ModTime = time.Unix(0, 0)
	}
	return fi, true
}

// TarOut writes the tree at path as a tar stream into w, which must be a pipe: init gets a copy, so
// its content is under the sandbox's control. Names are relative to path; if path is a file, it is
// the only entry. The stream has regular files, directories, links and hard links; other types and
// the kernel's file systems are left out.
//
// TarOut returns when init has written all. If ctx has no deadline and Held does not extend it,
// TarOut gives up after 10 minutes. The pipe must be read meanwhile. The caller keeps w, and closes
// it after TarOut has returned, so that the reader gets end of file.
func (c *Client) TarOut(ctx context.Context, path string, w *os.File) error {
	return c.tar(ctx, guest.KindTarOut, guest.None{}, path, w)
}

// TarIn extracts the tar stream that init reads from r, which must be a pipe, below path. Missing
// directories are made. All entries get the owner in as, or with Owners those that the stream
// states. Existing files are replaced, existing directories kept. An entry that would leave path,
// also through a link, is an error, and so are devices, FIFOs and sockets. After an error the
// entries before it stay.
//
// The caller keeps r. After an error, close r so that the writer notices: the rest is not read.
func (c *Client) TarIn(ctx context.Context, path string, r *os.File, as guest.TarInRequest) error {
	if as.UID == math.MaxUint32 || as.GID == math.MaxUint32 {
		return &guest.Error{Stage: guest.StageRequest, Errno: unix.EINVAL, Path: path}
	}
	return c.tar(ctx, guest.KindTarIn, as, path, r)
}

func (c *Client) tar(ctx context.Context, k guest.Kind, msg any, path string, pipe *os.File) error {
	if err := checkPath(path); err != nil {
		return err
	}
	req, err := guest.Encode(k, msg, path)
	if err != nil {
		return err
	}
	rc, err := pipe.SyscallConn() // not Fd, which would make the pipe blocking
	if err != nil {
		return fmt.Errorf("%s: use the pipe: %w", k, err)
	}
	give := -1
	var dup error
	if err := rc.Control(func(fd uintptr) {
		var st unix.Stat_t
		if dup = unix.Fstat(int(fd), &st); dup != nil {
			return
		}
		if st.Mode&unix.S_IFMT != unix.S_IFIFO {
			dup = errors.New("it is not a pipe")
			return
		}
		give, dup = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
	}); err != nil {
		dup = err
	}
	if dup != nil {
		return fmt.Errorf("%s: use the pipe: %w", k, dup)
	}
	// A duplicate, so that the caller may close its own at any time.
	defer func() { _ = unix.Close(give) }()
	conn, pkt, _, err := c.request(ctx, treeTimeout, req, []int{give}, guest.KindDone, 0)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := pkt.Into(&guest.None{}, 0); err != nil {
		return fmt.Errorf("%s: %w: %w", k, ErrLost, err)
	}
	return nil
}
