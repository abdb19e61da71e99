package workspace

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
)

// tempPrefix begins the names under which things are prepared beside their places. What a crash
// leaves under one is the prepared file, or the host's.
const tempPrefix = ".sandboxd-apply-"

// Result is the outcome of one item.
type Result struct {
	Item *Item
	Err  error // nil: applied
}

// Apply makes the changes, each atomically: a file is prepared beside its place and then exchanged
// for the one that the plan saw. If another one is there by then, that one is put back, and the
// result is an error. Protected items are applied with protected only. Once ctx has ended no
// further item is begun.
func (p *Plan) Apply(ctx context.Context, items []*Item, protected bool) []Result {
	a := applier{Plan: p, done: make(map[string]bool)}
	var results []Result
	for _, item := range items {
		var err error
		switch {
		case item.Refused != "":
			err = errors.New(item.Refused)
		case item.Conflict != "":
			err = errors.New(item.Conflict)
		case item.Protected && !protected:
			err = errors.New("a protected path")
		case ctx.Err() != nil:
			err = context.Cause(ctx)
		default:
			err = a.apply(item)
		}
		results = append(results, Result{item, err})
	}
	// Modes of directories come last: one may keep its owner from making files in it.
	for _, m := range slices.Backward(a.modes) {
		if err := a.chmod(m.name, m.mode); err != nil {
			for i := range results {
				if results[i].Item == m.item && results[i].Err == nil {
					results[i].Err = err
				}
			}
		}
	}
	return results
}

type applier struct {
	*Plan
	done  map[string]bool // files that this has written
	modes []dirMode
}

// protected is as [Item.Protected] of a path.
func (p *Plan) protected(name string) bool { return Protected(name) || p.inRepository(name) }

type dirMode struct {
	item *Item
	name string
	mode fs.FileMode
}

func (a *applier) apply(item *Item) error {
	e := item.e
	dir, err := a.to.parent(item.Path)
	if err != nil {
		return fmt.Errorf("open its directory: %w", err)
	}
	defer unix.Close(dir)
	base := path.Base(item.Path)
	if item.Kind == api.Deleted {
		return a.remove(dir, base, item)
	}
	if e.kind == directory && item.was.kind == directory {
		a.modes = append(a.modes, dirMode{item, item.Path, e.mode})
		return nil
	}
	temp := tempPrefix + rand.Text()
	if err := a.make(dir, temp, item); err != nil {
		return errors.Join(err, removeAll(dir, temp))
	}
	if err := a.place(dir, temp, base, item); err != nil {
		return err
	}
	a.done[item.Path] = true
	if e.kind == directory {
		a.modes = append(a.modes, dirMode{item, item.Path, e.mode})
	}
	return nil
}

// make makes what the entry says, under a temporary name.
func (a *applier) make(dir int, temp string, item *Item) error {
	e := item.e
	switch e.kind {
	case directory:
		if err := unix.Mkdirat(dir, temp, 0o700); err != nil {
			return fmt.Errorf("make directory: %w", err)
		}
		return own(dir, temp, &item.was)
	case link:
		if err := unix.Symlinkat(e.target, dir, temp); err != nil {
			return fmt.Errorf("make link: %w", err)
		}
		return own(dir, temp, &item.was)
	case none, special:
		return fmt.Errorf("make %v: nothing to make", e.kind)
	case file:
	}
	first, like := a.like[e.same]
	// A further name would be one of a protected file, which can be changed through it from then on.
	if e.same != "" && (a.done[e.same] || like && !a.protected(e.same)) {
		from, err := a.to.parent(e.same)
		if err != nil {
			return fmt.Errorf("open directory of %s: %w", Quote(e.same), err)
		}
		defer unix.Close(from)
		if err := unix.Linkat(from, path.Base(e.same), dir, temp, 0); err != nil {
			return fmt.Errorf("link to %s: %w", Quote(e.same), err)
		}
		if now, err := statAt(dir, temp); err != nil || like && !first.same(&now) {
			return errors.Join(err, fmt.Errorf("%s has %w", Quote(e.same), errChanged))
		}
		return nil
	}
	fd, err := unix.Openat(dir, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("make file: %w", err)
	}
	f := os.NewFile(uintptr(fd), temp)
	_, err = io.Copy(f, a.set.content(e))
	if err == nil {
		err = own(dir, temp, &item.was)
	}
	if err == nil {
		err = f.Chmod(e.mode)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write file: %w", err)
	}
	return nil
}

