package attack

import (
	"os/signal"

	"golang.org/x/sys/unix"
)

func terminals() []Attack {
	return []Attack{
		{"tiocsti", Filter, func() error { return ttyIoctl(unix.TIOCSTI) }},
		{"tiocsetd", Filter, func() error { return reached(ttyIoctl(unix.TIOCSETD)) }},
		{"tiocsti-high-bits", Filter, func() error { return ttyIoctl(unix.TIOCSTI | 1<<32) }},
		// A console's selection is pasted into what reads it (CVE-2023-1523, CVE-2023-28100). A terminal
		// that is no console answers EINVAL or ENOTTY.
		{"tioclinux", Filter, func() error { return reached(ttyIoctl(unix.TIOCLINUX)) }},
		// Messages of the host's console go to one's own terminal, until it is closed (ioctl_tty(2)).
		{"tioccons", Namespaces, func() error { return ttyIoctl(unix.TIOCCONS) }},
		// Settings of a terminal are locked, and its users hung up (ioctl_tty(2)).
		{"tiocslcktrmios", Namespaces, func() error { return ttyIoctl(unix.TIOCSLCKTRMIOS) }},
		{"tiocvhangup", Namespaces, func() error {
			signal.Ignore(unix.SIGHUP)
			return ttyIoctl(tiocVHangup)
		}},
		// A terminal is taken from the session that has it (ioctl_tty(2), TIOCSCTTY with 1).
		{"steal-terminal", Namespaces, stealTerminal},
	}
}

const tiocVHangup = 0x5437

// stealTerminal takes a terminal that is a child's.
func stealTerminal() error {
	slave, err := openTerminal(unix.O_NOCTTY)
	if err != nil {
		return err
	}
	var started [2]int
	if err := unix.Pipe2(started[:], unix.O_CLOEXEC); err != nil {
		return err
	}
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		_, _, _ = unix.RawSyscall(unix.SYS_SETSID, 0, 0, 0)
		_, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(slave), unix.TIOCSCTTY, 0)
		if errno != 0 {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, uintptr(errno), 0, 0)
		}
		_, _, _ = unix.RawSyscall(unix.SYS_KILL, 0, uintptr(unix.SIGSTOP), 0) // its group, which is it alone
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(int(pid), &status, unix.WUNTRACED, nil); err != nil {
		return err
	}
	if status.Exited() {
		return unix.Errno(status.ExitStatus())
	}
	err = unix.IoctlSetInt(slave, unix.TIOCSCTTY, 1)
	if killed := end(int(pid)); killed != nil {
		return killed
	}
	return err
}
