package attack

import (
	"errors"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Corpus is every attack, in the order in which they are tried.
func Corpus() []Attack {
	var all []Attack
	for _, part := range [][]Attack{mounts(), namespaces(), initProcess(), kernelInterfaces(), hostControl(), files(), programs(), sockets(), terminals(), pools()} {
		all = append(all, part...)
	}
	return all
}

// reached turns the kernel's answer to senseless arguments into success: the call was not refused.
func reached(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOSYS) {
		return err
	}
	return nil
}

func path(name string) uintptr {
	p, _ := unix.BytePtrFromString(name)
	return uintptr(unsafe.Pointer(p))
}

func mounts() []Attack {
	mount := func(source, target, kind string, flags uintptr) func() error {
		return func() error { return unix.Mount(source, target, kind, flags, "") }
	}
	return []Attack{
		{"mount-tmpfs", Filter, mount("tmpfs", "/tmp", "tmpfs", 0)},
		{"mount-proc", Filter, mount("proc", "/tmp", "proc", 0)},
		{"mount-sysfs", Filter, mount("sysfs", "/tmp", "sysfs", 0)},
		{"mount-devpts", Filter, mount("devpts", "/tmp", "devpts", 0)},
		{"mount-mqueue", Filter, mount("mqueue", "/tmp", "mqueue", 0)},
		{"mount-cgroup2", Filter, mount("cgroup2", "/tmp", "cgroup2", 0)},
		// The way to release_agent (CVE-2022-0492).
		{"mount-cgroup1", Filter, func() error { return unix.Mount("cgroup", "/tmp", "cgroup", 0, "none,name=attacker") }},
		{"mount-bind-rw", Filter, mount("/", "/tmp", "", unix.MS_BIND|unix.MS_REC)},
		{"mount-shared", Filter, mount("", "/", "", unix.MS_REC|unix.MS_SHARED)},
		{"remount-proc-rw", Filter, mount("", "/proc", "", unix.MS_REMOUNT|unix.MS_BIND)},
		{"umount-proc", Filter, func() error { return unix.Unmount("/proc", unix.MNT_DETACH) }},
		{"fsopen", Filter, func() error { _, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC); return err }},
		{"fspick", Filter, func() error { _, err := unix.Fspick(unix.AT_FDCWD, "/tmp", unix.FSPICK_CLOEXEC); return err }},
		{"open-tree-clone", Filter, func() error {
			_, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE|unix.AT_RECURSIVE)
			return err
		}},
		{"move-mount", Filter, func() error {
			return reached(unix.MoveMount(-1, "", unix.AT_FDCWD, "/tmp", unix.MOVE_MOUNT_F_EMPTY_PATH))
		}},
		{"mount-setattr", Filter, func() error {
			return unix.MountSetattr(unix.AT_FDCWD, "/tmp", 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_NODEV})
		}},
		{"pivot-root", Filter, func() error { return unix.PivotRoot("/tmp", "/tmp") }},
		{"chroot", Filter, func() error { return unix.Chroot("/tmp") }},
	}
}

