package attack

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

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
		// Overlays copied files with the ids, capabilities and set-id bits of their lower layers
		// (CVE-2021-3493, CVE-2023-0386, CVE-2023-2640, CVE-2023-32629).
		{"mount-overlay", Filter, func() error { return unix.Mount("overlay", "/tmp", "overlay", 0, "lowerdir=/tmp:/dev") }},
		// A file system in user space holds up the kernel in the middle of a copy, like userfaultfd (the
		// exploits of CVE-2022-0185 and CVE-2022-2588). Without a descriptor of /dev/fuse it is invalid.
		{"mount-fuse", Filter, func() error { return reached(unix.Mount("fuse", "/tmp", "fuse", 0, "fd=-1")) }},
		// Programs and maps of BPF that others have pinned are files in it (bpf(2)).
		{"mount-bpf", Filter, mount("bpf", "/tmp", "bpf", 0)},
		// An interpreter of one's own for every program of a kind, since Linux 6.7 in user namespaces.
		{"mount-binfmt-misc", Filter, mount("binfmt_misc", "/tmp", "binfmt_misc", 0)},
		// All devices of the host, disks included (the usual way out of a privileged container).
		{"mount-devtmpfs", Filter, mount("devtmpfs", "/tmp", "devtmpfs", 0)},
		// Kernel memory, tracing and fault injection (kernel lockdown(7)).
		{"mount-debugfs", Filter, mount("debugfs", "/tmp", "debugfs", 0)},
		// An image of a file system is parsed by code that trusts it (CVE-2025-38222, hundreds of ext4 and
		// XFS). There is no such device.
		{"mount-image", Filter, func() error { return reached(unix.Mount("/nowhere", "/tmp", "ext4", 0, "")) }},
		// The length of legacy options wrapped around (CVE-2022-0185).
		{"fsconfig", Filter, func() error { return reached(raw(unix.SYS_FSCONFIG, ^uintptr(0), 1, path("source"))) }},
		{"fsmount", Filter, func() error { return reached(raw(unix.SYS_FSMOUNT, ^uintptr(0), 0, 0)) }},
		// A copy of mounts with other attributes, id maps included, in one call (Linux 6.15).
		{"open-tree-attr", Filter, openTreeAttr},
		// What lies below hidden mounts, sources and options of all (statmount(2), Linux 6.8).
		{"listmount", Filter, listMount},
		{"statmount", Filter, statMount},
	}
}

// openTreeAttr makes a copy of /tmp that is read-only.
func openTreeAttr() error {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	fd, _, errno := unix.RawSyscall6(unix.SYS_OPEN_TREE_ATTR, ^uintptr(99), path("/tmp"), // AT_FDCWD is -100
		unix.OPEN_TREE_CLONE, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0)
	if errno != 0 {
		return errno
	}
	return unix.Close(int(fd))
}

// mountRequest is struct mnt_id_req of linux/mount.h.
type mountRequest struct {
	size, spare uint32
	mount       uint64
	param       uint64
}

func listMount() error {
	const root = ^uint64(0) // LSMT_ROOT
	request := mountRequest{size: 24, mount: root}
	var ids [4]uint64
	n, _, errno := unix.RawSyscall6(unix.SYS_LISTMOUNT, uintptr(unsafe.Pointer(&request)), uintptr(unsafe.Pointer(&ids)), uintptr(len(ids)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	if n == 0 {
		return errors.New("it lists none")
	}
	return nil
}

// statMount asks about the mount that the id of the root directory names.
func statMount() error {
	var root unix.Statx_t
	const uniqueID = 0x4000 // STATX_MNT_ID_UNIQUE
	if err := unix.Statx(unix.AT_FDCWD, "/", 0, uniqueID, &root); err != nil {
		return err
	}
	request := mountRequest{size: 24, mount: root.Mnt_id, param: 1} // STATMOUNT_SB_BASIC
	var answer [1024]byte
	return raw4(unix.SYS_STATMOUNT, uintptr(unsafe.Pointer(&request)), uintptr(unsafe.Pointer(&answer)), unsafe.Sizeof(answer), 0)
}
