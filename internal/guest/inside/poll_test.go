package inside

import (
	"bytes"
	"errors"
	"io"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/guesttest"
)

// polledPair returns a connection for init, waited for by poll(2) alone, and its other end.
func polledPair(t *testing.T) (ours *guest.Conn, theirs int, p *poller) {
	t.Helper()
	p, err := newPoller()
	if err != nil {
		t.Fatal(err)
	}
	p.always = true
	a, b := guesttest.SocketPair(t)
	t.Cleanup(func() { _ = unix.Close(b) })
	f := p.open(a, "socket")
	if _, ok := f.(*polled); !ok {
		t.Fatalf("a %T", f)
	}
	c, err := guest.NewConnOf(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c, b, p
}

// A connection that the runtime's poller has no watch for is like any other: it waits, ends at its
// deadline and when it is closed, and many of them wait at a time.
func TestPolledConnection(t *testing.T) {
	c, other, p := polledPair(t)
	packet, err := guest.Encode(guest.KindPing, guest.None{})
	if err != nil {
		t.Fatal(err)
	}
	received := func() chan error {
		done := make(chan error, 1)
		go func() {
			pkt, _, err := c.Recv()
			if err == nil && pkt.Kind != guest.KindPing {
				err = errors.New(pkt.Kind)
			}
			done <- err
		}()
		return done
	}
	done := received()
	guesttest.WaitFor(t, func() bool { return waiting(p) == 1 })
	if err := guest.SendTo(other, packet, nil); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("receive: %v", err)
	}

	done = received()
	guesttest.WaitFor(t, func() bool { return waiting(p) == 1 })
	if err := c.SetReadDeadline(guest.Expired); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("receive with a deadline that comes meanwhile: %v", err)
	}
	if err := <-received(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("receive with a deadline that has passed: %v", err)
	}
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
		t.Error(err)
	}
	if err := <-received(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("receive with a deadline to come: %v", err)
	}
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		t.Error(err)
	}

	// A full queue: the sender waits until it is read.
	sent := make(chan error, 1)
	go func() {
		var err error
		for range 2000 {
			if err = c.Send(packet); err != nil {
				break
			}
		}
		sent <- err
	}()
	guesttest.WaitFor(t, func() bool { return waiting(p) == 1 })
	for n := 0; n < 2000; {
		if _, _, err := guest.RecvFrom(other); err == nil {
			n++
		} else if !errors.Is(err, unix.EAGAIN) {
			t.Fatal(err)
		}
	}
	if err := <-sent; err != nil {
		t.Errorf("send: %v", err)
	}

	done = received()
	guesttest.WaitFor(t, func() bool { return waiting(p) == 1 })
	_ = c.Close()
	if err := <-done; !errors.Is(err, os.ErrClosed) {
		t.Errorf("receive on a connection that is closed meanwhile: %v", err)
	}
	if err := c.Send(packet); !errors.Is(err, os.ErrClosed) {
		t.Errorf("send on a closed connection: %v", err)
	}
}

func waiting(p *poller) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.waits)
}

// All bytes go through many pipes at a time, whose both ends are waited for.
func TestPolledPipes(t *testing.T) {
	p, err := newPoller()
	if err != nil {
		t.Fatal(err)
	}
	p.always = true
	data := bytes.Repeat([]byte("0123456789abcdef"), 32<<10)
	var wg sync.WaitGroup
	for range 20 {
		var ends [2]int
		if err := unix.Pipe2(ends[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		r, w := p.open(ends[0], "pipe"), p.open(ends[1], "pipe")
		wg.Go(func() {
			n, err := w.Write(data)
			if err := errors.Join(err, w.Close()); err != nil || n != len(data) {
				t.Errorf("wrote %d, %v", n, err)
			}
		})
		wg.Go(func() {
			got, err := io.ReadAll(r)
			if err := errors.Join(err, r.Close()); err != nil || !bytes.Equal(got, data) {
				t.Errorf("read %d bytes, %v", len(got), err)
			}
		})
	}
	wg.Wait()
	if n := waiting(p); n != 0 {
		t.Errorf("%d waits are left", n)
	}
}
