package guest

import (
	"errors"
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func connPair(tb testing.TB) (*conn, *conn) {
	tb.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		tb.Fatal(err)
	}
	a, err := newConn(p[0])
	if err != nil {
		tb.Fatal(err)
	}
	b, err := newConn(p[1])
	if err != nil {
		tb.Fatal(err)
	}
	return a, b
}

// The kernel may report the end of a connection before its last packet, see recv.
func TestLastPacketIsNotLostToTheEnd(t *testing.T) {
	leaks(t)
	n := 30000
	if testing.Short() {
		n = 1000
	}
	for range n {
		a, b := connPair(t)
		go func() {
			_ = b.send([]byte("pong {}"))
			_ = b.close()
		}()
		if pkt, _, err := a.recv(); err != nil || pkt.kind != kindPong {
			t.Fatalf("%+v, %v", pkt, err)
		}
		if _, _, err := a.recv(); !errors.Is(err, io.EOF) {
			t.Fatalf("at the end: %v", err)
		}
		_ = a.close()
	}
}

// What has come is not late because nobody looked until its time was over: a machine may stop between the two. Nor is the end.
func TestWhatHasComeIsNotLate(t *testing.T) {
	leaks(t)
	a, b := connPair(t)
	defer func() { _, _ = a.close(), b.close() }()
	if err := errors.Join(a.f.SetReadDeadline(past), b.send([]byte("pong {}"))); err != nil {
		t.Fatal(err)
	}
	if pkt, _, err := a.peek(); err != nil || pkt.kind != kindPong {
		t.Errorf("peek: %+v, %v", pkt, err)
	}
	if pkt, _, err := a.answer(); err != nil || pkt.kind != kindPong {
		t.Errorf("answer: %+v, %v", pkt, err)
	}
	if _, _, err := a.recv(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("nothing has come: %v", err)
	}
	_ = b.close()
	if _, _, err := a.recv(); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
}

func TestRecv(t *testing.T) {
	leaks(t)
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
		{"too long", func(fd int) error { return unix.Sendmsg(fd, make([]byte, maxPacket+1), nil, nil, 0) }, "packet too long"},
		{"too many descriptors", func(fd int) error {
			return unix.Sendmsg(fd, []byte("x {}"), unix.UnixRights(fdsOf(int(r.Fd()), maxFDs+1)...), nil, 0)
		}, "packet with too many descriptors"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			leaks(t)
			a, b := connPair(t)
			defer func() { _, _ = a.close(), b.close() }()
			var sent error
			if err := b.rc.Control(func(fd uintptr) { sent = tc.send(int(fd)) }); err != nil || sent != nil {
				t.Fatal(err, sent)
			}
			if _, _, err := a.recv(); err == nil || err.Error() != tc.want {
				t.Errorf("got %v, want %s", err, tc.want)
			}
		})
	}
}
