package seccomp

import "slices"

// Numbers of errors and arguments that filters use, spelled out because a plan for arm64 may be
// made on amd64. They are the same on both.
const (
	errnoEPERM           = 1
	errnoENOMEM          = 12
	errnoEINVAL          = 22
	errnoENOSYS          = 38
	errnoENOPROTOOPT     = 92
	errnoEPROTONOSUPPORT = 93
	errnoENOTSUP         = 95
	errnoEAFNOSUPPORT    = 97

	cloneNewNS     = 0x00020000
	cloneNewCgroup = 0x02000000
	cloneNewIPC    = 0x08000000
	cloneNewUser   = 0x10000000
	cloneNewPID    = 0x20000000
	cloneNewNet    = 0x40000000

	afUnix, afInet, afInet6, afNetlink = 1, 2, 10, 16
	afMask                             = 0x3f // Linux has families up to 45

	solIP, solSocket, solTCP, solUDP, solIPv6, solNetlink = 0, 1, 6, 17, 41, 270

	sockStream, sockDgram, sockTypeMask = 1, 2, 0xf // the other bits are flags

	ipprotoTCP, ipprotoUDP = 6, 17
	ipprotoMask            = 0x1ff // up to 262, MPTCP
	tcpULP                 = 31
	tcpMask                = 0x3f // options up to 45
	netlinkRoute           = 0
	netlinkMask            = 0x1f // up to 22

	tiocSTI, tiocLINUX, tiocSETD = 0x5412, 0x541c, 0x5423
	// The lower half of FS_IOC_RESVSP, FS_IOC_RESVSP64 and FS_IOC_ZERO_RANGE: fallocate(2) by an older
	// way (fs/ioctl.c).
	fsReserve, fsReserve64, fsZeroRange = 0x5828, 0x582a, 0x5839

	// Options of solSocket; it has options up to 84.
	soAttachFilter, soLockFilter, soAttachBPF            = 26, 44, 50
	soAttachReuseportCBPF, soAttachReuseportEBPF, soMask = 51, 52, 0x7f

	seccompSetModeFilter, seccompMask = 1, 0x3 // operations up to 3
	prSetSeccomp, prMask              = 22, 0xff

	rlimitCore, rlimitMask = 4, 0xf // resources up to 15

	ptraceAttach, ptraceSeize, ptraceMask = 16, 0x4206, 0x421f // no other request has these bits
	setPipeSize, fcntlMask                = 1031, 0x40f        // as above

	// SIOCGIFBR and SIOCSIFBR, and the 64 requests of VLANs, bonds, bridges and time stamps of devices
	// (linux/sockios.h).
	getBridge, setBridge, ofDevices, ofDevicesMask = 0x8940, 0x8941, 0x8980, 0xffc0

	// ioctlMask tells these requests from all that programs make (TestIoctlsOfPrograms). Each bit more
	// takes libseccomp time, at every start of a sandbox.
	ioctlMask = 0x9ff

	mapHugetlb, mfdHugetlb, shmHugetlb = 0x40000, 0x4, 0o4000

	fallocKeepSize, fallocPunchHole, fallocCollapseRange   = 0x01, 0x02, 0x08
	fallocZeroRange, fallocInsertRange, fallocUnshareRange = 0x10, 0x20, 0x40
)

// Default is the filter of profile "default": an allow-list without the parts of the kernel in
// which most of its published holes were. Package managers, compilers, debuggers, shells and the
// run-times of Go, Python, Node, Java and Rust run on it as they do on a plain host.
func Default() Filter {
	f := Filter{Name: "default"}
	f.Groups = slices.Concat(allowed(), conditional(), fallocateGroups(), refused())
	return f
}

// Embedded are the filters that profiles are generated from. Profile "build" has the default's.
func Embedded() []Filter { return []Filter{Default(), Hardened()} }

