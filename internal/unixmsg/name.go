package unixmsg

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxName is the longest path of a socket address: the 108 bytes of sun_path, less the NUL.
const maxName = 107

// ShortName returns a path for a file in an open directory that fits into a socket address, however
// long the directory's own path is. The path is good while dir is open.
func ShortName(dir *os.File, name string) string {
	return "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + name
}

// WithShortName calls use with a path to the same file that fits into a socket address. The path is
// good during the call.
func WithShortName(path string, use func(name string) error) error {
	if len(path) <= maxName {
		return use(path)
	}
	// O_PATH: to reach a socket one must be able to search its directory, not to read it.
	fd, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the socket's directory: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	return use("/proc/self/fd/" + strconv.Itoa(fd) + "/" + filepath.Base(path))
}

// Listen makes a listening SOCK_SEQPACKET socket with mode 0600 under a name in an open directory.
// A file that has the name is an error (EADDRINUSE). The file is blocking and close-on-exec.
func Listen(dir *os.File, name string, backlog int) (_ *os.File, err error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make socket: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if err := ownerOnly(fd); err != nil {
		return nil, fmt.Errorf("set the socket's mode: %w", err)
	}
	err = unix.Bind(fd, &unix.SockaddrUnix{Name: ShortName(dir, name)})
	goruntime.KeepAlive(dir)
	if err != nil {
		return nil, fmt.Errorf("bind: %w", err)
	}
	if err := unix.Listen(fd, backlog); err != nil {
		return nil, errors.Join(fmt.Errorf("listen: %w", err), unix.Unlinkat(int(dir.Fd()), name, 0))
	}
	return f, nil
}

// OwnerOnly is a Control of [net.ListenConfig] that gives the file of a Unix socket mode 0600: at
// no moment may other users connect.
func OwnerOnly(_, _ string, conn syscall.RawConn) error {
	var cerr error
	err := conn.Control(func(fd uintptr) { cerr = ownerOnly(int(fd)) })
	return errors.Join(err, cerr)
}

// ownerOnly sets the mode of an unbound socket. Less the umask, bind gives it to the file.
func ownerOnly(fd int) error { return unix.Fchmod(fd, 0o600) }

// Pair returns the two ends of a new pair of connected sockets. The files have a name for errors,
// and are blocking and close-on-exec.
func Pair(kind int, name string) (a, b *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), name), os.NewFile(uintptr(fds[1]), name), nil
}
