package launcher

import (
	"errors"
	"fmt"
	"net"
	"os"
	goruntime "runtime"
	"runtime/debug"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/landlock"
	"github.com/sandboxd/sandboxd/netns"
)

// The maker is a child of the launcher that makes network namespaces: rules of nf_tables take a
// socket that the launcher's own filter refuses. It is started before that filter is loaded, and
// reads nothing but requests without content.

// fdMaker is the maker's end of its socket.
const fdMaker = 3

// makerRequest asks for one namespace.
type makerRequest struct{}

// makerAnswer comes with the descriptors of a namespace, or with an error. The first one comes
// without a request: it says whether a namespace could be made.
type makerAnswer struct {
	Error string `json:"error,omitempty"`
}

// makerCapabilities are those over the namespaces that it makes, which belong to the launcher's
// user namespace.
var makerCapabilities = []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN, unix.CAP_NET_BIND_SERVICE}

// MakerConfine is the first stage of the maker. It returns only on error, after reporting it.
func MakerConfine() error {
	return giveUp(fdMaker, makerAnswer{Error: confineMaker().Error()})
}

// giveUp sends the only answer of a maker that gives up.
func giveUp(fd int, a makerAnswer) error {
	c, err := makerConn(fd)
	if err != nil {
		return err
	}
	return errors.Join(send(c, a), c.Close())
}

func makerConn(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "maker")
	defer f.Close() // the connection has its own
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("open the maker's socket: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(errors.New("open the maker's socket: it is none"), c.Close())
	}
	return u, nil
}

func confineMaker() error {
	goruntime.LockOSThread() // as in confineAndExec
	exe, err := begin(fdMaker + 1)
	if err != nil {
		return err
	}
	if err := makerRoot(); err != nil {
		return fmt.Errorf("build the maker's root: %w", err)
	}
	if err := restrictMaker(exe); err != nil {
		return fmt.Errorf("confine the maker: %w", err)
	}
	return execute(exe, "network-confined", struct{}{})
}

// makerRoot makes a root with nothing but a proc of the maker's own PID namespace, of which only
// /proc/sys/net is writable.
func makerRoot() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	const restricted = unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC
	root, err := newMount("tmpfs", restricted, [2]string{"mode", "0555"}, [2]string{"size", "4k"})
	if err != nil {
		return err
	}
	defer unix.Close(root)
	if err := unix.Mkdirat(root, "proc", 0o555); err != nil {
		return fmt.Errorf("make /proc: %w", err)
	}
	if err := unix.MoveMount(root, "", unix.AT_FDCWD, RootfsDir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach tmpfs: %w", err)
	}
	proc, err := newMount("proc", restricted)
	if err != nil {
		return err
	}
	defer unix.Close(proc)
	if err := unix.MoveMount(proc, "", root, "proc", unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach proc: %w", err)
	}
	if err := bind(proc, "sys/net", proc, "/sys/net", 0); err != nil {
		return err
	}
	for _, m := range []int{proc, root} {
		if err := unix.MountSetattr(m, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return fmt.Errorf("make read-only: %w", err)
		}
	}
	if err := unix.Fchdir(root); err != nil {
		return fmt.Errorf("enter: %w", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detach old root: %w", err)
	}
	return unix.Chdir("/")
}

// restrictMaker takes all other capabilities from the calling thread, and all files but those below
// /proc/sys/net where the kernel has Landlock. Landlock does not look at the files of namespaces.
func restrictMaker(exe int) (err error) {
	if err := dropCapabilities(makerCapabilities); err != nil {
		return err
	}
	if err := dropInheritable(); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	abi, err := kernel.LandlockABI()
	if err != nil || abi < kernel.LandlockRefer {
		return nil // as in restrict
	}
	handled := landlock.Everything(abi)
	handled.Handled_access_net &^= unix.LANDLOCK_ACCESS_NET_BIND_TCP // for the sockets that it makes
	rules, err := landlock.New(&handled)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rules.Close()) }()
	sysctls := uint64(unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE)
	if abi >= 3 {
		sysctls |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if err := rules.AllowPath("/proc/sys/net", sysctls); err != nil {
		return err
	}
	// As in landlockPlan.apply.
	self := uint64(unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE)
	if err := rules.Allow(exe, self); err != nil && !errors.Is(err, unix.EBADFD) {
		return fmt.Errorf("allow own executable in Landlock: %w", err)
	}
	return rules.RestrictThread()
}

// dropInheritable takes the inheritable and ambient capabilities from the calling thread. The
// launcher has some of its start, and the bounding set does not limit what they give to a program.
func dropInheritable() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	data[0].Inheritable, data[1].Inheritable = 0, 0
	if err := unix.Capset(&hdr, &data[0]); err != nil { // ambient ones are inheritable too
		return fmt.Errorf("drop inheritable capabilities: %w", err)
	}
	return nil
}

