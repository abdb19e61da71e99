package inside

import (
	"errors"
	"syscall"

	"github.com/sandboxd/sandboxd/internal/guest"

	goruntime "runtime"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/landlock"
)

// Everything that the daemon starts in a sandbox is in one Landlock domain, and so are its
// children; init is not. Landlock refuses them: to write outside of the profile's directories, to
// change any mount, to make block devices, to use devices outside of /dev, to inspect or signal
// init, and to reach a socket or process outside.
//
// A domain belongs to a thread, and its children inherit it. Two threads with the same restrictions
// are in two domains, whose programs could not signal each other. So one thread restricts itself
// and forks everything (see forker).

// landlockRule allows access beneath a directory.
type landlockRule struct {
	Dir    string
	Access uint64
}

// landlockPlan holds the access that is taken away, and the exceptions.
type landlockPlan struct {
	Handled unix.LandlockRulesetAttr
	Rules   []landlockRule
}

// planLandlock computes the plan from the kernel's ABI and the profile.
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
	// Programs never make block devices. Character devices include whiteouts: the kernel refuses
	// others to a user namespace.
	p.Handled.Handled_access_fs = unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_REFER | device
	if c.Writable == nil {
		// Links and renames between directories need a rule in any case, whatever is handled.
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

// apply restricts the calling thread and everything that it starts, for good. It needs
// no_new_privs, which the launcher has set.
func (p *landlockPlan) apply() (err error) {
	rules, err := landlock.New(&p.Handled)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rules.Close()) }()
	for _, r := range p.Rules {
		if r.Access == 0 {
			continue // this kernel's Landlock has no such access
		}
		if err := rules.AllowPath(r.Dir, r.Access); err != nil {
			return err
		}
	}
	return rules.RestrictThread()
}

// forker is the thread that forks everything.
type forker struct{ requests chan func() }

// newForker starts the thread, which runs as long as init. C may be nil: no restrictions. A thread
// of its own also is the only one that new processes can make their tracer: see server.untrace.
func newForker(c *guest.Confinement) (*forker, error) {
	f := &forker{requests: make(chan func())}
	confined := make(chan error)
	go func() {
		goruntime.LockOSThread() // never unlocked: no other goroutine may run on this thread
		var err error
		if c != nil {
			p := planLandlock(c)
			err = p.apply()
		}
		confined <- err
		if err != nil {
			return
		}
		for r := range f.requests {
			r()
		}
	}()
	return f, <-confined
}

func (f *forker) forkExec(path string, argv []string, attr *syscall.ProcAttr) (pid int, err error) {
	f.do(func() bool {
		pid, err = forkExec(path, argv, attr)
		return true
	})
	return pid, err
}

// do calls what on the thread that forks.
func (f *forker) do(what func() bool) bool {
	done := make(chan bool, 1)
	f.requests <- func() { done <- what() }
	return <-done
}
