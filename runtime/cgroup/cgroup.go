// Package cgroup finds, prepares and leaves the cgroup v2 subtree that the host delegates to the
// daemon.
//
// The subtree looks like this, where own is the cgroup that the daemon was started in:
//
//	own/                      controllers enabled for its children; no process of its own (cgroups.rst, "no internal process")
//	├── supervisor/           the daemon, and processes started in own beside it
//	└── sandboxd-<name>/      [Subtree.Path]; given to the launcher's root, bound at the launcher's /sys/fs/cgroup
//	    ├── launcher/         the launcher: in here so that its parent is the common ancestor that it must be able to write to
//	    └── <sandbox id>/     one per sandbox, with its limits
//
// Where nothing is delegated and systemd manages the host (a login shell, a user unit without
// Delegate=), it is asked for a scope to be own: package systemd does the asking. So it is in a
// service, delegated or not: systemd starts a service again in the unit's cgroup itself, which
// could hold no process any more once controllers are enabled in it. A service with
// DelegateSubgroup=supervisor (systemd 254) needs no scope: there the daemon finds itself in its
// leaf.
//
// A daemon of root without systemd stays where it is, and makes sandboxd-<name>/ at the top of the
// hierarchy. In a container own is the root of its cgroup namespace. Several daemons can share one
// own; each takes and leaves its place in it under a lock on the directory.
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/flock"
)

// wanted are the controllers that limits need.
var wanted = []string{"cpu", "cpuset", "io", "memory", "pids"}

// usual are the controllers of the default limits. A limit by another controller is set on request,
// and refused if that is missing.
var usual = []string{"cpu", "memory", "pids"}

// Wanted are the controllers that limits need.
func Wanted() []string { return slices.Clone(wanted) }

// Subtree is the cgroup that the host delegates. The zero value delegates nothing.
type Subtree struct {
	Mount       string   // where cgroup v2 is mounted, "" if it is not
	Path        string   // directory for sandboxes, "" if nothing is delegated
	Controllers []string // those enabled for the children of Path, sorted
	Reason      string   // missing controllers of the default limits, and the remedy; empty if none is missing
	// Rest is the same for controllers that only explicit limits need (io, cpuset), where Reason is
	// empty.
	Rest string
}

// Has reports whether a limit of the controller can be enforced.
func (s Subtree) Has(controller string) bool { return slices.Contains(s.Controllers, controller) }

// Leaf is the name of the daemon's own cgroup.
const Leaf = "supervisor"

const (
	prefix      = "sandboxd-" // of the directories for sandboxes
	launcherDir = "launcher"
	// leafMark is an attribute of a leaf that we have made, as opposed to one that the host made and
	// keeps (systemd's DelegateSubgroup=): cgroup directories have user attributes since Linux 5.7.
	leafMark = "user.sandboxd.leaf"
)

// Prepare finds the delegated subtree, moves the daemon into a leaf of its own and enables the
// available controllers. Name keeps the directories of several daemons apart. Enter moves the
// process into a scope of systemd's; nil if systemd is not to be asked. Anything that the host does
// not give is no error, and is listed in Reason.
func Prepare(ctx context.Context, name string, enter func(ctx context.Context) error) (Subtree, error) {
	at, err := find("self")
	if err != nil {
		return Subtree{}, err
	}
	host := survey(at)
	var denied error
	entered := false
	if host.Asks && enter != nil {
		if denied = enter(ctx); denied == nil {
			moved, err := find("self")
			if err != nil {
				return Subtree{}, err
			}
			if entered = moved.own != at.own; entered {
				at = moved
			} else {
				denied = errors.New("it agreed, and the daemon is where it was")
			}
		}
	}
	s := Subtree{Mount: at.mount}
	lacks := func(why string, controllers []string) Subtree {
		if denied != nil {
			why += "; systemd was asked for a scope: " + denied.Error()
		}
		s.Reason = why + "; " + host.Remedy(controllers)
		return s
	}
	own := at.own
	if host.AtTop && !entered {
		own = at.mount // nothing else is ours to rearrange
	}
	if why := at.refused(own); why != "" {
		return lacks(why, nil), nil
	}
	lock, err := lockDir(ctx.Done(), own)
	if err != nil {
		return Subtree{}, err
	}
	defer lock.Close()
	// Before any process moves, so that a daemon that leaves now waits for us and then sees that own
	// is in use.
	path := filepath.Join(own, prefix+name)
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, os.ErrExist) { //nolint:gosec // G301: cgroups are readable by all
		return lacks(fmt.Sprintf("a cgroup cannot be made: %v", err), nil), nil
	}
	if err := handOn(ctx, own); err != nil {
		if ctx.Err() != nil {
			return Subtree{}, errors.Join(err, unix.Rmdir(path), release(own))
		}
		return lacks(fmt.Sprintf("the daemon cannot move into a leaf of its own: %v", err), nil), errors.Join(unix.Rmdir(path), release(own))
	}
	s.Path = path
	s.Controllers, _ = enable(s.Path)
	if lacking := without(wanted, s.Controllers); len(lacking) > 0 {
		s = lacks(fmt.Sprintf("controllers %s are not available in %s", strings.Join(lacking, ", "), own), lacking)
		if len(without(usual, s.Controllers)) == 0 {
			s.Rest, s.Reason = s.Reason, ""
		}
	}
	return s, nil
}

