// Package quota counts the disk space of directories and stops the sandboxes that exceed a limit.
//
// A user without privileges has no quota of the kernel for a directory, so the space is counted:
// [Measure] walks directories, [Processes] finds the files that have no name any more. [Watch]
// decides when to count, from the free space of the file system.
package quota

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Usage is an amount of disk space. As a limit, zero means none.
type Usage struct {
	Bytes  int64 // of allocated blocks, not of lengths
	Inodes int64
}

// Exceeds reports whether u is more than the limit in either kind.
func (u Usage) Exceeds(limit Usage) bool {
	return limit.Bytes > 0 && u.Bytes > limit.Bytes || limit.Inodes > 0 && u.Inodes > limit.Inodes
}

func (u Usage) plus(o Usage) Usage { return Usage{u.Bytes + o.Bytes, u.Inodes + o.Inodes} }

// MaxDepth is the number of levels that Measure descends. Each is an open descriptor.
const MaxDepth = 512

// ErrDeep means that directories are nested deeper than [MaxDepth], where nothing is counted.
var ErrDeep = fmt.Errorf("directories are nested deeper than %d levels, where files are not counted", MaxDepth)

// Measure counts what lies below dirs, the directories included and every inode once. No link is
// followed. The count ends early, with the usage so far, when that exceeds the limit. Entries and
// directories that vanish meanwhile are no error.
func Measure(dirs []string, limit Usage) (Usage, error) {
	c := counter{limit: limit, linked: make(map[inode]bool), buf: make([]byte, 32<<10)}
	for _, dir := range dirs {
		fd, err := open(unix.AT_FDCWD, dir)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return c.used, fmt.Errorf("measure %s: %w", dir, err)
		}
		err = c.dir(fd, 0)
		if errors.Is(err, errEnough) {
			return c.used, nil
		}
		if err != nil {
			return c.used, fmt.Errorf("measure %s: %w", dir, err)
		}
	}
	return c.used, nil
}

type inode struct{ dev, ino uint64 }

type counter struct {
	limit   Usage
	used    Usage
	linked  map[inode]bool // seen, of those with several names
	pending int64          // directories that were found and not entered yet
	buf     []byte
}

var errEnough = errors.New("over the limit")

// dir counts an open directory and closes it.
func (c *counter) dir(fd, depth int) (err error) {
	defer func() { _ = unix.Close(fd) }() // only read
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if err := c.add(&st); err != nil {
		return err
	}
	var below []string // read to the end first: the buffer is shared by all levels
	for {
		n, err := unix.ReadDirent(fd, c.buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		if n <= 0 || err != nil {
			break
		}
		_, _, names := unix.ParseDirent(c.buf[:n], -1, nil)
		for _, name := range names {
			err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
			switch {
			case errors.Is(err, unix.ENOENT):
				continue
			case err != nil:
				return err
			case st.Mode&unix.S_IFMT == unix.S_IFDIR:
				// Not counted before it is entered; a directory of many must not fill the memory.
				if c.pending++; c.used.plus(Usage{0, c.pending}).Exceeds(c.limit) {
					c.used.Inodes += c.pending
					return errEnough
				}
				below = append(below, name)
				continue
			}
			if err := c.add(&st); err != nil {
				return err
			}
		}
	}
	if len(below) > 0 && depth == MaxDepth {
		return ErrDeep
	}
	for _, name := range below {
		c.pending--
		next, err := open(fd, name)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			continue // replaced meanwhile
		}
		if err != nil {
			return err
		}
		if err := c.dir(next, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (c *counter) add(st *unix.Stat_t) error {
	if st.Nlink > 1 && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		key := inode{uint64(st.Dev), st.Ino} //nolint:unconvert // Dev has another type elsewhere
		if c.linked[key] {
			return nil
		}
		c.linked[key] = true
	}
	c.used = c.used.plus(Usage{st.Blocks * 512, 1})
	if c.used.Exceeds(c.limit) {
		return errEnough
	}
	return nil
}

func open(parent int, name string) (int, error) {
	for {
		fd, err := unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NOATIME, 0)
		if errors.Is(err, unix.EPERM) { // not the owner's
			fd, err = unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		}
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}
