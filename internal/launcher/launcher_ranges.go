package launcher

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/runtime"
)

// Ranges hands out the ranges of host ids, one to each running sandbox.
//
// Files on disk belong to one range, whatever process made them. A sandbox sees them through mounts
// that map that range to its own. The mounts come from the daemon's broker, one pair for each
// range, when all ranges that have some are taken; they stay for the launcher's life. They are
// attached in a mount namespace of their own, in which one thread works: each start of a sandbox
// copies the launcher's mount namespace, which must not grow with the number of ranges.
type Ranges struct {
	disk   []idmap.Range // the range of files, in the launcher's ids
	count  int           // number of ranges; 0: all sandboxes share that of the files
	reason string        // for a count of 0
	work   chan func()   // calls for the thread that is in the mount namespace

	mu      sync.Mutex
	mounted []bool // by number - 1: the range is taken
	held    map[string]*held
}

// rangeAt is the directory of the mounts' namespace that has one directory for each range.
const rangeAt = "/ranges"

// RangeDir is the directory in which a sandbox that is being started attaches the mounts of its
// range, at the same names as in the launcher's root.
const RangeDir = "/range"

// OpenRanges returns the ranges of a launcher. It verifies on the first one that the kernel's
// overlays work on mapped mounts; where they do not, sandboxes share their ids, with the reason.
func OpenRanges(setup *Setup, first []*os.File) (*Ranges, error) {
	defer closeAll(first)
	r := &Ranges{disk: setup.IDs, count: setup.Ranges, reason: setup.SharedIDs}
	if r.count == 0 {
		return r, nil
	}
	r.work = make(chan func())
	ready := make(chan error)
	go func() { _ = osthread.Run(func() error { r.serve(ready); return nil }) }()
	if err := <-ready; err != nil {
		return nil, fmt.Errorf("make the mount namespace of the ranges: %w", err)
	}
	err := r.Mount(1, first)
	if err == nil {
		err = r.call(verifyOverlay)
	}
	if err != nil {
		r.count, r.reason = 0, err.Error()+rangeRemedy
	}
	return r, nil
}

// serve is the thread, on which no other goroutine runs. It does not return, unless it fails.
func (r *Ranges) serve(ready chan<- error) {
	err := func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		at, err := newMount("tmpfs", unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID, [2]string{"mode", "0711"}, [2]string{"size", "64m"})
		if err != nil {
			return err
		}
		defer unix.Close(at)
		return unix.MoveMount(at, "", unix.AT_FDCWD, rangeAt, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}()
	ready <- err
	if err != nil {
		return
	}
	for do := range r.work {
		do()
	}
}

// call runs f in the namespace of the mounts.
func (r *Ranges) call(f func() error) error {
	done := make(chan error)
	r.work <- func() { done <- f() }
	return <-done
}

// Own reports whether each sandbox has a range of its own; reason says why not.
func (r *Ranges) Own() (own bool, reason string) { return r.count > 0, r.reason }

// Lease is the hold of one sandbox on a range.
type Lease struct {
	ranges *Ranges
	number int // 0: the range that all share
	once   sync.Once
}

// errWantsRange means that a sandbox can be started once one more range has its mounts.
var errWantsRange = errors.New("no range of host ids is free")

// wantsRangeError names that range.
type wantsRangeError struct{ number int }

func (e *wantsRangeError) Error() string {
	return fmt.Sprintf("%v: %d have mounts", errWantsRange, e.number-1)
}
func (e *wantsRangeError) Unwrap() error { return errWantsRange }

