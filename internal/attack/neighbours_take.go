package attack

import (
	"errors"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// errSmall is the error of a pipe with fewer pages than pipe(7) promises: its user has too many.
const errSmall = refusal("few pages")

// until takes one after the other until the bound or the first refusal.
func until(one func(i int) error) func(bound int) (int, error) {
	return func(bound int) (int, error) {
		for i := range bound {
			if err := one(i); err != nil {
				return i, err
			}
		}
		return bound, nil
	}
}

// one makes a taker of a function that makes a descriptor.
func one(open func() (int, error)) func(bound int) (int, error) {
	return until(func(int) error {
		_, err := open()
		return err
	})
}

// ofFiles holds the error at the limit of descriptors. That lies far beyond the bound of rows about
// the memory of such objects.
var ofFiles = map[string]string{"EMFILE": Limits}

// memory returns the row of a thing that the kernel counts as memory only.
func memory(name string, bound int, take func(bound int) (int, error)) Resource {
	return Resource{
		Name: name, Pool: OfMemory, Bound: bound, Stops: ofFiles, take: take,
		Empty: []string{"ENOMEM", "ENOBUFS"}, Want: wantOf(OfMemory, 0, nil),
	}
}

// hardened are the profiles whose filters close further calls.
var hardened = []string{"hardened"}

// closedTo returns a row that the filters of some profiles close.
func closedTo(profiles []string, r Resource) Resource {
	r.Closed = profiles
	return r
}

// refused returns the row of a resource that the filter keeps closed.
func refused(name string, pool Pool, bound int, empty []string, take func(bound int) (int, error)) Resource {
	return Resource{
		Name: name, Pool: pool, Bound: bound, Empty: empty, Want: want(Filter), take: take,
		// On a host without huge pages a refusal and an empty pool look alike.
		Refused: []string{"ENOPROTOOPT", "EINVAL", "ENOMEM"},
	}
}

// pooled returns the row of a resource that nothing bounds but the pool's own size.
func pooled(name string, pool Pool, bound int, unit int64, size func() int64, empty []string, take func(bound int) (int, error)) Resource {
	return Resource{
		Name: name, Pool: pool, Bound: bound, Unit: unit, Size: size, Empty: empty, Unsized: OfMemory, Stops: ofFiles,
		Want: wantOf(pool, unit, size), take: take,
	}
}

func descriptors() []Resource {
	fileMax := pooled("open-files", OfHost, 3000, 256, sysctl("fs/file-max"), []string{"ENFILE"},
		one(func() (int, error) { return unix.Eventfd(0, unix.EFD_CLOEXEC) }))
	fileMax.Want = func(s Setting) string {
		if size := fileMax.Size(); size > 0 {
			return s.bounds(OfHost, fileMax.Unit, size)
		}
		return s.bounds(OfMemory, 0, 0)
	}
	return []Resource{
		{Name: "descriptors", Pool: OfSandbox, Bound: 70_000, Stops: ofFiles, Want: want(Limits), take: func(bound int) (int, error) {
			return until(func(int) error { _, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0); return err })(bound)
		}},
		fileMax,
		// A watch has some 160 bytes of the kernel's (ep_poll: "4% of low memory").
		pooled("epoll-watches", OfUser, 4000, 160, sysctl("fs/epoll/max_user_watches"), []string{"ENOSPC"}, epollWatches),
		{
			Name: "inotify-instances", Pool: OfUser, Bound: 200, Size: sysctl("fs/inotify/max_user_instances"), Want: want(Ceilings),
			Stops: map[string]string{"EMFILE": Ceilings}, Ceiling: readCeiling("max_inotify_instances", "fs/inotify/max_user_instances"),
			take: one(func() (int, error) { return unix.InotifyInit1(unix.IN_CLOEXEC) }),
		},
		{
			Name: "inotify-watches", Pool: OfUser, Bound: 1000, Size: sysctl("fs/inotify/max_user_watches"), Want: want(Ceilings),
			Stops: map[string]string{"ENOSPC": Ceilings}, Ceiling: readCeiling("max_inotify_watches", "fs/inotify/max_user_watches"),
			take: inotifyWatches,
		},
		refused("fanotify", OfUser, 8, []string{"EMFILE"}, one(func() (int, error) {
			return unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_CLOEXEC|unix.FAN_REPORT_FID, unix.O_RDONLY)
		})),
		// Each instance watches the one before, as deep as the kernel lets them (EP_MAX_NESTS), and so on.
		pooled("nested-epolls", OfUser, 2000, 160, sysctl("fs/epoll/max_user_watches"), []string{"ENOSPC"}, nestedEpolls),
		memory("directory-notifications", 500, until(func(int) error {
			fd, err := unix.Open("/dev/shm", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			const create, often = 4, 1 << 31 // DN_CREATE, DN_MULTISHOT
			_, err = unix.FcntlInt(uintptr(fd), unix.F_NOTIFY, create|often)
			return err
		})),
		memory("eventfds", 1000, one(func() (int, error) { return unix.Eventfd(0, unix.EFD_CLOEXEC) })),
		memory("timerfds", 1000, one(func() (int, error) { return unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC) })),
		memory("signalfds", 1000, one(func() (int, error) { return unix.Signalfd(-1, new(unix.Sigset_t), unix.SFD_CLOEXEC) })),
		memory("pidfds", 1000, one(func() (int, error) { return unix.PidfdOpen(os.Getpid(), 0) })),
		{
			Name: "terminals", Pool: OfHost, Bound: 300, Size: sysctl("kernel/pty/max"), Empty: []string{"ENOSPC"}, Want: want(MountOptions),
			Ceiling: readOption("devpts", "max"),
			take:    one(func() (int, error) { return unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0) }),
		},
		{
			Name: "terminals-by-devpts", Pool: OfHost, Bound: 300, Size: sysctl("kernel/pty/max"), Empty: []string{"ENOSPC"}, Want: want(MountOptions),
			Ceiling: readOption("devpts", "max"),
			take:    one(func() (int, error) { return unix.Open("/dev/pts/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0) }),
		},
		pooled("pipe-pages", OfUser, 1200, 0, sysctl("fs/pipe-user-pages-soft"), []string{string(errSmall), "EPERM", "ENFILE"}, pipePages),
		pooled("descriptors-in-flight", OfUser, 70_000, 0, nil, []string{"ETOOMANYREFS"}, inFlight),
		{ // no limit counts them, nor a memory cgroup their memory (Linux 6.18)
			Name: "record-locks", Pool: OfHost, Bound: 2000, Stops: ofFiles, Empty: []string{"ENOLCK"}, Want: want(Nothing), take: recordLocks,
		},
		memory("leases", 200, leases),
	}
}

func buffers() []Resource {
	return []Resource{
		memory("memory", 32, until(func(int) error { return touched(1 << 20) })),
		memory("memfds", 32, until(func(int) error {
			fd, err := unix.MemfdCreate("taken", unix.MFD_CLOEXEC)
			if err != nil {
				return err
			}
			return fillFile(fd)
		})),
		memory("unix-sockets", 16, until(func(int) error { return fullPair() })),
		memory("netlink-sockets", 200, one(func() (int, error) { return unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0) })),
		// In 64 KiB. No cgroup counts these messages.
		{Name: "netlink-messages", Pool: OfLauncher, Bound: 256, Stops: ofFiles, Empty: []string{"ENOBUFS", "ENOMEM"}, Want: want(Counted), take: until(func(int) error {
			return unreadAnswers(64 << 10)
		})},
		{Name: "datagram-errors", Pool: OfLauncher, Bound: 256, Stops: ofFiles, Empty: []string{"ENOBUFS", "ENOMEM"}, Want: want(Counted), take: until(func(int) error {
			return unreadErrors(64 << 10)
		})},
		{Name: "connection-timestamps", Pool: OfHost, Bound: 64, Stops: ofFiles, Empty: []string{"ENOBUFS", "ENOMEM"}, Want: want(Nothing), take: until(func(int) error {
			return unreadTimestamps(64 << 10)
		})},
		// Pages that are sent without a copy, in KiB, count for the user up to the limit of locked memory.
		{Name: "pages-under-way", Pool: OfUser, Bound: 1024, Refused: []string{"ENOPROTOOPT"}, Empty: []string{"ENOBUFS"}, Want: wantOf(OfUser, 0, nil), Stops: ofFiles, take: pagesUnderWay},
		memory("landlock-rulesets", 200, one(func() (int, error) {
			attr := unix.LandlockRulesetAttr{Handled_access_fs: unix.LANDLOCK_ACCESS_FS_EXECUTE}
			fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), 8, 0)
			if errno != 0 {
				return -1, errno
			}
			return int(fd), nil
		})),
		// In KiB; both pools are of the host, whichever network namespace a socket is in.
		pooled("tcp-memory", OfHost, 8192, 4096, sysctl("net/ipv4/tcp_mem"), []string{"dropped", "ENOBUFS", "ENOMEM"}, tcpMemory),
		pooled("udp-memory", OfHost, 2048, 4096, sysctl("net/ipv4/udp_mem"), []string{"dropped", "ENOBUFS", "ENOMEM"}, udpMemory),
		pooled("tcp-orphans", OfHost, 64, 8192, sysctl("net/ipv4/tcp_max_orphans"), []string{"ENOBUFS", "ENOMEM"}, orphans),
		{
			Name: "loopback-ports", Pool: OfSandbox, Bound: 1000, Want: want(Namespaces), Empty: []string{"EADDRINUSE"}, Stops: ofFiles,
			take: until(func(int) error {
				fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return err
				}
				return unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback})
			}),
		},
		{Name: "locked-memory", Closed: hardened, Pool: OfSandbox, Bound: 300, Want: want(Limits), Stops: map[string]string{"ENOMEM": Limits, "EPERM": Limits, "EAGAIN": Limits}, take: until(func(int) error { return lockedPages(16) })},
		// Locked segments are counted by user and, since Linux 5.14, in every user namespace above.
		{
			Name: "locked-segments", Closed: hardened, Pool: OfUser, Bound: 300, Want: lockedLimit, Lingers: true, Stops: map[string]string{"ENOMEM": Limits, "EPERM": Limits, "ENOSPC": Limits},
			take: asUsers(func() error { _, err := lockedSegment(); return err }),
		},
		// Where the host promises no more memory than it has, mappings that are never touched use that up.
		{Name: "committed-memory", Pool: OfHost, Unsized: OfNothing, Bound: 64, Size: func() int64 {
			if sysctl("vm/overcommit_memory")() == 2 {
				return 0
			}
			return -1
		}, Empty: []string{"ENOMEM"}, Want: func(s Setting) string {
			if sysctl("vm/overcommit_memory")() == 2 {
				return Nothing
			}
			return Endless
		}, take: until(func(int) error {
			_, err := unix.Mmap(-1, 0, 1<<28, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
			return err
		})},
		{Name: "random-bytes", Pool: OfNothing, Bound: 64, Want: want(Endless), take: until(func(int) error {
			_, err := unix.Getrandom(make([]byte, 64<<10), unix.GRND_NONBLOCK)
			return err
		})},
	}
}