func allowed() []Group {
	return []Group{
		{Reason: "files and directories", Calls: []string{
			"cachestat", "chdir", "close", "close_range", "copy_file_range", "dup", "dup3", "faccessat", "faccessat2",
			"fadvise64", "fchdir", "fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "fdatasync",
			"fgetxattr", "flistxattr", "flock", "fremovexattr", "fsetxattr", "fstat", "fstatfs", "fsync", "ftruncate",
			"getcwd", "getdents64", "getxattr", "getxattrat", "lgetxattr", "linkat", "listxattr", "listxattrat", "llistxattr",
			"lremovexattr", "lseek", "lsetxattr", "mkdirat", "newfstatat", "openat", "openat2", "pipe2", "pread64", "preadv",
			"preadv2", "pwrite64", "pwritev", "pwritev2", "read", "readahead", "readlinkat", "readv", "removexattr",
			"removexattrat", "renameat", "renameat2", "sendfile", "setxattr", "setxattrat", "splice", "statfs", "statx",
			"symlinkat", "sync", "sync_file_range", "syncfs", "tee", "truncate", "umask", "unlinkat", "utimensat", "vmsplice",
			"write", "writev",
			// FIFOs and sockets are ordinary files; device nodes the kernel refuses to a user namespace by
			// itself.
			"mknodat",
		}},
		{Reason: "memory", Calls: []string{
			"brk", "madvise", "map_shadow_stack", "membarrier", "mincore", "mlock", "mlock2", "mlockall", "mprotect", "mremap", "mseal", "msync", "munlock", "munlockall", "munmap", "pkey_alloc",
			"pkey_free", "pkey_mprotect", "process_mrelease",
		}},
		{Reason: "processes and threads; what they may do to each other is decided by credentials within the sandbox", Calls: []string{
			"execve", "execveat", "exit", "exit_group", "getcpu", "getegid", "geteuid", "getgid", "getgroups", "getpgid",
			"getpid", "getppid", "getpriority", "getresgid", "getresuid", "getrlimit", "getrusage", "getsid", "gettid", "getuid",
			"get_robust_list", "ioprio_get", "ioprio_set", "kill", "pidfd_open", "pidfd_send_signal", "restart_syscall", "rseq", "sched_getaffinity", "sched_getattr", "sched_getparam",
			"sched_get_priority_max", "sched_get_priority_min", "sched_getscheduler", "sched_rr_get_interval",
			"sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler", "sched_yield", "set_robust_list",
			"set_tid_address", "setpgid", "setpriority", "setsid", "tgkill", "times", "tkill", "wait4", "waitid",
		}},
		{Reason: "credentials: package managers and init change user; no_new_privs and the bounding set hold", Calls: []string{
			"capget", "capset", "setfsgid", "setfsuid", "setgid", "setgroups", "setregid", "setresgid", "setresuid", "setreuid",
			"setuid",
		}},
		{Reason: "programs that restrict themselves further", Calls: []string{
			"landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self",
		}},
		{Reason: "signals", Calls: []string{
			"rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigqueueinfo", "rt_sigreturn", "rt_sigsuspend",
			"rt_sigtimedwait", "rt_tgsigqueueinfo", "sigaltstack", "signalfd4",
		}},
		{Reason: "time, read and waited for", Calls: []string{
			"clock_getres", "clock_gettime", "clock_nanosleep", "getitimer", "gettimeofday", "nanosleep", "setitimer",
			"timer_create", "timer_delete", "timer_getoverrun", "timer_gettime", "timer_settime", "timerfd_create",
			"timerfd_gettime", "timerfd_settime",
		}},
		{Reason: "waiting for events and each other", Calls: []string{
			"epoll_create1", "epoll_ctl", "epoll_pwait", "epoll_pwait2", "eventfd2", "futex", "futex_requeue", "futex_wait",
			"futex_waitv", "futex_wake", "inotify_add_watch", "inotify_init1", "inotify_rm_watch", "ppoll", "pselect6",
		}},
		{Reason: "sockets, once made", Calls: []string{
			"accept", "accept4", "bind", "connect", "getpeername", "getsockname", "getsockopt", "listen", "recvfrom", "recvmmsg",
			"recvmsg", "sendmmsg", "sendmsg", "sendto", "shutdown",
		}},
		{Reason: "System V and POSIX IPC, in an IPC namespace of its own (databases use it)", Calls: []string{
			"mq_getsetattr", "mq_notify", "mq_open", "mq_timedreceive", "mq_timedsend", "mq_unlink", "msgctl", "msgget", "msgrcv",
			"msgsnd", "semctl", "semget", "semop", "semtimedop", "shmat", "shmctl", "shmdt",
		}},
		{Reason: "facts about the system", Calls: []string{"getrandom", "sysinfo", "uname"}},
		{Reason: "what newer calls have replaced, on x86-64", Only: AMD64, Calls: []string{
			"access", "alarm", "arch_prctl", "chmod", "chown", "creat", "dup2", "epoll_create", "epoll_wait", "eventfd", "fork",
			"futimesat", "getdents", "getpgrp", "inotify_init", "lchown", "link", "lstat", "mkdir", "mknod", "open", "pause",
			"pipe", "poll", "readlink", "rename", "rmdir", "select", "signalfd", "stat", "symlink", "time", "unlink", "utime",
			"utimes", "vfork",
		}},
	}
}

