package egress

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/kernel"
)

func init() { roles["attack"] = takenOver }

// An attack is tried by a gateway that was taken over.
type attack struct {
	name string
	try  func() error
	// privileged attacks, and those that would end the process or its confinement, work for no
	// process of the test before it is confined.
	privileged bool
	landlock   int // version of Landlock that refuses it; 0 if the filter does
}

// call makes a system call.
func call(number uintptr, args ...uintptr) func() error {
	return func() error {
		var a [6]uintptr
		copy(a[:], args)
		fd, _, errno := unix.Syscall6(number, a[0], a[1], a[2], a[3], a[4], a[5])
		if errno != 0 {
			return errno
		}
		if number == unix.SYS_SOCKET || number == unix.SYS_MEMFD_CREATE || number == unix.SYS_PIDFD_OPEN || number == unix.SYS_INOTIFY_INIT1 {
			return unix.Close(int(fd))
		}
		return nil
	}
}

func open1(path string, flags int) func() error {
	return func() error {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		return unix.Close(fd)
	}
}

func execute(path string, args ...string) func() error {
	return func() error {
		cmd := exec.Command(path, args...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stderr, os.Stderr // else /dev/null is opened first
		return cmd.Run()
	}
}

// attacks returns the attacks. dir has a file, a Unix socket and a program; peer is a process of
// the same user, which permits tracing.
func attacks(dir string, peer int) []attack {
	file := filepath.Join(dir, "file")
	name, err := unix.BytePtrFromString(file)
	if err != nil {
		panic(err)
	}
	word := make([]byte, 8)
	local := unix.Iovec{Base: &word[0], Len: 8}
	remote := unix.RemoteIovec{Base: uintptr(unsafe.Pointer(&word[0])), Len: 8} // an address that the peer may not have
	return []attack{
		{name: "read a file", try: open1(file, unix.O_RDONLY), landlock: 2},
		{name: "read the passwords", try: open1("/etc/passwd", unix.O_RDONLY), landlock: 2},
		{name: "read its own environment", try: open1("/proc/self/environ", unix.O_RDONLY), landlock: 2},
		{name: "read the peer's environment", try: open1(fmt.Sprintf("/proc/%d/environ", peer), unix.O_RDONLY), landlock: 2},
		{name: "read the peer's memory", try: open1(fmt.Sprintf("/proc/%d/mem", peer), unix.O_RDONLY), landlock: 2},
		{name: "list a directory", try: open1(dir, unix.O_RDONLY|unix.O_DIRECTORY)},
		{name: "hold a directory", try: open1(dir, unix.O_PATH)},
		{name: "write to a file", try: open1(file, unix.O_WRONLY)},
		{name: "make a file", try: func() error {
			err := open1(filepath.Join(dir, "new"), unix.O_RDONLY|unix.O_CREAT)()
			if err == nil {
				return os.Remove(filepath.Join(dir, "new"))
			}
			return err
		}},
		{name: "truncate a file", try: call(unix.SYS_TRUNCATE, uintptr(unsafe.Pointer(name)), 4)},
		{name: "change a file's mode", try: call(unix.SYS_FCHMODAT, ^uintptr(99), uintptr(unsafe.Pointer(name)), 0o600)},
		{name: "write over a file's times", try: func() error { return unix.Utimes(file, nil) }},
		{name: "remove a file", try: func() error {
			if err := unix.Unlink(file); err != nil {
				return err
			}
			return os.WriteFile(file, []byte("planted"), 0o600)
		}},
		{name: "execute a program", try: execute("/bin/true")},
		{name: "execute itself", try: execute("/proc/self/exe", "-test.list", "^$")},
		{name: "execute a program in its place", try: call(unix.SYS_EXECVE, uintptr(unsafe.Pointer(name)), 0, 0), privileged: true},
		{name: "execute a descriptor in its place", try: call(unix.SYS_EXECVEAT, 0, uintptr(unsafe.Pointer(name)), 0, 0, 0), privileged: true},
		{name: "fork", try: func() error {
			pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
			if pid == 0 && errno == 0 {
				_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0) // the child
			}
			if errno != 0 {
				return errno
			}
			return nil
		}},
		{name: "make a process by the newer call", try: call(unix.SYS_CLONE3, 0, 0), privileged: true},
		{name: "trace a process", try: func() error { return ptrace(unix.PTRACE_SEIZE, peer) }, privileged: true},
		{name: "read another process's memory", try: func() error {
			_, err := unix.ProcessVMReadv(peer, []unix.Iovec{local}, []unix.RemoteIovec{remote}, 0)
			return err
		}, privileged: true},
		{name: "take a descriptor of another process", try: call(unix.SYS_PIDFD_GETFD, ^uintptr(0), 0, 0), privileged: true},
		{name: "hold another process", try: call(unix.SYS_PIDFD_OPEN, uintptr(peer), 0)},
		{name: "signal another process", try: call(unix.SYS_KILL, uintptr(peer), 0)},
		{name: "signal a thread of another process", try: call(unix.SYS_TGKILL, uintptr(peer), uintptr(peer), 0)},
		{name: "be signalled for another process", try: func() error {
			_, err := unix.FcntlInt(0, unix.F_SETOWN, peer)
			return err
		}},
		{name: "make a Unix socket", try: call(unix.SYS_SOCKET, unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)},
		{name: "make a pair of Unix sockets", try: func() error {
			p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			return errors.Join(unix.Close(p[0]), unix.Close(p[1]))
		}},
		{name: "connect to a Unix socket", try: func() error {
			c, err := net.Dial("unix", filepath.Join(dir, "sock"))
			if err != nil {
				return err
			}
			return c.Close()
		}},
		{name: "make a netlink socket", try: call(unix.SYS_SOCKET, unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)},
		{name: "make a raw socket", try: call(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP), privileged: true},
		{name: "make a packet socket", try: call(unix.SYS_SOCKET, unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0), privileged: true},
		{name: "make a vsock", try: call(unix.SYS_SOCKET, unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0), privileged: true},
		{name: "make a socket of MPTCP", try: call(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP), privileged: true},
		{name: "listen on a port", try: func() error {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				return err
			}
			return l.Close()
		}},
		{name: "receive on a port", try: func() error {
			c, err := net.ListenPacket("udp", "127.0.0.1:0")
			if err != nil {
				return err
			}
			return c.Close()
		}},
		{name: "filter a socket by a program", try: func() error {
			s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("control: %w", err)
			}
			defer unix.Close(s)
			return unix.SetsockoptSockFprog(s, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &unix.SockFilter{Code: unix.BPF_RET}})
		}},
		{name: "make memory that executes", try: func() error {
			m, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			if err != nil {
				return err
			}
			return unix.Munmap(m)
		}},
		{name: "make its memory executable", try: func() error {
			m, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			if err != nil {
				return fmt.Errorf("control: %w", err)
			}
			return errors.Join(unix.Mprotect(m, unix.PROT_READ|unix.PROT_EXEC), unix.Munmap(m))
		}},
		{name: "make a file in memory", try: call(unix.SYS_MEMFD_CREATE, uintptr(unsafe.Pointer(name)), 0)},
		{name: "ask a terminal", try: func() error { _, err := unix.IoctlGetInt(int(os.Stderr.Fd()), unix.TIOCINQ); return err }, privileged: true},
		{name: "be traced and dumped again", try: func() error { return unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0) }},
		{name: "raise its limit of core files", try: func() error { return unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) }},
		{name: "become another user", try: call(unix.SYS_SETRESUID, 12345, 12345, 12345), privileged: true},
		{name: "regain a capability", try: call(unix.SYS_CAPSET, 0, 0), privileged: true},
		{name: "make a namespace", try: call(unix.SYS_UNSHARE, unix.CLONE_NEWUSER), privileged: true},
		{name: "enter a namespace", try: call(unix.SYS_SETNS, 0, 0), privileged: true},
		{name: "mount", try: call(unix.SYS_MOUNT, 0, 0, 0, unix.MS_BIND, 0), privileged: true},
		{name: "change its root", try: call(unix.SYS_CHROOT, uintptr(unsafe.Pointer(name))), privileged: true},
		{name: "open by a handle", try: call(unix.SYS_OPEN_BY_HANDLE_AT, 0, 0, 0), privileged: true},
		{name: "load a program into the kernel", try: call(unix.SYS_BPF, 0, 0, 0), privileged: true},
		{name: "measure the kernel", try: call(unix.SYS_PERF_EVENT_OPEN, 0, 0, 0, 0, 0), privileged: true},
		{name: "make a ring of calls", try: call(unix.SYS_IO_URING_SETUP, 1, 0), privileged: true},
		{name: "handle page faults", try: call(unix.SYS_USERFAULTFD, unix.O_CLOEXEC), privileged: true},
		{name: "use the kernel's keys", try: call(unix.SYS_KEYCTL, unix.KEYCTL_GET_KEYRING_ID, ^uintptr(2), 0), privileged: true},
		{name: "watch files", try: call(unix.SYS_INOTIFY_INIT1, unix.IN_CLOEXEC)},
		{name: "share memory", try: func() error { _, err := unix.SysvShmGet(unix.IPC_PRIVATE, 4096, unix.IPC_CREAT|0o600); return err }, privileged: true},
		{name: "trace by prctl", try: func() error { return unix.Prctl(unix.PR_SET_PTRACER, uintptr(peer), 0, 0, 0) }, privileged: true},
		{name: "load another filter", try: call(unix.SYS_SECCOMP, 99, 0, 0), privileged: true},
	}
}