func closedPools() []Resource {
	return []Resource{
		refused("asynchronous-io", OfHost, 8, []string{"EAGAIN"}, until(func(int) error { _, err := aio(128); return err })),
		refused("socket-filters", OfHost, 16, []string{"errno 524", "ENOMEM"}, one(func() (int, error) { return filtered(unix.SO_ATTACH_FILTER) })),
		refused("reuseport-filters", OfHost, 16, []string{"errno 524", "ENOMEM"}, one(func() (int, error) { return filtered(unix.SO_ATTACH_REUSEPORT_CBPF) })),
		refused("seccomp-filters", OfHost, 16, []string{"errno 524", "ENOMEM"}, seccompFilters),
		refused("bpf-maps", OfHost, 8, []string{"ENOMEM"}, until(func(int) error { return bpf() })),
		refused("keys", OfUser, 32, []string{"EDQUOT"}, until(func(i int) error {
			_, err := unix.AddKey("user", "taken-"+strconv.Itoa(i), []byte("x"), unix.KEY_SPEC_PROCESS_KEYRING)
			return err
		})),
		refused("io-uring", OfHost, 4, []string{"ENOMEM"}, until(func(int) error { return ioUring() })),
		refused("perf-events", OfUser, 4, nil, until(func(int) error { return perf() })),
		refused("user-namespaces", OfUser, 2, []string{"ENOSPC"}, until(func(int) error { return clone(unix.CLONE_NEWUSER) })),
		refused("uts-namespaces", OfUser, 2, []string{"ENOSPC"}, until(func(int) error { return inChild(unix.SYS_UNSHARE, unix.CLONE_NEWUTS, 0) })),
		refused("network-namespaces", OfUser, 2, []string{"ENOSPC"}, until(func(int) error { return clone(unix.CLONE_NEWNET) })),
		refused("mounts", OfHost, 4, []string{"ENOSPC"}, one(func() (int, error) { return unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC) })),
		// Connection tracking is switched on by rules, and those come over this family.
		{Name: "connection-tracking", Pool: OfHost, Bound: 4, Want: want(Filter), Stops: map[string]string{"EPROTONOSUPPORT": Filter}, take: one(func() (int, error) {
			return unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		})},
		refused("huge-memfds", OfHost, 4, []string{"ENOMEM", "ENOSPC"}, one(func() (int, error) {
			return unix.MemfdCreate("taken", unix.MFD_CLOEXEC|unix.MFD_HUGETLB)
		})),
		refused("huge-pages", OfHost, 4, []string{"ENOMEM"}, until(func(int) error {
			b, err := unix.Mmap(-1, 0, 2<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_HUGETLB)
			if err == nil {
				b[0] = 1
			}
			return err
		})),
		refused("huge-segments", OfHost, 4, []string{"ENOMEM"}, until(func(int) error {
			const hugetlb = 0o4000
			_, err := unix.SysvShmGet(unix.IPC_PRIVATE, 2<<20, unix.IPC_CREAT|hugetlb|0o600)
			return err
		})),
		{Name: "pressure-triggers", Pool: OfHost, Bound: 8, Want: want(ReadOnly), Stops: map[string]string{
			"EACCES": ReadOnly, "EROFS": ReadOnly, "ENOENT": ReadOnly, "EPERM": ReadOnly, "EOPNOTSUPP": ReadOnly,
		}, take: until(func(int) error {
			fd, err := unix.Open("/proc/pressure/memory", unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			_, err = unix.Write(fd, []byte("some 200000 2000000\x00"))
			return err
		})},
		{Name: "real-time", Closed: hardened, Pool: OfHost, Bound: 1, Want: want(Limits), Stops: map[string]string{"EPERM": Limits, "ENOSYS": Filter}, take: until(func(int) error {
			pid, err := child(false)
			if err != nil {
				return err
			}
			if err := unix.SchedSetAttr(pid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: 1}, 0); err != nil {
				return err
			}
			// Where groups have no real time it would not even end.
			return unix.SchedSetAttr(pid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}, 0)
		})},
		{Name: "priority", Closed: hardened, Pool: OfHost, Bound: 1, Want: want(Limits), Stops: map[string]string{"EPERM": Limits, "EACCES": Limits, "ENOSYS": Filter}, take: until(func(int) error {
			pid, err := child(false)
			if err != nil {
				return err
			}
			return unix.Setpriority(unix.PRIO_PROCESS, pid, -1)
		})},
	}
}

