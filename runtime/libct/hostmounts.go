package libct

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
)

// Mounts of the host's files.
//
// They come as descriptors of mounts that are attached nowhere, made outside of the launcher, with
// flags and ids. Init attaches them in the sandbox's mount namespace, and verifies both: the
// daemon, which has passed them on, may have been taken over. No path of the host is known here.
//
// The kernel maps the ids of a mount for root of the host only. The sandbox of an ordinary user's
// daemon that has mounts gets another id map instead (withUser).

// hostMount is a mount that Init attaches.
type hostMount struct {
	FD       int    `json:"fd"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"read_only,omitempty"`
	UID      uint32 `json:"uid"` // of the source, as the sandbox sees it
}

// hostMounts plans the mounts of the host's files, whose descriptors begin with first.
func hostMounts(spec *runtime.Spec, first int) []hostMount {
	var all []hostMount
	for i, m := range spec.Mounts {
		h := hostMount{FD: first + i, Target: m.Target, ReadOnly: m.ReadOnly}
		if m.UID != nil {
			h.UID = *m.UID
		}
		all = append(all, h)
	}
	return all
}

// idsOf returns the id map of a sandbox, of those that it has by its range.
func idsOf(spec *runtime.Spec, host *Host) ([]idmap.Range, error) {
	if len(spec.Mounts) == 0 {
		return host.IDs, nil
	}
	uid, gid := spec.Mounts[0].UID, spec.Mounts[0].GID
	for _, m := range spec.Mounts {
		if m.UID == nil || m.GID == nil || *m.UID != *uid || *m.GID != *gid {
			return nil, fmt.Errorf("mount at %s: its ids are not those of the others", m.Target)
		}
	}
	switch {
	case spec.MountIDs == api.MountsMapped:
		return host.IDs, nil
	case host.Own:
		return nil, errors.New("mounts: they come without a map of ids, and this sandbox has a range of its own")
	case host.Single:
		if *uid != 0 || *gid != 0 {
			return nil, fmt.Errorf("mounts: without subordinate ids there is only root, not %d:%d: %w", *uid, *gid, runtime.ErrUnenforceable)
		}
		return host.IDs, nil
	case *uid != *gid:
		return nil, fmt.Errorf("mounts: the daemon of an ordinary user has one map for users and groups, so that both ids must be the same number, not %d:%d: %w",
			*uid, *gid, runtime.ErrUnenforceable)
	}
	return withUser(host.IDs, int(*uid))
}

// withUser makes the launcher's id 0, the daemon's user, the id inside of a sandbox. The id that
// was there before becomes the one after all others, so that the image's files of that owner have
// one that the sandbox's root may handle.
func withUser(ids []idmap.Range, inside int) ([]idmap.Range, error) {
	if len(ids) != 1 || ids[0].Inside != 0 || ids[0].Outside < 1 {
		return nil, fmt.Errorf("mounts: unexpected id map %v", ids)
	}
	r := ids[0]
	if inside < 0 || inside >= r.Size {
		return nil, fmt.Errorf("mounts: the sandbox has %d ids, so there is no %d: %w", r.Size, inside, runtime.ErrUnenforceable)
	}
	var all []idmap.Range
	if inside > 0 {
		all = append(all, idmap.Range{Inside: 0, Outside: r.Outside, Size: inside})
	}
	all = append(all, idmap.Range{Inside: inside, Outside: 0, Size: 1})
	if rest := r.Size - inside - 1; rest > 0 {
		all = append(all, idmap.Range{Inside: inside + 1, Outside: r.Outside + inside + 1, Size: rest})
	}
	return append(all, idmap.Range{Inside: r.Size, Outside: r.Outside + inside, Size: 1}), nil
}

// attachHostMounts attaches the mounts of the host's files below the root.
func attachHostMounts(mounts []hostMount) error {
	if len(mounts) == 0 {
		return nil
	}
	root, err := unix.Open(launcher.RootfsDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the root: %w", err)
	}
	defer unix.Close(root)
	for i := range mounts {
		if err := mounts[i].attach(root); err != nil {
			return fmt.Errorf("mount at %s: %w", mounts[i].Target, err)
		}
	}
	return nil
}

func (m *hostMount) attach(root int) error {
	if err := m.verify(); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(m.FD, &st); err != nil {
		return fmt.Errorf("look at it: %w", err)
	}
	target, err := makeTarget(root, m.Target, st.Mode&unix.S_IFMT == unix.S_IFDIR)
	if err != nil {
		return err
	}
	defer unix.Close(target)
	if err := unix.MoveMount(m.FD, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	return plug(m.FD)
}

// verify checks the flags and the ids of a mount.
func (m *hostMount) verify() error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(m.FD, &fs); err != nil {
		return fmt.Errorf("verify: %w", err)
	}
	want := int64(unix.ST_NOSUID | unix.ST_NODEV)
	if m.ReadOnly {
		want |= unix.ST_RDONLY
	}
	if fs.Flags&want != want {
		return fmt.Errorf("verify: its flags are %#x, not %#x", fs.Flags, want)
	}
	var st unix.Stat_t
	if err := unix.Fstat(m.FD, &st); err != nil {
		return fmt.Errorf("verify: %w", err)
	}
	if st.Uid != m.UID {
		return fmt.Errorf("verify: its owner is seen as %d, not as %d", st.Uid, m.UID)
	}
	if kind := st.Mode & unix.S_IFMT; kind != unix.S_IFDIR && kind != unix.S_IFREG {
		return errors.New("verify: it is neither a directory nor a regular file")
	}
	return nil
}

// makeTarget opens the place of a mount, and makes what is missing of it. No link of the image is
// followed: the mount would hide what the link leads to, such as /dev with our init.
func makeTarget(root int, target string, dir bool) (int, error) {
	at, err := unix.Dup(root)
	if err != nil {
		return -1, err
	}
	unix.CloseOnExec(at)
	names := strings.Split(strings.TrimPrefix(filepath.Clean(target), "/"), "/")
	for i, name := range names {
		flags := uint64(unix.O_PATH | unix.O_CLOEXEC)
		if i < len(names)-1 || dir {
			flags |= unix.O_DIRECTORY
			err = unix.Mkdirat(at, name, 0o755)
		} else {
			var fd int
			if fd, err = unix.Openat(at, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644); err == nil {
				err = unix.Close(fd)
			}
		}
		next := -1
		if err == nil || errors.Is(err, unix.EEXIST) {
			next, err = unix.Openat2(at, name, &unix.OpenHow{Flags: flags, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS})
		}
		_ = unix.Close(at) // only a handle
		switch {
		case errors.Is(err, unix.ELOOP):
			return -1, fmt.Errorf("the image has a link there; name the place that it leads to: %w", runtime.ErrRootfs)
		case errors.Is(err, unix.ENOTDIR):
			return -1, fmt.Errorf("the image has a file there: %w", runtime.ErrRootfs)
		case err != nil:
			return -1, fmt.Errorf("make it: %w", err)
		}
		at = next
	}
	if !dir {
		var st unix.Stat_t
		if err := unix.Fstat(at, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			return -1, errors.Join(fmt.Errorf("a file of the host cannot be mounted over what the image has there: %w", runtime.ErrRootfs), err, unix.Close(at))
		}
	}
	return at, nil
}
