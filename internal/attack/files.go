package attack

import (
	"golang.org/x/sys/unix"
)

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