func ipcs() []Resource {
	limited := map[string]string{"EMFILE": Limits, "EAGAIN": Limits}
	return []Resource{
		{Name: "message-queues", Closed: hardened, Pool: OfUser, Bound: 40, Stops: limited, Want: want(Limits), take: one(func() (int, error) {
			return queue("/sandboxd-taken-"+strconv.Itoa(os.Getpid()), true)
		})},
		{Name: "posix-timers", Pool: OfUser, Bound: 1100, Stops: limited, Want: want(Limits), take: until(func(int) error { _, err := timer(); return err })},
		{Name: "pending-signals", Closed: hardened, Pool: OfUser, Bound: 1100, Stops: limited, Want: want(Limits), take: func(bound int) (n int, err error) {
			blockedErr := withBlocked(func() error {
				n, err = until(func(int) error { return queueSignal() })(bound)
				return err
			})
			return n, blockedErr
		}},
		closedTo(hardened, memory("shared-memory", 32, until(func(int) error {
			id, err := unix.SysvShmGet(unix.IPC_PRIVATE, 1<<20, unix.IPC_CREAT|0o600)
			if err != nil {
				return err
			}
			b, err := unix.SysvShmAttach(id, 0, 0)
			if err != nil {
				return err
			}
			for i := 0; i < len(b); i += 4096 {
				b[i] = 1
			}
			return nil
		}))),
		closedTo(hardened, memory("semaphores", 64, until(func(int) error { _, err := semaphores(250); return err }))),
		closedTo(hardened, memory("messages", 30, until(func(int) error {
			id, _, errno := unix.Syscall(unix.SYS_MSGGET, unix.IPC_PRIVATE, unix.IPC_CREAT|0o600, 0)
			if errno != 0 {
				return errno
			}
			var m struct {
				kind int64
				text [8000]byte
			}
			m.kind = 1
			if _, _, errno := unix.Syscall6(unix.SYS_MSGSND, id, uintptr(unsafe.Pointer(&m)), uintptr(len(m.text)), unix.IPC_NOWAIT, 0, 0); errno != 0 {
				return errno
			}
			return nil
		}))),
	}
}

