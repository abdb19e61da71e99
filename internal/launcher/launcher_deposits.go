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

// Bounds of what daemons may deposit. The descriptors are the launcher's own for as long.
const (
	maxDeposits    = 512 // of all sandboxes, but for one of each: that nobody else's may keep out
	maxDepositors  = 1024
	maxOfOne       = 64 // of one sandbox
	maxDeposited   = 8  // descriptors of one deposit
	perWithdrawal  = maxFiles / maxDeposited
	maxDepositName = 32
)

// deposits are descriptors that a daemon leaves here for the one after it: those of execs that are to survive it. The launcher
// looks at none of them. They are raw, because package os would have the runtime's poller, and with it the launcher, wake up
// for every byte that goes through a pipe that is not its business.
type deposits struct {
	mu   sync.Mutex
	held map[depositKey][]int
}

type depositKey struct{ sandbox, name string }

func (k depositKey) compare(o depositKey) int {
	if c := strings.Compare(k.sandbox, o.sandbox); c != 0 {
		return c
	}
	return strings.Compare(k.name, o.name)
}

// put takes copies of files, in the place of what was there under the name.
func (d *deposits) put(sandbox, name string, files []*os.File) (err error) {
	if sandbox == "" || len(sandbox) > maxDepositName || name == "" || len(name) > maxDepositName || len(files) < 1 || len(files) > maxDeposited {
		return fmt.Errorf("launcher deposit: %q of sandbox %q with %d descriptors: not a deposit", name, sandbox, len(files))
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
	key := depositKey{sandbox, name}
	old, replaces := d.held[key]
	if !replaces {
		of, sandboxes := 0, make(map[string]bool)
		for k := range d.held {
			sandboxes[k.sandbox] = true
			if k.sandbox == sandbox {
				of++
			}
		}
		if of >= maxOfOne || of > 0 && len(d.held)-len(sandboxes) >= maxDeposits || of == 0 && len(sandboxes) >= maxDepositors {
			return fmt.Errorf("launcher deposit: %d execs of the sandbox and %d of all are kept, which is the most: %w", of, len(d.held), runtime.ErrInUse)
		}
	}
	if d.held == nil {
		d.held = make(map[depositKey][]int)
	}
	d.held[key] = fds
	closeRaw(old)
	return nil
}

// page gives copies of the deposits after this one, as many as one message holds.
func (d *deposits) page(after wireDeposit) (list []wireDeposit, files []*os.File, more bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var keys []depositKey
	for k := range d.held {
		if k.compare(depositKey{after.Sandbox, after.Name}) > 0 {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, depositKey.compare)
	if more = len(keys) > perWithdrawal; more {
		keys = keys[:perWithdrawal]
	}
	for _, k := range keys {
		for _, fd := range d.held[k] {
			c, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
			if err != nil {
				closeAll(files)
				return nil, nil, false, fmt.Errorf("launcher withdraw: copy descriptor: %w", err)
			}
			files = append(files, os.NewFile(uintptr(c), "deposited"))
		}
		list = append(list, wireDeposit{Sandbox: k.sandbox, Name: k.name, Files: len(d.held[k])})
	}
	return list, files, more, nil
}

// drop forgets one deposit, or all of a sandbox where name is empty.
func (d *deposits) drop(sandbox, name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for k, fds := range d.held {
		if k.sandbox == sandbox && (name == "" || k.name == name) {
			closeRaw(fds)
			delete(d.held, k)
		}
	}
}

// dropped drops what is kept for a sandbox that has been deleted, or was not there to be.
func (d *deposits) dropped(sandbox string, err error) error {
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
