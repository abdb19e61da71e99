package guest

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"time"
)

// Init is given its time anew for as long as its sandbox is kept from running, and not a moment more.
func TestSilenceOfAHeldSandbox(t *testing.T) {
	var asked atomic.Int32
	answer := make(chan struct{})
	c := fakeInit(t, func(conn *conn, _ packet, _ []int) {
		select {
		case <-answer:
			p, err := encode(kindPong, none{})
			if err != nil {
				t.Error(err)
			}
			_ = conn.send(p)
		case <-t.Context().Done():
		}
		conn.await()
	})
	// It must be short where it is to end, and long where we look at the clock ourselves: between what Held says and the look at it.
	const short, long = 20 * time.Millisecond, 500 * time.Millisecond
	ping := func(grace time.Duration) error {
		req, err := encode(kindPing, none{})
		if err != nil {
			t.Fatal(err)
		}
		conn, _, _, err := c.request(t.Context(), grace, req, nil, kindPong, 0)
		if err == nil {
			_ = conn.close()
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
	asked.Store(0)
	c.Held = func() time.Time {
		if asked.Add(1) < 3 {
			return time.Now()
		}
		if asked.Load() == 3 {
			close(answer)
		}
		return time.Now().Add(time.Minute) // a slow machine has its time
	}
	if err := ping(long); err != nil || asked.Load() < 3 {
		t.Errorf("held: %v, asked %d times", err, asked.Load())
	}
	// Nor does what it is held for count against what it has for a whole list.
	var resumed time.Time
	goOn := make(chan struct{})
	list := fakeInit(t, func(conn *conn, _ packet, _ []int) {
		_ = conn.send([]byte("listing {}"))
		<-goOn
		for range 2 {
			_ = conn.send([]byte(`process {"pid":7,"ppid":1,"uid":0,"state":"S","age":1,"cpu":1,"rss":1,"name":"x"}`))
		}
		_ = conn.send([]byte("done {}"))
		conn.await()
	})
	list.processesFor = 3 * time.Second
	list.Held = func() time.Time {
		if resumed.IsZero() {
			resumed = time.Now()
			close(goOn)
		}
		return resumed
	}
	if got, err := list.Processes(t.Context()); err != nil || len(got) != 2 {
		t.Errorf("held in the middle of a list: %v, %v", got, err)
	}
	// Who gives up is not kept waiting by it.
	ctx, cancel := context.WithCancel(t.Context())
	req, err := encode(kindPing, none{})
	if err != nil {
		t.Fatal(err)
	}
	silent := fakeInit(t, func(conn *conn, _ packet, _ []int) { conn.await() })
	silent.Held = func() time.Time { cancel(); return time.Now().Add(time.Hour) }
	if _, _, _, err := silent.request(ctx, short, req, nil, kindPong, 0); !errors.Is(err, context.Canceled) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("given up while it is held: %v", err)
	}
}