func ptrace(request, pid int) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, uintptr(request), uintptr(pid), 0, 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// takenOver attacks, confines itself as a gateway does, and attacks again on several threads.
func takenOver(args []string) error {
	dir, peer := args[0], os.Getppid()
	abi, _ := kernel.LandlockABI()
	all := attacks(dir, peer)
	var errs []error
	for _, a := range all {
		if a.privileged {
			continue
		}
		if err := a.try(); err != nil {
			errs = append(errs, fmt.Errorf("control: %s: %w", a.name, err))
		}
	}
	held, _, _, err := confineProcess()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	defer held.Close()
	var mu sync.Mutex
	var threads sync.WaitGroup
	for range 4 {
		threads.Go(func() {
			for _, a := range all {
				if a.landlock > abi {
					continue
				}
				err := a.try()
				want := unix.EPERM // the filter's
				if a.landlock > 0 {
					want = unix.EACCES
				}
				if !errors.Is(err, want) {
					mu.Lock()
					errs = append(errs, fmt.Errorf("%s: %w, want %w", a.name, errorOf(err), want))
					mu.Unlock()
				}
			}
		})
	}
	threads.Wait()
	return errors.Join(errs...)
}

var errDone = errors.New("it works")

func errorOf(err error) error {
	if err == nil {
		return errDone
	}
	return err
}

