package attack

import (
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// aroundFilter are ways around a filter: calls that change after it has looked, and filters of a
// program's own.
func aroundFilter() []Attack {
	return append([]Attack{
		// A program's own filter asks a supervisor of its own, which lets the call go on
		// (SECCOMP_USER_NOTIF_FLAG_CONTINUE, Linux 5.5): the outer filter must have been asked too.
		{"seccomp-notify-continue", Filter, notifyContinue},
		// The options of ptrace(2) that suspend the filters of a child, and read them.
		{"ptrace-suspends-filter", Namespaces, func() error { return traced(unix.PTRACE_SEIZE, suspendSeccomp, nil) }},
		{"ptrace-reads-filter", Namespaces, func() error {
			return traced(unix.PTRACE_SEIZE, 0, func(pid int) error {
				const getFilter = 0x420c
				return reached(raw4(unix.SYS_PTRACE, getFilter, uintptr(pid), 0, 0))
			})
		}},
	}, processorAround()...)
}

const suspendSeccomp = 1 << 21 // PTRACE_O_SUSPEND_SECCOMP

// waiting makes a child that stops itself and then makes a call; it ends with the call's error.
func waiting(trap uintptr) (pid int, err error) {
	child, _, errno := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
	if errno != 0 {
		return 0, errno
	}
	if child == 0 {
		me, _, _ := unix.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
		_, _, _ = unix.RawSyscall(unix.SYS_KILL, me, uintptr(unix.SIGSTOP), 0)
		_, _, errno := unix.RawSyscall(trap, unix.CLONE_NEWUTS, 0, 0)
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, uintptr(errno), 0, 0) // nothing else is safe in this child
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(int(child), &status, unix.WUNTRACED, nil); err != nil {
		return 0, err
	}
	if !status.Stopped() {
		return 0, fmt.Errorf("the child did not stop: %#x", status)
	}
	return int(child), nil
}

// traced becomes the tracer of a child that has stopped, and then ends the child.
func traced(request int, data uintptr, then func(pid int) error) error {
	goruntime.LockOSThread() // a tracer is a thread; never unlocked
	pid, err := waiting(unix.SYS_GETPID)
	if err != nil {
		return err
	}
	err = raw4(unix.SYS_PTRACE, uintptr(request), uintptr(pid), 0, data)
	if err == nil && then != nil {
		_ = raw4(unix.SYS_PTRACE, unix.PTRACE_INTERRUPT, uintptr(pid), 0, 0)
		var status unix.WaitStatus
		if _, err = unix.Wait4(pid, &status, unix.WALL, nil); err == nil {
			err = then(pid)
		}
	}
	return errors.Join(err, end(pid))
}

// end kills a child and waits for its end.
func end(pid int) error {
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		return err
	}
	for {
		var status unix.WaitStatus
		if _, err := unix.Wait4(pid, &status, unix.WALL, nil); err != nil || status.Exited() || status.Signaled() {
			return err
		}
	}
}

// notifyContinue has a child install a filter whose supervisor is this process, and make the call
// unshare(CLONE_NEWUTS), which the supervisor lets go on.
func notifyContinue() error {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	child, err := os.StartProcess("/proc/self/exe", []string{"attacker", mainArg, "supervised"}, &os.ProcAttr{
		Files: []*os.File{nil, nil, os.Stderr, os.NewFile(uintptr(fds[1]), "supervisor")},
	})
	if err != nil {
		return err
	}
	_ = unix.Close(fds[1]) // also where the file was not passed on
	err = letGoOn(fds[0])
	if err != nil {
		_ = child.Kill() // it may have ended
	}
	state, waitErr := child.Wait()
	if err = errors.Join(err, waitErr); err != nil {
		return err
	}
	if code := state.ExitCode(); code != 0 {
		return unix.Errno(code)
	}
	return nil
}

// letGoOn receives the listener of a filter from a child, and has each of its calls go on.
func letGoOn(socket int) error {
	space := make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := unix.Recvmsg(socket, make([]byte, 1), space, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return err
	}
	if n == 0 {
		return nil // it has ended, and its exit says why
	}
	messages, err := unix.ParseSocketControlMessage(space[:oobn])
	if err != nil || len(messages) != 1 {
		return fmt.Errorf("no listener: %w", err)
	}
	rights, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return err
	}
	listener := rights[0]
	defer unix.Close(listener)
	for {
		poll := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if poll[0].Revents&unix.POLLIN == 0 {
			if poll[0].Revents != 0 {
				return nil // no thread has the filter any more
			}
			continue
		}
		var notification [80]byte // struct seccomp_notif
		if err := raw(unix.SYS_IOCTL, uintptr(listener), 0xc0502100, uintptr(unsafe.Pointer(&notification))); err != nil {
			continue // it was interrupted or has ended
		}
		answer := struct {
			id    uint64
			value int64
			errno int32
			flags uint32
		}{id: *(*uint64)(unsafe.Pointer(&notification)), flags: 1} // SECCOMP_USER_NOTIF_FLAG_CONTINUE
		_ = raw(unix.SYS_IOCTL, uintptr(listener), 0xc0182101, uintptr(unsafe.Pointer(&answer)))
	}
}

// supervised is the child of notifyContinue. Its exit code is the error of its attempt.
func supervised() (code int) {
	goruntime.LockOSThread() // the filter is this thread's
	fail := func(err error) int {
		if errno, ok := errors.AsType[unix.Errno](err); ok {
			return int(errno)
		}
		return int(unix.EIO)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fail(err)
	}
	const allow, notify = 0x7fff0000, 0x7fc00000
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_UNSHARE, Jf: 1},
		{Code: unix.BPF_RET, K: notify},
		{Code: unix.BPF_RET, K: allow},
	}
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	const setModeFilter, newListener = 1, 8
	fd, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, setModeFilter, newListener, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return fail(errno)
	}
	const supervisor = 3
	if err := unix.Sendmsg(supervisor, []byte{0}, unix.UnixRights(int(fd)), nil, 0); err != nil {
		return fail(err)
	}
	if err := unix.Unshare(unix.CLONE_NEWUTS); err != nil {
		return fail(err)
	}
	return 0
}
