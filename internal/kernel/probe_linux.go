package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Release is the kernel's version as uname says it. For people only: nothing is decided by it.
func Release() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("ask for the kernel's release: %w", err)
	}
	return unix.ByteSliceToString(u.Release[:]), nil
}

// UserNamespaces tries to make a user namespace and, with the privileges that it gives, a mount,
// network, PID, IPC and UTS namespace. To make the first alone proves little: Ubuntu's AppArmor
// lets every user do so and takes the privileges away.
func UserNamespaces() error {
	// The Go runtime does all of it between fork and exec, and the exec is the step that must fail: a
	// path below a file. No other step answers ENOTDIR.
	attr := &os.ProcAttr{Sys: &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		// With CLONE_NEWNS the runtime also makes the mounts private, which needs CAP_SYS_ADMIN in the
		// namespace.
		Unshareflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
	}}
	p, err := os.StartProcess("/proc/self/exe/nothing", []string{"nothing"}, attr)
	if err == nil {
		_, err = p.Wait()
		return errors.Join(errors.New("probe user namespaces: a program was found below a file"), err)
	}
	if errors.Is(err, syscall.ENOTDIR) {
		return nil
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		err = errno // the path would only mislead
	}
	return &UnsupportedError{Feature: "user namespaces", Since: "3.8", Err: err}
}

// seccompActions are the kernel's words for its answers
// (Documentation/userspace-api/seccomp_filter.rst).
var seccompActions = []struct {
	word  string
	value uint32
}{
	{"kill_process", 0x80000000},
	{"kill_thread", 0x00000000},
	{"trap", 0x00030000},
	{"errno", 0x00050000},
	{"user_notif", 0x7fc00000},
	{"trace", 0x7ff00000},
	{"log", 0x7ffc0000},
	{"allow", 0x7fff0000},
}

// SeccompActions asks which answers a system call filter may give; none is an error.
func SeccompActions() ([]string, error) {
	var words []string
	var last error
	for _, a := range seccompActions {
		value := a.value
		if err := seccomp(unix.SECCOMP_GET_ACTION_AVAIL, &value); err != nil {
			last = err
			continue
		}
		words = append(words, a.word)
	}
	if len(words) == 0 {
		return nil, &UnsupportedError{Feature: "system call filters", Since: "4.14", Err: last}
	}
	return words, nil
}

// LandlockRefer is the first version of Landlock (Linux 5.19) that lets a file have links in two
// directories. Under version 1 none may, so that layers cannot be unpacked there.
const LandlockRefer = 2

// LandlockRemedy is what to do where there is no such version.
const LandlockRemedy = `run Linux 5.19 or newer with landlock in the "lsm=" list of the kernel's command line`

// LandlockABI is the version of Landlock, 1 or more.
func LandlockABI() (int, error) {
	v, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0, &UnsupportedError{Feature: "Landlock", Since: "5.13", Err: errno}
	}
	return int(v), nil
}

// Calls tries the newer system calls that launcher and daemon cannot do without.
func Calls() error {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return &UnsupportedError{Feature: "pidfd_open", Since: "5.3", Err: err}
	}
	if err := unix.Close(fd); err != nil {
		return fmt.Errorf("probe pidfd_open: %w", err)
	}
	fd, err = unix.Openat2(unix.AT_FDCWD, "/", &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return &UnsupportedError{Feature: "openat2", Since: "5.6", Err: err}
	}
	if err := unix.Close(fd); err != nil {
		return fmt.Errorf("probe openat2: %w", err)
	}
	// Of no descriptor: the call is there or it is not.
	if err := unix.CloseRange(^uint(0), ^uint(0), 0); err != nil {
		return &UnsupportedError{Feature: "close_range", Since: "5.9", Err: err}
	}
	return nil
}

// Sysctl reads a number below /proc/sys, such as "kernel/yama/ptrace_scope". Many exist on some
// kernels only: found says whether it does.
func Sysctl(name string) (value int, found bool, err error) {
	text, err := fs.ReadFile(os.DirFS("/proc/sys"), name)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("read sysctl: %w", err)
	}
	value, err = strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, true, fmt.Errorf("read sysctl %s: %w", name, err)
	}
	return value, true, nil
}

// CorePattern returns the sysctl kernel.core_pattern.
func CorePattern() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/core_pattern")
	if err != nil {
		return "", fmt.Errorf("read sysctl: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}

// IPCIsOurs returns nil if the calling process can set the ceilings of its IPC namespace.
func IPCIsOurs() error { return unix.Access("/proc/sys/kernel/shmmni", unix.W_OK) }

// UserXattrs tries whether files in dir can carry user.* attributes: overlay in a user namespace
// keeps its marks there.
func UserXattrs(dir string) (err error) {
	f, err := os.CreateTemp(dir, ".sandboxd-probe-")
	if err != nil {
		return fmt.Errorf("probe extended attributes: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	if err := unix.Fsetxattr(int(f.Fd()), "user.sandboxd.probe", []byte("y"), 0); err != nil {
		return &UnsupportedError{Feature: "user.* attributes in " + dir, Since: "6.6 on tmpfs", Err: err}
	}
	return nil
}

// Filesystem names the kind of file system that path lies on, where it is one that matters to us.
func Filesystem(path string) (string, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return "", fmt.Errorf("ask for the file system of %s: %w", path, err)
	}
	names := map[int64]string{
		unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs", unix.TMPFS_MAGIC: "tmpfs",
		unix.OVERLAYFS_SUPER_MAGIC: "overlay", unix.NFS_SUPER_MAGIC: "nfs", unix.FUSE_SUPER_MAGIC: "fuse", 0x2fc12fc1: "zfs",
		unix.F2FS_SUPER_MAGIC: "f2fs", unix.ECRYPTFS_SUPER_MAGIC: "ecryptfs", 0xca451a4e: "bcachefs", unix.V9FS_MAGIC: "9p",
	}
	if n, ok := names[st.Type]; ok {
		return n, nil
	}
	return fmt.Sprintf("type %#x", st.Type), nil
}
