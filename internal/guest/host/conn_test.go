package host

import (
	"errors"
	"io"
	"os"
	"testing"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"

	"github.com/sandboxd/sandboxd/internal/guest"
)

// A packet that arrived in time is not late because the reader looked after its deadline: a machine
// may stop between the two. Neither is the end.
func TestArrivedPacketIsNotLate(t *testing.T) {
	guesttest.Leaks(t)
	a, b := connPair(t)
	defer func() { _, _ = a.Close(), b.Close() }()
	if err := errors.Join(a.SetReadDeadline(guest.Expired), b.Send([]byte("pong {}"))); err != nil {
		t.Fatal(err)
	}
	if pkt, _, err := a.peek(); err != nil || pkt.Kind != guest.KindPong {
		t.Errorf("peek: %+v, %v", pkt, err)
	}
	if pkt, _, err := a.answer(); err != nil || pkt.Kind != guest.KindPong {
		t.Errorf("answer: %+v, %v", pkt, err)
	}
	if _, _, err := a.Recv(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("nothing has come: %v", err)
	}
	_ = b.Close()
	if _, _, err := a.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
}

func connPair(tb testing.TB) (*conn, *conn) {
	tb.Helper()
	p, q := guesttest.SocketPair(tb)
	a, err := newConn(p)
	if err != nil {
		tb.Fatal(err)
	}
	b, err := newConn(q)
	if err != nil {
		tb.Fatal(err)
	}
	return a, b
}
