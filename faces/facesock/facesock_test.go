package facesock

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
)

// A user other than the face's is told nothing, even when the mode of the socket would let it in.
func TestListenServesItsUser(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	l, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the socket's mode: %v, %v", fi.Mode(), err)
	}
	const stranger = 65534
	if os.Geteuid() == 0 {
		if err := errors.Join(os.Chmod(path, 0o666), os.Chmod(filepath.Dir(path), 0o711)); err != nil {
			t.Fatal(err)
		}
	} else {
		l.(*owners).uid = stranger
	}
	dial := func(uid int) (c net.Conn) {
		t.Helper()
		if err := osthread.Run(func() (err error) {
			// From its directory: those above may be closed to the other user.
			if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Chdir(filepath.Dir(path))); err != nil {
				return err
			}
			if os.Geteuid() == 0 {
				if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
					return errno
				}
			}
			c, err = net.Dial("unix", "sock")
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return c
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("x"))
			_ = c.Close()
		}
	}()
	c := dial(stranger)
	defer c.Close()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("a stranger's read: %v", err)
	}
	if os.Geteuid() != 0 {
		return // its user is the stranger here
	}
	own := dial(0)
	defer own.Close()
	if n, err := own.Read(make([]byte, 1)); n != 1 {
		t.Errorf("the user's own read: %v", err)
	}
}
