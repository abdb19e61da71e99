package attack

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"

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
		// Where memory and devices lie: others read zeros.
		{"read-iomem", Namespaces, readIomem},
		// Other ways to a masked file: through the link of a process to its root (CVE-2025-31133,
		// CVE-2025-52881), and below the mount that masks it.
		{"read-keys-by-root-link", Masked, func() error { return read("/proc/self/root/proc/keys") }},
		{"read-keys-below-mask", Masked, belowMask},
		{"open-disk", NoDevices, openDisk},
	}
	part := func(verb, layer string, try func(file string) error, named map[string]string) {
		for name, file := range named {
			all = append(all, Attack{verb + "-" + name, layer, func() error { return try(file) }})
		}
	}
	// To open is to be able to; nothing is written.
	part("write", ReadOnly, func(file string) error { return open(file, unix.O_WRONLY) }, map[string]string{
		"userns-sysctl": "/proc/sys/user/max_user_namespaces", "core-pattern": "/proc/sys/kernel/core_pattern", "modprobe": "/proc/sys/kernel/modprobe", "sysrq": "/proc/sysrq-trigger",
		"panic": "/proc/sys/kernel/panic", "randomize": "/proc/sys/kernel/randomize_va_space", "ip-forward": "/proc/sys/net/ipv4/ip_forward",
		"drop-caches": "/proc/sys/vm/drop_caches", "uevent-helper": "/sys/kernel/uevent_helper", "irq": "/proc/irq/default_smp_affinity",
		"binfmt": "/proc/sys/fs/binfmt_misc/register", "hugepages": "/sys/kernel/mm/transparent_hugepage/enabled", "power": "/sys/power/state",

		// Sysctls of a namespace are its root's: nothing but the mount's flag keeps them (sysctl of IPC,
		// PID, network and user namespaces). The first chooses the pid of the next process, the second
		// the groups that may send ICMP, the others bound the kernel's memory for queues.
		"next-pid": "/proc/sys/kernel/ns_last_pid", "ping-group": "/proc/sys/net/ipv4/ping_group_range",
		"message-sysctl": "/proc/sys/kernel/msgmax", "queue-sysctl": "/proc/sys/fs/mqueue/queues_max", "shared-memory-sysctl": "/proc/sys/kernel/shmmax",
		// The kernel starts programs by these names, as root of the host (like core_pattern).
		"poweroff-command": "/proc/sys/kernel/poweroff_cmd", "usermode-helper": "/proc/sys/kernel/usermodehelper/bset",
		"firmware-path": "/sys/module/firmware_class/parameters/path",
		// Cores of set-id programs, promises of memory, tracing of the kernel, the host's devices.
		"suid-dumpable": "/proc/sys/fs/suid_dumpable", "overcommit": "/proc/sys/vm/overcommit_memory", "ftrace": "/proc/sys/kernel/ftrace_enabled",
		"device-event": "/sys/devices/virtual/mem/null/uevent", "processor-online": "/sys/devices/system/cpu/cpu1/online",
		"pci-rescan": "/sys/bus/pci/rescan", "memory-types": "/proc/mtrr",
	})
	part("read", Masked, read, map[string]string{
		"keys": "/proc/keys", "kcore": "/proc/kcore", "timer-list": "/proc/timer_list", "interrupts": "/proc/interrupts",
		"firmware": "/sys/firmware/dmi/tables/DMI", "memory-map": "/sys/firmware/memmap/0/start",
		"acpi-table": "/sys/firmware/acpi/tables/DSDT",
	})
	// Files of root of the host, which root of a user namespace is not: uses of each frame of the
	// host's memory, sizes and addresses of its kernel's objects, its log.
	part("read", Namespaces, read, map[string]string{
		"page-counts": "/proc/kpagecount", "page-flags": "/proc/kpageflags", "page-cgroups": "/proc/kpagecgroup", "slab": "/proc/slabinfo",
		"kernel-mappings": "/proc/vmallocinfo", "page-types": "/proc/pagetypeinfo", "terminal-drivers": "/proc/tty/driver/serial",
	})
	part("read", Capabilities, func(file string) error { return open(file, unix.O_RDONLY) }, map[string]string{"log": "/proc/kmsg"})
	part("open", NoDevices, func(file string) error { return open(file, unix.O_RDWR) }, map[string]string{
		"kmsg": "/dev/kmsg", "mem": "/dev/mem", "kvm": "/dev/kvm", "fuse": "/dev/fuse", "tun": "/dev/net/tun",
		// The call userfaultfd without the call (userfaultfd(2), Linux 6.1).
		"userfaultfd": "/dev/userfaultfd",
		// Disks made of files, mounts that wait, the screen, the keyboard, the hypervisor, the latency of
		// the host's processors.
		"loop-control": "/dev/loop-control", "autofs": "/dev/autofs", "screen": "/dev/vcs", "console": "/dev/tty0", "vsock": "/dev/vsock",
		"latency": "/dev/cpu_dma_latency", "btrfs-control": "/dev/btrfs-control",
	})
	return sorted(all)
}

func readIomem() error {
	text, err := os.ReadFile("/proc/iomem")
	if err != nil {
		return err
	}
	for line := range bytes.Lines(text) {
		begin, _, _ := strings.Cut(strings.TrimSpace(string(line)), "-")
		if strings.Trim(begin, "0") != "" {
			return nil
		}
	}
	return errors.New("all of them are 0")
}

// belowMask opens a masked file as an entry of the file system itself, below the mount that masks
// it (openat2(2), RESOLVE_NO_XDEV).
func belowMask() error {
	dir, err := unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	fd, err := unix.Openat2(dir, "keys", &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_XDEV | unix.RESOLVE_BENEATH})
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "keys")
	defer f.Close() // only read
	text, err := io.ReadAll(f)
	if err == nil && len(text) == 0 {
		return errors.New("empty")
	}
	return err
}

// openDisk opens any disk that the host lists.
func openDisk() error {
	text, err := os.ReadFile("/proc/partitions")
	if err != nil {
		return err
	}
	err = errors.New("there is no disk")
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) == 4 && fields[0] != "major" {
			if err = open("/dev/"+fields[3], unix.O_RDONLY); err == nil {
				return nil
			}
		}
	}
	return err
}
