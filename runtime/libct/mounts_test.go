package libct

import (
	"context"
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A waiter for the mounts of deleted sandboxes waits for all that were let go before, and no longer
// than its context.
func TestCloserIsWaitedFor(t *testing.T) {
	var c closer
	if err := c.wait(t.Context()); err != nil {
		t.Error(err)
	}
	var fds []int
	for range 20 {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		defer unix.Close(p[0])
		fds = append(fds, p[0])
		c.close(p[1])
	}
	if err := c.wait(t.Context()); err != nil {
		t.Error(err)
	}
	for _, fd := range fds {
		if n, err := unix.Read(fd, make([]byte, 1)); n != 0 || err != nil {
			t.Errorf("not let go: %v", err)
		}
	}
	stuck := closer{working: make(chan struct{})}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := stuck.wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("stuck: %v", err)
	}
}