func places() []Resource {
	readOnly := map[string]string{"EROFS": ReadOnly, "EACCES": ReadOnly, "EDQUOT": "quota"}
	disk := func(s Setting) string {
		if s.Profile == "hardened" {
			return ReadOnly
		}
		return s.bounds(OfDisk, 0, 0)
	}
	return []Resource{
		{Name: "tmpfs-bytes", Pool: OfMemory, Bound: 96, Empty: []string{"ENOMEM"}, Stops: map[string]string{"ENOSPC": MountOptions}, Want: want(MountOptions), Ceiling: readOption("tmpfs", "size"), take: until(func(i int) error {
			fd, err := unix.Open("/dev/shm/taken-"+strconv.Itoa(i), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
			if err != nil {
				return err
			}
			if err := unix.Unlink("/dev/shm/taken-" + strconv.Itoa(i)); err != nil {
				return err
			}
			return fillFile(fd)
		})},
		{Name: "tmpfs-inodes", Pool: OfMemory, Bound: 2000, Empty: []string{"ENOMEM"}, Stops: map[string]string{"ENOSPC": MountOptions}, Want: want(MountOptions), Ceiling: readOption("tmpfs", "nr_inodes"), take: inodes("/dev/shm")},
		// Attributes of users take of the ceiling on files (Linux 6.6); before that there are none.
		{Name: "tmpfs-attributes", Pool: OfMemory, Bound: 64, Closed: hardened, Refused: []string{"ENOTSUP"}, Empty: []string{"ENOMEM"}, Stops: map[string]string{"ENOSPC": MountOptions}, Want: func(Setting) string {
			if attributes() {
				return MountOptions
			}
			return Filter
		}, Ceiling: readOption("tmpfs", "nr_inodes"), take: until(func(i int) error {
			name := "/dev/shm/attributes-" + strconv.Itoa(i)
			fd, err := unix.Open(name, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Fsetxattr(fd, "user.taken", make([]byte, 32<<10), 0)
		})},
		{Name: "dentries", Pool: OfNothing, Bound: 2000, Want: want(Endless), take: until(func(i int) error {
			if err := unix.Access("/absent-"+strconv.Itoa(i), unix.F_OK); err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
			return nil
		})},
		{Name: "disk-bytes", Pool: OfDisk, Bound: 32, Empty: []string{"ENOSPC"}, Stops: readOnly, Want: disk, take: until(func(i int) error {
			fd, err := diskFile("taken-" + strconv.Itoa(i))
			if err != nil {
				return err
			}
			if err := unix.Fallocate(fd, 0, 0, 1<<20); !errors.Is(err, unix.EOPNOTSUPP) {
				return err
			}
			return fillFile(fd)
		})},
		{Name: "dirty-pages", Pool: OfDisk, Bound: 8, Empty: []string{"ENOSPC"}, Stops: readOnly, Want: disk, take: until(func(i int) error {
			fd, err := diskFile("dirty-" + strconv.Itoa(i))
			if err != nil {
				return err
			}
			return fillFile(fd)
		})},
		{Name: "disk-inodes", Pool: OfDisk, Bound: 500, Empty: []string{"ENOSPC"}, Stops: readOnly, Want: disk, take: inodes("")},
	}
}

func tasks() []Resource {
	full := map[string]string{"EAGAIN": "limit of processes"}
	return []Resource{
		// The kernel starts a helper of the host's for each crash if its pattern is a pipe.
		{Name: "core-dumps", Pool: OfHost, Bound: 4, Want: want(Limits), Stops: map[string]string{"no dump": Limits}, take: until(func(int) error { return crash() })},
		// With autogroups each session is one group of the scheduler, with a share of the processors.
		{Name: "sessions", Pool: OfCPU, Bound: 64, Stops: full, Want: wantOf(OfCPU, 0, nil), take: until(func(int) error { _, err := child(true); return err })},
		{Name: "zombies", Pool: OfHost, Bound: 600, Stops: full, Want: want("limit of processes"), take: until(func(int) error {
			pid, _, errno := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
			if errno != 0 {
				return errno
			}
			if pid == 0 {
				_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0) // nothing else is safe in this child
			}
			return nil
		})},
		{Name: "processes", Pool: OfHost, Bound: 600, Stops: full, Want: want("limit of processes"), take: until(func(int) error { _, err := child(false); return err })},
	}
}

var loopback = [4]byte{127, 0, 0, 1}

// epollWatches lets each of its epoll instances watch the same hundred descriptors.
func epollWatches(bound int) (int, error) {
	var watched [100]int
	for i := range watched {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			return 0, err
		}
		watched[i] = fd
	}
	var ep int
	return until(func(i int) (err error) {
		if i%len(watched) == 0 {
			if ep, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
				return err
			}
		}
		return unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, watched[i%len(watched)], &unix.EpollEvent{})
	})(bound)
}

