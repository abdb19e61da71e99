package httpapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/flock"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// longPast is a deadline that wakes a blocked reader or writer.
var longPast = time.Unix(1, 0)

// lockPatience bounds the wait for a lock or a socket's path that another daemon holds: it may be
// about to end.
const lockPatience = 500 * time.Millisecond

// errServed reports a socket's path that another daemon serves, whatever its directories are.
var errServed = errors.New("another sandboxd serves it, or is about to: stop it first (sandboxd shutdown), or choose another socket")

// AcquireLock makes sure that no other daemon works in dir until the lock is closed or the process
// ends. The lock belongs to the open file: it cannot be left behind.
func AcquireLock(dir string) (io.Closer, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	path := filepath.Join(dir, "sandboxd.lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	err = flock.Exclusive(nil, lockPatience, f) // a daemon that is about to end may hold it for another moment
	if err != nil {
		_ = f.Close() // nothing was written
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("another sandboxd works in %s: stop it first (sandboxd shutdown), or choose another directory", dir)
		}
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return f, nil
}

// Socket is the API's listening socket, in a directory that only we may search.
type Socket struct {
	*net.UnixListener
	tenants Tenants
	conns   peerConns
	dir     *os.File // of the socket
	name    string
	file    *os.File // the socket's: as long as it is open no other file can be taken for it
	lock    io.Closer
	once    sync.Once
}

// Listen listens for the daemon's user and the tenants. It replaces a socket that a killed daemon
// left, and refuses to replace one that is served. A path outside of the runtime directory lies in
// a directory that exists. Access to that directory is its owner's business; the socket's own mode
// keeps others out.
func Listen(ctx context.Context, runtimeDir, path string, tenants Tenants) (_ *Socket, err error) {
	if err := os.MkdirAll(runtimeDir, 0o700); err != nil {
		return nil, fmt.Errorf("make runtime directory: %w", err)
	}
	dir, err := os.OpenFile(runtimeDir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open runtime directory: %w", err)
	}
	s := &Socket{dir: dir, name: filepath.Base(path), tenants: tenants}
	defer func() {
		if err == nil {
			return
		}
		err = errors.Join(err, dir.Close())
		if s.lock != nil {
			err = errors.Join(err, s.lock.Close())
		}
	}()
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return nil, fmt.Errorf("examine runtime directory: %w", err)
	}
	if int(st.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("runtime directory %s belongs to uid %d, not to us", runtimeDir, st.Uid)
	}
	if st.Mode&0o077 != 0 {
		if err := dir.Chmod(0o700); err != nil {
			return nil, fmt.Errorf("close runtime directory to others: %w", err)
		}
	}
	// Two daemons with different data directories would still fight for one socket.
	if s.lock, err = AcquireLock(runtimeDir); err != nil {
		return nil, err
	}
	if filepath.Dir(path) != filepath.Clean(runtimeDir) {
		other, err := os.OpenFile(filepath.Dir(path), unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("open the socket's directory: %w", err)
		}
		err = dir.Close()
		if s.dir, dir = other, other; err != nil {
			return nil, fmt.Errorf("close runtime directory: %w", err)
		}
	}
	if err := s.exclusively(func() error { return s.take(ctx) }); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return s, nil
}

// exclusively calls do while no other daemon does the same with the path. It retries for a moment
// while another daemon serves it, because that daemon may just have been killed.
func (s *Socket) exclusively(do func() error) error {
	retry := time.NewTicker(10 * time.Millisecond)
	defer retry.Stop()
	for began := time.Now(); ; <-retry.C {
		if err := s.tryExclusively(do); !errors.Is(err, errServed) || time.Since(began) >= lockPatience {
			return err
		}
	}
}

