package libct

import (
	"errors"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxOpen is the number of levels of a tree that are held open while it is removed.
const maxOpen = 64

// removeTree removes a sandbox's directory and everything in it; one that is not there is no error.
//
// os.RemoveAll holds a descriptor for every level, and a program can make a tree that is deeper
// than our limit of descriptors: it could never be deleted, and during the attempt nothing else
// here could open a file. So a directory maxOpen levels down is moved to the top, where all names
// are ours, and removed from there. No link is followed; we have CAP_DAC_OVERRIDE over the
// sandbox's ids only.
func removeTree(dir string) error {
	top, err := openDir(unix.AT_FDCWD, dir)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	r := remover{top: top, buf: make([]byte, 16<<10)}
	err = r.removeDir(unix.AT_FDCWD, dir, top, 0)
	if err := errors.Join(err, unix.Close(top)); err != nil {
		return &os.PathError{Op: "remove", Path: dir, Err: err}
	}
	return nil
}

type remover struct {
	top   int
	moved int    // to the top
	buf   []byte // for one read of any directory
}

// removeDir removes a directory, which is open as fd and the given number of levels down.
func (r *remover) removeDir(parent int, name string, fd, depth int) error {
	for {
		if err := r.empty(fd, depth); err != nil {
			return err
		}
		err := unix.Unlinkat(parent, name, unix.AT_REMOVEDIR)
		if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
			return err
		}
		// A removal while reading can miss entries, and directories are moved to the top while that is
		// read.
		if _, err := unix.Seek(fd, 0, unix.SEEK_SET); err != nil {
			return err
		}
	}
}

// empty removes what one pass through an open directory finds.
func (r *remover) empty(fd, depth int) error {
	for {
		n, err := unix.ReadDirent(fd, r.buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return err
		}
		_, _, names := unix.ParseDirent(r.buf[:n], -1, nil)
		for _, name := range names {
			if err := r.remove(fd, name, depth); err != nil {
				return err
			}
		}
	}
}

func (r *remover) remove(parent int, name string, depth int) error {
	err := unix.Unlinkat(parent, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if !errors.Is(err, unix.EISDIR) {
		return &os.PathError{Op: "unlink", Path: name, Err: err}
	}
	if depth == maxOpen {
		return r.move(parent, name)
	}
	fd, err := openDir(parent, name)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	return errors.Join(r.removeDir(parent, name, fd, depth+1), unix.Close(fd))
}

// move brings a directory to the top. A removal that did not come to its end may have left the name
// there.
func (r *remover) move(parent int, name string) error {
	for {
		err := unix.Renameat(parent, name, r.top, "deep-"+strconv.Itoa(r.moved))
		r.moved++
		if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
}

func openDir(parent int, name string) (int, error) {
	for {
		fd, err := unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}