// nestedEpolls makes chains of four instances, of which each watches the one before.
func nestedEpolls(bound int) (int, error) {
	last := -1
	return until(func(i int) error {
		ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
		if err != nil {
			return err
		}
		if i%4 != 0 {
			err = unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, last, &unix.EpollEvent{Events: unix.EPOLLIN})
		}
		last = ep
		return err
	})(bound)
}

// inotifyWatches watches so many files of its own.
func inotifyWatches(bound int) (int, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp("/dev/shm", "taken")
	if err != nil {
		return 0, unwrapped(err)
	}
	return until(func(i int) error {
		name := filepath.Join(dir, strconv.Itoa(i))
		if err := unix.Mknod(name, unix.S_IFREG|0o600, 0); err != nil {
			return err
		}
		_, err := unix.InotifyAddWatch(fd, name, unix.IN_OPEN)
		return err
	})(bound)
}

// pipePages makes pipes large, then ordinary ones, until one is smaller than those of others.
func pipePages(bound int) (int, error) {
	large := true
	return until(func(int) error {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			return err
		}
		if large {
			if _, err := unix.FcntlInt(uintptr(p[0]), unix.F_SETPIPE_SZ, 1<<20); err == nil {
				return nil
			}
			large = false
		}
		if n, err := unix.FcntlInt(uintptr(p[0]), unix.F_GETPIPE_SZ, 0); err != nil || n < 64<<10 {
			return errSmall
		}
		return nil
	})(bound)
}

// inFlight sends descriptors that are never received.
func inFlight(bound int) (int, error) {
	var rights []byte
	var pair [2]int
	fds := make([]int, 250)
	n, err := until(func(i int) (err error) {
		if i%8 == 0 { // as many as the queue of a socket takes
			if pair, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
				return err
			}
			for j := range fds {
				fds[j] = pair[0]
			}
			rights = unix.UnixRights(fds...)
		}
		return unix.Sendmsg(pair[0], []byte("x"), rights, nil, unix.MSG_DONTWAIT)
	})((bound + len(fds) - 1) / len(fds))
	return n * len(fds), err
}

// recordLocks locks every second byte of the inode of all eventfds: none of them can be joined.
// recordLocks locks a file of its own: all anonymous inodes are one, and another process that locks
// an eventfd would be in the way.
func recordLocks(bound int) (int, error) {
	fd, err := unix.MemfdCreate("locked", unix.MFD_CLOEXEC)
	if err != nil {
		return 0, err
	}
	return until(func(i int) error {
		return unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: int64(2 * i), Len: 1})
	})(bound)
}

func leases(bound int) (int, error) {
	dir, err := os.MkdirTemp("/dev/shm", "leased")
	if err != nil {
		return 0, unwrapped(err)
	}
	return until(func(i int) error {
		fd, err := unix.Open(filepath.Join(dir, strconv.Itoa(i)), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		_, err = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK)
		return err
	})(bound)
}

// touched maps so many bytes and writes to each page.
func touched(size int) error {
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	for i := 0; i < len(b); i += 4096 {
		b[i] = 1
	}
	return nil
}

