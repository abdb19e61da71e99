package guest

import "golang.org/x/sys/unix"

// IsKernelFS reports whether a file system's content comes from the kernel, by its magic number.
func IsKernelFS(magic int64) bool {
	switch magic {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEBUGFS_MAGIC,
		unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, unix.BPF_FS_MAGIC, unix.NSFS_MAGIC, unix.BINFMTFS_MAGIC:
		return true
	}
	return false
}
