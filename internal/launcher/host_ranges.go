package launcher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/runtime"
)

// rangeDirs are the directories that a sandbox with a range of its own sees through mounts of that
// range, in the order in which the mounts travel.
var rangeDirs = []string{"layers", "sandboxes"}

// rangeFlags hold on these mounts: no file of a sandbox is meant to have an effect there, and no
// name to lead elsewhere. The overlays above them have flags of their own.
const rangeFlags = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSYMFOLLOW

// MountRange makes the mounts of one range of ids for the launcher of o: of the layers and of the
// sandboxes, attached nowhere. The caller is root of the host, as the kernel demands for the file
// systems of disks. Directories and maps are those of o, and number is all that a client chooses.
func MountRange(_ context.Context, o Options, number int) (_ []*os.File, err error) {
	uid, gid, err := o.IDs.MountMap(number)
	if err != nil {
		return nil, err
	}
	ns, err := idmap.Namespace(uid, gid)
	if err != nil {
		return nil, fmt.Errorf("mount for range %d: %w", number, err)
	}
	defer ns.Close() // only a handle
	var mounts []*os.File
	defer func() {
		if err != nil {
			closeAll(mounts)
		}
	}()
	for _, name := range rangeDirs {
		m, err := mapped(filepath.Join(o.DataDir, name), o.IDs, ns)
		if err != nil {
			return nil, fmt.Errorf("mount for range %d: %w", number, err)
		}
		mounts = append(mounts, m)
	}
	return mounts, nil
}

// mapped returns a mount of the launcher's directory dir with the map of a user namespace.
func mapped(dir string, ids idmap.Plan, ns *os.File) (*os.File, error) {
	// Not through a link: the daemon can make some in its data directory.
	from, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer from.Close() // only a handle
	fi, err := from.Stat()
	if err != nil {
		return nil, err
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != ids.UID[0].Outside || int(st.Gid) != ids.GID[0].Outside {
		return nil, fmt.Errorf("%s does not belong to the launcher", dir)
	}
	return idmap.CloneMount(from, ns, rangeFlags)
}

// firstRange makes the mounts of the first range, by which a launcher finds out whether the kernel
// and the file system can map mounts. Reason says why they cannot, though the daemon is root: an
// ordinary user has one range, and can map neither ext4 nor XFS, so there it is no news.
func firstRange(ctx context.Context, o Options) (mounts []*os.File, reason string) {
	switch {
	case o.IDs.Method != idmap.Direct:
		return nil, ""
	case o.IDs.Ranges() == 0:
		return nil, fmt.Sprintf("the daemon has not the %d ids of two ranges to give: start the container that this is with more, "+
			"or remove the entries of \"sandboxd\" in /etc/subuid and /etc/subgid", 2*idmap.SandboxIDs+1)
	}
	mounts, err := MountRange(ctx, o, 1)
	if err != nil {
		return nil, err.Error() + rangeRemedy
	}
	return mounts, ""
}

// rangeRemedy follows the error of the step that has failed.
const rangeRemedy = ": it takes Linux 5.19, CAP_SYS_ADMIN over the host, and a data directory on ext4, xfs or btrfs"

// addRange gives the launcher the mounts of one more range, for a sandbox that found none free when
// wanted was the next. Requests that come together add one each. A creation that is cancelled does
// not wait for its turn; in it, the mounts are not wasted. A launcher that has died wants no range:
// the creation asks the one after it.
func (c *Client) addRange(ctx context.Context, launcher, wanted int) error {
	select {
	case c.ranges <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-c.ranges }()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	c.mu.Lock()
	number, died := max(wanted, c.lastRange+1), launcher != c.launchers
	c.mu.Unlock()
	if died {
		return nil
	}
	if number > c.opts.IDs.Ranges() && wanted < number {
		return nil // the launcher has them all: it gives one away, or refuses
	}
	mounts, err := c.opts.MountRange(ctx, number)
	if err != nil {
		return fmt.Errorf("get host ids for a sandbox: %w", err)
	}
	defer closeAll(mounts)
	if _, err = c.ask(ctx, &request{Op: opRange, Range: number}, mounts...); err != nil && !errors.Is(err, runtime.ErrExists) {
		if c.started() != launcher {
			return nil
		}
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if launcher == c.launchers { // else it was given to one that has died
		c.lastRange = number
	}
	return nil
}
