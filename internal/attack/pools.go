package attack

import (
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pools are attacks on what all programs of a host have together and no limit of a sandbox counts,
// and on the limits themselves. Each takes one of a thing: a program that may have one can have
// all.
func pools() []Attack {
	all := []Attack{
		// All filters of a host have net.core.bpf_jit_limit bytes together: after some 9,200 socket
		// filters no seccomp filter is loaded, and no sandbox starts.
		{"attach-filter", Filter, func() error { return attachFilter(unix.SOL_SOCKET, unix.SO_ATTACH_FILTER) }},
		{"attach-filter-high-bits", Filter, func() error { return attachFilter(1<<32|unix.SOL_SOCKET, 1<<32|unix.SO_ATTACH_FILTER) }},
		{"attach-filter-unix", Filter, func() error { return attachFilterTo(unix.AF_UNIX, unix.SOCK_DGRAM) }},
		{"attach-filter-ipv6", Filter, func() error { return attachFilterTo(unix.AF_INET6, unix.SOCK_STREAM) }},
		{"attach-filter-netlink", Filter, func() error { return attachFilterTo(unix.AF_NETLINK, unix.SOCK_RAW) }},
		{"attach-reuseport-filter", Filter, func() error { return attachFilter(unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF) }},
		{"attach-ebpf", Filter, func() error { return attachProgram(unix.SO_ATTACH_BPF) }},
		{"attach-reuseport-ebpf", Filter, func() error { return attachProgram(unix.SO_ATTACH_REUSEPORT_EBPF) }},
		{"lock-filter", Filter, func() error { return onSocket(unix.AF_UNIX, 0, unix.SOL_SOCKET, unix.SO_LOCK_FILTER, 1) }},
		{"nested-filter", Filter, func() error { return nestedFilter(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0) }},
		{"nested-filter-high-bits", Filter, func() error { return nestedFilter(unix.SYS_SECCOMP, 1<<32|unix.SECCOMP_SET_MODE_FILTER, 0) }},
		{"nested-filter-all-threads", Filter, func() error {
			return nestedFilter(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC)
		}},
		{"nested-filter-listener", Filter, func() error {
			return nestedFilter(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER)
		}},
		{"nested-filter-prctl", Filter, func() error { return nestedFilter(unix.SYS_PRCTL, unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER) }},

		// Without descriptors init finds nothing that it is to kill.
		{"limit-init-descriptors", Filter, func() error { return limitInit(unix.RLIMIT_NOFILE) }},
		{"limit-init-processes", Filter, func() error { return limitInit(unix.RLIMIT_NPROC) }},
		{"limit-init-memory", Filter, func() error { return limitInit(unix.RLIMIT_AS) }},
		{"limit-init-processor", Filter, func() error { return limitInit(unix.RLIMIT_CPU) }},
		{"limit-init-high-bits", Filter, func() error { return limitOther(1<<32 | 1) }},
		{"limit-init-thread", Filter, func() error {
			threads, err := os.ReadDir("/proc/1/task")
			if err != nil {
				return err
			}
			thread, err := strconv.Atoi(threads[len(threads)-1].Name()) // not the first, if it has several
			if err != nil {
				return err
			}
			return limitOther(uintptr(thread))
		}},
		{"limit-child", Filter, func() error {
			pid, err := child(false)
			if err != nil {
				return err
			}
			return errors.Join(limitOther(uintptr(pid)), unix.Kill(pid, unix.SIGKILL))
		}},
		{"limit-cores-anew", Filter, limitCores},
		// By its own number, which the filter does not know.
		{"limit-cores-by-number", Filter, func() error {
			var has unix.Rlimit
			if err := unix.Getrlimit(unix.RLIMIT_CORE, &has); err != nil {
				return err
			}
			return unix.Prlimit(os.Getpid(), unix.RLIMIT_CORE, &has, nil)
		}},

		// fs.aio-max-nr is the host's, and root of it is refused as well.
		{"io-setup", Filter, func() error {
			var context uintptr
			if err := raw(unix.SYS_IO_SETUP, 1, uintptr(unsafe.Pointer(&context)), 0); err != nil {
				return err
			}
			return raw(unix.SYS_IO_DESTROY, context, 0, 0)
		}},
		{"io-submit", Filter, func() error { return reached(raw(unix.SYS_IO_SUBMIT, 0, 1, 0)) }},

		// Where the call is reached, the kernel misses a file or a size before it looks for pages.
		{"mmap-hugetlb", Filter, func() error {
			_, _, errno := unix.RawSyscall6(unix.SYS_MMAP, 0, 2<<20, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_HUGETLB, ^uintptr(0), 0)
			if errno == unix.EBADF {
				return nil
			}
			return errno
		}},
		{"memfd-hugetlb", Filter, func() error {
			fd, err := unix.MemfdCreate("attacker", unix.MFD_HUGETLB|unix.MFD_CLOEXEC)
			if err != nil {
				return err
			}
			return unix.Close(fd)
		}},
		{"shm-hugetlb", Filter, func() error {
			const hugetlb = 0o4000
			_, _, errno := unix.RawSyscall(unix.SYS_SHMGET, unix.IPC_PRIVATE, 0, unix.IPC_CREAT|hugetlb)
			if errno == unix.EINVAL {
				return nil
			}
			return errno
		}},

		// The size of a page stands in the upper bits.
		{"mmap-hugetlb-1g", Filter, func() error {
			const gib = 30 << 26
			_, _, errno := unix.RawSyscall6(unix.SYS_MMAP, 0, 1<<30, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_HUGETLB|gib, ^uintptr(0), 0)
			if errno == unix.EBADF {
				return nil
			}
			return errno
		}},
		{"memfd-hugetlb-2m", Filter, func() error {
			const mib2 = 21 << 26
			fd, err := unix.MemfdCreate("attacker", unix.MFD_HUGETLB|mib2|unix.MFD_CLOEXEC)
			return closing(fd, err)
		}},

		// The kernel asks modprobe, root of the host, for a module before it looks at the caller.
		{"modprobe-bridge", Filter, func() error { return deviceIoctl(0x8940) }}, // SIOCGIFBR
		{"modprobe-vlan", Filter, func() error { return deviceIoctl(0x8982) }},   // SIOCGIFVLAN
		// The pages of stdio's pipes are the daemon's.
		{"larger-pipe", Filter, func() error {
			var p [2]int
			if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
				return err
			}
			_, err := unix.FcntlInt(uintptr(p[0]), unix.F_SETPIPE_SZ, 128<<10)
			return errors.Join(err, unix.Close(p[0]), unix.Close(p[1]))
		}},
		// A page of it splits the kernel's map of all memory for good.
		{"secret-memory", Filter, func() error {
			fd, _, errno := unix.RawSyscall(unix.SYS_MEMFD_SECRET, unix.O_CLOEXEC, 0, 0)
			if errno != 0 {
				return errno
			}
			return unix.Close(int(fd))
		}},
		// Two processes that trace each other and stop at their ends cannot be killed.
		{"trace-attach", Filter, func() error { return traced(unix.PTRACE_ATTACH, 0, nil) }},
		{"trace-seize", Filter, func() error { return traced(unix.PTRACE_SEIZE, 0, nil) }},

		// A program that may write its score may lower it. When the host's memory runs out, the kernel
		// then ends those of other sandboxes in its place.
		{"write-own-oom-score", ReadOnly, func() error { return rewrite("/proc/self/oom_score_adj") }},
		{"write-inits-oom-score", ReadOnly, func() error { return rewrite("/proc/1/oom_score_adj") }},
		{"write-own-memory", ReadOnly, func() error {
			fd, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
			return closing(fd, err)
		}},
		{"touch-device", ReadOnly, func() error {
			now := []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_NOW}}
			return unix.UtimesNanoAt(unix.AT_FDCWD, "/dev/null", now, 0)
		}},
		{"touch-device-by-descriptor", ReadOnly, func() error {
			fd, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			now := []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_NOW}}
			return raw4(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&now[0])), 0)
		}},
	}
	for _, file := range []struct{ name, path string }{
		{"command-line", "/proc/cmdline"},
		{"disk-activity", "/proc/diskstats"},
		{"pressure", "/proc/pressure/cpu"},
		{"pressure-memory", "/proc/pressure/memory"},
		{"disk-activity-by-root", "/proc/self/root/proc/diskstats"},
	} {
		all = append(all, Attack{"read-" + file.name, Masked, func() error { return read(file.path) }})
	}
	return all
}

