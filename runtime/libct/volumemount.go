package libct

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/quota"
)

// volumePlan is a volume that Init mounts.
type volumePlan struct {
	Dir      string `json:"dir"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"read_only,omitempty"`
	// Fill has the files of the root at Target copied first, as long as they take no more than Room. A
	// volume that is New, with nothing there to copy, gets the owner.
	Fill bool        `json:"fill,omitempty"`
	New  bool        `json:"new,omitempty"`
	Room quota.Usage `json:"room,omitzero"`
	UID  uint32      `json:"uid,omitempty"`
	GID  uint32      `json:"gid,omitempty"`
}

// enforceVolumes plans how the limits of volumes hold. Sandboxes that share one must see the same
// owners of its files.
func enforceVolumes(spec *runtime.Spec, host *Host, e *api.Enforced) error {
	if len(spec.Volumes) == 0 {
		return nil
	}
	e.Volumes = "none"
	for i := range spec.Volumes {
		m := &spec.Volumes[i]
		if m.Limit != (runtime.VolumeUsage{}) || m.Own && e.Disk != "none" {
			e.Volumes = "accounting"
		}
	}
	if spec.MountIDs == api.MountsUser && !host.Single {
		return fmt.Errorf("volumes: with mounts of the host's files this sandbox runs under the daemon's user, whose files in a volume no other sandbox could use; mount one or the other, or use a daemon of root: %w",
			runtime.ErrUnenforceable)
	}
	return nil
}

// plan plans the mounts of volumes. None lies in another, so that their order does not matter.
func (h *heldVolumes) plan() ([]volumePlan, error) {
	var all []volumePlan
	for i := range h.spec {
		m := &h.spec[i]
		p := volumePlan{Dir: volumeData(m.ID), Target: m.Target, ReadOnly: m.ReadOnly, Fill: h.fill[i], UID: m.UID, GID: m.GID, Room: quota.Usage(m.Limit)}
		if h.e.host.Single {
			p.UID, p.GID = 0, 0
		}
		if p.Fill {
			_, err := os.Lstat(filepath.Join(volumeDir(m.ID), usedVolume))
			p.New = errors.Is(err, os.ErrNotExist)
			spare, err := h.e.SpareDisk()
			if err != nil {
				return nil, err
			}
			if spare = max(1, spare); p.Room.Bytes == 0 || spare < p.Room.Bytes {
				p.Room.Bytes = spare
			}
		}
		if h.e.host.Own {
			p.Dir = filepath.Join(launcher.RangeDir, p.Dir)
		}
		all = append(all, p)
	}
	return all, nil
}

// mountVolumes mounts the volumes below the root, in Init.
func mountVolumes(volumes []volumePlan) error {
	if len(volumes) == 0 {
		return nil
	}
	root, err := unix.Open(launcher.RootfsDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the root: %w", err)
	}
	defer unix.Close(root)
	for i := range volumes {
		if volumes[i].Fill {
			debug.SetGCPercent(100) // the names of many files
		}
		if err := volumes[i].mount(root); err != nil {
			return fmt.Errorf("volume at %s: %w", volumes[i].Target, err)
		}
	}
	return nil
}

// volumeFlags hold on the mount of every volume, as on the root.
const volumeFlags = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

func (v *volumePlan) mount(root int) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, v.Dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("copy mount: %w", err)
	}
	defer unix.Close(fd)
	// Links in it are the sandbox's own, and lead where its programs may go.
	attr := unix.MountAttr{Attr_set: volumeFlags, Attr_clr: unix.MOUNT_ATTR_NOSYMFOLLOW, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("restrict mount: %w", err)
	}
	there := hasDirectory(root, v.Target)
	target, err := makeTarget(root, v.Target, true)
	if err != nil {
		return err
	}
	defer unix.Close(target)
	if v.Fill {
		if err := v.fill(fd, target, there); err != nil {
			return fmt.Errorf("copy the image's files to it: %w", err)
		}
	}
	if v.ReadOnly {
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
		if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
			return fmt.Errorf("restrict mount: %w", err)
		}
	}
	if err := unix.MoveMount(fd, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	return v.verify(fd)
}

// verify checks the flags of the mount.
func (v *volumePlan) verify(fd int) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return fmt.Errorf("verify: %w", err)
	}
	const noSymFollow = 0x2000 // ST_NOSYMFOLLOW of linux/statfs.h, Linux 5.10
	want := int64(unix.ST_NOSUID | unix.ST_NODEV)
	if v.ReadOnly {
		want |= unix.ST_RDONLY
	}
	if fs.Flags&(want|noSymFollow) != want {
		return fmt.Errorf("verify: its flags are %#x", fs.Flags)
	}
	return nil
}

// hasDirectory reports whether the root has a directory at a target, reached without links.
func hasDirectory(root int, target string) bool {
	fd, err := unix.Openat2(root, strings.TrimPrefix(target, "/"), &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return false
	}
	_ = unix.Close(fd) // only a handle
	return true
}

// fill copies the directory from, of the root, to the volume.
func (v *volumePlan) fill(volume, from int, there bool) error {
	if !there {
		if v.New {
			return unix.Fchownat(volume, "", int(v.UID), int(v.GID), unix.AT_EMPTY_PATH)
		}
		return nil
	}
	src, err := openDir(from, ".")
	if err != nil {
		return err
	}
	defer unix.Close(src)
	dst, err := openDir(volume, ".")
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	c := copier{top: dst, room: v.Room, used: quota.Usage{Bytes: 4096, Inodes: 1}, links: make(map[fileID]string), buf: make([]byte, 256<<10), zeros: make([]byte, 256<<10)}
	found, err := c.entries(src, dst, ".", 0)
	if err != nil || !found && !v.New {
		return err
	}
	return c.describe(src, dst)
}

