package attack

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

func raw(trap, a, b, c uintptr) error {
	if _, _, errno := unix.RawSyscall(trap, a, b, c); errno != 0 {
		return errno
	}
	return nil
}

// raw4 is raw with one more argument.
func raw4(trap, a, b, c, d uintptr) error {
	if _, _, errno := unix.RawSyscall6(trap, a, b, c, d, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

func open(path string, flags int) error {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func write(path, value string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte(value))
	return err
}

// read works only where there is something to read: a masked file is /dev/null.
func read(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	n, err := unix.Read(fd, make([]byte, 64))
	if err == nil && n == 0 {
		return errors.New("empty")
	}
	return err
}

// clone makes a child that ends at once.
func clone(flags uintptr) error {
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE, flags|uintptr(unix.SIGCHLD), 0, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0) // nothing else is safe in this child
	}
	var status unix.WaitStatus
	_, err := unix.Wait4(int(pid), &status, 0, nil)
	return err
}

// inChild makes a call in a child that has but one thread, which ends with the error.
func inChild(trap, a, b uintptr) error {
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		_, _, errno := unix.RawSyscall(trap, a, b, 0)
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, uintptr(errno), 0, 0) // nothing else is safe in this child
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(int(pid), &status, 0, nil); err != nil {
		return err
	}
	if code := status.ExitStatus(); code != 0 {
		return syscall.Errno(code)
	}
	return nil
}

// kernelAddresses reads where the kernel lies: unprivileged readers get zeros.
func kernelAddresses() error {
	f, err := os.Open("/proc/kallsyms")
	if err != nil {
		return err
	}
	defer f.Close() // only read
	line := make([]byte, 16)
	if _, err := f.Read(line); err != nil {
		return err
	}
	if strings.Trim(string(line), "0") == "" {
		return errors.New("all of them are 0")
	}
	return nil
}

// cloneArgs is struct clone_args of linux/sched.h.
type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

func clone3() error {
	return clone3With(&cloneArgs{flags: unix.CLONE_NEWUSER, exitSignal: uint64(unix.SIGCHLD)})
}

// clone3With makes a child that ends at once.
func clone3With(args *cloneArgs) error {
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(args)), unsafe.Sizeof(*args), 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
	var status unix.WaitStatus
	_, err := unix.Wait4(int(pid), &status, 0, nil)
	return err
}

func cloneIntoCgroup() error {
	fd, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	const intoCgroup = 0x200000000
	return reached(clone3With(&cloneArgs{flags: intoCgroup, exitSignal: uint64(unix.SIGCHLD), cgroup: uint64(fd)}))
}

// openHandle opens an object of a pseudo file system again, by its handle alone.
func openHandle(root int, of func() (int, error)) error {
	fd, err := of()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	handle, _, err := unix.NameToHandleAt(fd, "", unix.AT_EMPTY_PATH)
	if err != nil {
		return err
	}
	again, err := unix.OpenByHandleAt(root, handle, unix.O_RDONLY|unix.O_CLOEXEC)
	if err != nil {
		return err
	}
	return unix.Close(again)
}

// nextMountNamespace looks for a neighbour of this mount namespace, in both directions.
func nextMountNamespace() error {
	fd, err := unix.Open("/proc/self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, request := range []uintptr{0x8010b70b, 0x8010b70c} { // NS_MNT_GET_NEXT, NS_MNT_GET_PREV
		var info [16]byte // struct mnt_ns_info
		var next uintptr
		next, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(&info)))
		if errno == 0 {
			return unix.Close(int(next))
		}
		err = errno
	}
	return err
}

func setns(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Setns(fd, 0)
}

// setnsInChild enters a namespace that a process with threads cannot.
func setnsInChild(path string, kind int) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return inChild(unix.SYS_SETNS, uintptr(fd), uintptr(kind))
}

// ptrace is let go again when this process ends.
func ptrace(pid int) error { return unix.PtraceSeize(pid) }

func readInit() error {
	buf := make([]byte, 8)
	local := []unix.Iovec{{Base: &buf[0], Len: uint64(len(buf))}}
	// Any mapped address would do; without the right to look, EPERM comes before EFAULT.
	_, err := unix.ProcessVMReadv(1, local, []unix.RemoteIovec{{Base: 0x400000, Len: len(buf)}}, 0)
	if errors.Is(err, unix.EFAULT) {
		return nil // it was allowed to look
	}
	return err
}

