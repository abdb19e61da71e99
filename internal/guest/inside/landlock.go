package inside

import (
	"github.com/sandboxd/sandboxd/internal/guest"

	"errors"
	goruntime "runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/landlock"
)

// Everything that the daemon starts in a sandbox, and what that starts, is in one Landlock domain, which init is not in. So what
// Landlock refuses is refused to programs: to write outside of where the profile lets them, to change any mount, to make block
// devices, to use devices elsewhere than in /dev; and to look into init, to signal it, or to reach a socket or process outside.
//
// A domain belongs to a thread, and its children inherit it. Two threads that restrict themselves alike are in two domains,
// whose programs could not signal each other. So one thread restricts itself and forks everything (see forker).

// landlockRule lets something be done beneath a directory.
type landlockRule struct {
	Dir    string
	Access uint64
}

// landlockPlan is what is taken away, and what is given back.
type landlockPlan struct {
	Handled unix.LandlockRulesetAttr
	Rules   []landlockRule
}

// plan is a pure function of what is known of the kernel and the profile.
func planLandlock(c *guest.Confinement) landlockPlan {
	const write = unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE |
		unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG |
		unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_MAKE_FIFO | unix.LANDLOCK_ACCESS_FS_MAKE_SYM |
		unix.LANDLOCK_ACCESS_FS_REFER
	var p landlockPlan
	var truncate, device uint64
	if c.ABI >= 3 {
		truncate = unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if c.ABI >= 5 {
		device = unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	if c.ABI >= 6 {
		p.Handled.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	}
	// Nobody makes a block device. Character devices are whiteouts: others the kernel refuses a user namespace.
	p.Handled.Handled_access_fs = unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_REFER | device
	if c.Writable == nil {
		// Links and renames between directories are refused unless they are allowed, whatever is handled.
		p.Rules = []landlockRule{{"/", unix.LANDLOCK_ACCESS_FS_REFER}, {"/dev", device}}
	} else {
		p.Handled.Handled_access_fs |= write | truncate
		p.Rules = []landlockRule{{"/dev", unix.LANDLOCK_ACCESS_FS_WRITE_FILE | truncate | device}, {"/dev/shm", write | truncate}}
		for _, dir := range c.Writable {
			p.Rules = append(p.Rules, landlockRule{dir, write | truncate})
		}
	}
	return p
}

// apply restricts the calling thread and all that it starts, for good. No_new_privs, which it needs, the launcher has set.
func (p *landlockPlan) apply() (err error) {
	rules, err := landlock.New(&p.Handled)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rules.Close()) }()
	for _, r := range p.Rules {
		if r.Access == 0 {
			continue // this kernel's Landlock does not know what it would allow
		}
		if err := rules.AllowPath(r.Dir, r.Access); err != nil {
			return err
		}
	}
	return rules.RestrictThread()
}

// forker is the thread that everything is forked from.
type forker struct{ requests chan forkRequest }

type forkRequest struct {
	path string
	argv []string
	attr *syscall.ProcAttr
	done chan<- forkDone
}

type forkDone struct {
	pid int
	err error
}

// newForker starts it. It runs for as long as init.
func newForker(c *guest.Confinement) (*forker, error) {
	f := &forker{requests: make(chan forkRequest)}
	confined := make(chan error)
	go func() {
		goruntime.LockOSThread() // and never unlocked: nothing else may run on it
		p := planLandlock(c)
		err := p.apply()
		confined <- err
		if err != nil {
			return
		}
		for r := range f.requests {
			pid, err := forkExec(r.path, r.argv, r.attr)
			r.done <- forkDone{pid, err}
		}
	}()
	return f, <-confined
}

func (f *forker) forkExec(path string, argv []string, attr *syscall.ProcAttr) (int, error) {
	done := make(chan forkDone, 1)
	f.requests <- forkRequest{path, argv, attr, done}
	r := <-done
	return r.pid, r.err
}