// tryExclusively locks the directory: a daemon with another runtime directory has another lock.
func (s *Socket) tryExclusively(do func() error) (err error) {
	switch err := unix.Flock(int(s.dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return errServed
	case err != nil:
		return fmt.Errorf("lock its directory: %w", err)
	}
	defer func() {
		if uerr := unix.Flock(int(s.dir.Fd()), unix.LOCK_UN); uerr != nil {
			err = errors.Join(err, fmt.Errorf("unlock its directory: %w", uerr))
		}
	}()
	return do()
}

// take listens on a path that no daemon serves.
func (s *Socket) take(ctx context.Context) error {
	if err := removeStale(ctx, s.dir, s.name); err != nil {
		return fmt.Errorf("remove stale socket: %w", err)
	}
	config := net.ListenConfig{Control: unixmsg.OwnerOnly}
	l, err := config.Listen(ctx, "unix", unixmsg.ShortName(s.dir, s.name))
	if err != nil {
		return err
	}
	fd, err := unix.Openat(int(s.dir.Fd()), s.name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return errors.Join(fmt.Errorf("open it: %w", err), l.Close())
	}
	s.UnixListener, s.file = l.(*net.UnixListener), os.NewFile(uintptr(fd), s.name)
	if err := s.open(); err != nil {
		return errors.Join(fmt.Errorf("open it to tenants: %w", err), s.file.Close(), unix.Unlinkat(int(s.dir.Fd()), s.name, 0), l.Close())
	}
	// http.Server closes the listener when the shutdown begins; the path goes when it ends.
	s.SetUnlinkOnClose(false)
	return nil
}

// open opens the socket's file to the tenants: the group first, so that no other one ever has it.
func (s *Socket) open() error {
	if !s.tenants.any() {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(s.file.Fd()), &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK || int(st.Uid) != os.Geteuid() {
		return errors.New("another file is in its place")
	}
	// The descriptor is of the name alone (O_PATH), which fchmod(2) and fchown(2) refuse.
	path := fmt.Sprintf("/proc/self/fd/%d", s.file.Fd())
	if g := s.tenants.Group; g != nil {
		if err := os.Chown(path, -1, int(*g)); err != nil {
			return err
		}
	}
	return unix.Chmod(path, s.tenants.mode())
}

// unlink removes the path if it is still ours: another daemon may have taken it since we stopped
// accepting.
func (s *Socket) unlink() error {
	var ours, there unix.Stat_t
	err := unix.Fstat(int(s.file.Fd()), &ours)
	if err == nil {
		err = unix.Fstatat(int(s.dir.Fd()), s.name, &there, unix.AT_SYMLINK_NOFOLLOW)
	}
	if err == nil && ours.Dev == there.Dev && ours.Ino == there.Ino {
		err = unix.Unlinkat(int(s.dir.Fd()), s.name, 0)
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// removeStale removes the socket of a daemon that was killed. A served one is [errServed], and a
// file of another type is left alone.
func removeStale(ctx context.Context, dir *os.File, name string) error {
	var st unix.Stat_t
	err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return err
	case st.Mode&unix.S_IFMT != unix.S_IFSOCK:
		return fmt.Errorf("%s exists and is no socket", name)
	}
	switch c, err := new(net.Dialer).DialContext(ctx, "unix", unixmsg.ShortName(dir, name)); {
	case err == nil:
		_ = c.Close() // nothing was said
		return errServed
	case errors.Is(err, unix.EAGAIN): // more wait for it than it has room for
		return errServed
	case !errors.Is(err, unix.ECONNREFUSED):
		return err
	}
	return unix.Unlinkat(int(dir.Fd()), name, 0)
}

// Accept reads the peer's credentials before anything else is read.
func (s *Socket) Accept() (net.Conn, error) {
	for {
		c, err := s.AcceptUnix()
		if oneOf(err, unix.ENOSPC, unix.ENOMEM, unix.ENOBUFS) {
			return nil, lack{err}
		}
		if err != nil {
			return nil, err
		}
		p := peer{uid: peerUID(c)}
		if p.operator() {
			return &peerConn{UnixConn: c, peer: p}, nil
		}
		if s.tenants.Group != nil {
			if p.groups, err = peerGroups(c); err != nil {
				p.uid = unknownUID // which is no tenant
			}
		}
		counted := p.uid
		if !s.tenants.has(p) {
			counted = unknownUID // strangers have one count: a user can have thousands of uids
		}
		if !s.conns.enter(counted) {
			_ = c.Close() // nothing was said
			continue
		}
		return &peerConn{UnixConn: c, peer: p, leave: sync.OnceFunc(func() { s.conns.leave(counted) })}, nil
	}
}

// A lack is an error of Accept that http.Server tries again after: the kernel has no epoll watch or
// no memory left for a connection. For any other it would stop serving.
type lack struct{ error }

// Timeout implements [net.Error].
func (lack) Timeout() bool { return false }

// Temporary implements [net.Error].
func (lack) Temporary() bool { return true }

// Unwrap returns the cause.
func (l lack) Unwrap() error { return l.error }

func oneOf(err error, errnos ...unix.Errno) bool {
	return slices.ContainsFunc(errnos, func(e unix.Errno) bool { return errors.Is(err, e) })
}

// Close stops accepting, which is all that http.Server means by it. A second call does nothing.
func (s *Socket) Close() error {
	err := s.UnixListener.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Remove closes the socket and takes it away.
func (s *Socket) Remove() error {
	var err error
	s.once.Do(func() {
		err = s.Close()
		if lerr := s.exclusively(s.unlink); lerr != nil {
			err = errors.Join(err, fmt.Errorf("remove socket: %w", lerr))
		}
		err = errors.Join(err, s.file.Close(), s.dir.Close(), s.lock.Close())
	})
	return err
}

// peerConn is a connection with its peer. It sends files without copying them.
type peerConn struct {
	*net.UnixConn
	peer  peer
	leave func() // gives the peer's count back; nil if it is not counted
}

// Close closes the connection.
func (c *peerConn) Close() error {
	if c.leave != nil {
		c.leave()
	}
	return c.UnixConn.Close()
}

// unknownUID is the uid of a peer that the kernel does not identify: 2^32-1 means "no id"
// everywhere.
const unknownUID = ^uint32(0)

func peerUID(c *net.UnixConn) uint32 {
	uid, err := unixmsg.PeerUID(c)
	if err != nil {
		return unknownUID
	}
	return uid
}

type peerKey struct{}

func peerContext(ctx context.Context, c net.Conn) context.Context {
	if p, ok := c.(*peerConn); ok {
		return context.WithValue(ctx, peerKey{}, p)
	}
	return ctx
}

func peerOf(ctx context.Context) peer {
	if c := connOf(ctx); c != nil {
		return c.peer
	}
	return peer{uid: unknownUID}
}

// connOf returns the connection of a request; nil in tests that have none.
func connOf(ctx context.Context) *peerConn {
	c, _ := ctx.Value(peerKey{}).(*peerConn)
	return c
}

// ReadFrom sends a regular file with sendfile(2), which net has for TCP only. net/http calls it for
// a body of known length, with a *io.LimitedReader around the file.
func (c *peerConn) ReadFrom(r io.Reader) (int64, error) {
	if l, ok := r.(*io.LimitedReader); ok {
		if f, ok := l.R.(*os.File); ok {
			n, err, handled := c.sendfile(f, l.N)
			l.N -= n
			if handled {
				return n, err
			}
		}
	}
	return io.Copy(patientWriter{c}, r)
}

// patientWriter limits the time for each part, and hides the other methods of the connection.
type patientWriter struct{ c *peerConn }

func (w patientWriter) Write(p []byte) (int, error) {
	_ = w.c.SetWriteDeadline(time.Now().Add(answerTimeout)) // every connection of ours has deadlines
	return w.c.Write(p)
}

// sendfile reports handled as false where nothing was sent and the ordinary way should be tried.
func (c *peerConn) sendfile(f *os.File, n int64) (sent int64, err error, handled bool) {
	src, err := f.SyscallConn()
	if err != nil {
		return 0, nil, false //nolint:nilerr // the ordinary way meets the same error
	}
	dst, err := c.SyscallConn()
	if err != nil {
		return 0, nil, false //nolint:nilerr // the ordinary way meets the same error
	}
	var sendErr, waitErr error
	err = src.Control(func(in uintptr) {
		for sent < n && sendErr == nil && waitErr == nil {
			_ = c.SetWriteDeadline(time.Now().Add(answerTimeout)) // every connection of ours has deadlines
			waitErr = dst.Write(func(out uintptr) bool {
				// In parts small enough that a live reader takes each in time.
				m, err := unix.Sendfile(int(out), int(in), nil, int(min(n-sent, 1<<20)))
				switch {
				case errors.Is(err, unix.EAGAIN):
					return false
				case errors.Is(err, unix.EINTR):
				case err != nil:
					sendErr = err
				case m == 0: // the file became shorter
					sendErr = io.ErrUnexpectedEOF
				default:
					sent += int64(m)
				}
				return true
			})
		}
	})
	return sent, errors.Join(err, waitErr, sendErr), true
}