// conditional are the calls whose arguments decide. Values that no program uses are left over and
// answer ENOSYS: rules for them would only cost time, at every start of a sandbox.
func conditional() []Group {
	// CLONE_NEWUTS is not among them: the init marks every exec with a UTS namespace of its own and
	// finds by it what to kill. It needs CAP_SYS_ADMIN, which in a sandbox the init alone has.
	// CLONE_NEWTIME is no flag of clone(2).
	const namespaces = cloneNewNS | cloneNewCgroup | cloneNewIPC | cloneNewUser | cloneNewPID | cloneNewNet

	// AF_INET is 2 and AF_INET6 10: one bit apart, so one condition.
	inet := [][]Cond{{{Arg: 0, Mask: low32 &^ 8, Value: afInet}}}
	sockType := func(kind uint64) [][]Cond { return [][]Cond{{{Arg: 1, Mask: sockTypeMask, Value: kind}}} }
	return []Group{
		{
			Reason: "processes and threads in the sandbox's namespaces",
			Calls:  []string{"clone"},
			When:   [][]Cond{{{Arg: 0, Mask: namespaces, Value: 0}}},
		},
		{
			Reason: "no new namespaces: with a user namespace come capabilities over mounts, networks and net filters (CVE-2022-0185, -2023-32233, …)",
			Calls:  []string{"clone"},
			Errno:  errnoEPERM,
			When:   anyBit(0, namespaces),
		},
		{
			Reason: "local sockets",
			Calls:  []string{"socket", "socketpair"},
			When:   anyOf(0, afUnix),
		},
		{
			// The kernel makes a packet socket of an internet socket with the old type SOCK_PACKET
			// (__sock_create), and a raw one sends whatever headers it is given. Both need a capability that
			// one's own profile may have.
			Reason: "TCP and UDP, and no raw or packet sockets in their guise",
			Calls:  []string{"socket"},
			When: and(inet, slices.Concat(
				and(sockType(sockStream), anyOf(2, 0, ipprotoTCP)),
				and(sockType(sockDgram), anyOf(2, 0, ipprotoUDP)),
			)),
		},
		{
			Reason: "asking for interfaces and addresses, as getifaddrs does",
			Calls:  []string{"socket"},
			When:   [][]Cond{{is(0, afNetlink), is(2, netlinkRoute)}},
		},
		{
			// Go listens with MPTCP by default and useradd speaks to the audit system: both go on after this
			// answer, and stop after EPERM.
			Reason: "no other protocol (MPTCP, SCTP, DCCP, SMC, netfilter, audit, …)",
			Calls:  []string{"socket"},
			Errno:  errnoEPROTONOSUPPORT,
			When: slices.Concat(
				and(inet, noneOf(2, ipprotoMask, 0, ipprotoTCP, ipprotoUDP)),
				and(anyOf(0, afNetlink), noneOf(2, netlinkMask, netlinkRoute)),
			),
		},
		{
			Reason: "no other family (ALG, VSOCK, PACKET, XDP, TIPC, CAN, Bluetooth, …): rarely used, often broken",
			Calls:  []string{"socket"},
			Errno:  errnoEAFNOSUPPORT,
			When:   noneOf(0, afMask, afUnix, afInet, afInet6, afNetlink),
		},
		{
			Reason: "pairs are local sockets only",
			Calls:  []string{"socketpair"},
			Errno:  errnoEAFNOSUPPORT,
			When:   noneOf(0, afMask, afUnix),
		},
		{
			// Options 0 to 63 of TCP but one, and 0 to 127 of all sockets but five; the levels of kernel TLS,
			// RDS, ALG, MPTCP and the like are not named.
			Reason: "options of the sockets that can be made",
			Calls:  []string{"setsockopt"},
			When: slices.Concat(
				anyOf(1, solIP, solUDP, solIPv6, solNetlink),
				and(anyOf(1, solSocket), within(low32&^soMask, noneOf(2, soMask, filterOptions...))),
				and(anyOf(1, solTCP), within(low32&^tcpMask, noneOf(2, tcpMask, tcpULP))),
			),
		},
		{
			// All programs of the host's users together have net.core.bpf_jit_limit bytes for them. Once these
			// are used up, no seccomp filter is loaded either, so no sandbox starts. The kernel counts neither
			// by user nor by cgroup. Programs take this answer for a kernel without filters.
			Reason: "no program of BPF on a socket: they use up memory that all filters of the host share",
			Calls:  []string{"setsockopt"},
			Errno:  errnoENOPROTOOPT,
			When:   and(anyOf(1, solSocket), anyOf(2, filterOptions...)),
		},
		{
			Reason: "asking about filters, and the strict mode",
			Calls:  []string{"seccomp"},
			When:   within(low32&^seccompMask, noneOf(0, seccompMask, seccompSetModeFilter)),
		},
		{
			// From the same memory, 32,768 instructions a process. They are counted by process only, so a
			// small number of filters is not to be had. After this answer man-db, vsftpd, sshd and Chromium do
			// without, as on a kernel that has none.
			Reason: "no filters within the filter: they use up memory that all filters of the host share",
			Calls:  []string{"seccomp"},
			Errno:  errnoEINVAL,
			When:   anyOf(0, seccompSetModeFilter),
		},
		{
			// No other option has the lower byte of PR_SET_SECCOMP.
			Reason: "a process's own attributes",
			Calls:  []string{"prctl"},
			When:   noneOf(0, prMask, prSetSeccomp),
		},
		{
			Reason: "the older way to a filter",
			Calls:  []string{"prctl"},
			Errno:  errnoEINVAL,
			When:   [][]Cond{{{Arg: 0, Mask: prMask, Value: prSetSeccomp}}},
		},
		{
			Reason: "one's own limits, and reading those of others",
			Calls:  []string{"prlimit64"},
			When: slices.Concat(
				and([][]Cond{{whole(0, 0)}}, within(low32&^rlimitMask, noneOf(1, rlimitMask, rlimitCore))),
				[][]Cond{{whole(2, 0)}},
			),
		},
		{
			// Init's among them, and its threads have pids of their own: without descriptors it cannot find
			// what to kill. All 64 bits are compared: a zero in the lower half alone is refused, not let
			// through.
			Reason: "no limits of other processes",
			Calls:  []string{"prlimit64"},
			Errno:  errnoEPERM,
			When:   [][]Cond{{isNot(0, 0), isNot(2, 0)}},
		},
		{
			// A limit of 1 byte keeps the kernel from starting the host's program for cores (core(5)). With 0
			// it starts it. Programs that hold secrets set 0 and give up where that is refused.
			Reason:  "the limit of cores stays, and no core is written in any case",
			Calls:   []string{"prlimit64"},
			Pretend: true,
			When:    [][]Cond{{whole(0, 0), is(1, rlimitCore), isNot(2, 0)}},
		},
		{
			Reason: "one's own limits, by the older call",
			Calls:  []string{"setrlimit"},
			When:   within(low32&^rlimitMask, noneOf(0, rlimitMask, rlimitCore)),
		},
		{
			Reason:  "the limit of cores stays, by the older call",
			Calls:   []string{"setrlimit"},
			Pretend: true,
			When:    anyOf(0, rlimitCore),
		},
		{
			Reason: "memory in ordinary pages",
			Calls:  []string{"mmap"},
			When:   [][]Cond{{{Arg: 3, Mask: mapHugetlb, Value: 0}}},
		},
		{
			// A host reserves them for a program of its own; they are counted by no limit of ours. Programs
			// take this answer for a host that has none left.
			Reason: "no huge pages",
			Calls:  []string{"mmap"},
			Errno:  errnoENOMEM,
			When:   [][]Cond{{{Arg: 3, Mask: mapHugetlb, Value: mapHugetlb}}},
		},
		{
			Reason: "files in memory, in ordinary pages",
			Calls:  []string{"memfd_create"},
			When:   [][]Cond{{{Arg: 1, Mask: mfdHugetlb, Value: 0}}},
		},
		{
			Reason: "no files of huge pages",
			Calls:  []string{"memfd_create"},
			Errno:  errnoENOMEM,
			When:   [][]Cond{{{Arg: 1, Mask: mfdHugetlb, Value: mfdHugetlb}}},
		},
		{
			Reason: "System V shared memory, in ordinary pages",
			Calls:  []string{"shmget"},
			When:   [][]Cond{{{Arg: 2, Mask: shmHugetlb, Value: 0}}},
		},
		{
			Reason: "no shared memory of huge pages",
			Calls:  []string{"shmget"},
			Errno:  errnoENOMEM,
			When:   [][]Cond{{{Arg: 2, Mask: shmHugetlb, Value: shmHugetlb}}},
		},
		{
			Reason: "no TLS or other protocol in the kernel on top of TCP (CVE-2023-0461, -2024-26583, -2025-39682, …)",
			Calls:  []string{"setsockopt"},
			Errno:  errnoEPERM,
			When:   [][]Cond{{is(1, solTCP), is(2, tcpULP)}},
		},
		{
			// The upper half of a request is direction and size. Looking at some bits of the lower one closes
			// many requests more than it must, none of which a sandbox has a device for.
			Reason: "controlling terminals, files and sockets",
			Calls:  []string{"ioctl"},
			When:   noneOf(1, ioctlMask, closedIoctls()...),
		},
		{
			// The kernel asks modprobe for the module before it looks at the caller, and starts that as root
			// of the host.
			Reason: "no bridges and VLANs",
			Calls:  []string{"ioctl"},
			Errno:  errnoEPERM,
			When:   [][]Cond{{low16(getBridge)}, {low16(setBridge)}, {{Arg: 1, Mask: ofDevicesMask, Value: ofDevices}}},
		},
		{
			Reason: "descriptors",
			Calls:  []string{"fcntl"},
			When:   noneOf(1, fcntlMask, setPipeSize),
		},
		{
			// The pages of a pipe count for the user that made it: of stdio that is the daemon's.
			Reason: "no larger pipes",
			Calls:  []string{"fcntl"},
			Errno:  errnoEPERM,
			When:   [][]Cond{{{Arg: 1, Mask: fcntlMask, Value: setPipeSize}}},
		},
		{
			Reason: "tracing of one's own children, which ask for it, and of theirs",
			Calls:  []string{"ptrace"},
			When:   noneOf(0, ptraceMask, ptraceAttach, ptraceSeize),
		},
		{
			// Two processes that trace each other and stop at their ends (PTRACE_O_TRACEEXIT) cannot be
			// killed, not even by root of the host. strace goes on without.
			Reason: "no attaching to processes",
			Calls:  []string{"ptrace"},
			Errno:  errnoEPERM,
			When:   [][]Cond{{{Arg: 0, Mask: ptraceMask, Value: ptraceAttach}}, {{Arg: 0, Mask: ptraceMask, Value: ptraceSeize}}},
		},
		{
			Reason: "no blocks without writing, by an older way",
			Calls:  []string{"ioctl"},
			Errno:  errnoENOTSUP,
			When:   [][]Cond{{low16(fsReserve)}, {low16(fsReserve64)}, {low16(fsZeroRange)}},
		},
		{
			Reason: "no typing into a terminal (CVE-2016-2568, -2017-5226), no pasting on a console, no line disciplines (CVE-2017-2636)",
			Calls:  []string{"ioctl"},
			Errno:  errnoEPERM,
			When:   [][]Cond{{low16(tiocSTI)}, {low16(tiocLINUX)}, {low16(tiocSETD)}},
		},
		{
			// Any of PER_LINUX, PER_LINUX32 (8) and UNAME26 (0x20000), and asking. The rest takes away
			// address randomisation or makes data executable.
			Reason: "personalities that do not weaken a process",
			Calls:  []string{"personality"},
			When:   [][]Cond{{{Arg: 0, Mask: low32 &^ 0x20008, Value: 0}}, {is(0, low32)}},
		},
	}
}