// fillFile writes a MiB.
func fillFile(fd int) error {
	zeros := make([]byte, 64<<10)
	for left := 1 << 20; left > 0; {
		n, err := unix.Write(fd, zeros)
		if err != nil {
			return err
		}
		left -= n
	}
	return nil
}

// fullPair leaves some MiB unread in Unix sockets.
func fullPair() error {
	text := make([]byte, 32<<10)
	for sum := 0; sum < 1<<20; {
		p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		for {
			n, err := unix.Write(p[0], text)
			if errors.Is(err, unix.EAGAIN) {
				break
			} else if err != nil {
				return err
			}
			sum += n
		}
	}
	return nil
}

// connection connects to a listener of its own over loopback.
func connection() (listener, client int, err error) {
	bringUp()
	if listener, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, -1, err
	}
	if err := unix.Bind(listener, &unix.SockaddrInet4{Addr: loopback}); err != nil {
		return -1, -1, errors.Join(err, unix.Close(listener))
	}
	if err := unix.Listen(listener, 64); err != nil {
		return -1, -1, err
	}
	client, err = connectTo(listener)
	if err != nil {
		_ = unix.Close(listener) // the first error says more
	}
	return listener, client, err
}

// bringUp switches loopback on where it may: a control has a network namespace of its own.
func bringUp() {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if request, err := unix.NewIfreq("lo"); err == nil {
		request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
		_ = unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request)
	}
}

func connectTo(listener int) (client int, err error) {
	name, err := unix.Getsockname(listener)
	if err != nil {
		return -1, err
	}
	if client, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, err
	}
	if err := unix.Connect(client, name); err != nil {
		_ = unix.Close(client) // the first error says more
		return -1, err
	}
	return client, unix.SetNonblock(client, false)
}

// tcpMemory writes into connections that are never read, in KiB.
func tcpMemory(bound int) (sum int, err error) {
	text := make([]byte, 64<<10)
	for sum < bound {
		n, err := stuff(text, bound-sum)
		if err != nil {
			return sum, err
		}
		if sum += n; n == 0 {
			return sum, refusal("dropped")
		}
	}
	return sum, nil
}

// stuff fills one connection until it takes no more, and returns KiB.
func stuff(text []byte, most int) (sum int, err error) {
	_, client, err := connection() // the listener stays open
	if err != nil {
		return 0, err
	}
	if err := unix.SetNonblock(client, true); err != nil {
		return 0, err
	}
	for sum < most {
		n, err := unix.Write(client, text)
		if errors.Is(err, unix.EAGAIN) {
			break
		} else if err != nil {
			return sum, err
		}
		sum += n >> 10
	}
	return sum, nil
}

// datagrams returns a socket on loopback that is its own peer.
func datagrams() (fd int, name unix.Sockaddr, err error) {
	bringUp()
	if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, nil, err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback}); err != nil {
		return -1, nil, errors.Join(err, unix.Close(fd))
	}
	name, err = unix.Getsockname(fd)
	return fd, name, err
}

// udpMemory leaves datagrams unread, in KiB of the kernel's.
func udpMemory(bound int) (sum int, err error) {
	text := make([]byte, 8<<10)
	for sum < bound {
		fd, name, err := datagrams()
		if err != nil {
			return sum, err
		}
		for range 32 {
			if err := unix.Sendto(fd, text, unix.MSG_DONTWAIT, name); err != nil && !errors.Is(err, unix.EAGAIN) {
				return sum, err
			}
		}
		var info [9]uint32 // SK_MEMINFO_VARS
		size := uint32(unsafe.Sizeof(info))
		if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO, uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0); errno != 0 {
			return sum, errno
		}
		if info[0] == 0 {
			return sum, refusal("dropped")
		}
		sum += int(info[0] >> 10)
	}
	return sum, nil
}

// orphans closes connections whose bytes the other end does not read.
func orphans(bound int) (int, error) {
	text := make([]byte, 64<<10)
	return until(func(int) error {
		_, client, err := connection() // the listener stays open, and nothing accepts
		if err != nil {
			return err
		}
		if err := unix.SetNonblock(client, true); err != nil {
			return err
		}
		for err == nil {
			_, err = unix.Write(client, text)
		}
		return unix.Close(client)
	})(bound)
}

// queued returns the bytes of messages that wait in a socket.
func queued(fd int) (int, error) {
	var info [9]uint32 // SK_MEMINFO_VARS
	length := uint32(unsafe.Sizeof(info))
	if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO, uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&length)), 0); errno != 0 {
		return 0, errno
	}
	return int(info[0]), nil
}

// unreadIn calls send until so many bytes wait in a socket.
func unreadIn(fd, size int, send func() error) error {
	for {
		n, err := queued(fd)
		if err != nil || n >= size {
			return err
		}
		if err := send(); err != nil {
			return err
		}
	}
}

