// Package flock waits for a lock on an open file, no longer than its caller can.
package flock

import (
	"errors"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// retry is the interval between two attempts.
const retry = 10 * time.Millisecond

// Forever is a patience without end, for a caller that can stop the wait.
const Forever = time.Duration(math.MaxInt64)

// Exclusive takes the lock of flock(2) on f. It returns EWOULDBLOCK if another open file holds the
// lock until patience ends or stop is closed (a context's Done; nil for never): flock(2) itself
// would wait for ever if the holder was stopped. Closing every copy of f unlocks.
func Exclusive(stop <-chan struct{}, patience time.Duration, f *os.File) error {
	limit := time.NewTimer(patience)
	defer limit.Stop()
	tick := time.NewTicker(retry)
	defer tick.Stop()
	for last := false; ; {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || last {
			return err
		}
		select {
		case <-tick.C:
		case <-limit.C:
			last = true // it may have been released since the last attempt, long ago on a machine that stands still
		case <-stop:
			return err
		}
	}
}