// filterOptions are those by which a program of BPF gets into the kernel, and the one that keeps it
// there.
var filterOptions = []uint32{soAttachFilter, soLockFilter, soAttachBPF, soAttachReuseportCBPF, soAttachReuseportEBPF}

// low16 compares the lower half of the second argument.
func low16(value uint32) Cond { return Cond{Arg: 1, Mask: 0xffff, Value: uint64(value)} }

// closedIoctls are the lower halves of requests that are closed.
func closedIoctls() []uint32 {
	closed := []uint32{tiocSTI, tiocLINUX, tiocSETD, fsReserve, fsReserve64, fsZeroRange, getBridge, setBridge}
	for n := uint32(ofDevices); n&ofDevicesMask == ofDevices; n++ {
		closed = append(closed, n)
	}
	return closed
}

// within narrows alternatives of one condition each to values that have none of the bits.
func within(none uint64, alternatives [][]Cond) [][]Cond {
	for i := range alternatives {
		alternatives[i][0].Mask |= none
	}
	return alternatives
}

// fallocateGroups let fallocate(2) give blocks back, and reserve none: that fills a disk in
// milliseconds and costs the program nothing. After this errno glibc's posix_fallocate writes
// instead, and most programs go on without.
func fallocateGroups() []Group {
	return []Group{
		{
			Reason: "holes are punched into files, and ranges taken out",
			Calls:  []string{"fallocate"},
			When:   anyOf(1, fallocKeepSize|fallocPunchHole, fallocCollapseRange),
		},
		{
			Reason: "no blocks without writing: no quota bounds them",
			Calls:  []string{"fallocate"},
			Errno:  errnoENOTSUP,
			When: anyOf(1, 0, fallocKeepSize, fallocZeroRange, fallocZeroRange|fallocKeepSize, fallocInsertRange, fallocUnshareRange,
				fallocUnshareRange|fallocKeepSize),
		},
	}
}

