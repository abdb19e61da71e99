// Package flock waits for a lock on an open file, and no longer than its caller can.
package flock

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// pause is how long a lock that was taken is left alone.
const pause = 10 * time.Millisecond

// Exclusive takes the lock of flock(2), and is refused with EWOULDBLOCK and the context's error when somebody else has it
// until the context ends. flock(2) itself would wait for ever, for a holder who was stopped. Closing every copy of the file
// unlocks.
func Exclusive(ctx context.Context, f *os.File) error {
	retry := time.NewTicker(pause)
	defer retry.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return err
		}
		select {
		case <-retry.C:
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		}
	}
}
