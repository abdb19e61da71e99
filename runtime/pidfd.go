package runtime

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// pollable takes over an engine's pidfd and returns it in a form on which the Go poller can wait: a
// thousand watched sandboxes then cost a thousand goroutines and no thread.
func pollable(f *os.File) (_ *os.File, err error) {
	defer func() { err = errors.Join(err, f.Close()) }()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("duplicate pidfd: %w", err)
	}
	// os.NewFile registers only non-blocking descriptors with the poller.
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("make pidfd non-blocking: %w", err), unix.Close(fd))
	}
	p := os.NewFile(uintptr(fd), "pidfd")
	if err := p.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("wait for pidfd: %w", err), p.Close())
	}
	return p, nil
}

// waitReadable returns nil once f is readable or hung up, and os.ErrDeadlineExceeded at f's read
// deadline. It reads nothing.
func waitReadable(f *os.File) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var pollErr error
	err = conn.Read(func(fd uintptr) bool {
		var ready bool
		ready, pollErr = readable(int(fd))
		return ready || pollErr != nil
	})
	return errors.Join(err, pollErr)
}

func readable(fd int) (bool, error) {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0) //nolint:gosec // descriptors fit
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}

// PIDOf asks the kernel which process a pidfd refers to, as our PID namespace counts; 0 where it
// cannot say.
func PIDOf(f *os.File) int {
	conn, err := f.SyscallConn()
	if err != nil {
		return 0
	}
	pid := 0
	_ = conn.Control(func(fd uintptr) { // f is open: nothing here depends on the outcome but the number
		data, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
		if err != nil {
			return
		}
		lines := bufio.NewScanner(bytes.NewReader(data))
		for lines.Scan() {
			if v, ok := bytes.CutPrefix(lines.Bytes(), []byte("Pid:")); ok {
				pid, _ = strconv.Atoi(string(bytes.TrimSpace(v)))
			}
		}
	})
	return max(pid, 0)
}
