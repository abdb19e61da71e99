package unixmsg

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pair returns two connected sockets; net.UnixConn is the strictest user, because it has deadlines
// and a poller.
func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	one, other, err := Pair(unix.SOCK_SEQPACKET, "socket")
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, f := range []*os.File{one, other} {
		c, err := net.FileConn(f)
		if err = errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		conns[i] = c.(*net.UnixConn)
		t.Cleanup(func() { _ = c.Close() })
	}
	return conns[0], conns[1]
}

func receive(f *Format, c *net.UnixConn, flags int) (string, []int, error) {
	conn, err := c.SyscallConn()
	if err != nil {
		return "", nil, err
	}
	var text string
	fds, err := f.Receive(conn, flags, func(p []byte) error {
		text = string(p)
		if text == "refuse" {
			return io.ErrNoProgress
		}
		return nil
	})
	return text, fds, err
}

// sendRaw sends descriptors without a byte too, to which the Go functions would add one.
func sendRaw(fd int, data, control []byte) error {
	var h unix.Msghdr
	if len(data) > 0 {
		v := unix.Iovec{Base: &data[0]}
		v.SetLen(len(data))
		h.Iov = &v
		h.SetIovlen(1)
	}
	if len(control) > 0 {
		h.Control = &control[0]
		h.SetControllen(len(control))
	}
	if _, _, errno := unix.Syscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&h)), 0); errno != 0 {
		return errno
	}
	return nil
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// A refused packet leaves no descriptor open, whatever is wrong with it.
func TestReceive(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	rights := func(n int) []byte { return unix.UnixRights(slices.Repeat([]int{int(null.Fd())}, n)...) }
	for _, tc := range []struct {
		name    string
		data    []byte
		control []byte
		fds     int
		want    error
	}{
		{"plain", []byte("x"), nil, 0, nil},
		{"longest", bytes.Repeat([]byte("x"), 100), nil, 0, nil},
		{"descriptors", []byte("x"), rights(3), 3, nil},
		{"too long", bytes.Repeat([]byte("x"), 101), rights(1), 0, errLong},
		{"one descriptor too many", []byte("x"), rights(4), 0, errFiles},
		{"many descriptors too many", []byte("x"), rights(200), 0, errFiles},
		{"nothing", nil, nil, 0, errEmpty},
		{"descriptors alone", nil, rights(2), 0, io.EOF},
		{"not understood", []byte("refuse"), rights(2), 0, io.ErrNoProgress},
	} {
		t.Run(tc.name, func(t *testing.T) {
			format := Format{MaxBytes: 100, MaxFiles: 3}
			a, b := pair(t)
			before := descriptors(t)
			conn, err := a.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var sent error
			if err := conn.Control(func(fd uintptr) { sent = sendRaw(int(fd), tc.data, tc.control) }); err != nil || sent != nil {
				t.Fatal(err, sent)
			}
			_, fds, err := receive(&format, b, 0)
			if !errors.Is(err, tc.want) || tc.want == nil && err != nil || len(fds) != tc.fds {
				t.Errorf("%d descriptors, %v", len(fds), err)
			}
			for _, fd := range fds {
				if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
					t.Errorf("descriptor %d is not close-on-exec (%v)", fd, err)
				}
			}
			CloseAll(fds)
			if after := descriptors(t); after != before {
				t.Errorf("%d descriptors leaked", after-before)
			}
		})
	}
}

// A full descriptor table of this process must not count against the peer.
func TestFullDescriptorTableIsOurs(t *testing.T) {
	a, b := pair(t)
	format := Format{MaxBytes: 100, MaxFiles: 3}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = r.Close(), w.Close() }()
	if _, _, err := a.WriteMsgUnix([]byte("x"), unix.UnixRights(int(r.Fd()), int(w.Fd())), nil); err != nil {
		t.Fatal(err)
	}
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	_, fds, got := receive(&format, b, 0)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(got, unix.EMFILE) || len(fds) != 0 {
		t.Errorf("%d descriptors, %v", len(fds), got)
	}
}

// A socket that asks for credentials gets a control message that no protocol of ours expects.
func TestOddControlMessageIsRefused(t *testing.T) {
	a, b := pair(t)
	format := Format{MaxBytes: 100, MaxFiles: 30}
	conn, err := b.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var set error
	if err := conn.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1) }); err != nil || set != nil {
		t.Fatal(err, set)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	before := descriptors(t)
	if _, _, err := a.WriteMsgUnix([]byte("x"), unix.UnixRights(int(null.Fd())), nil); err != nil {
		t.Fatal(err)
	}
	if _, fds, err := receive(&format, b, 0); !errors.Is(err, errControl) || len(fds) != 0 {
		t.Errorf("%d descriptors, %v", len(fds), err)
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors leaked", after-before)
	}
}

// A packet that arrived before its deadline was looked at is not late, and neither is the end of
// the connection.
func TestArrivedPacketIsNotLate(t *testing.T) {
	a, b := pair(t)
	format := Format{MaxBytes: 100, MaxFiles: 3}
	if err := b.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := receive(&format, b, 0); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("no packet: %v", err)
	}
	conn, err := a.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := format.Send(conn, []byte("x")); err != nil {
		t.Fatal(err)
	}
	for _, flags := range []int{unix.MSG_PEEK, 0} {
		if text, _, err := receive(&format, b, flags); text != "x" || err != nil {
			t.Errorf("a packet: %q, %v", text, err)
		}
	}
	_ = a.Close()
	if _, _, err := receive(&format, b, 0); !errors.Is(err, io.EOF) {
		t.Errorf("the end: %v", err)
	}
	if err := format.Send(conn, []byte("x")); err == nil {
		t.Error("sends on a closed connection")
	}
}

func TestTooLargePacketIsNotSent(t *testing.T) {
	a, _ := pair(t)
	format := Format{MaxBytes: 100}
	conn, err := a.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := format.Send(conn, make([]byte, 101)); !errors.Is(err, unix.EMSGSIZE) {
		t.Errorf("%v", err)
	}
}

// A socket is its owner's alone from the first moment, whatever the length of its path.
func TestListenAndReach(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	l, err := Listen(dir, "s", 4)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if fi, err := os.Stat(filepath.Join(path, "s")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	if _, err := Listen(dir, "s", 4); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a second socket of the name: %v", err)
	}
	if err := WithShortName(filepath.Join(path, "s"), func(name string) error {
		c, err := new(net.Dialer).DialContext(t.Context(), "unixpacket", name)
		if err != nil {
			return err
		}
		defer c.Close()
		uid, err := PeerUID(c.(*net.UnixConn))
		if err != nil || int(uid) != os.Geteuid() {
			t.Errorf("the peer has uid %d, %v", uid, err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	if err := WithShortName("/short", func(name string) error {
		if name != "/short" {
			t.Errorf("a short path became %s", name)
		}
		return io.ErrNoProgress
	}); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("%v", err)
	}
}

// The file of a listener has mode 0600, whatever the umask leaves of the default.
func TestOwnerOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	config := net.ListenConfig{Control: OwnerOnly}
	l, err := config.Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
}

// No end of a pair leaks into a program that is executed.
func TestPair(t *testing.T) {
	a, b, err := Pair(unix.SOCK_STREAM, "socket")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []*os.File{a, b} {
		if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("flags %#x, %v", flags, err)
		}
	}
	if _, err := a.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if data, err := io.ReadAll(b); string(data) != "x" || err != nil {
		t.Errorf("%q, %v", data, err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}
