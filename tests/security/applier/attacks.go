package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/launcher"
)

// marker stands before the results, in whatever message they travel.
const marker = "ATTACKS:"

// attack tries everything and says for each whether it "worked" or the error that stopped it.
func attack() string {
	results := make(map[string]string)
	for _, a := range attacks {
		results[a.name] = "worked"
		if err := a.try(); err != nil && !errors.Is(err, a.reached) {
			results[a.name] = err.Error()
		}
	}
	data, err := json.Marshal(results)
	if err != nil {
		return err.Error()
	}
	return marker + string(data)
}

// outside is a directory that was let slip: one of the host, which the test gives as the layer's
// stream, or another sandbox's.
const outside = 0

// attacks are tried in this order. Where reached is set, that error says that the call got as far
// as an honest one with such arguments would: nothing forbade it.
var attacks = []struct {
	name    string
	reached error
	try     func() error
}{
	// Files. /host is visible in the launcher's root, and in no layer of the test's.
	{name: "open-outside-path", try: func() error { return open(unix.AT_FDCWD, launcher.HostDir, unix.O_RDONLY) }},
	{name: "open-outside-dotdot", try: func() error { return open(unix.AT_FDCWD, "../../../.."+launcher.HostDir, unix.O_RDONLY) }},
	{name: "open-proc", try: func() error { return open(unix.AT_FDCWD, "/proc/self/status", unix.O_RDONLY) }},
	{name: "read-outside-descriptor", try: func() error { return open(outside, "planted", unix.O_RDONLY) }},
	{name: "write-outside-descriptor", try: func() error { return open(outside, "planted", unix.O_WRONLY|unix.O_TRUNC) }},
	{name: "create-outside-descriptor", try: func() error { return open(outside, "created", unix.O_WRONLY|unix.O_CREAT) }},
	{name: "remove-outside-descriptor", try: func() error { return unix.Unlinkat(outside, "removed", 0) }},
	{name: "leaked-descriptor", try: func() error { var st unix.Stat_t; return unix.Fstat(leaked, &st) }},
	{name: "read-layer-below", try: readBelow},
	{name: "write-layer-below", try: writeBelow},
	{name: "make-socket-file", try: func() error { return unix.Mknodat(outside, "socket", unix.S_IFSOCK|0o600, 0) }},
	{name: "make-device", reached: unix.ENOENT, try: func() error { return unix.Mknodat(unix.AT_FDCWD, "", unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))) }},
	{name: "file-handle", reached: unix.EOVERFLOW, try: fileHandle},
	{name: "device-ioctl", reached: unix.ENOTTY, try: func() error { return raw(unix.SYS_IOCTL, outside, unix.TIOCSTI, 0) }},

	// The network.
	{name: "socket-inet", try: func() error { return socket(unix.AF_INET) }},
	{name: "socket-unix", try: func() error { return socket(unix.AF_UNIX) }},
	{name: "socket-netlink", try: func() error { return socket(unix.AF_NETLINK) }},
	{name: "socketpair", try: func() error { _, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0); return err }},

	// Processes. The file to execute is no program: what gets as far as to read it says so.
	{name: "execve", reached: unix.ENOEXEC, try: execute},
	{name: "memfd", try: func() error { _, err := unix.MemfdCreate("x", 0); return err }},
	{name: "fork", try: func() error { return clone(0) }},
	{name: "clone-user", try: func() error { return clone(unix.CLONE_NEWUSER) }},
	{name: "clone-mount", try: func() error { return clone(unix.CLONE_NEWNS) }},
	{name: "clone-net", try: func() error { return clone(unix.CLONE_NEWNET) }},
	{name: "clone-thread-net", reached: unix.EINVAL, try: func() error { return raw(unix.SYS_CLONE, unix.CLONE_THREAD|unix.CLONE_NEWNET, 0, 0) }},
	{name: "clone3", reached: unix.EINVAL, try: func() error { return raw(unix.SYS_CLONE3, 0, 0, 0) }},
	{name: "unshare-mount", try: func() error { return unix.Unshare(unix.CLONE_NEWNS) }},
	{name: "unshare-user", reached: unix.EINVAL, try: func() error { return unix.Unshare(unix.CLONE_NEWUSER) }}, // a process with threads
	{name: "setns", reached: unix.EBADF, try: func() error { return unix.Setns(-1, unix.CLONE_NEWNS) }},
	{name: "ptrace", reached: unix.ESRCH, try: func() error { return raw(unix.SYS_PTRACE, unix.PTRACE_ATTACH, 999_999, 0) }},
	{name: "process-vm-readv", reached: unix.ESRCH, try: func() error { return raw(unix.SYS_PROCESS_VM_READV, 999_999, 0, 0) }},
	{name: "kill", reached: unix.ESRCH, try: func() error { return unix.Kill(999_999, 0) }},
	{name: "pidfd-open", try: func() error { _, err := unix.PidfdOpen(1, 0); return err }},
	{name: "limits-of-others", reached: unix.ESRCH, try: func() error { return raw(unix.SYS_PRLIMIT64, 999_999, unix.RLIMIT_CORE, 0) }},
	{name: "change-uid", try: func() error { none := ^uintptr(0); return raw(unix.SYS_SETRESUID, none, none, none) }},
	{name: "change-capabilities", reached: unix.EFAULT, try: func() error { return raw(unix.SYS_CAPSET, 0, 0, 0) }},
	{name: "dumpable", try: func() error { return unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0) }},
	{name: "keyring", try: func() error { _, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_PROCESS_KEYRING, true); return err }},

	// Mounts and the machine.
	{name: "mount", reached: unix.ENODEV, try: func() error { return unix.Mount("x", "/", "nosuchfs", 0, "") }},
	{name: "umount", reached: unix.ENOENT, try: func() error { return unix.Unmount("/nosuchdir", 0) }},
	{name: "pivot-root", reached: unix.ENOENT, try: func() error { return unix.PivotRoot("/nosuchdir", "/nosuchdir") }},
	{name: "chroot", try: func() error { return unix.Chroot("/") }},
	{name: "fsopen", try: func() error { _, err := unix.Fsopen("tmpfs", 0); return err }},
	{name: "open-tree-clone", reached: unix.EINVAL, try: func() error { _, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE); return err }},
	{name: "move-mount", reached: unix.EBADF, try: func() error { return unix.MoveMount(-1, "", unix.AT_FDCWD, "/", unix.MOVE_MOUNT_F_EMPTY_PATH) }},
	{name: "mount-setattr", reached: unix.EBADF, try: func() error {
		return unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID})
	}},
	{name: "host-name", try: func() error { return unix.Sethostname([]byte("attacker")) }},
}

