package cli

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// checkWatches reports whether this program can wait for anything. Without an epoll instance and
// one watch Go's runtime ends it with a stack trace at its first timer. Programs of sandboxes that
// run under this user's own uid (a host without subordinate ids) can use the watches up.
func checkWatches() error {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("make an epoll instance: %w", err)
	}
	defer func() { _ = unix.Close(ep) }()
	ev, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("make an eventfd: %w", err)
	}
	defer func() { _ = unix.Close(ev) }()
	err = unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, ev, &unix.EpollEvent{Events: unix.EPOLLIN})
	if errors.Is(err, unix.ENOSPC) {
		return errors.New("this user's epoll watches are used up (fs.epoll.max_user_watches), perhaps by a program in a sandbox without subordinate ids: " +
			"end the program that holds them, and try again")
	}
	if err != nil {
		return fmt.Errorf("watch an eventfd: %w", err)
	}
	return nil
}
