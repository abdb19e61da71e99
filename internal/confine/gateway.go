package confine

import (
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Gateway is the input of the plan for the process that relays the connections of sandboxes. It
// reads bytes of sandboxes and of servers, and needs nothing but sockets and the resolver's files.
type Gateway struct {
	ABI     int  // as in [Daemon]; 0 if the kernel's Landlock cannot enforce the plan
	Signals bool // as in [Daemon]
	Files   []string
	Dirs    []string // both of [Resolver]
}

// Probe is like [Daemon.Probe].
func (g *Gateway) Probe() (ok bool) {
	g.ABI, g.Signals, ok = probe()
	return ok
}

// Plan returns the gateway's plan. It is a pure function.
func (g Gateway) Plan() Plan {
	p := denyAll(g.ABI, g.Signals)
	if g.ABI >= 4 {
		p.Handled.Handled_access_net = unix.LANDLOCK_ACCESS_NET_BIND_TCP // connections may lead to any port
	}
	for _, file := range g.Files {
		p.allow(file, unix.LANDLOCK_ACCESS_FS_READ_FILE)
	}
	for _, dir := range g.Dirs {
		p.allow(dir, unix.LANDLOCK_ACCESS_FS_READ_FILE)
	}
	return p
}

// Missing lists actions that only a later kernel would deny a confined gateway. The filter denies
// sockets other than of the Internet, signals, and whatever changes files on every kernel.
func (g Gateway) Missing() []string {
	if g.ABI == 0 {
		return []string{"it can read files of its user (Linux 5.19 with Landlock keeps it from that)"}
	}
	return nil
}

// Apply takes everything from this process that a gateway does not need, irrevocably, on every
// thread, and verifies it. The caller keeps the result as long as the resolver's files are read.
// The order matters: the filter refuses the calls that make the other restrictions.
func (g Gateway) Apply() (_ *Held, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("confine the gateway: %w", err)
		}
	}()
	if err := hide(); err != nil {
		return nil, err
	}
	if err := dropPrivileges(); err != nil {
		return nil, err
	}
	held := new(Held)
	if g.ABI > 0 {
		if held, err = g.Plan().Apply(); err != nil {
			return nil, err
		}
	}
	if err := gatewayFilter(os.Getpid()).apply(refuseUnix); err != nil {
		return nil, errors.Join(err, held.Close())
	}
	return held, nil
}

// RaiseDescriptors gives this process as many descriptors as it can be given, and returns their
// number. Root's is above the inherited hard limit, as long as it has CAP_SYS_RESOURCE.
func RaiseDescriptors() (uint64, error) {
	var limit syscall.Rlimit
	// Of the package syscall, which then does not reset the limit for children.
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 0, fmt.Errorf("read the limit of descriptors: %w", err)
	}
	if most, err := maxDescriptors(); err == nil && most > limit.Max {
		if syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: most, Max: most}) == nil {
			return most, nil
		}
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: limit.Max, Max: limit.Max}); err != nil {
		return 0, fmt.Errorf("raise the limit of descriptors to %d: %w", limit.Max, err)
	}
	return limit.Max, nil
}

// hide keeps the memory of this process from others of its user.
func hide() error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbid core files: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("forbid tracing by processes of the same user: %w", err)
	}
	return nil
}

// maxDescriptors returns the highest limit of descriptors that a process can be given.
func maxDescriptors() (n uint64, err error) {
	data, err := os.ReadFile("/proc/sys/fs/nr_open")
	if err != nil {
		return 0, err
	}
	_, err = fmt.Sscan(string(data), &n)
	return n, err
}

// dropPrivileges empties the capability sets and the supplementary groups on every thread.
func dropPrivileges() error {
	if err := onAllThreads("set no_new_privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1); err != nil {
		return err
	}
	// Without CAP_SETGID, or where a user namespace denies it, the groups stay.
	if err := syscall.Setgroups(nil); err != nil && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("drop supplementary groups: %w", err)
	}
	if held, err := capabilities(); err != nil {
		return err
	} else if held[0].Effective&(1<<unix.CAP_SETPCAP) != 0 {
		for c := uintptr(0); ; c++ {
			// EINVAL is the answer for a number beyond the kernel's last capability.
			if _, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0); err != nil {
				break
			}
			if err := onAllThreads("drop a capability from the bounding set", unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c); err != nil {
				return err
			}
		}
	}
	header, none := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
	//nolint:gosec // the addresses are those of the structures which capset(2) reads
	err := onAllThreads("drop capabilities", unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&none)))
	goruntime.KeepAlive(&header)
	goruntime.KeepAlive(&none)
	if err != nil {
		return err
	}
	left, err := capabilities()
	if err != nil {
		return err
	}
	if left != none { // ambient ones cannot be without permitted ones
		return fmt.Errorf("capabilities are left: %v", left)
	}
	return nil
}

// capabilities returns those of the calling thread.
func capabilities() (held [2]unix.CapUserData, err error) {
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &held[0]); err != nil {
		return held, fmt.Errorf("read capabilities: %w", err)
	}
	return held, nil
}

// onAllThreads makes a system call on every thread. It ends the process if they disagree.
func onAllThreads(what string, call, arg0, arg1 uintptr) error {
	if _, _, errno := syscall.AllThreadsSyscall6(call, arg0, arg1, 0, 0, 0, 0); errno != 0 {
		return fmt.Errorf("%s: %w", what, errno)
	}
	return nil
}
