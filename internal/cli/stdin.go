package cli

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// interruptible is a file reader whose Read can be interrupted. os.File does not support this for
// terminals and regular files, which the runtime's poller does not handle.
type interruptible struct {
	f    *os.File
	wake [2]*os.File // a pipe: closing its writing end wakes Read
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

// interrupt ends a pending Read and all later ones. The pipe's reading end stays open until the
// process ends, because a pending Read may still poll it.
func (i *interruptible) interrupt() { _ = i.wake[1].Close() } // closing a pipe does not fail