// refused are the calls that are known and closed. To leave one out here would close it as well;
// being listed, it has a reason and answers EPERM.
func refused() []Group {
	groups := []Group{
		{Reason: "namespaces are made and entered by the launcher alone", Calls: []string{"setns", "unshare"}},
		{Reason: "the sandbox's mounts stay as they were built", Calls: []string{
			"chroot", "fsconfig", "fsmount", "fsopen", "fspick", "mount", "mount_setattr", "move_mount", "open_tree",
			"open_tree_attr", "pivot_root", "umount2",
		}},
		{Reason: "io_uring: a second system call interface, past this filter (CVE-2022-29582, -2023-2598, -2024-0582, …)", Calls: []string{
			"io_uring_enter", "io_uring_register", "io_uring_setup",
		}},
		{Reason: "programs in the kernel and its counters (CVE-2021-3490, -2013-2094, …)", Calls: []string{"bpf", "perf_event_open"}},
		{Reason: "userfaultfd stops the kernel in the middle of a copy, which most exploits of races want", Calls: []string{"userfaultfd"}},
		{Reason: "key rings are not divided by namespaces (CVE-2016-0728)", Calls: []string{"add_key", "keyctl", "request_key"}},
		{Reason: "files by handle, past the mount namespace (the \"shocker\" escape)", Calls: []string{"name_to_handle_at", "open_by_handle_at"}},
		{Reason: "descriptors and faults taken from another process; fanotify and quota see whole file systems", Calls: []string{
			"fanotify_init", "fanotify_mark", "pidfd_getfd", "quotactl", "quotactl_fd",
		}},
		{Reason: "the host's kernel, its modules, its power, its log, its swap, its clock, its name", Calls: []string{
			"acct", "adjtimex", "clock_adjtime", "clock_settime", "delete_module", "finit_module", "init_module", "kexec_file_load",
			"kexec_load", "reboot", "sethostname", "setdomainname", "settimeofday", "swapoff", "swapon", "syslog", "vhangup",
		}},
		{Reason: "ports and descriptor tables of the processor (CVE-2015-3290)", Only: AMD64, Calls: []string{"ioperm", "iopl", "modify_ldt"}},
	}
	for i := range groups {
		groups[i].Errno = errnoEPERM
	}
	return append(groups, Group{
		// Each page leaves the kernel's map of all memory in smaller pieces, for good.
		Reason: "no secret memory",
		Calls:  []string{"memfd_secret"},
		Errno:  errnoENOSYS,
	}, Group{
		// Its flags lie in memory, where a filter cannot look. glibc, musl and Go fall back to clone(2)
		// on ENOSYS only.
		Reason: "clone3 hides its flags from filters",
		Calls:  []string{"clone3"},
		Errno:  errnoENOSYS,
	}, Group{
		// strace and debuggers fall back to ptrace's own way after ENOSYS, and give up after EPERM.
		Reason: "another process's memory; ptrace does it too, more slowly and with fewer holes",
		Calls:  []string{"process_vm_readv", "process_vm_writev"},
		Errno:  errnoENOSYS,
	})
}
