// Package guesttest has helpers for the tests of the guest protocol.
package guesttest

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	goruntime "runtime"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// PassProc opens the caller's /proc as the descriptor on which an init expects it ([guest.ProcFD]),
// for a process that is about to execute one.
func PassProc() error {
	proc, err := unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("open /proc: %w", err)
	}
	if proc == guest.ProcFD {
		return nil
	}
	if err := unix.Dup3(proc, guest.ProcFD, 0); err != nil {
		return fmt.Errorf("pass /proc: %w", err)
	}
	return unix.Close(proc)
}

// Leaks fails the test if it leaves descriptors or goroutines.
func Leaks(tb testing.TB) {
	tb.Helper()
	count := func() (int, int) {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			tb.Fatal(err)
		}
		return len(fds), goruntime.NumGoroutine()
	}
	// The runtime's poller opens its descriptors with the first file that needs it.
	r, w, err := os.Pipe()
	if err != nil {
		tb.Fatal(err)
	}
	_, _ = r.Close(), w.Close()
	fds, gos := count()
	tb.Cleanup(func() {
		var f, g int
		if !Within(tb, func() bool { f, g = count(); return f <= fds && g <= gos }) {
			buf := make([]byte, 1<<16)
			buf = buf[:goruntime.Stack(buf, true)]
			tb.Errorf("%d descriptors (were %d), %d goroutines (were %d)\n%s", f, fds, g, gos, buf)
		}
	})
}

// Within waits until ready returns true, and reports whether it did. It gives up late, because
// another test may keep the machine busy.
func Within(tb testing.TB, ready func() bool) bool {
	tb.Helper()
	deadline := time.After(testenv.HungAfter)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ready() {
		select {
		case <-tick.C:
		case <-deadline:
			return ready() // this process may have been stopped until the deadline
		}
	}
	return true
}

// WaitFor is Within that fails the test.
func WaitFor(tb testing.TB, ready func() bool) {
	tb.Helper()
	if !Within(tb, ready) {
		tb.Fatal("it does not come to that")
	}
}

// OddFiles returns a directory with one file of each type that is not regular, and with links to
// them.
func OddFiles(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o666); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: filepath.Join(dir, "socket")}); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{
		"link-to-fifo": "fifo", "link-to-device": "/dev/zero", "link-to-proc": "/proc/self/status", "loop": "loop",
		"dangling": "nothing", "link-to-dir": ".",
	} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// Tree lists a directory: type, permissions, name, and the content of files or the target of links.
func Tree(t *testing.T, dir string) []string {
	t.Helper()
	var list []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		line := fi.Mode().String() + " " + rel
		switch {
		case fi.Mode().IsRegular():
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if len(b) > 40 {
				b = fmt.Appendf(nil, "%d bytes", len(b))
			}
			line += " = " + string(b)
		case fi.Mode()&fs.ModeSymlink != 0:
			link, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " -> " + link
		}
		list = append(list, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// SocketPair returns two connected non-blocking SOCK_SEQPACKET sockets.
func SocketPair(tb testing.TB) (int, int) {
	tb.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		tb.Fatal(err)
	}
	return p[0], p[1]
}

// Listen makes the socket that an init inherits. The path may exceed a socket address.
func Listen(path string) (*os.File, error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }() // only read
	l, err := unixmsg.Listen(dir, filepath.Base(path), guest.MaxConns)
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.Close() }() // the result is a copy
	fd, err := unix.FcntlInt(l.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	// Only a file made of a non-blocking descriptor uses the runtime's poller, so that Close ends a
	// wait.
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}