// A gateway that was taken over reaches no file, executes nothing, reaches no other process and no
// Unix socket, and leaves its confinement in no way that we know.
func TestTakenOver(t *testing.T) {
	requirePureGo(t)
	dir, err := os.MkdirTemp("", "egress") //nolint:usetesting // a socket's path has 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("planted"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(dir, "sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "attack", dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v:\n%s", err, out)
	}
}

// A gateway has no capability in any set, no supplementary group of root's, and is hidden from
// other processes of its user.
func TestPrivilegesOfProcess(t *testing.T) {
	_, s, _ := startGateway(t)
	pid := s.cmd.Process.Pid
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	fields := make(map[string]string)
	for line := range strings.Lines(string(data)) {
		name, value, _ := strings.Cut(line, ":")
		fields[name] = strings.TrimSpace(value)
	}
	want := map[string]string{"CapInh": zeros, "CapPrm": zeros, "CapEff": zeros, "CapAmb": zeros, "NoNewPrivs": "1", "Seccomp": "2"}
	if os.Geteuid() == 0 {
		want["CapBnd"], want["Groups"] = zeros, ""
	}
	for name, value := range want {
		if fields[name] != value {
			t.Errorf("%s is %q, want %q", name, fields[name], value)
		}
	}
	environ, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if os.Geteuid() != 0 && !errors.Is(err, os.ErrPermission) {
		t.Errorf("its environment is readable for its user: %q, %v", environ, err)
	}
	var core unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_CORE, nil, &core); err != nil && os.Geteuid() == 0 {
		t.Error(err)
	}
	if core.Max != 0 {
		t.Errorf("core files of %d bytes", core.Max)
	}
}

const zeros = "0000000000000000"