// copier copies directories of the root file system, which no program has run in yet, to a volume
// that nothing else uses. Both are read and written through descriptors, a name at a time.
type copier struct {
	top   int // the volume's directory
	room  quota.Usage
	used  quota.Usage
	links map[fileID]string // files with several names: the first one
	buf   []byte
	zeros []byte // as long
}

type fileID struct{ dev, ino uint64 }

// copyDepth is the number of levels that are copied: no image has more (layer.Limits.Depth).
const copyDepth = 256

// take counts one more file of a size.
func (c *copier) take(size int64) error {
	c.used.Inodes++
	c.used.Bytes += (size + 4095) &^ 4095
	if c.used.Exceeds(c.room) {
		return fmt.Errorf("they take more than the volume may have, or the disk has: %d bytes: %w", c.room.Bytes, runtime.ErrRootfs)
	}
	return nil
}

// entries copies the entries of a directory; found reports whether it has any.
func (c *copier) entries(src, dst int, rel string, depth int) (found bool, err error) {
	if depth == copyDepth {
		return false, fmt.Errorf("%q: more than %d directories deep: %w", rel, copyDepth, runtime.ErrRootfs)
	}
	var names []string
	for {
		n, err := unix.ReadDirent(src, c.buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return false, err
		}
		if n <= 0 {
			break
		}
		_, _, names = unix.ParseDirent(c.buf[:n], -1, names)
	}
	for _, name := range names {
		if err := c.entry(src, dst, name, filepath.Join(rel, name), depth); err != nil {
			return true, fmt.Errorf("%q: %w", name, err)
		}
	}
	return len(names) > 0, nil
}

func (c *copier) entry(src, dst int, name, rel string, depth int) error {
	var st unix.Stat_t
	if err := unix.Fstatat(src, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	kind := st.Mode & unix.S_IFMT
	id := fileID{uint64(st.Dev), st.Ino} //nolint:unconvert // Dev has another type elsewhere
	if first, ok := c.links[id]; ok && kind != unix.S_IFDIR {
		return unix.Linkat(c.top, first, dst, name, 0)
	}
	if kind != unix.S_IFDIR && st.Nlink > 1 {
		c.links[id] = rel
	}
	switch kind {
	case unix.S_IFDIR:
		return c.directory(src, dst, name, rel, depth)
	case unix.S_IFREG:
		return c.file(src, dst, name, &st)
	case unix.S_IFLNK:
		if err := c.take(0); err != nil {
			return err
		}
		n, err := unix.Readlinkat(src, name, c.buf)
		if err != nil {
			return err
		}
		if err := unix.Symlinkat(string(c.buf[:n]), dst, name); err != nil {
			return err
		}
	case unix.S_IFIFO:
		if err := c.take(0); err != nil {
			return err
		}
		if err := unix.Mknodat(dst, name, unix.S_IFIFO|0o600, 0); err != nil {
			return err
		}
		if err := unix.Fchmodat(dst, name, st.Mode&0o777, 0); err != nil {
			return err
		}
	default:
		return nil // sockets and devices
	}
	if err := unix.Fchownat(dst, name, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	return unix.UtimesNanoAt(dst, name, []unix.Timespec{st.Mtim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW)
}

func (c *copier) directory(src, dst int, name, rel string, depth int) (err error) {
	if err := c.take(4096); err != nil {
		return err
	}
	from, err := openDir(src, name)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	if err := unix.Mkdirat(dst, name, 0o700); err != nil {
		return err
	}
	to, err := openDir(dst, name)
	if err != nil {
		return err
	}
	defer unix.Close(to)
	if _, err := c.entries(from, to, rel, depth+1); err != nil {
		return err
	}
	return c.describe(from, to)
}

func (c *copier) file(src, dst int, name string, st *unix.Stat_t) error {
	if err := c.take(st.Blocks * 512); err != nil {
		return err
	}
	from, err := unix.Openat(src, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	to, err := unix.Openat(dst, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(to)
	at := int64(0)
	for {
		n, err := unix.Read(from, c.buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
		for done := 0; done < n && !bytes.Equal(c.buf[:n], c.zeros[:n]); { // zeros become holes
			m, err := unix.Pwrite(to, c.buf[done:n], at+int64(done))
			if err != nil && !errors.Is(err, unix.EINTR) {
				return err
			}
			done += max(0, m)
		}
		at += int64(n)
	}
	if err := unix.Ftruncate(to, at); err != nil {
		return err
	}
	return c.describe(from, to)
}

// describe gives the copy of a file or directory its extended attributes, owner, mode and time.
func (c *copier) describe(from, to int) error {
	var st unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	const most = 64 << 10 // XATTR_LIST_MAX and XATTR_SIZE_MAX
	names, value := c.buf[:most], c.buf[most:2*most]
	n, err := unix.Flistxattr(from, names)
	if err != nil && !errors.Is(err, unix.ENOTSUP) {
		return err
	}
	for name := range strings.SplitSeq(string(names[:max(0, n)]), "\x00") {
		if !strings.HasPrefix(name, "user.") || strings.HasPrefix(name, "user.overlay") {
			continue // as in layers
		}
		n, err := unix.Fgetxattr(from, name, value)
		if err != nil {
			return err
		}
		if err := unix.Fsetxattr(to, name, value[:n], 0); err != nil && !errors.Is(err, unix.ENOTSUP) {
			return err
		}
	}
	if err := unix.Fchown(to, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Fchmod(to, st.Mode&0o7777); err != nil { // after the owner, which clears bits
		return err
	}
	return unix.UtimesNanoAt(to, "", []unix.Timespec{st.Mtim, st.Mtim}, unix.AT_EMPTY_PATH)
}
