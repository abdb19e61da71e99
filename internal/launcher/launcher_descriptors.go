package launcher

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/runtime"
)

// Bounds of the descriptor store, whose descriptors count as the launcher's own.
const (
	maxSets      = 512 // of all sandboxes; the first one of each sandbox does not count, so that others cannot crowd it out
	maxSandboxes = 1024
	maxOfOne     = 64 // of one sandbox
	maxSetFiles  = 8  // descriptors of one set
	perPage      = maxFiles / maxSetFiles
	maxSetName   = 32
)

// descriptorStore holds descriptors of execs that outlive the daemon, for its successor. The
// launcher never reads them. They are raw, because with package os the runtime's poller would wake
// the launcher for every byte that passes through a foreign pipe.
type descriptorStore struct {
	mu   sync.Mutex
	held map[setKey][]int
}

type setKey struct{ sandbox, name string }

func (k setKey) compare(o setKey) int {
	if c := strings.Compare(k.sandbox, o.sandbox); c != 0 {
		return c
	}
	return strings.Compare(k.name, o.name)
}

// put stores copies of files, in the place of those under the same name.
func (d *descriptorStore) put(sandbox, name string, files []*os.File) (err error) {
	if sandbox == "" || len(sandbox) > maxSetName || name == "" || len(name) > maxSetName || len(files) < 1 || len(files) > maxSetFiles {
		return fmt.Errorf("launcher deposit: %q of sandbox %q with %d descriptors: not a set of 1 to 8", name, sandbox, len(files))
	}
	var fds []int
	defer func() {
		if err != nil {
			closeRaw(fds)
		}
	}()
	for _, f := range files {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return fmt.Errorf("launcher deposit: keep descriptor: %w", err)
		}
		fds = append(fds, fd)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	key := setKey{sandbox, name}
	old, replaces := d.held[key]
	if !replaces {
		of, sandboxes := 0, make(map[string]bool)
		for k := range d.held {
			sandboxes[k.sandbox] = true
			if k.sandbox == sandbox {
				of++
			}
		}
		if of >= maxOfOne || of > 0 && len(d.held)-len(sandboxes) >= maxSets || of == 0 && len(sandboxes) >= maxSandboxes {
			return fmt.Errorf("launcher deposit: %d execs of the sandbox and %d of all are kept, which is the most: %w", of, len(d.held), runtime.ErrInUse)
		}
	}
	if d.held == nil {
		d.held = make(map[setKey][]int)
	}
	d.held[key] = fds
	closeRaw(old)
	return nil
}

// page returns copies of the stored descriptors after one of a list, as many as one message holds.
func (d *descriptorStore) page(after wireSet) (list []wireSet, files []*os.File, more bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var keys []setKey
	for k := range d.held {
		if k.compare(setKey{after.Sandbox, after.Name}) > 0 {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, setKey.compare)
	if more = len(keys) > perPage; more {
		keys = keys[:perPage]
	}
	for _, k := range keys {
		for _, fd := range d.held[k] {
			c, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
			if err != nil {
				closeAll(files)
				return nil, nil, false, fmt.Errorf("launcher withdraw: copy descriptor: %w", err)
			}
			files = append(files, os.NewFile(uintptr(c), "stored"))
		}
		list = append(list, wireSet{Sandbox: k.sandbox, Name: k.name, Files: len(d.held[k])})
	}
	return list, files, more, nil
}

// drop removes one set, or, if name is empty, all of a sandbox.
func (d *descriptorStore) drop(sandbox, name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for k, fds := range d.held {
		if k.sandbox == sandbox && (name == "" || k.name == name) {
			closeRaw(fds)
			delete(d.held, k)
		}
	}
}

// dropped removes the sets of a sandbox that has been deleted, or did not exist.
func (d *descriptorStore) dropped(sandbox string, err error) error {
	if err == nil || errors.Is(err, runtime.ErrNotFound) {
		d.drop(sandbox, "")
	}
	return err
}

func closeRaw(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
