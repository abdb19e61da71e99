package guest_test

import (
	"errors"
	"io"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/guesttest"
)

// The kernel may report the end of a connection before its last packet, see recv.
func TestLastPacketIsNotLostToTheEnd(t *testing.T) {
	guesttest.Leaks(t)
	n := 30000
	if testing.Short() {
		n = 1000
	}
	for range n {
		a, b := connPair(t)
		go func() {
			_ = b.Send([]byte("pong {}"))
			_ = b.Close()
		}()
		if pkt, _, err := a.Recv(); err != nil || pkt.Kind != guest.KindPong {
			t.Fatalf("%+v, %v", pkt, err)
		}
		if _, _, err := a.Recv(); !errors.Is(err, io.EOF) {
			t.Fatalf("at the end: %v", err)
		}
		_ = a.Close()
	}
}

func TestRecv(t *testing.T) {
	guesttest.Leaks(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = r.Close(), w.Close() }()
	for _, tc := range []struct {
		name string
		send func(fd int) error
		want string
	}{
		{"empty", func(fd int) error { return unix.Sendmsg(fd, nil, nil, nil, 0) }, "packet without a byte"},
		{"no kind", func(fd int) error { return unix.Sendmsg(fd, []byte("x"), nil, nil, 0) }, "packet without a kind"},
		{"too long", func(fd int) error { return unix.Sendmsg(fd, make([]byte, guest.MaxPacket+1), nil, nil, 0) }, "packet too long"},
		{"too many descriptors", func(fd int) error {
			return unix.Sendmsg(fd, []byte("x {}"), unix.UnixRights(slices.Repeat([]int{int(r.Fd())}, guest.MaxFDs+1)...), nil, 0)
		}, "packet with too many descriptors"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			guesttest.Leaks(t)
			a, b := connPair(t)
			defer func() { _, _ = a.Close(), b.Close() }()
			if err := tc.send(int(b.File().Fd())); err != nil {
				t.Fatal(err)
			}
			if _, _, err := a.Recv(); err == nil || err.Error() != tc.want {
				t.Errorf("got %v, want %s", err, tc.want)
			}
		})
	}
}

func connPair(tb testing.TB) (*guest.Conn, *guest.Conn) {
	tb.Helper()
	p, q := guesttest.SocketPair(tb)
	a, err := guest.NewConn(p)
	if err != nil {
		tb.Fatal(err)
	}
	b, err := guest.NewConn(q)
	if err != nil {
		tb.Fatal(err)
	}
	return a, b
}

// A peer that does not read must not hold up the caller of SendNow, even if a copy of the socket
// was made blocking.
func TestSendNowDoesNotWait(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fds[1]) }()
	c, err := guest.NewConn(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := unix.SetNonblock(fds[0], false); err != nil { // as a holder of a copy can
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		var err error
		for range 10_000 {
			if err = c.SendNow(make([]byte, 32<<10)); err != nil {
				break
			}
		}
		done <- err
	}()
	select {
	case err := <-done:
		if !errors.Is(err, unix.EAGAIN) {
			t.Errorf("%v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("SendNow waits for the peer")
	}
}