// without returns those of all that are not in have.
func without(all, have []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(c string) bool { return slices.Contains(have, c) })
}

// Look returns the cgroup that a process is in, and the controllers that groups below it can have.
func Look(pid int) (dir string, controllers []string, err error) {
	at, err := find(strconv.Itoa(pid))
	if err != nil {
		return "", nil, err
	}
	if at.own == "" {
		return "", nil, fmt.Errorf("process %d is in no cgroup that can be seen here", pid)
	}
	return at.own, words(at.own, "cgroup.controllers"), nil
}

// Of returns the subtree in which a launcher of that name runs, for [Subtree.Leave]: a daemon may
// be started again in another cgroup than the launcher that it adopts. The zero value means none.
func Of(launcher int, name string) (Subtree, error) {
	at, err := find(strconv.Itoa(launcher))
	if err != nil {
		return Subtree{}, err
	}
	if path := filepath.Dir(at.own); filepath.Base(at.own) == launcherDir && filepath.Base(path) == prefix+name {
		return Subtree{Mount: at.mount, Path: path}, nil
	}
	return Subtree{Mount: at.mount}, nil
}

// isTop reports whether dir is the root of the whole hierarchy, which alone may hold processes
// beside cgroups and alone has no cgroup.events. The root of a container's cgroup namespace is not.
func isTop(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "cgroup.events"))
	return errors.Is(err, os.ErrNotExist)
}

// lockPatience bounds the wait of lockDir. The lock is held for a few writes, but every process
// that may open the directory can hold it.
const lockPatience = 10 * time.Second

// lockDir keeps the daemons that share dir from rearranging it at the same time. Closing the file
// unlocks.
func lockDir(stop <-chan struct{}, dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("lock cgroup: %w", err)
	}
	if err := flock.Exclusive(stop, lockPatience, f); err != nil {
		return nil, errors.Join(fmt.Errorf("lock cgroup %s: %w", dir, err), f.Close())
	}
	return f, nil
}

// vacate moves every process of own into its leaf: the daemon, and processes started beside it.
func vacate(own string) error {
	leaf := filepath.Join(own, Leaf)
	switch err := os.Mkdir(leaf, 0o755); { //nolint:gosec // G301: cgroup directories have this mode
	case err == nil:
		// Without the mark the leaf stays when the daemon leaves, and that is all.
		_ = unix.Setxattr(leaf, leafMark, []byte("1"), 0)
	case !errors.Is(err, os.ErrExist):
		return err
	}
	return move(own, leaf)
}

// move moves every process from one cgroup to another. Those that are born meanwhile are found in
// the next round.
func move(from, to string) error {
	for range 100 {
		data, err := os.ReadFile(filepath.Join(from, "cgroup.procs"))
		if err != nil {
			return err
		}
		pids := strings.Fields(string(data))
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			if pid == "0" { // written, it would name ourselves
				return fmt.Errorf("processes of another PID namespace are in %s", from)
			}
			err := os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(pid), 0) //nolint:gosec // G703: a cgroup that Prepare chose
			if err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("move process %s: %w", pid, err)
			}
		}
	}
	return fmt.Errorf("processes keep appearing in %s", from)
}