// Take takes a range for a sandbox that is about to start. The lowest one is taken, so that there
// are no more mounts than sandboxes have run at once.
func (r *Ranges) Take() (*Lease, error) {
	if r.count == 0 {
		return &Lease{ranges: r}, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, taken := range r.mounted {
		if !taken {
			r.mounted[i] = true
			return &Lease{ranges: r, number: i + 1}, nil
		}
	}
	if len(r.mounted) == r.count {
		return nil, fmt.Errorf("each of the %d ranges of host ids has a running sandbox: %w", r.count, runtime.ErrTooMany)
	}
	return nil, &wantsRangeError{len(r.mounted) + 1}
}

// Release gives the range back, when no process of its sandbox is left. Further calls do nothing.
func (l *Lease) Release() {
	l.once.Do(func() {
		if l.number == 0 {
			return
		}
		l.ranges.mu.Lock()
		defer l.ranges.mu.Unlock()
		l.ranges.mounted[l.number-1] = false
	})
}

// IDs is the map of the sandbox's user namespace, in the launcher's ids.
func (l *Lease) IDs() []idmap.Range {
	if l.number == 0 {
		return l.ranges.disk
	}
	return idmap.RangeMap(l.number)
}

// Mounts returns a copy of the range's mounts, attached nowhere, for a sandbox to attach at
// [RangeDir]; nil if it shares its ids and needs none.
func (l *Lease) Mounts() (*os.File, error) {
	if l.number == 0 {
		return nil, nil
	}
	var fd int
	err := l.ranges.call(func() (err error) {
		fd, err = unix.OpenTree(unix.AT_FDCWD, rangePath(l.number), unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("copy the mounts of range %d: %w", l.number, err)
	}
	return os.NewFile(uintptr(fd), "range"), nil
}

func rangePath(number int) string { return filepath.Join(rangeAt, strconv.Itoa(number)) }

// Mount attaches the mounts of the next range, and verifies that they are what they should be: the
// daemon, which has passed them on, may have been taken over.
func (r *Ranges) Mount(number int, mounts []*os.File) error {
	if len(mounts) != len(rangeDirs) {
		return fmt.Errorf("range %d: %d mounts, not %d", number, len(mounts), len(rangeDirs))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case number >= 1 && number <= len(r.mounted):
		return fmt.Errorf("range %d has its mounts: %w", number, runtime.ErrExists)
	case number != len(r.mounted)+1 || number > r.count:
		return fmt.Errorf("range %d is not the next of %d", number, r.count)
	}
	if err := r.call(func() error { return attachRange(number, mounts) }); err != nil {
		return fmt.Errorf("range %d: %w", number, err)
	}
	r.mounted = append(r.mounted, false)
	return nil
}

// attachRange attaches the mounts of a range. On error none is left.
func attachRange(number int, mounts []*os.File) (err error) {
	at := rangePath(number)
	if err := os.Mkdir(at, 0o711); err != nil { //nolint:gosec // G301: the sandbox's root passes through
		return err
	}
	defer func() {
		if err != nil {
			for _, name := range rangeDirs {
				_ = unix.Unmount(filepath.Join(at, name), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) // if it came that far
				_ = unix.Rmdir(filepath.Join(at, name))
			}
			// Not RemoveAll: if a mount stayed, it would empty the directory of all layers.
			err = errors.Join(err, unix.Rmdir(at))
		}
	}()
	for i, name := range rangeDirs {
		target := filepath.Join(at, name)
		if err := os.Mkdir(target, 0o711); err != nil { //nolint:gosec // G301: as above
			return err
		}
		if err := unix.MoveMount(int(mounts[i].Fd()), "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("attach %s: %w", name, err)
		}
		if err := verifyRange(number, filepath.Join("/", name), target); err != nil {
			return err
		}
	}
	return nil
}

// verifyRange checks that target is the launcher's directory dir, with the flags of such mounts,
// and that the first and the last id on disk are seen as those of the range.
func verifyRange(number int, dir, target string) (err error) {
	var want, got unix.Stat_t
	if err := errors.Join(unix.Stat(dir, &want), unix.Stat(target, &got)); err != nil {
		return fmt.Errorf("verify mount of %s: %w", dir, err)
	}
	if got.Dev != want.Dev || got.Ino != want.Ino || got.Uid != want.Uid || got.Gid != want.Gid {
		return fmt.Errorf("verify mount of %s: it is another directory, or of another owner", dir)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(target, &fs); err != nil {
		return fmt.Errorf("verify mount of %s: %w", dir, err)
	}
	const noSymFollow = 0x2000 // ST_NOSYMFOLLOW of linux/statfs.h, Linux 5.10
	if flags := int64(unix.ST_NOSUID | unix.ST_NODEV | noSymFollow); fs.Flags&flags != flags {
		return fmt.Errorf("verify mount of %s: its flags are %#x", dir, fs.Flags)
	}
	const probe = partial + "range"
	file := filepath.Join(dir, probe)
	if err := os.Mkdir(file, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("verify mount of %s: %w", dir, err)
	}
	defer func() { err = errors.Join(err, os.Remove(file)) }()
	for _, id := range []int{1, idmap.SandboxIDs} {
		if err := os.Lchown(file, id, id); err != nil {
			return fmt.Errorf("verify mount of %s: %w", dir, err)
		}
		if err := unix.Lstat(filepath.Join(target, probe), &got); err != nil {
			return fmt.Errorf("verify mount of %s: %w", dir, err)
		}
		if seen := id + number*idmap.SandboxIDs; int(got.Uid) != seen || int(got.Gid) != seen {
			return fmt.Errorf("verify mount of %s: id %d is seen as %d:%d, not as %d", dir, id, got.Uid, got.Gid, seen)
		}
	}
	return nil
}

// verifyOverlay mounts an overlay on directories of the first range. Before Linux 5.19 overlayfs
// refuses mapped mounts.
func verifyOverlay() (err error) {
	const name = partial + "overlay"
	real := filepath.Join(SandboxesDir, name)
	if err := os.RemoveAll(real); err != nil {
		return fmt.Errorf("verify overlay on mapped mounts: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(real)) }()
	for _, d := range []string{"lower", "upper", "work"} {
		if err := os.MkdirAll(filepath.Join(real, d), 0o711); err != nil { //nolint:gosec // G301: empty
			return fmt.Errorf("verify overlay on mapped mounts: %w", err)
		}
	}
	dir := filepath.Join(rangePath(1), SandboxesDir, name)
	options := "userxattr,lowerdir=" + dir + "/lower,upperdir=" + dir + "/upper,workdir=" + dir + "/work"
	if err := unix.Mount("overlay", RootfsDir, "overlay", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount overlay on mapped mounts: %w", err)
	}
	return unix.Unmount(RootfsDir, unix.MNT_DETACH)
}