func open(dir int, name string, flags int) error {
	fd, err := unix.Openat(dir, name, flags|unix.O_CLOEXEC, 0o600)
	if err == nil {
		_ = unix.Close(fd)
	}
	return err
}

// below is the descriptor of the layer below, which has a directory "below". The first stage has
// none yet.
func below() (int, error) {
	for fd := 3; fd < 50; fd++ {
		var st unix.Stat_t
		if unix.Fstatat(fd, "below", &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
			return fd, nil
		}
	}
	return -1, errors.New("no layer below is open")
}

func readBelow() error {
	fd, err := below()
	if err != nil {
		return err
	}
	return open(fd, "below/file", unix.O_RDONLY)
}

func writeBelow() error {
	fd, err := below()
	if err != nil {
		return err
	}
	return unix.Mkdirat(fd, "new", 0o700)
}

func fileHandle() error {
	var handle struct{ bytes, kind uint32 }
	var mount int32
	dir := [2]byte{'/'}
	here := unix.AT_FDCWD
	_, _, errno := unix.Syscall6(unix.SYS_NAME_TO_HANDLE_AT, uintptr(here), uintptr(unsafe.Pointer(&dir)),
		uintptr(unsafe.Pointer(&handle)), uintptr(unsafe.Pointer(&mount)), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func socket(family int) error {
	fd, err := unix.Socket(family, unix.SOCK_DGRAM, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return err
}

// execute puts a file into the directory that it may write to, and executes it.
func execute() error {
	dir, name := unix.AT_FDCWD, "program"
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o755)
	if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) { // the launcher's root, in the control
		dir = outside
		fd, err = unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o755)
	}
	if err != nil {
		return fmt.Errorf("make a program: %w", err)
	}
	_, err = unix.Write(fd, []byte("no program\n"))
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		return err
	}
	path, argv := append([]byte(name), 0), [2]*byte{}
	_, _, errno := unix.Syscall6(unix.SYS_EXECVEAT, uintptr(dir), uintptr(unsafe.Pointer(&path[0])), uintptr(unsafe.Pointer(&argv)), uintptr(unsafe.Pointer(&argv)), 0, 0)
	return errno
}

// clone makes a process that ends at once.
func clone(flags uintptr) error {
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, flags|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		for {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0) // nothing else is safe in this child
		}
	}
	_, err := unix.Wait4(int(pid), nil, 0, nil)
	return err
}

func raw(call, a, b, c uintptr) error {
	if _, _, errno := unix.RawSyscall(call, a, b, c); errno != 0 {
		return errno
	}
	return nil
}
