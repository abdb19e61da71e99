package seccomp

import "slices"

// Hardened is the filter of profile "hardened": for programs that compute, read and write files,
// start other programs and speak over sockets, without root and without privileges. Each call is
// here because programs of tests/security TestRealProgramsRun or the sandbox's init, which the
// filter holds too, make it. Calls with a fallback that programs take by themselves (splice,
// extended attributes, pkeys, sync_file_range, …) are not.
func Hardened() Filter {
	return Filter{Name: "hardened", Groups: slices.Concat(hardenedAllowed(), without(conditional(), "personality", "ptrace", "setrlimit", "shmget"), fallocateGroups(), refused(), hardenedRefused())}
}

func hardenedAllowed() []Group {
	return []Group{
		{Reason: "files and directories", Calls: []string{
			"chdir", "close", "close_range", "copy_file_range", "dup", "dup3", "faccessat", "faccessat2", "fadvise64",
			"fchdir", "fchmod", "fchmodat", "fchown", "fchownat", "fdatasync", "flock", "fstat", "fstatfs",
			"fsync", "ftruncate", "getcwd", "getdents64", "linkat", "lseek", "mkdirat", "mknodat", "newfstatat", "openat", "openat2", "pipe2",
			"pread64", "preadv", "pwrite64", "pwritev", "read", "readlinkat", "readv", "renameat", "renameat2", "sendfile", "statfs",
			"statx", "symlinkat", "truncate", "umask", "unlinkat", "utimensat", "write", "writev",
		}},
		{Reason: "memory", Calls: []string{
			"brk", "madvise", "membarrier", "mprotect", "mremap", "msync", "munmap",
		}},
		{Reason: "processes and threads", Calls: []string{
			"execve", "execveat", "exit", "exit_group", "getegid", "geteuid", "getgid", "getgroups", "getpgid", "getpid", "getppid",
			"getresgid", "getresuid", "getrlimit", "getrusage", "gettid", "getuid", "kill", "pidfd_open",
			"pidfd_send_signal", "restart_syscall", "rseq", "sched_get_priority_max",
			"sched_get_priority_min", "sched_getaffinity", "sched_getparam", "sched_getscheduler", "sched_setaffinity", "sched_yield",
			"set_robust_list", "set_tid_address", "setpgid", "setsid", "tgkill", "times", "tkill", "wait4", "waitid",
		}},
		{Reason: "the init becomes the user of an exec; without a capability the others get nowhere with it", Calls: []string{
			"capget", "capset", "setgid", "setgroups", "setresgid", "setresuid", "setuid", // setres*: posix_spawn of make
		}},
		{Reason: "programs that restrict themselves further", Calls: []string{
			"landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self",
		}},
		{Reason: "signals", Calls: []string{
			"rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigreturn", "rt_sigsuspend", "rt_sigtimedwait", "sigaltstack", "signalfd4",
		}},
		{Reason: "time, read and waited for", Calls: []string{
			"clock_getres", "clock_gettime", "clock_nanosleep", "gettimeofday", "nanosleep", "setitimer", "timer_create", "timer_delete",
			"timer_settime", "timerfd_create", "timerfd_settime",
		}},
		{Reason: "waiting for events and each other", Calls: []string{
			"epoll_create1", "epoll_ctl", "epoll_pwait", "eventfd2", "futex", "inotify_add_watch",
			"inotify_init1", "inotify_rm_watch", "ppoll", "pselect6",
		}},
		{Reason: "sockets, once made", Calls: []string{
			"accept4", "bind", "connect", "getpeername", "getsockname", "getsockopt", "listen", "recvfrom", "recvmsg", "sendmsg", "sendto",
			"shutdown",
		}},
		{Reason: "facts about the system", Calls: []string{"getrandom", "sysinfo", "uname"}},
		{Reason: "what newer calls have replaced and C libraries still make, on x86-64", Only: AMD64, Calls: []string{
			"access", "arch_prctl", "chmod", "creat", "dup2", "epoll_wait", "getpgrp", "link", "lstat", "mkdir", "open", "pipe", "poll",
			"readlink", "rename", "rmdir", "stat", "symlink", "unlink", "vfork",
		}},
	}
}

// hardenedRefused are calls that the default allows, for which EPERM is the better answer.
func hardenedRefused() []Group {
	return []Group{{
		Reason: "other processes are not looked into, not even one's own children",
		Calls:  []string{"ptrace"},
		Errno:  errnoEPERM,
	}, {
		// Programs that copy files take this for a file system without attributes; of ENOSYS Python makes
		// an error.
		Reason: "no extended attributes: a second store of data, read and written by much code of its own in each file system",
		Calls: []string{
			"fgetxattr", "flistxattr", "fremovexattr", "fsetxattr", "getxattr", "getxattrat", "lgetxattr", "listxattr", "listxattrat", "llistxattr",
			"lremovexattr", "lsetxattr", "removexattr", "removexattrat", "setxattr", "setxattrat",
		},
		Errno: errnoENOTSUP,
	}}
}

// without leaves out the groups that are about one of the calls alone.
func without(groups []Group, calls ...string) []Group {
	return slices.DeleteFunc(groups, func(g Group) bool { return len(g.Calls) == 1 && slices.Contains(calls, g.Calls[0]) })
}
