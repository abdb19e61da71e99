package cli

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// interruptible is a reader of a file whose Read can be ended from outside. os.File cannot do it for terminals and
// regular files, which the runtime's poller does not know.
type interruptible struct {
	f    *os.File
	wake [2]*os.File // a pipe: closing its writing end wakes Read up
}

func newInterruptible(f *os.File) (*interruptible, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	return &interruptible{f: f, wake: [2]*os.File{r, w}}, nil
}

// Read reads from the file, or returns io.EOF once interrupt has been called.
func (i *interruptible) Read(p []byte) (int, error) {
	for {
		fds := []unix.PollFd{
			{Fd: int32(i.f.Fd()), Events: unix.POLLIN},       //nolint:gosec // a descriptor fits
			{Fd: int32(i.wake[0].Fd()), Events: unix.POLLIN}, //nolint:gosec // a descriptor fits
		}
		_, err := unix.Poll(fds, -1)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return 0, fmt.Errorf("poll stdin: %w", err)
		case fds[1].Revents != 0:
			return 0, io.EOF
		case fds[0].Revents != 0:
			return i.f.Read(p)
		}
	}
}

// interrupt ends a Read that is under way, and all later ones. The reading end of the pipe stays for the Read that may
// still look at it, and goes with the process.
func (i *interruptible) interrupt() { _ = i.wake[1].Close() } // closing a pipe does not fail
