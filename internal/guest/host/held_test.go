package host

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"

	"github.com/sandboxd/sandboxd/internal/guest"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Init is given its time anew for as long as its sandbox is kept from running, and not a moment
// more.
func TestSilenceOfAHeldSandbox(t *testing.T) {
	var asked atomic.Int32
	answer := make(chan struct{})
	c := fakeInit(t, func(conn *conn, _ guest.Packet, _ []int) {
		select {
		case <-answer:
			p, err := guest.Encode(guest.KindPong, guest.None{})
			if err != nil {
				t.Error(err)
			}
			_ = conn.Send(p)
		case <-t.Context().Done():
		}
		conn.await()
	})
	// Short where the wait is to end, and long where this test reads the clock itself: between the
	// value of Held and its use.
	const short, long = 20 * time.Millisecond, 500 * time.Millisecond
	ping := func(grace time.Duration) error {
		req, err := guest.Encode(guest.KindPing, guest.None{})
		if err != nil {
			t.Fatal(err)
		}
		conn, _, _, err := c.request(t.Context(), grace, req, nil, guest.KindPong, 0)
		if err == nil {
			_ = conn.Close()
		}
		return err
	}
	if err := ping(short); !errors.Is(err, ErrLost) {
		t.Errorf("not held: %v", err)
	}
	c.Held = func() time.Time { asked.Add(1); return time.Now().Add(-time.Hour) }
	if err := ping(short); !errors.Is(err, ErrLost) || asked.Load() == 0 {
		t.Errorf("held an hour ago: %v, asked %d times", err, asked.Load())
	}
	c.Held = func() time.Time {
		if asked.Add(1) < 3 {
			return time.Now()
		}
		if asked.Load() == 3 {
			close(answer)
		}
		return time.Now().Add(testenv.HungAfter) // a slow machine has its time
	}
	// Others may keep us from the look at the clock for too long, but not each time.
	var err error
	if !guesttest.Within(t, func() bool { asked.Store(0); err = ping(long); return asked.Load() >= 3 }) || err != nil {
		t.Errorf("held: %v, asked %d times", err, asked.Load())
	}
	// The time for which it is held does not count against the time for a whole list either.
	const whole = 50 * time.Millisecond
	goOn := make(chan struct{})
	list := fakeInit(t, func(conn *conn, _ guest.Packet, _ []int) {
		_ = conn.Send([]byte("listing {}"))
		<-goOn
		_ = conn.Send([]byte("done {}"))
		conn.await()
	})
	list.Held = sync.OnceValue(func() time.Time {
		close(goOn)
		return time.Now().Add(testenv.HungAfter) // as above
	})
	req, err := guest.Encode(guest.KindProcesses, guest.None{})
	if err != nil {
		t.Fatal(err)
	}
	listing, _, _, err := list.request(t.Context(), testenv.HungAfter, req, nil, guest.KindListing, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listing.Close() }()
	patience := whole
	if pkt, err := list.next(t.Context(), listing, replyTimeout, &patience, guest.KindProcess, guest.KindDone); err != nil || pkt.Kind != guest.KindDone || patience != whole {
		t.Errorf("held in the middle of a list: %+v, %v, and %v are left of %v", pkt, err, patience, whole)
	}
	// A caller that gives up is not delayed by it.
	ctx, cancel := context.WithCancel(t.Context())
	if req, err = guest.Encode(guest.KindPing, guest.None{}); err != nil {
		t.Fatal(err)
	}
	silent := fakeInit(t, func(conn *conn, _ guest.Packet, _ []int) { conn.await() })
	silent.Held = func() time.Time { cancel(); return time.Now().Add(time.Hour) }
	if _, _, _, err := silent.request(ctx, short, req, nil, guest.KindPong, 0); !errors.Is(err, context.Canceled) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("given up while it is held: %v", err)
	}
}