// gone reports whether a cgroup has been removed, before it was opened or since: systemd removes a
// scope with its last process, and the daemon that leaves it may be in another.
func gone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) }

// release undoes vacate and enable on own, if the leaf is ours and has no other process.
func release(own string) error {
	leaf := filepath.Join(own, Leaf)
	if _, err := unix.Getxattr(leaf, leafMark, nil); err != nil {
		return nil // no leaf, or not ours
	}
	entries, err := os.ReadDir(own)
	if gone(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("leave cgroup: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() && e.Name() != Leaf {
			return nil // of another daemon or program
		}
	}
	data, err := os.ReadFile(filepath.Join(own, "cgroup.subtree_control"))
	if gone(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("leave cgroup: %w", err)
	}
	for c := range strings.FieldsSeq(string(data)) {
		err := os.WriteFile(filepath.Join(own, "cgroup.subtree_control"), []byte("-"+c), 0)
		if err != nil && !gone(err) {
			return fmt.Errorf("leave cgroup: disable %s in %s: %w", c, own, err)
		}
	}
	if err := move(leaf, own); err != nil && !gone(err) {
		return fmt.Errorf("leave cgroup: %w", err)
	}
	if err := unix.Rmdir(leaf); err != nil && !gone(err) {
		return fmt.Errorf("remove cgroup %s: %w", leaf, err)
	}
	return nil
}

// The attempts to hand controllers on, and the time between two.
const (
	handOnAttempts = 50
	handOnPause    = 20 * time.Millisecond
)

// handOn moves every process of own into its leaf, and enables own's controllers for its children.
// It tries for a second: for a moment the kernel counts processes that were moved, or have ended,
// among those of own, which keep the controllers off.
func handOn(ctx context.Context, own string) error {
	for attempt := 1; ; attempt++ {
		if !isTop(own) {
			if err := vacate(own); err != nil && attempt == 1 {
				return err
			}
		}
		if _, busy := enable(own); !busy || attempt == handOnAttempts {
			return nil // what is off is found later
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(handOnPause):
		}
	}
}

// enable turns on each wanted controller of dir for its children, and returns all that are on
// afterwards. Busy reports whether a process in dir has kept one off.
func enable(dir string) (on []string, busy bool) {
	for _, c := range wanted {
		// One at a time: a controller that cannot be enabled must not keep the others off.
		err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0)
		busy = busy || errors.Is(err, unix.EBUSY)
	}
	return words(dir, "cgroup.subtree_control"), busy
}

// words reads a list, sorted; it is empty where the file cannot be read.
func words(dir, file string) []string {
	data, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return nil
	}
	return slices.Sorted(strings.FieldsSeq(string(data)))
}

// EnterLauncher puts the launcher into its leaf and gives the subtree to its root: uid and gid of
// the host.
func (s Subtree) EnterLauncher(pid, uid, gid int) error {
	leaf := filepath.Join(s.Path, launcherDir)
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, os.ErrExist) { //nolint:gosec // G301: cgroup directories have this mode
		return fmt.Errorf("make the launcher's cgroup: %w", err)
	}
	if err := os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
		return fmt.Errorf("move the launcher into its cgroup: %w", err)
	}
	if os.Geteuid() != 0 {
		return nil // the launcher's root is this uid
	}
	for _, dir := range []string{s.Path, leaf} {
		for _, f := range []string{"", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"} {
			if err := os.Chown(filepath.Join(dir, f), uid, gid); err != nil {
				return fmt.Errorf("give the cgroup to the launcher: %w", err)
			}
		}
	}
	return nil
}