// allowAll is a filter of one instruction.
func allowAll() (*unix.SockFprog, *unix.SockFilter) {
	instruction := &unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0x7fff0000}
	return &unix.SockFprog{Len: 1, Filter: instruction}, instruction
}

// attachFilter gives a socket a filter, which goes with the socket.
func attachFilter(level, option uintptr) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{}); err != nil {
		return err
	}
	program, instruction := allowAll()
	_, _, errno := unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), level, option, uintptr(unsafe.Pointer(program)), unsafe.Sizeof(*program), 0)
	goruntime.KeepAlive(instruction)
	if errno != 0 {
		return errno
	}
	return nil
}

// attachProgram offers a socket a descriptor that is no program.
func attachProgram(option int) error {
	err := onSocket(unix.AF_INET, 0, unix.SOL_SOCKET, option, 1<<20)
	if errors.Is(err, unix.EBADF) {
		return nil
	}
	return err
}

// onSocket sets an option of a new socket. It works where the kernel has looked at the option.
func onSocket(family, protocol, level, option, value int) error {
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.SetsockoptInt(fd, level, option, value)
}

// nestedFilter loads a filter in a thread that ends with it.
func nestedFilter(call, first, second uintptr) error {
	outcome := make(chan error)
	go func() {
		goruntime.LockOSThread() // never unlocked: the filter ends with the thread
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			outcome <- err
			return
		}
		program, instruction := allowAll()
		err := raw(call, first, second, uintptr(unsafe.Pointer(program)))
		goruntime.KeepAlive(instruction)
		outcome <- err
	}()
	return <-outcome
}