func namespaces() []Attack {
	var all []Attack
	for _, ns := range []struct {
		name string
		flag int
	}{
		{"user", unix.CLONE_NEWUSER},
		{"mount", unix.CLONE_NEWNS},
		{"net", unix.CLONE_NEWNET},
		{"pid", unix.CLONE_NEWPID},
		{"ipc", unix.CLONE_NEWIPC},
		{"uts", unix.CLONE_NEWUTS},
		{"cgroup", unix.CLONE_NEWCGROUP},
	} {
		all = append(all, Attack{"clone-" + ns.name, Filter, func() error { return clone(uintptr(ns.flag)) }})
		// A Go program has threads, and with them a user namespace cannot be left.
		if ns.name == "user" {
			all = append(all, Attack{"unshare-user", Filter, func() error { return inChild(unix.SYS_UNSHARE, uintptr(ns.flag)) }})
			continue
		}
		all = append(all, Attack{"unshare-" + ns.name, Filter, func() error { return unix.Unshare(ns.flag) }})
	}
	all = append(
		all,
		Attack{"unshare-time", Filter, func() error { return unix.Unshare(unix.CLONE_NEWTIME) }},
		Attack{"clone-user-high-bits", Filter, func() error { return clone(unix.CLONE_NEWUSER | 1<<32) }},
		Attack{"clone3-user", Filter, clone3},
	)
	for _, ns := range []string{"uts", "ipc", "net", "cgroup"} {
		all = append(all, Attack{"setns-init-" + ns, Filter, func() error { return setns("/proc/1/ns/" + ns) }})
	}
	return append(all, Attack{"setns-pidfd-init", Filter, func() error {
		fd, err := unix.PidfdOpen(1, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Setns(fd, unix.CLONE_NEWUTS|unix.CLONE_NEWIPC)
	}})
}

func initProcess() []Attack {
	return []Attack{
		{"ptrace-init", Undumpable, func() error { return ptrace(1) }},
		{"read-init-memory", Undumpable, func() error { return open("/proc/1/mem", unix.O_RDWR) }},
		{"read-init-exe", Undumpable, func() error { return open("/proc/1/exe", unix.O_RDONLY) }},
		{"read-init-environ", Undumpable, func() error { return open("/proc/1/environ", unix.O_RDONLY) }},
		{"read-init-maps", Undumpable, func() error { return open("/proc/1/maps", unix.O_RDONLY) }},
		{"read-init-auxv", Undumpable, func() error { return open("/proc/1/auxv", unix.O_RDONLY) }},
		{"read-init-syscall", Undumpable, func() error { return read("/proc/1/syscall") }},
		{"enter-init-root", Undumpable, func() error { return unix.Chdir("/proc/1/root/") }},
		{"enter-init-cwd", Undumpable, func() error { return unix.Chdir("/proc/1/cwd/") }},
		{"open-init-fds", Undumpable, openInitFDs},
		{"process-vm-readv-init", Filter, readInit},
		{"process-vm-writev-init", Filter, func() error {
			return reached(raw(unix.SYS_PROCESS_VM_WRITEV, 1, 0, 0))
		}},
		{"pidfd-getfd-init", Filter, pidfdGetfd},
		{"kcmp-init", Filter, func() error {
			_, _, errno := unix.RawSyscall6(unix.SYS_KCMP, 1, uintptr(os.Getpid()), 1, 0, 0, 0) // KCMP_VM
			if errno != 0 {
				return errno
			}
			return nil
		}},
		{"move-pages-init", Filter, func() error {
			_, _, errno := unix.RawSyscall6(unix.SYS_MOVE_PAGES, 1, 0, 0, 0, 0, 0)
			if errno != 0 {
				return reached(errno)
			}
			return nil
		}},
	}
}

func kernelInterfaces() []Attack {
	return []Attack{
		{"keyctl", Filter, keyctl},
		{"add-key", Filter, addKey},
		{"request-key", Filter, func() error {
			_, err := unix.RequestKey("user", "attacker", "", unix.KEY_SPEC_PROCESS_KEYRING)
			return reached(err)
		}},
		{"bpf", Filter, bpf},
		{"bpf-program-load", Filter, func() error { return reached(raw(unix.SYS_BPF, 5, 0, 0)) }},
		{"perf-event-open", Filter, perf},
		{"userfaultfd", Filter, func() error { return raw(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0) }},
		{"io-uring-setup", Filter, ioUring},
		{"io-uring-enter", Filter, func() error { return reached(raw(unix.SYS_IO_URING_ENTER, ^uintptr(0), 0, 0)) }},
		{"io-uring-register", Filter, func() error { return reached(raw(unix.SYS_IO_URING_REGISTER, ^uintptr(0), 0, 0)) }},
		{"open-by-handle", Filter, openByHandle},
		{"name-to-handle", Filter, func() error { _, _, err := unix.NameToHandleAt(unix.AT_FDCWD, "/etc", 0); return err }},
		{"fanotify-init", Filter, func() error { _, err := unix.FanotifyInit(unix.FAN_REPORT_FID, 0); return err }},
		{"no-randomisation", Filter, func() error { return raw(unix.SYS_PERSONALITY, 0x0040000, 0, 0) }},
		{"set-mempolicy", Filter, func() error { return raw(unix.SYS_SET_MEMPOLICY, 0, 0, 0) }},
		{"mbind", Filter, func() error { return reached(raw(unix.SYS_MBIND, 1, 0, 0)) }},
		{"quotactl", Filter, func() error { return reached(raw(unix.SYS_QUOTACTL, ^uintptr(0), 0, 0)) }},
	}
}

// hostControl is what root of a host does to it.
func hostControl() []Attack {
	return append([]Attack{
		{"sethostname", Filter, func() error { return unix.Sethostname([]byte("attacked")) }},
		{"setdomainname", Filter, func() error { return unix.Setdomainname([]byte("attacked")) }},
		{"kexec-file-load", Filter, func() error { return reached(raw(unix.SYS_KEXEC_FILE_LOAD, ^uintptr(0), ^uintptr(0), 0)) }},
		{"init-module", Filter, func() error { return reached(raw(unix.SYS_INIT_MODULE, 0, 0, 0)) }},
		{"finit-module", Filter, func() error { return reached(raw(unix.SYS_FINIT_MODULE, ^uintptr(0), 0, 0)) }},
		{"delete-module", Filter, func() error { return reached(raw(unix.SYS_DELETE_MODULE, path("attacker-has-no-module"), 0, 0)) }},
		{"reboot", Filter, func() error { return reached(raw(unix.SYS_REBOOT, 0, 0, 0)) }}, // without the magic numbers
		{"swapon", Filter, func() error { return reached(raw(unix.SYS_SWAPON, path("/nowhere"), 0, 0)) }},
		{"swapoff", Filter, func() error { return reached(raw(unix.SYS_SWAPOFF, path("/nowhere"), 0, 0)) }},
		{"acct", Filter, func() error { return reached(raw(unix.SYS_ACCT, path("/nowhere"), 0, 0)) }},
		{"settimeofday", Filter, func() error { return raw(unix.SYS_SETTIMEOFDAY, 0, 0, 0) }},
		{"clock-settime", Filter, func() error { return reached(raw(unix.SYS_CLOCK_SETTIME, unix.CLOCK_REALTIME, 0, 0)) }},
		{"adjtimex", Filter, func() error { _, err := unix.Adjtimex(&unix.Timex{}); return err }},
		{"syslog", Filter, func() error { _, err := unix.Klogctl(3, make([]byte, 64)); return err }},
		{"vhangup", Filter, func() error { return reached(raw(unix.SYS_VHANGUP, 0, 0, 0)) }},
	}, processorControl()...)
}

func files() []Attack {
	all := []Attack{
		{"mknod-device", Namespaces, func() error {
			return unix.Mknod("/tmp/attacker-sda", unix.S_IFBLK|0o600, int(unix.Mkdev(8, 0)))
		}},
		{"mknod-mem", Namespaces, func() error {
			return unix.Mknod("/tmp/attacker-mem", unix.S_IFCHR|0o600, int(unix.Mkdev(1, 1)))
		}},
		{"write-hostname-sysctl", ReadOnly, func() error { return write("/proc/sys/kernel/hostname", "attacked") }},
		{"write-cgroup", Filter, writeCgroup},
		{"read-kernel-addresses", Capabilities, kernelAddresses},
	}
	// To open is to be able to; nothing is written.
	for name, file := range map[string]string{
		"userns-sysctl": "/proc/sys/user/max_user_namespaces", "core-pattern": "/proc/sys/kernel/core_pattern", "modprobe": "/proc/sys/kernel/modprobe", "sysrq": "/proc/sysrq-trigger",
		"panic": "/proc/sys/kernel/panic", "randomize": "/proc/sys/kernel/randomize_va_space", "ip-forward": "/proc/sys/net/ipv4/ip_forward",
		"drop-caches": "/proc/sys/vm/drop_caches", "uevent-helper": "/sys/kernel/uevent_helper", "irq": "/proc/irq/default_smp_affinity",
		"binfmt": "/proc/sys/fs/binfmt_misc/register", "hugepages": "/sys/kernel/mm/transparent_hugepage/enabled", "power": "/sys/power/state",
	} {
		all = append(all, Attack{"write-" + name, ReadOnly, func() error { return open(file, unix.O_WRONLY) }})
	}
	for name, file := range map[string]string{
		"keys": "/proc/keys", "kcore": "/proc/kcore", "timer-list": "/proc/timer_list", "interrupts": "/proc/interrupts",
		"firmware": "/sys/firmware/dmi/tables/DMI", "memory-map": "/sys/firmware/memmap/0/start",
	} {
		all = append(all, Attack{"read-" + name, Masked, func() error { return read(file) }})
	}
	for name, file := range map[string]string{"kmsg": "/dev/kmsg", "mem": "/dev/mem", "kvm": "/dev/kvm", "fuse": "/dev/fuse", "tun": "/dev/net/tun"} {
		all = append(all, Attack{"open-" + name, NoDevices, func() error { return open(file, unix.O_RDWR) }})
	}
	return sorted(all)
}

// programs gain something by being started.
func programs() []Attack {
	return []Attack{
		{"exec-setuid", NoNewPrivs, func() error { return execSetID(unix.S_ISUID | 0o755) }},
		{"exec-setgid", NoNewPrivs, func() error { return execSetID(unix.S_ISGID | 0o755) }},
		{"exec-file-capability", Capabilities, execCapable},
	}
}

func sockets() []Attack {
	socket := func(name string, family, kind, protocol int) Attack {
		return Attack{"socket-" + name, Filter, func() error { return socketProtocol(family, kind, protocol) }}
	}
	return []Attack{
		socket("packet", unix.AF_PACKET, unix.SOCK_RAW, 0),
		socket("vsock", unix.AF_VSOCK, unix.SOCK_STREAM, 0),
		socket("alg", unix.AF_ALG, unix.SOCK_SEQPACKET, 0),
		socket("xdp", unix.AF_XDP, unix.SOCK_RAW, 0),
		socket("tipc", unix.AF_TIPC, unix.SOCK_STREAM, 0),
		socket("rds", unix.AF_RDS, unix.SOCK_SEQPACKET, 0),
		socket("can", unix.AF_CAN, unix.SOCK_RAW, 1),
		socket("key", unix.AF_KEY, unix.SOCK_RAW, 2),
		socket("raw-icmp", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP),
		socket("raw-ip6", unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_RAW),
		socket("mptcp", unix.AF_INET, unix.SOCK_STREAM, 262),
		socket("sctp", unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP),
		socket("udplite", unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE),
		socket("netlink-netfilter", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER),
		socket("netlink-xfrm", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_XFRM),
		socket("netlink-audit", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT),
		socket("netlink-uevent", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_KOBJECT_UEVENT),
		socket("netlink-generic", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_GENERIC),
		socket("netlink-diag", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_SOCK_DIAG),
		{"tcp-ulp", Filter, tcpULP},
		{"set-interface", Capabilities, setInterface},
	}
}

func terminals() []Attack {
	return []Attack{
		{"tiocsti", Filter, func() error { return ttyIoctl(unix.TIOCSTI) }},
		{"tiocsetd", Filter, func() error { return reached(ttyIoctl(unix.TIOCSETD)) }},
		{"tiocsti-high-bits", Filter, func() error { return ttyIoctl(unix.TIOCSTI | 1<<32) }},
	}
}

// sorted makes the order one that maps do not choose.
func sorted(all []Attack) []Attack {
	slices.SortFunc(all, func(a, b Attack) int { return strings.Compare(a.Name, b.Name) })
	return all
}
