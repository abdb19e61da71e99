// Package flock waits for a lock on an open file, and no longer than its caller can.
package flock

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// pause is how long a lock that was taken is left alone.
const pause = 10 * time.Millisecond

// Exclusive takes the lock of flock(2), and is refused with EWOULDBLOCK when somebody else has it all the time until patience
// ends, or stop (a context's Done; nil for none). flock(2) itself would wait for ever, for a holder who was stopped. Closing
// every copy of the file unlocks.
func Exclusive(stop <-chan struct{}, patience time.Duration, f *os.File) error {
	limit := time.NewTimer(patience)
	defer limit.Stop()
	retry := time.NewTicker(pause)
	defer retry.Stop()
	for last := false; ; {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || last {
			return err
		}
		select {
		case <-retry.C:
		case <-limit.C:
			last = true // it may have been let go of since we looked, long ago on a machine that stops for a moment
		case <-stop:
			return err
		}
	}
}
