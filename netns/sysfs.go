package netns

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
)

// Sysfs returns the namespace's sysfs as a mount that is attached nowhere, read-only, for a sandbox
// to attach (move_mount(2)). A sandbox cannot mount it itself: that takes CAP_SYS_ADMIN over the
// network namespace. The caller needs the same, and a mount namespace of its own in which no part
// of sysfs is covered.
func Sysfs(ns *os.File) (*os.File, error) {
	m := -1
	err := osthread.Run(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("setns", err)
		}
		fs, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
		if err != nil {
			return os.NewSyscallError("fsopen", err)
		}
		defer unix.Close(fs)
		if err := unix.FsconfigCreate(fs); err != nil {
			return os.NewSyscallError("fsconfig", err)
		}
		const attributes = unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_RDONLY
		m, err = unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attributes)
		return os.NewSyscallError("fsmount", err)
	})
	if err != nil {
		return nil, fmt.Errorf("mount sysfs of network namespace: %w", err)
	}
	return os.NewFile(uintptr(m), "sysfs"), nil
}
