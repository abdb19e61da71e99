package attack

import (
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
	}
}