// own gives what root has made to the owner of what it replaces, or else of its directory.
func own(dir int, temp string, was *state) error {
	if os.Geteuid() != 0 {
		return nil
	}
	owner := *was
	if was.kind == none {
		var st unix.Stat_t
		if err := unix.Fstat(dir, &st); err != nil {
			return fmt.Errorf("look at the owner of its directory: %w", err)
		}
		owner.uid, owner.gid = st.Uid, st.Gid
	}
	if err := unix.Fchownat(dir, temp, int(owner.uid), int(owner.gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set its owner: %w", err)
	}
	return nil
}

// place gives what has been made its name, and removes what had it.
func (a *applier) place(dir int, temp, base string, item *Item) error {
	if item.was.kind == none {
		err := unix.Renameat2(dir, temp, dir, base, unix.RENAME_NOREPLACE)
		if errors.Is(err, unix.EEXIST) {
			err = errChanged
		} else if err != nil {
			err = fmt.Errorf("rename: %w", err)
		}
		if err != nil {
			return errors.Join(err, removeAll(dir, temp))
		}
		return nil
	}
	exchange := func() error { return unix.Renameat2(dir, temp, dir, base, unix.RENAME_EXCHANGE) }
	if err := exchange(); errors.Is(err, unix.ENOENT) {
		return errors.Join(errChanged, removeAll(dir, temp))
	} else if err != nil {
		return errors.Join(fmt.Errorf("exchange with the host's: %w", err), removeAll(dir, temp))
	}
	if a.exchanged != nil {
		a.exchanged()
	}
	if err := a.verify(dir, temp, item); err != nil {
		if exchange() == nil {
			return errors.Join(err, removeAll(dir, temp))
		}
		return errors.Join(err, putBack(dir, temp, base)) // another process has taken the new one away
	}
	return removeAll(dir, temp)
}

// putBack gives what the host had its name back. Where another one has the name, both stay.
func putBack(dir int, temp, base string) error {
	if err := unix.Renameat2(dir, temp, dir, base, unix.RENAME_NOREPLACE); err != nil {
		return fmt.Errorf("put back what was there, which is now called %s: %w", Quote(temp), err)
	}
	return nil
}

// verify reports whether what is at a temporary name is what the plan saw.
func (a *applier) verify(dir int, temp string, item *Item) error {
	now, err := statAt(dir, temp)
	if err != nil {
		return err
	}
	if item.was.kind == directory {
		// Its own times change with its contents, which count.
		if now.kind != directory || now.ino != item.was.ino {
			return errChanged
		}
		return a.unchanged(item.Path, path.Join(path.Dir(item.Path), temp), &now)
	}
	if !item.was.same(&now) {
		return errChanged
	}
	return nil
}

func (a *applier) remove(dir int, base string, item *Item) error {
	temp := tempPrefix + rand.Text()
	if err := unix.Renameat2(dir, base, dir, temp, unix.RENAME_NOREPLACE); errors.Is(err, unix.ENOENT) {
		return nil // as wanted
	} else if err != nil {
		return fmt.Errorf("rename: %w", err)
	}
	if err := a.verify(dir, temp, item); err != nil {
		return errors.Join(err, putBack(dir, temp, base))
	}
	return removeAll(dir, temp)
}

// removeAll removes a tree, and nothing on another file system.
func removeAll(dir int, base string) error {
	err := unix.Unlinkat(dir, base, 0)
	if !errors.Is(err, unix.EISDIR) {
		return ignoreMissing(err)
	}
	var here unix.Stat_t
	if err := unix.Fstat(dir, &here); err != nil {
		return err
	}
	fd, err := unix.Openat(dir, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("remove %s: %w", Quote(base), err)
	}
	f := os.NewFile(uintptr(fd), base)
	defer f.Close() // only read
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Dev != here.Dev {
		return fmt.Errorf("remove %s: %w", Quote(base), unix.EXDEV)
	}
	names, err := f.Readdirnames(-1)
	if err != nil {
		return fmt.Errorf("remove %s: %w", Quote(base), err)
	}
	for _, name := range names {
		if err := removeAll(fd, name); err != nil {
			return err
		}
	}
	return ignoreMissing(unix.Unlinkat(dir, base, unix.AT_REMOVEDIR))
}

func (a *applier) chmod(name string, mode fs.FileMode) error {
	fd, err := a.to.open(name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("set its mode: %w", err)
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil {
		err = unix.Fchmod(fd, uint32(mode)|st.Mode&0o7000) // a set-gid directory stays one
	}
	return errors.Join(err, unix.Close(fd))
}

func ignoreMissing(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}