// MakerMain is the second stage: it makes a namespace for each request, until the launcher's end of
// the socket is closed. LoadFilter is as for [ApplyMain].
func MakerMain(loadFilter func(*specs.LinuxSeccomp) error) error {
	err := lockMaker(loadFilter)
	if err == nil {
		var n *netns.Namespace
		if n, err = netns.Make(); err == nil {
			err = n.Close()
		}
	}
	if err != nil {
		return giveUp(fdMaker, makerAnswer{Error: err.Error()})
	}
	c, err := makerConn(fdMaker)
	if err != nil {
		return err
	}
	defer c.Close() // the launcher sees the end
	if err := send(c, makerAnswer{}); err != nil {
		return err
	}
	for {
		files, err := receive(c, new(makerRequest))
		closeAll(files)
		if err != nil {
			return nil // the launcher has ended
		}
		if err := makeOne(c); err != nil {
			return err
		}
	}
}

// makeOne answers a request.
func makeOne(c *net.UnixConn) error {
	// A collection takes less than a namespace. Not before the first request, which may never come: a
	// collection's own memory is as large as what it saves then.
	debug.SetGCPercent(10)
	n, err := netns.Make()
	if err != nil {
		return send(c, makerAnswer{Error: err.Error()})
	}
	files := []*os.File{n.NS, n.Stream, n.DNS, n.DNSTCP}
	if n.Diag != nil {
		files = append(files, n.Diag)
	}
	return errors.Join(send(c, makerAnswer{}, files...), n.Close())
}

// lockMaker loads the filter and tries the forbidden calls.
func lockMaker(loadFilter func(*specs.LinuxSeccomp) error) error {
	if err := checkCapabilities(makerCapabilities); err != nil {
		return fmt.Errorf("confine the maker: %w", err)
	}
	if err := loadFilter(makerFilter()); err != nil {
		return fmt.Errorf("confine the maker: %w", err)
	}
	if fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0); err == nil {
		return errors.Join(errors.New("confine the maker: a local socket could be made"), unix.Close(fd))
	}
	if fd, err := unix.Open("/proc/sys/kernel/hostname", unix.O_WRONLY|unix.O_CLOEXEC, 0); err == nil {
		return errors.Join(errors.New("confine the maker: a file outside /proc/sys/net could be opened for writing"), unix.Close(fd))
	}
	return nil
}

// makerFilter allows the system calls of making a namespace. No execution, no process, no mount, no
// entering of a namespace, no tracing; no socket but those of TCP, UDP, routes,
// rules, and questions about sockets.
func makerFilter() *specs.LinuxSeccomp {
	f := filter(`
		read write close fcntl fstat newfstatat openat readlinkat
		bind listen getsockname getsockopt setsockopt sendto sendmsg recvfrom recvmsg getpeername
		mmap munmap mprotect madvise mremap brk mincore
		futex sched_yield sched_getaffinity set_robust_list rseq exit exit_group restart_syscall
		rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack tgkill getpid gettid getuid geteuid getgid getegid
		nanosleep clock_nanosleep clock_gettime gettimeofday timer_create timer_settime timer_delete setitimer
		epoll_create1 epoll_ctl epoll_pwait eventfd2 pipe2 getrandom uname seccomp`)
	is := func(index uint, value uint64) specs.LinuxSeccompArg {
		return specs.LinuxSeccompArg{Index: index, Value: value, Op: specs.OpEqualTo}
	}
	also := func(name string, args ...specs.LinuxSeccompArg) {
		f.Syscalls = append(f.Syscalls, specs.LinuxSyscall{Action: specs.ActAllow, Names: []string{name}, Args: args})
	}
	also("unshare", is(0, unix.CLONE_NEWNET))
	also("ioctl", is(1, unix.SIOCGSKNS)) // the namespace of a socket, to verify it
	also("socket", is(0, unix.AF_NETLINK), is(2, unix.NETLINK_ROUTE))
	also("socket", is(0, unix.AF_NETLINK), is(2, unix.NETLINK_NETFILTER))
	also("socket", is(0, unix.AF_NETLINK), is(2, unix.NETLINK_SOCK_DIAG))
	const kind = 0xf // the other bits are flags
	for _, t := range []uint64{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
		also("socket", is(0, unix.AF_INET6), specs.LinuxSeccompArg{Index: 1, Value: kind, ValueTwo: t, Op: specs.OpMaskedEqual}, is(2, 0))
	}
	return f
}