// unreadAnswers leaves so many bytes of answers unread in a netlink socket.
func unreadAnswers(size int) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	var question [unix.SizeofNlMsghdr + unix.SizeofIfInfomsg]byte
	*(*unix.NlMsghdr)(unsafe.Pointer(&question[0])) = unix.NlMsghdr{Len: uint32(len(question)), Type: unix.RTM_GETLINK, Flags: unix.NLM_F_REQUEST}
	(*unix.IfInfomsg)(unsafe.Pointer(&question[unix.SizeofNlMsghdr])).Index = 1 // lo
	return unreadIn(fd, size, func() error {
		return unix.Sendto(fd, question[:], unix.MSG_DONTWAIT, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	})
}

// unreadErrors leaves so many bytes of errors unread in a socket that sends to a port without one.
func unreadErrors(size int) error {
	closed, name, err := datagrams()
	if err != nil {
		return err
	}
	if err := unix.Close(closed); err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_RECVERR, 1); err != nil {
		return err
	}
	return unreadIn(fd, size, func() error {
		err := unix.Sendto(fd, make([]byte, 500), unix.MSG_DONTWAIT, name)
		if errors.Is(err, unix.ECONNREFUSED) { // the error of an earlier one
			return nil
		}
		return err
	})
}

// unreadTimestamps sends in a connection, and leaves so many bytes of its timestamps unread.
func unreadTimestamps(size int) error {
	listener, client, err := connection()
	if err != nil {
		return err
	}
	server, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	if err != nil {
		return err
	}
	control := make([]byte, unix.CmsgSpace(4))
	header := (*unix.Cmsghdr)(unsafe.Pointer(&control[0]))
	header.Level, header.Type = unix.SOL_SOCKET, unix.SO_TIMESTAMPING
	header.SetLen(unix.CmsgLen(4))
	*(*uint32)(unsafe.Pointer(&control[unix.CmsgLen(0)])) = unix.SOF_TIMESTAMPING_TX_SOFTWARE
	buffer := make([]byte, 4096)
	return unreadIn(client, size, func() error {
		if err := unix.Sendmsg(client, buffer[:1000], control, nil, 0); err != nil {
			return err
		}
		_, err := unix.Read(server, buffer)
		return err
	})
}

// attributes reports whether files of this kernel's tmpfs can have attributes of users.
func attributes() bool {
	fd, err := unix.MemfdCreate("attributes", unix.MFD_CLOEXEC)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return unix.Fsetxattr(fd, "user.probe", []byte("x"), 0) == nil
}

// pagesUnderWay sends pages without a copy (MSG_ZEROCOPY) into a connection that is never read, in
// KiB.
func pagesUnderWay(bound int) (sum int, err error) {
	pages, err := unix.Mmap(-1, 0, 8<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return 0, err
	}
	for sum < bound {
		_, client, err := connection() // the listener stays open, and nothing accepts
		if err != nil {
			return sum, err
		}
		if err := unix.SetsockoptInt(client, unix.SOL_SOCKET, unix.SO_ZEROCOPY, 1); err != nil {
			return sum, err
		}
		before := sum
		for sum < bound {
			n, err := unix.SendmsgN(client, pages, nil, nil, unix.MSG_ZEROCOPY|unix.MSG_DONTWAIT)
			if errors.Is(err, unix.EAGAIN) {
				break
			} else if err != nil {
				return sum, err
			}
			sum += n >> 10
		}
		if sum == before {
			return sum, refusal("dropped")
		}
	}
	return sum, nil
}

func lockedPages(pages int) error {
	b, err := unix.Mmap(-1, 0, pages*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	return unix.Mlock(b)
}

func lockedSegment() (id int, err error) {
	const shmLock = 11
	if id, err = unix.SysvShmGet(unix.IPC_PRIVATE, 64<<10, unix.IPC_CREAT|0o600); err != nil {
		return -1, err
	}
	if _, err := unix.SysvShmCtl(id, shmLock, nil); err != nil {
		_, _ = unix.SysvShmCtl(id, unix.IPC_RMID, nil) // the first error says more
		return -1, err
	}
	return id, nil
}

// lockedLimit is a Want. Each user of a sandbox is held by its limit. Their sum is not, and an
// ordinary user's daemon has no more for all of them than that user has.
func lockedLimit(s Setting) string {
	if s.OwnIDs {
		return Limits
	}
	return Nothing
}

// asUsers takes one after the other, as the next user where this one gets no more.
func asUsers(one func() error) func(bound int) (int, error) {
	return func(bound int) (int, error) {
		goruntime.LockOSThread() // never unlocked: the thread ends with its user
		user := uintptr(os.Getuid())
		for i := range bound {
			err := one()
			if err == nil {
				continue
			}
			user++
			// The saved and the effective user stay, so that there is a way to the next one.
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, user, ^uintptr(0), ^uintptr(0)); errno != 0 {
				return i, err
			}
			if err := one(); err != nil {
				return i, err
			}
		}
		return bound, nil
	}
}

func aio(events int) (id uintptr, err error) {
	if _, _, errno := unix.Syscall(unix.SYS_IO_SETUP, uintptr(events), uintptr(unsafe.Pointer(&id)), 0); errno != 0 {
		return 0, errno
	}
	return id, nil
}

