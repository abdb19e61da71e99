package broker

import (
	"errors"
	goruntime "runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A child inherits the slack of the thread that starts it. The thread itself keeps the default.
func TestSlackened(t *testing.T) {
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	slack := func() time.Duration {
		n, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		return time.Duration(n)
	}
	before := slack()
	failed := errors.New("failed")
	err := slackened(func() error {
		if got := slack(); got != 2*time.Millisecond {
			t.Errorf("the child would have a slack of %v", got)
		}
		return failed
	})
	if !errors.Is(err, failed) {
		t.Errorf("the start's error became %v", err)
	}
	if got := slack(); got != before {
		t.Errorf("the thread has a slack of %v, before %v", got, before)
	}
}