func pidfdGetfd() error {
	fd, err := unix.PidfdOpen(1, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	got, err := unix.PidfdGetfd(fd, 3, 0)
	if errors.Is(err, unix.EBADF) {
		return nil // it was allowed to take one, had there been one
	}
	if err != nil {
		return err
	}
	return unix.Close(got)
}

// openInitFDs follows every descriptor of init that it finds; to see their numbers alone is of no
// use.
func openInitFDs() error {
	entries, err := os.ReadDir("/proc/1/fd")
	if err != nil {
		return err
	}
	err = errors.New("init has no descriptors")
	for _, e := range entries {
		if err = open("/proc/1/fd/"+e.Name(), unix.O_PATH); err == nil {
			return nil
		}
	}
	return err
}

func keyctl() error {
	_, err := unix.KeyctlJoinSessionKeyring("attacker")
	return err
}

func addKey() error {
	_, err := unix.AddKey("user", "attacker", []byte("x"), unix.KEY_SPEC_PROCESS_KEYRING)
	return err
}

func bpf() error {
	// BPF_MAP_CREATE of an array with one element.
	attr := [18]uint32{2, 4, 4, 1}
	return raw(unix.SYS_BPF, 0, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
}

func perf() error {
	attr := unix.PerfEventAttr{
		Type: unix.PERF_TYPE_SOFTWARE, Size: uint32(unsafe.Sizeof(unix.PerfEventAttr{})),
		Config: unix.PERF_COUNT_SW_TASK_CLOCK, Bits: unix.PerfBitExcludeKernel | unix.PerfBitExcludeHv,
	}
	fd, err := unix.PerfEventOpen(&attr, 0, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func ioUring() error {
	var params [120]byte
	return raw(unix.SYS_IO_URING_SETUP, 4, uintptr(unsafe.Pointer(&params)), 0)
}

func openByHandle() error {
	handle, mount, err := unix.NameToHandleAt(unix.AT_FDCWD, "/etc", 0)
	_ = mount
	if err != nil {
		return err
	}
	root, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	fd, err := unix.OpenByHandleAt(root, handle, unix.O_RDONLY)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// writeCgroup makes a cgroup in any hierarchy that is mounted; the old escape mounts one of its
// own (CVE-2022-0492).
func writeCgroup() error {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if len(fields) < 3 || fields[2] != "cgroup2" {
			continue
		}
		if err := unix.Mkdir(fields[1]+"/attacker", 0o755); err == nil {
			return unix.Rmdir(fields[1] + "/attacker")
		}
	}
	return unix.Mount("cgroup2", "/tmp", "cgroup2", 0, "")
}

func socketProtocol(family, kind, protocol int) error {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// setInterface configures the loopback interface, as it is.
func setInterface() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, request); err != nil {
		return err
	}
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request)
}

// tcpULP attaches kernel TLS to a connection over loopback: the way into net/tls.
func tcpULP() error {
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	// Where it may, it brings the loopback interface up first.
	if request, err := unix.NewIfreq("lo"); err == nil {
		request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
		_ = unix.IoctlIfreq(listener, unix.SIOCSIFFLAGS, request)
	}
	addr := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}
	if err := unix.Bind(listener, addr); err != nil {
		return err
	}
	if err := unix.Listen(listener, 1); err != nil {
		return err
	}
	name, err := unix.Getsockname(listener)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	if err := unix.Connect(fd, name); err != nil {
		return err
	}
	const tcpULP = 31
	return unix.SetsockoptString(fd, unix.IPPROTO_TCP, tcpULP, "tls")
}

// openTerminal opens a terminal of this program's own, in a session of its own.
func openTerminal(flags int) (slave int, err error) {
	master, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return -1, err
	}
	n, err := unix.IoctlGetInt(master, unix.TIOCGPTN)
	if err != nil {
		return -1, err
	}
	if _, err := unix.Setsid(); err != nil && !errors.Is(err, unix.EPERM) {
		return -1, err
	}
	return unix.Open(fmt.Sprintf("/dev/pts/%d", n), unix.O_RDWR|unix.O_CLOEXEC|flags, 0)
}

// ttyIoctl makes a request, and gives a byte with it, as if typed.
func ttyIoctl(request uintptr) error {
	slave, err := openTerminal(0)
	if err != nil {
		return err
	}
	var c struct { // as large as what any of the requests reads
		first atomic.Uint32
		_     [60]byte
	}
	c.first.Store('x')
	return raw(unix.SYS_IOCTL, uintptr(slave), request, uintptr(unsafe.Pointer(&c)))
}