// Leave removes what Prepare made and puts the daemon back where it was started, so that the
// cgroups are as they were. The launcher must have been told to end; Leave waits until its last
// process has, or the context.
func (s Subtree) Leave(ctx context.Context) error {
	if s.Path == "" {
		return nil
	}
	if err := waitEmpty(ctx, s.Path); err != nil {
		return fmt.Errorf("leave cgroup: %w", err)
	}
	own := filepath.Dir(s.Path)
	lock, err := lockDir(ctx.Done(), own)
	if errors.Is(err, os.ErrNotExist) {
		return nil // its maker has removed it
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := removeAll(s.Path); err != nil {
		return err
	}
	if isTop(own) {
		return nil
	}
	return release(own)
}

// Abandon is Leave for a daemon without a launcher, perhaps because that did not get far. It waits
// for no process, and removes nothing if one is there after all.
func (s Subtree) Abandon() error {
	if s.Path == "" {
		return nil
	}
	own := filepath.Dir(s.Path)
	lock, err := lockDir(nil, own)
	if errors.Is(err, os.ErrNotExist) {
		return nil // its maker has removed it
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	// First of all its leaf: it cannot be removed while a launcher runs there.
	leaf := filepath.Join(s.Path, launcherDir)
	if err = unix.Rmdir(leaf); err != nil && !gone(err) {
		if errors.Is(err, unix.EBUSY) {
			return nil
		}
		return fmt.Errorf("remove cgroup %s: %w", leaf, err)
	}
	if err := removeAll(s.Path); errors.Is(err, unix.EBUSY) {
		return nil // processes of a sandbox, which are no concern of a daemon that gives up
	} else if err != nil {
		return err
	}
	if isTop(own) {
		return nil
	}
	return release(own)
}

// Kill ends every process in dir and below, and lifts the ceiling on their processor time: a killed
// process has to run once more, to die, and hundreds of processes that share a quarter of a
// processor take most of a minute for that. No program runs on without its ceiling. All of them,
// and their children that are just being forked, have been killed before it goes, and a killed
// process never returns from the kernel to its program. If that was not possible (cgroup.kill
// exists since Linux 5.14), the ceiling stays. Other sandboxes keep the share of their weight.
//
// A cgroup that is not there is one of the class [os.ErrNotExist]. That the ceiling stays is no
// error: the end only takes longer.
func Kill(dir string) error {
	if err := write(dir, "cgroup.kill", "1"); err != nil {
		return fmt.Errorf("end the processes of cgroup %s: %w", dir, err)
	}
	_ = write(dir, "cpu.max", "max") // see above; there may be no such file
	return nil
}

// Remove ends every process in dir and below, waits until they are gone, or the context, and
// removes the cgroups.
func Remove(ctx context.Context, dir string) error {
	if err := Kill(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := waitEmpty(ctx, dir); err != nil {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	return removeAll(dir)
}

// removeAll removes empty cgroups, those below first.
func removeAll(dir string) error {
	entries, err := os.ReadDir(dir)
	if gone(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove cgroup %s: %w", dir, err)
	}
	return nil
}

// waitEmpty waits until no process is left in dir or below.
func waitEmpty(ctx context.Context, dir string) error {
	if err := waitEvent(ctx, dir, "populated 0"); err != nil {
		return fmt.Errorf("processes are left in %s: %w", dir, err)
	}
	return nil
}

// waitEvent waits until cgroup.events says so, or dir is gone. The kernel tells of changes of it by
// POLLPRI.
func waitEvent(ctx context.Context, dir, event string) error {
	f, err := os.Open(filepath.Join(dir, "cgroup.events"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, 256)
	for {
		n, err := f.ReadAt(buf, 0)
		if gone(err) {
			return nil
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if strings.Contains(string(buf[:n]), event) {
			return nil
		}
		// The poll is short so that the end of the context is noticed.
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}, 100) //nolint:gosec // G115: a descriptor
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

const fileFreeze = "cgroup.freeze"

// Freeze stops every process in dir and below until [Thaw], and waits until they have stopped. They
// can be killed, and are when their deadline comes. After an error some may have. A cgroup that is
// not there is one of the class [os.ErrNotExist].
func Freeze(ctx context.Context, dir string) error {
	if err := write(dir, fileFreeze, "1"); err != nil {
		return fmt.Errorf("freeze: %w", err)
	}
	if err := waitEvent(ctx, dir, "frozen 1"); err != nil {
		return fmt.Errorf("freeze: wait for the processes in %s to stop: %w", dir, err)
	}
	return nil
}

// Thaw lets the processes of a frozen cgroup go on. One that is gone meanwhile is no error.
func Thaw(dir string) error {
	if err := write(dir, fileFreeze, "0"); err != nil && !gone(err) {
		return fmt.Errorf("thaw: %w", err)
	}
	return nil
}