// filtered returns a socket with a filter of 200 instructions.
func filtered(option int) (int, error) {
	const instructions = 200
	code := slices.Repeat([]unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}}, instructions)
	code[instructions-1] = unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0xffff}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if option == unix.SO_ATTACH_REUSEPORT_CBPF {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
			return -1, err
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback}); err != nil {
			return -1, err
		}
	}
	program := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, option, &program); err != nil {
		_ = unix.Close(fd) // the first error says more
		return -1, err
	}
	return fd, nil
}

// seccompFilters loads filters that let everything through, into one thread.
func seccompFilters(bound int) (int, error) {
	goruntime.LockOSThread() // never unlocked: the thread ends with its filters
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return 0, err
	}
	const allow = 0x7fff0000
	code := slices.Repeat([]unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}}, 200)
	code[len(code)-1] = unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: allow}
	program := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
	return until(func(int) error {
		const setModeFilter = 1
		if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, setModeFilter, 0, uintptr(unsafe.Pointer(&program))); errno != 0 {
			return errno
		}
		return nil
	})(bound)
}

// queue makes a message queue of the default size, and leaves its name only if it is to.
func queue(name string, nameless bool) (int, error) {
	path := append([]byte(strings.TrimPrefix(name, "/")), 0)
	const flags = unix.O_CREAT | unix.O_RDWR | unix.O_CLOEXEC
	fd, _, errno := unix.Syscall6(unix.SYS_MQ_OPEN, uintptr(unsafe.Pointer(&path[0])), flags, 0o600, 0, 0, 0)
	if errno != 0 {
		return -1, errno
	}
	if nameless { // it counts until it is closed
		if _, _, errno := unix.Syscall(unix.SYS_MQ_UNLINK, uintptr(unsafe.Pointer(&path[0])), 0, 0); errno != 0 {
			return -1, errno
		}
	}
	return int(fd), nil
}

func timer() (id int32, err error) {
	if _, _, errno := unix.Syscall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, 0, uintptr(unsafe.Pointer(&id))); errno != 0 {
		return 0, errno
	}
	return id, nil
}

func semaphores(n int) (int, error) {
	id, _, errno := unix.Syscall(unix.SYS_SEMGET, unix.IPC_PRIVATE, uintptr(n), unix.IPC_CREAT|0o600)
	if errno != 0 {
		return -1, errno
	}
	return int(id), nil
}

// blocked is a real-time signal that Go does not use.
const blocked = 62

// withBlocked calls f on a thread that blocks the signal, for as long as the process runs.
func withBlocked(f func() error) error {
	goruntime.LockOSThread() // never unlocked: signals stay queued to it
	var set unix.Sigset_t
	set.Val[0] = 1 << (blocked - 1)
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &set, nil); err != nil {
		return err
	}
	return f()
}

// queueSignal queues one more of them to this thread.
func queueSignal() error {
	var info [128]byte
	*(*int32)(unsafe.Pointer(&info[0])) = blocked
	*(*int32)(unsafe.Pointer(&info[8])) = -1 // SI_QUEUE
	if _, _, errno := unix.Syscall6(unix.SYS_RT_TGSIGQUEUEINFO, uintptr(os.Getpid()), uintptr(unix.Gettid()), blocked, uintptr(unsafe.Pointer(&info)), 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// diskFile makes a file in the root of the sandbox, and leaves it there. A control works in an
// empty directory.
func diskFile(name string) (int, error) {
	root := "/"
	if os.Getenv(envControl) != "" {
		root = "/tmp"
	}
	return unix.Open(filepath.Join(root, name), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
}

// inodes makes empty files in a directory; empty means where the sandbox's files lie.
func inodes(dir string) func(bound int) (int, error) {
	return until(func(i int) error {
		name := "inode-" + strconv.Itoa(i)
		if dir == "" {
			fd, err := diskFile(name)
			return closing(fd, err)
		}
		fd, err := unix.Open(filepath.Join(dir, name), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		return unix.Close(fd)
	})
}

// child starts a process that waits until this thread ends, in a session of its own if it is to.
func child(session bool) (pid int, err error) {
	goruntime.LockOSThread() // never unlocked: children end with their parent's thread
	forked, _, errno := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
	if errno != 0 {
		return -1, errno
	}
	if forked != 0 {
		return int(forked), nil
	}
	// Nothing but system calls is safe in this child.
	_, _, _ = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0)
	if session {
		_, _, _ = unix.RawSyscall(unix.SYS_SETSID, 0, 0, 0)
	}
	for {
		_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
	}
}

// crash starts a process that ends by a signal that dumps core, and reports whether the kernel did.
func crash() error {
	var byDefault [4]uint64
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 { // nothing but system calls is safe in this child
		_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGQUIT), uintptr(unsafe.Pointer(&byDefault)), 0, 8, 0, 0)
		me, _, _ := unix.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
		_, _, _ = unix.RawSyscall(unix.SYS_KILL, me, uintptr(unix.SIGQUIT), 0)
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(int(pid), &status, 0, nil); err != nil {
		return err
	}
	if !status.CoreDump() {
		return refusal("no dump")
	}
	return nil
}

// unwrapped returns the errno of an error of package os.
func unwrapped(err error) error {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return errno
	}
	return err
}