// limitInit sets a limit of init to the value that it has.
func limitInit(resource int) error {
	var has unix.Rlimit
	if err := unix.Prlimit(1, resource, nil, &has); err != nil {
		return fmt.Errorf("read it: %w", err)
	}
	return unix.Prlimit(1, resource, &has, nil)
}

// limitCores sets the limit of cores to 0 bytes. With another limit than 1 the kernel starts the
// host's program for cores, where it has one.
func limitCores() error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return err
	}
	var has unix.Rlimit
	if err := unix.Prlimit(os.Getpid(), unix.RLIMIT_CORE, nil, &has); err != nil {
		return err
	}
	if has.Cur == 1 {
		return errors.New("the limit is 1 byte still")
	}
	return nil
}

// deviceIoctl makes a request of a socket that some device may know.
func deviceIoctl(request uintptr) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(reached(raw(unix.SYS_IOCTL, uintptr(fd), request, 0)), unix.Close(fd))
}

// rewrite writes to a file the line that it has.
func rewrite(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read it: %w", err)
	}
	return write(path, string(text))
}

// attachFilterTo gives a new socket of a family a filter.
func attachFilterTo(family, kind int) error {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	program, instruction := allowAll()
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, program)
	goruntime.KeepAlive(instruction)
	return err
}

// limitOther sets the limit of descriptors of another process to the one that it has.
func limitOther(pid uintptr) error {
	var has unix.Rlimit
	if err := raw4(unix.SYS_PRLIMIT64, pid, unix.RLIMIT_NOFILE, 0, uintptr(unsafe.Pointer(&has))); err != nil {
		return fmt.Errorf("read it: %w", err)
	}
	return raw4(unix.SYS_PRLIMIT64, pid, unix.RLIMIT_NOFILE, uintptr(unsafe.Pointer(&has)), 0)
}
