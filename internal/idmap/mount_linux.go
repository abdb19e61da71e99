package idmap

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
)

// CloneMount returns a copy of the mount that the directory dir is on, attached nowhere, with dir
// as its root, the map of the user namespace ns and the flags MOUNT_ATTR_*. The caller needs
// CAP_SYS_ADMIN over the file system, and the file system must support mapped mounts: ext4, XFS and
// Btrfs do (mount_setattr(2), "ID-mapped mounts").
func CloneMount(dir, ns *os.File, flags uint64) (*os.File, error) {
	fd, err := unix.OpenTree(int(dir.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("copy mount of %s: %w", dir.Name(), err)
	}
	m := os.NewFile(uintptr(fd), dir.Name())
	// The copy of a shared mount is its peer: on hosts with systemd, mounts made below the copy would
	// appear on the host.
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP | flags, Propagation: unix.MS_PRIVATE, Userns_fd: uint64(ns.Fd())}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return nil, errors.Join(fmt.Errorf("map the ids of the mount of %s: %w", dir.Name(), err), m.Close())
	}
	return m, nil
}

// ProbeMounts reports why no overlay on mapped mounts of directories in dir can be mounted. The
// caller is root.
func ProbeMounts(dir string) (err error) {
	tmp, err := os.MkdirTemp(dir, ".sandboxd-probe-")
	if err != nil {
		return fmt.Errorf("probe mapped mounts: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	for _, d := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(tmp, d), 0o700); err != nil {
			return fmt.Errorf("probe mapped mounts: %w", err)
		}
	}
	file := filepath.Join(tmp, "lower", "file")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Lchown(file, 1, 1)); err != nil {
		return fmt.Errorf("probe mapped mounts: %w", err)
	}
	root, err := os.OpenFile(tmp, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("probe mapped mounts: %w", err)
	}
	defer root.Close() // only a handle
	ids := []Range{{Inside: 0, Outside: 0, Size: 1}, {Inside: 1, Outside: 2, Size: 1}}
	ns, err := Namespace(ids, ids)
	if err != nil {
		return err
	}
	defer ns.Close() // only a handle
	mapped, err := CloneMount(root, ns, 0)
	if err != nil {
		return err
	}
	defer mapped.Close()                                                   // only a handle
	return osthread.Run(func() error { return probeOverlay(tmp, mapped) }) // in a mount namespace of its own
}

func probeOverlay(tmp string, mapped *os.File) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.MoveMount(int(mapped.Fd()), "", unix.AT_FDCWD, tmp, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach a mapped mount: %w", err)
	}
	if err := unix.Chdir(tmp); err != nil { // relative names need no quotes
		return err
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV
	if err := unix.Mount("overlay", "merged", "overlay", flags, "userxattr,lowerdir=lower,upperdir=upper,workdir=work"); err != nil {
		return fmt.Errorf("mount an overlay on mapped mounts: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Lstat("merged/file", &st); err != nil {
		return fmt.Errorf("look through a mapped mount: %w", err)
	}
	if st.Uid != 2 || st.Gid != 2 {
		return fmt.Errorf("a file of id 1 is seen as %d:%d through a mount that maps it to 2", st.Uid, st.Gid)
	}
	return nil
}
