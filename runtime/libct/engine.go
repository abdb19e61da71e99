// Package libct starts sandboxes through libcontainer. It is the only importer of
// github.com/opencontainers/runc, which guarantees its binary and not its Go API.
//
// The package runs in the launcher only: importing it registers libcontainer's C constructor, which
// looks at the environment at every start of the binary, and [Engine] expects the root that the
// launcher has built for itself.
//
// # Theory of operation
//
// libcontainer executes the launcher's own binary anew as "sandboxd-launcher init". Its C part
// makes the namespaces; then [Init] runs, already root of the sandbox's user namespace. It mounts
// the sandbox's overlay in the sandbox's own mount namespace, so that the launcher's mount table
// does not grow with the number of sandboxes. After that libcontainer builds /dev, /proc and /sys,
// pivots, drops capabilities and executes the sandbox's init, which loads the seccomp filter: a
// program that the launcher has compiled once for all sandboxes of a profile. A sandbox has been
// created when its init reports that it is confined.
package libct

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/seccomp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
	"github.com/sandboxd/sandboxd/runtime/quota"
)

// killTimeout bounds the wait for a killed sandbox. Processes in an uninterruptible sleep can
// exceed it.
const killTimeout = 30 * time.Second

// updateTimeout bounds an update: when the daemon stops waiting (after 30 s) it has been made or
// taken back. To take memory back from a sandbox that writes to a slow disk can take that long.
const updateTimeout = 15 * time.Second

// Engine implements runtime.Engine in the launcher.
type Engine struct {
	host     Host
	ranges   *launcher.Ranges
	networks *launcher.Networks
	freezer  *launcher.Freezer
	filters  filters
	disk     *quota.Watch
	unread   *unreadWatch
	volumes  volumes
	ended    closer // mount namespaces of deleted sandboxes

	mu        sync.Mutex
	closed    bool
	sandboxes map[string]*instance
}

var (
	_ runtime.Engine    = (*Engine)(nil)
	_ runtime.Networker = (*Engine)(nil)
)

type instance struct {
	ready     chan struct{}           // closed when its creation has ended, well or not; what follows is valid then
	container *libcontainer.Container // nil if the creation failed
	pid       int                     // of the init; another process's once it has been reaped
	pidfd     *os.File
	started   time.Time
	update    sync.Mutex // held by the one that changes what follows, which Engine.mu guards besides
	spec      runtime.Spec
	enforced  api.Enforced
	network   *launcher.Network // nil if it has none
	paused    *pause            // nil while it runs
	pausing   sync.Mutex        // held by the one that pauses or resumes it
	deadline  *time.Timer
	since     unix.Timespec // time of its start, by the clock of the file system
	used      quota.Usage   // disk space at its end; zero while it runs
	exceeded  string        // reason why its disk usage has ended it
	excess    string        // reason why memory of the kernel's has
	ended     chan struct{} // closed when the init has been reaped, and with it everything in its PID namespace
}

// Open returns the engine, or an error if the host cannot hold the engine's promises.
func Open(host Host, ranges *launcher.Ranges, networks *launcher.Networks) (*Engine, error) {
	if !seccomp.Enabled {
		return nil, errors.New("this launcher was built without seccomp (build tag seccomp): it must not run anything")
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return nil, fmt.Errorf("read own descriptor limit: %w", err)
	}
	host.Nofile = limit.Max
	if err := unix.Getrlimit(unix.RLIMIT_NPROC, &limit); err != nil {
		return nil, fmt.Errorf("read own limit of processes: %w", err)
	}
	host.Nproc = limit.Max
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &limit); err != nil {
		return nil, fmt.Errorf("read own limit of cores: %w", err)
	}
	host.Core, host.CorePattern = limit.Max, readCorePattern()
	var err error
	if host.Score, err = ownScore(); err != nil {
		return nil, err
	}
	// The launcher's own IPC namespace is like those of its sandboxes.
	if host.IPC = kernel.IPCIsOurs() == nil; !host.IPC {
		host.Missing = append(host.Missing, "ceilings of System V IPC: this kernel lets no namespace set its own: "+kernel.IPCRemedy)
	}
	if _, err := unread("/proc/self/net/", 0); err != nil {
		host.Missing = append(host.Missing, "a bound for unread messages of sockets: "+err.Error())
	}
	host.landlock(kernel.LandlockABI())
	host.ownIDs(ranges.Own())
	if host.given, host.limits, err = given(); err != nil {
		return nil, err
	}
	if err := host.boundAll(); err != nil {
		return nil, fmt.Errorf("bound what all sandboxes have together: %w", err)
	}
	e := &Engine{host: host, ranges: ranges, networks: networks, freezer: launcher.NewFreezer(), unread: newUnreadWatch(), sandboxes: make(map[string]*instance)}
	if e.disk, err = openDisk(host.DiskReserve); err != nil {
		return nil, err
	}
	if host.Cgroup {
		// Our own is a child like the sandboxes' will be.
		files, err := os.ReadDir(filepath.Join(launcher.CgroupDir, "launcher"))
		if err != nil {
			return nil, fmt.Errorf("read own cgroup: %w", err)
		}
		for _, f := range files {
			e.host.Files = append(e.host.Files, f.Name())
		}
	}
	if err := e.sweep(); err != nil {
		return nil, err
	}
	e.sweepVolumes()
	return e, nil
}

// landlock notes the version that can hold sandboxes. A version that forbids links between
// directories confines nothing, like none at all, and the sandboxes' Enforced says so.
func (h *Host) landlock(abi int, err error) {
	if err == nil && abi >= kernel.LandlockRefer {
		h.Landlock = abi
		return
	}
	h.Missing = append(h.Missing, "Landlock: this kernel has none, or an old one: "+kernel.LandlockRemedy)
}

// ownIDs notes whether each sandbox has a range of ids to itself. There is a reason only where that
// could have been expected.
func (h *Host) ownIDs(own bool, reason string) {
	h.Own = own
	if reason != "" {
		h.Missing = append(h.Missing, "own ids: all sandboxes of this daemon share one range of host ids: "+reason)
	}
}

// sweep removes the cgroups that sandboxes of an earlier launcher left: their processes ended with
// it. Their directories stay until the daemon deletes them, because it knows which ones hold
// something that is still wanted.
func (e *Engine) sweep() error {
	if !e.host.Cgroup {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
	defer cancel()
	entries, err := os.ReadDir(launcher.CgroupDir)
	if err != nil {
		return fmt.Errorf("read cgroups: %w", err)
	}
	for _, entry := range entries {
		if entry.IsDir() && entry.Name() != "launcher" {
			// The kernel has killed all processes in the dead launcher's PID namespace; this is the first
			// wait for their end.
			if err := cgroup.Remove(ctx, filepath.Join(launcher.CgroupDir, entry.Name())); err != nil {
				return fmt.Errorf("clean up after an earlier launcher: %w", err)
			}
		}
	}
	return nil
}

// Freezer returns the freezer that pauses sandboxes with cgroups. Every other user of the cgroup
// freezer must go through it too.
func (e *Engine) Freezer() *launcher.Freezer { return e.freezer }

// Host returns the engine's findings about the host.
func (e *Engine) Host() *Host { return &e.host }

func validID(id string) error {
	if len(id) < 3 || len(id) > 32 || strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
		return fmt.Errorf("sandbox id %q is not 3 to 32 lower-case letters and digits", id)
	}
	return nil
}

// planned is a spec and the plans made from it, before anything is done.
type planned struct {
	spec     *runtime.Spec
	enforced api.Enforced
	config   *configs.Config
	lease    *launcher.Lease // hold on its ids
	owner    int             // of its workspace, as programs see it
}

// plan plans a sandbox, and takes its ids. The caller releases them, unless start is called.
func (e *Engine) plan(spec *runtime.Spec) (*planned, error) {
	if err := validID(spec.ID); err != nil {
		return nil, err
	}
	host := e.host
	host.CorePattern = readCorePattern() // it may have changed
	enforced, err := Enforce(spec, &host)
	if err != nil {
		return nil, err
	}
	if len(spec.Opened) > 0 && len(spec.Opened) != len(spec.Mounts) {
		return nil, fmt.Errorf("sandbox %s: %d mounts have come, not %d", spec.ID, len(spec.Opened), len(spec.Mounts))
	}
	if spec.Workspace != nil && len(spec.Mounts) > 0 {
		return nil, fmt.Errorf("sandbox %s: a workspace and mounts, whose ids differ: %w", spec.ID, runtime.ErrUnenforceable)
	}
	var lease *launcher.Lease
	switch {
	case spec.Workspace != nil:
		lease, err = e.ranges.TakeForWorkspace(spec.Workspace)
	case len(spec.Mounts) > 0:
		lease, err = e.ranges.TakeFor(spec.ID, len(spec.Opened) > 0)
	default:
		lease, err = e.ranges.Take()
	}
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", spec.ID, err)
	}
	host.IDs = lease.IDs()
	if host.IDs, err = idsOf(spec, &host); err != nil {
		lease.Release()
		return nil, err
	}
	owner := 0
	if w := spec.Workspace; w != nil {
		if !w.Mapped {
			host.IDs = launcher.WithOwner(host.IDs)
		}
		owner = ownerSeen(w, &host)
	}
	config, err := Plan(spec, &host, &enforced)
	if err != nil {
		lease.Release()
		return nil, err
	}
	mutate(spec.ID, config)
	return &planned{spec, enforced, config, lease, owner}, nil
}

// Create implements runtime.Engine.
func (e *Engine) Create(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	p, err := e.plan(spec)
	if err != nil {
		return nil, err
	}
	_, in, err := e.claim(ctx, spec.ID, true)
	if err != nil {
		p.lease.Release()
		return nil, fmt.Errorf("create sandbox %s: %w", spec.ID, err)
	}
	st, err := e.start(ctx, in, p, control, func(dir string) (undo func(), err error) {
		if err := os.Mkdir(dir, 0o711); err != nil { //nolint:gosec // G301: the sandbox's root must reach its upper directory
			if errors.Is(err, os.ErrExist) {
				err = runtime.ErrExists
			}
			return nil, fmt.Errorf("make its directory: %w", err)
		}
		return func() { _ = removeTree(dir) }, nil
	})
	if err != nil {
		return nil, fmt.Errorf("create sandbox %s: %w", spec.ID, err)
	}
	return st, nil
}

// Start implements runtime.Engine.
func (e *Engine) Start(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	p, err := e.plan(spec)
	if err != nil {
		return nil, err
	}
	was, in, err := e.claim(ctx, spec.ID, false)
	if err != nil {
		p.lease.Release()
		return nil, fmt.Errorf("start sandbox %s: %w", spec.ID, err)
	}
	held := was
	st, err := e.start(ctx, in, p, control, func(dir string) (undo func(), err error) {
		if was != nil {
			if err := e.forget(was); err != nil {
				return nil, err
			}
			held = nil
		}
		if spec.Fresh {
			if err := removeTree(dir); err != nil {
				return nil, fmt.Errorf("throw its files away: %w", err)
			}
			return func() {}, os.Mkdir(dir, 0o711) //nolint:gosec // G301: as in Create
		}
		_, err = os.Lstat(filepath.Join(dir, "upper"))
		if errors.Is(err, os.ErrNotExist) {
			err = fmt.Errorf("nothing is left of it: %w", runtime.ErrNotFound)
		}
		return func() {}, err
	})
	if err != nil {
		e.mu.Lock()
		if held != nil && e.sandboxes[spec.ID] == nil { // Delete gives its resources back
			e.sandboxes[spec.ID] = held
		}
		e.mu.Unlock()
		return nil, fmt.Errorf("start sandbox %s: %w", spec.ID, err)
	}
	return st, nil
}

// reserve enters a sandbox that is to be started, or deleted, in the place of one that has ended or
// of none. Kill and Delete wait until that is done.
func (e *Engine) reserve(id string, was *instance) (*instance, error) {
	in := &instance{ready: make(chan struct{}), ended: make(chan struct{})}
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closed:
		return nil, fmt.Errorf("the launcher is ending: %w", runtime.ErrUnavailable)
	case e.sandboxes[id] != was, was != nil && (was.container == nil || !was.hasEnded()):
		return nil, runtime.ErrExists
	}
	if was != nil && was.deadline != nil {
		was.deadline.Stop()
	}
	e.sandboxes[id] = in
	return in, nil
}

// claim reserves the id of a sandbox that is to run: a new one, or one that has ended. Another
// operation may hold the id for a moment, such as a deletion by a daemon that has died: claim waits
// for its end.
func (e *Engine) claim(ctx context.Context, id string, isNew bool) (was, in *instance, err error) {
	for {
		e.mu.Lock()
		was = e.sandboxes[id]
		e.mu.Unlock()
		if was != nil {
			select {
			case <-was.ready:
			case <-ctx.Done():
				return nil, nil, fmt.Errorf("wait for its id, which another operation holds: %w", ctx.Err())
			}
			e.mu.Lock()
			stays := e.sandboxes[id] == was
			e.mu.Unlock()
			switch {
			case !stays:
				continue
			case isNew, !was.hasEnded():
				return nil, nil, runtime.ErrExists
			}
		}
		in, err = e.reserve(id, was)
		if !errors.Is(err, runtime.ErrExists) { // else another claim was first
			return was, in, err
		}
	}
}

// forget gives back the resources of a sandbox that has ended, except its directories. A second
// call does no harm.
func (e *Engine) forget(in *instance) error {
	if err := in.container.Destroy(); err != nil {
		return err
	}
	if err := e.resume(in); err != nil { // else a sandbox started in its place would be frozen
		return err
	}
	if err := in.pidfd.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// start runs a sandbox that was reserved, in the directory that prepare makes or finds. On error it
// undoes its own work, that of prepare, and the reservation.
func (e *Engine) start(ctx context.Context, in *instance, p *planned, control *os.File,
	prepare func(dir string) (undo func(), err error),
) (_ *runtime.Started, err error) {
	spec := p.spec
	undo := []func(){p.lease.Release}
	defer func() {
		defer close(in.ready)
		if err == nil {
			return
		}
		for _, f := range slices.Backward(undo) {
			f()
		}
		e.mu.Lock()
		delete(e.sandboxes, spec.ID)
		e.mu.Unlock()
	}()
	dir := filepath.Join(launcher.SandboxesDir, spec.ID)
	unprepare, err := prepare(dir)
	if err != nil {
		return nil, err
	}
	undo = append(undo, unprepare)
	overlays, err := e.prepareOverlays(dir, &spec.Rootfs)
	if err != nil {
		return nil, fmt.Errorf("prepare rootfs: %w", err)
	}
	var work unix.Stat_t // was just made
	if err := unix.Lstat(overlays[0].Work, &work); err != nil {
		return nil, fmt.Errorf("prepare rootfs: %w", err)
	}
	var network *launcher.Network
	var sysfs *os.File
	switch {
	case spec.Join != "":
		var ns *os.File
		if ns, sysfs, err = e.shareNetwork(p, dir); err != nil {
			return nil, err
		}
		defer ns.Close()    // libcontainer's child has entered it
		defer sysfs.Close() // only a handle
	case !spec.Network:
		if err := e.writeFiles(dir, spec, spec.Hostname); err != nil {
			return nil, err
		}
	default:
		if network, sysfs, err = e.takeNetwork(ctx, p, dir); err != nil {
			return nil, err
		}
		undo = append(undo, network.Close)
		defer sysfs.Close() // only a handle
	}
	mounts, err := p.lease.Mounts()
	if err != nil {
		return nil, err
	}
	if mounts != nil {
		defer mounts.Close() // only a handle
	}
	root := planRoot(spec, &e.host, p.config, overlays)
	inherited := []*os.File{control, nil, nil} // descriptors 3, 4 and fdFilter
	if mounts != nil {
		inherited = append(inherited, mounts) // fdRange
	}
	if sysfs != nil {
		root.Sysfs = 3 + len(inherited)
		inherited = append(inherited, sysfs)
	}
	root.Mounts = hostMounts(spec, 3+len(inherited))
	inherited = append(inherited, spec.Opened...)
	if root.Workspace, err = e.prepareWorkspace(dir, p, 3+len(inherited)); err != nil {
		return nil, err
	}
	if root.Workspace != nil {
		inherited = append(inherited, spec.Workspace.Mount)
	}
	volumes, err := e.holdVolumes(ctx, spec)
	if err != nil {
		return nil, err
	}
	undo = append(undo, func() {
		if err := volumes.release(); err != nil {
			slog.Error("a volume has a part of an image's files", "error", err)
		}
	})
	if root.Volumes, err = volumes.plan(); err != nil {
		return nil, fmt.Errorf("volume: %w", err)
	}
	plan, err := memfile("rootfs", root)
	if err != nil {
		return nil, err
	}
	defer plan.Close()
	// Errors from before the sandbox's init runs are written here; a hostile init can fill it and no
	// more.
	complaints, err := boundedFile("complaints", 4096)
	if err != nil {
		return nil, err
	}
	defer complaints.Close()

	if e.host.Cgroup {
		path := filepath.Join(launcher.CgroupDir, spec.ID)
		undo = append(undo, func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
			defer cancel()
			_ = cgroup.Remove(ctx, path) // the next launcher sweeps remains
		})
		if err := os.Mkdir(path, 0o755); err != nil { //nolint:gosec // G301: cgroups are readable by all
			return nil, fmt.Errorf("make its cgroup: %w", err)
		}
		if err := e.limit(ctx, path, &api.Limits{}, spec); err != nil {
			return nil, err
		}
	}
	channel, err := e.handFilter(spec.Profile.Seccomp, p.config)
	if err != nil {
		return nil, err
	}
	defer channel.close()
	inherited[1], inherited[2] = plan, channel.init
	container, err := libcontainer.Create(launcher.StateDir, spec.ID, p.config)
	if err != nil {
		return nil, err
	}
	undo = append(undo, func() { _ = container.Destroy() })
	process := &libcontainer.Process{
		Args:       append([]string{initPath, guest.FilterArg(fdFilter)}, confinement(spec, &p.enforced).InitArgs()...),
		Env:        []string{"PATH=/", "GOMAXPROCS=1"}, // libcontainer insists on the first; the init runs no second thread of Go from the start
		Cwd:        "/",
		Init:       true,
		Stderr:     complaints,
		ExtraFiles: inherited,
	}
	if err := slackened(func() error { return container.Run(process) }); err != nil {
		reapStage(err)
		complaint := said(complaints)
		if text, ok := strings.CutPrefix(complaint, ": "+blamesImage); ok {
			return nil, &imageError{text}
		}
		return nil, notStarted(err, complaint)
	}
	pid, err := process.Pid()
	if err != nil {
		return nil, err
	}
	go func() {
		_, _ = process.Wait() // how the init ended says nothing: it runs until it is killed
		p.lease.Release()     // the kernel has ended all others of its PID namespace before
		if network != nil {
			network.Close()
		}
		e.unwatchDisk(in, spec.ID)
		e.unread.remove(spec.ID)
		e.leaveVolumes(in) // a caller that waits for the end may remove them at once
		close(in.ended)
		e.leaveVolumes(in) // again: join may have come between the two, and did not see the end
	}()
	undo = append(undo, func() { _ = unix.Kill(pid, unix.SIGKILL); <-in.ended })
	// The child cannot be reaped before the kill above or its own end, and Wait has it: the pid is not
	// reused under us as long as the pidfd is opened before anything else is awaited.
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, notStarted(fmt.Errorf("open its pidfd: %w", err), said(complaints)) // it has ended already
	}
	pidfd := os.NewFile(uintptr(fd), "pidfd")
	undo = append(undo, func() { _ = pidfd.Close() })
	if err := channel.wait(ctx); err != nil {
		return nil, notStarted(err, said(complaints))
	}
	out, err := dup(pidfd)
	if err != nil {
		return nil, err
	}
	if err := volumes.keep(); err != nil {
		return nil, errors.Join(err, out.Close())
	}

	e.mu.Lock()
	in.container, in.pid, in.pidfd, in.started = container, pid, pidfd, time.Now()
	in.spec, in.enforced, in.network = *spec, p.enforced, network
	in.spec.Opened = nil // the caller's
	if w := spec.Workspace; w != nil {
		kept := *w
		kept.Mount, kept.Hidden = nil, nil // the request's to close; large
		in.spec.Workspace = &kept
	}
	in.spec.Rootfs, in.spec.Profile.Seccomp = rootfs.Source{}, nil // a filter is large, and nothing asks for it again
	e.schedule(in, spec.ID, spec.Deadline)
	e.mu.Unlock()
	e.watchDisk(in, spec.ID, &spec.Limits, work.Ctim) //nolint:contextcheck // the watch outlives the request
	e.watchUnread(in, spec.ID)
	volumes.join(in, spec.ID) //nolint:contextcheck // see above
	if err := volumes.release(); err != nil {
		slog.Error("a volume is held", "error", err) // nothing is left to undo
	}
	return &runtime.Started{ID: spec.ID, Enforced: p.enforced, Limits: spec.Limits, Deadline: spec.Deadline, Pidfd: out}, nil
}

// slackened runs the start of a sandbox with late timers: the thread with which Go's runtime
// watches itself wakes up every 20 µs while a program is busy, on a processor that the start, and
// later an exec, could use. That is so in libcontainer's child, a Go program, and in the sandbox's
// init. A process has the slack of the thread that forked it, and hands it on; init gives programs
// the kernel's default.
func slackened(run func() error) (err error) {
	const slack = 2 * time.Millisecond
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(slack), 0, 0, 0); err != nil {
		return fmt.Errorf("set timer slack: %w", err)
	}
	defer func() {
		err = errors.Join(err, unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0)) // the thread's default
	}()
	return run()
}

// confinement returns the restrictions that the sandbox's init puts on programs.
func confinement(spec *runtime.Spec, enforced *api.Enforced) *guest.Confinement {
	c := &guest.Confinement{ABI: enforced.Landlock}
	if spec.Profile.ReadOnlyRoot {
		c.Writable = []string{}
		for _, m := range scratchOf(spec) {
			c.Writable = append(c.Writable, m.Path)
		}
		for _, m := range spec.Mounts {
			if !m.ReadOnly {
				c.Writable = append(c.Writable, m.Target)
			}
		}
		for _, m := range spec.Volumes {
			if !m.ReadOnly {
				c.Writable = append(c.Writable, m.Target)
			}
		}
		if spec.Workspace != nil {
			c.Writable = append(c.Writable, spec.Workspace.Target)
		}
	}
	return c
}

// planRoot plans the mounts that Init makes.
func planRoot(spec *runtime.Spec, host *Host, config *configs.Config, overlays []launcher.Overlay) *rootPlan {
	plan := &rootPlan{Overlays: overlays, Own: host.Own, ReadOnly: spec.Profile.ReadOnlyRoot}
	plan.Files, _ = etcFiles(filepath.Join(launcher.SandboxesDir, spec.ID), spec, spec.Hostname)
	if spec.Network {
		plan.Trust = trustOf(spec)
	}
	for _, m := range spec.Tmpfs {
		plan.Tmpfs = append(plan.Tmpfs, m.Path)
	}
	plan.Ceilings = ofOne(host.given, spec.Limits.Memory, host.IPC && config.Namespaces.Contains(configs.NEWIPC))
	if host.Own { // upper and work directories through the mounts of its range; lower ones are relative to the layers
		for i := range plan.Overlays {
			o := &plan.Overlays[i]
			o.Upper, o.Work = filepath.Join(launcher.RangeDir, o.Upper), filepath.Join(launcher.RangeDir, o.Work)
		}
		for i := range plan.Files {
			plan.Files[i].File = filepath.Join(launcher.RangeDir, plan.Files[i].File)
		}
		if plan.Trust != "" {
			plan.Trust = filepath.Join(launcher.RangeDir, plan.Trust)
		}
	}
	if plan.ReadOnly {
		for _, m := range config.Mounts {
			if m.Destination != "/dev" && !strings.HasPrefix(m.Destination, "/dev/") { // mounts below are made on the fresh /dev
				plan.Dirs = append(plan.Dirs, m.Destination)
			}
		}
		plan.Dirs = append(plan.Dirs, "/dev")
	}
	return plan
}

// limit makes a sandbox's cgroup hold what to says; it has held from. A new one is limited before a
// process is in it.
func (e *Engine) limit(ctx context.Context, path string, from *api.Limits, to *runtime.Spec) error {
	changes := cgroup.Changes(settings(from, &to.IODevice, &e.host), settings(&to.Limits, &to.IODevice, &e.host))
	switch err := cgroup.Apply(ctx, path, changes); {
	case errors.Is(err, cgroup.ErrInUse):
		return fmt.Errorf("apply limits: %w: %w", runtime.ErrInUse, err)
	case ctx.Err() != nil: // an outcome of its own: the host could
		return fmt.Errorf("apply limits: %w", err)
	case err != nil:
		return fmt.Errorf("apply limits: %w: %w", runtime.ErrUnenforceable, err)
	}
	return nil
}

// schedule sets the timer that ends a sandbox at its deadline. It needs Engine.mu.
func (e *Engine) schedule(in *instance, id string, deadline time.Time) {
	if in.deadline != nil {
		in.deadline.Stop()
	}
	if deadline.IsZero() {
		return
	}
	in.deadline = time.AfterFunc(time.Until(deadline), func() { _ = e.strike(in, id) })
}

// Update implements runtime.Engine.
func (e *Engine) Update(ctx context.Context, id string, change *runtime.Change) (_ api.Enforced, err error) {
	in, err := e.find(ctx, id)
	if err != nil {
		return api.Enforced{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, updateTimeout)
	defer cancel()
	in.update.Lock()
	defer in.update.Unlock()
	if err := ctx.Err(); err != nil {
		return api.Enforced{}, fmt.Errorf("sandbox %s: wait for an earlier update: %w", id, err)
	}
	e.mu.Lock()
	next, enforced := in.spec, in.enforced
	e.mu.Unlock()
	if in.hasEnded() {
		return api.Enforced{}, fmt.Errorf("sandbox %s: it has ended: %w", id, runtime.ErrNotFound)
	}
	was := next.Limits
	if change.Hostname != "" {
		before := next.Hostname
		next.Hostname = change.Hostname
		if err := in.setHostname(change.Hostname); err != nil {
			return api.Enforced{}, fmt.Errorf("sandbox %s: %w", id, err)
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, in.setHostname(before))
			}
		}()
		if next.Network {
			if err := e.writeFiles(filepath.Join(launcher.SandboxesDir, id), &next, change.Hostname); err != nil {
				return api.Enforced{}, fmt.Errorf("sandbox %s: %w", id, err)
			}
		}
	}
	if change.Limits != nil {
		next.Limits, next.Explicit = *change.Limits, change.Explicit
		if next.Limits.Nofile != was.Nofile {
			return api.Enforced{}, fmt.Errorf("nofile limit: each process has its own since its start: %w", runtime.ErrUnenforceable)
		}
		created := enforced
		if enforced, err = Enforce(&next, &e.host); err != nil {
			return api.Enforced{}, err
		}
		keepCores(&enforced, &created)
		if next.Limits.Pids != was.Pids && enforced.Pids == "rlimit" {
			return api.Enforced{}, fmt.Errorf("pids limit: without a cgroup v2 pids controller each process has its own since its start: %w",
				runtime.ErrUnenforceable)
		}
		if before, after := scoreOfInit(&was, &e.host, &created), scoreOfInit(&next.Limits, &e.host, &enforced); after != before {
			if err := in.score(after); err != nil {
				return api.Enforced{}, fmt.Errorf("sandbox %s: %w", id, err)
			}
			defer func() {
				if err != nil && !in.hasEnded() {
					err = errors.Join(err, in.score(before))
				}
			}()
		}
		if e.host.Cgroup {
			if err := e.limit(ctx, filepath.Join(launcher.CgroupDir, id), &was, &next); err != nil {
				if in.hasEnded() { // and its cgroup is going
					err = fmt.Errorf("it has ended: %w", runtime.ErrNotFound)
				}
				return api.Enforced{}, err
			}
		}
	}
	if !change.Deadline.IsZero() {
		next.Deadline = change.Deadline
	}
	e.mu.Lock()
	since := in.since
	e.mu.Unlock()
	if change.Limits != nil {
		e.watchDisk(in, id, &next.Limits, since) //nolint:contextcheck // the watch outlives the request
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	in.spec, in.enforced = next, enforced
	if change.Hostname != "" {
		in.started = time.Now()
	}
	if e.sandboxes[id] == in { // Delete stops the timer
		e.schedule(in, id, next.Deadline)
	}
	return enforced, nil
}

// setHostname gives the sandbox a hostname: that of its init, which processes started from then on
// copy. The init itself could not, because the filter refuses sethostname to everything in the
// sandbox.
func (in *instance) setHostname(hostname string) error {
	return osthread.Run(func() error {
		conn, err := in.pidfd.SyscallConn()
		if err != nil {
			return err
		}
		var enter error
		if err := conn.Control(func(fd uintptr) { enter = unix.Setns(int(fd), unix.CLONE_NEWUTS) }); err != nil {
			return fmt.Errorf("it is deleted: %w", runtime.ErrNotFound)
		}
		if errors.Is(enter, unix.ESRCH) {
			return fmt.Errorf("it has ended: %w", runtime.ErrNotFound)
		}
		if enter != nil {
			return fmt.Errorf("enter its UTS namespace: %w", enter)
		}
		if err := unix.Sethostname([]byte(hostname)); err != nil {
			return fmt.Errorf("set its hostname: %w", err)
		}
		return nil
	})
}

// refusals are the words in which programs report that they cannot have another process or thread:
// the kernel's EAGAIN as the C library and libcontainer write it, and those of Go's runtime, which
// ends its program.
var refusals = []string{"esource temporarily unavailable", "failed to create new OS thread"}

// notStarted returns the error of a sandbox that could not be started, from the launcher's error
// and the processes' complaint. The processes in between hand on no errno: only their words tell
// that another process could not be had.
func notStarted(err error, complaint string) error {
	said := err.Error() + complaint
	if errors.Is(err, unix.EAGAIN) || slices.ContainsFunc(refusals, func(words string) bool { return strings.Contains(said, words) }) {
		for i := range len(complaint) - 1 {
			if complaint[i] == ';' && complaint[i+1] != ' ' { // the end of a line; Go's runtime goes on with its stacks
				complaint = complaint[:i]
				break
			}
		}
		return fmt.Errorf("%w: %w%s", runtime.ErrProcesses, err, complaint)
	}
	return fmt.Errorf("%w%s", err, complaint)
}

// reapStage waits for libcontainer's stage 1 of a start that has failed, where that is by its own
// account. It is a child of the launcher, which libcontainer waits for only once the stages have
// told its pid: else it would count as a process of all sandboxes until the launcher ends, and each
// refusal for want of one leave one less (TestWantOfProcessesIsTold).
func reapStage(failed error) {
	_, said, _ := strings.Cut(failed.Error(), "nsexec-1[")
	number, _, _ := strings.Cut(said, "]")
	pid, err := strconv.Atoi(number)
	if err != nil || pid <= 1 {
		return
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // it has been waited for
	}
	defer unix.Close(fd)
	// The error quotes words that may be a client's, so no other process is waited for: its end would
	// be missing elsewhere.
	if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err != nil || string(name) != "runc:[1:CHILD]\n" {
		return
	}
	ends := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}} //nolint:gosec // descriptors are small
	for until := time.Now().Add(time.Second); ; {               // it has closed its log, so it is about to end
		n, err := unix.Poll(ends, max(0, int(time.Until(until).Milliseconds())))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && n == 1 {
			_ = unix.Waitid(unix.P_PIDFD, fd, nil, unix.WEXITED|unix.WNOHANG|unix.WALL, nil)
		}
		return
	}
}

// imageError is what Init said of an image, of the class runtime.ErrRootfs.
type imageError struct{ message string }

func (e *imageError) Error() string { return e.message }
func (e *imageError) Unwrap() error { return runtime.ErrRootfs }

// prepareOverlays makes the writable directories of a sandbox and returns the mounts. Overlayfs
// shows the root of the upper directory, so the rootfs' has the owner and mode that the image gives
// its "/"; the others are owned by the sandbox's root. Directories of a sandbox that is started
// again exist, and stay as the sandbox has made them.
func (e *Engine) prepareOverlays(dir string, source *rootfs.Source) ([]launcher.Overlay, error) {
	overlays, err := launcher.Overlays(dir, source)
	if err == nil {
		overlays, err = launcher.Present(overlays)
	}
	if err != nil {
		return nil, err
	}
	for _, l := range overlays[0].Lower {
		if _, err := os.Lstat(filepath.Join(launcher.LayersDir, l)); err != nil {
			return nil, fmt.Errorf("layer %s: %w", l, err)
		}
	}
	for _, d := range source.HostDirs {
		if _, err := os.Lstat(launcher.HostDir + d); err != nil {
			return nil, fmt.Errorf("host directory %s: %w", d, err)
		}
	}
	root := e.host.IDs[0].Outside
	owner := unix.Stat_t{Uid: uint32(root), Gid: uint32(root), Mode: 0o755} //nolint:gosec // G115: ids of the host
	for i, o := range overlays {
		// The next overlay has no use for the remains of an interrupted one in its work directory.
		if err := os.RemoveAll(o.Work); err != nil {
			return nil, err
		}
		upper := owner
		if i == 0 {
			if err := unix.Lstat(filepath.Join(launcher.LayersDir, o.Lower[0]), &upper); err != nil {
				return nil, fmt.Errorf("layer %s: %w", o.Lower[0], err)
			}
		}
		if err := makeOwned(o.Work, &owner); err != nil {
			return nil, err
		}
		if err := makeOwned(o.Upper, &upper); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, err
		}
	}
	return overlays, nil
}

// makeOwned makes a directory with the owner and mode that are wanted.
func makeOwned(dir string, want *unix.Stat_t) error {
	if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // G301: it becomes the sandbox's "/"
		return err
	}
	if err := os.Lchown(dir, int(want.Uid), int(want.Gid)); err != nil {
		return err
	}
	return unix.Chmod(dir, want.Mode&0o7777) // after the owner, which clears bits
}

// List implements runtime.Engine.
func (e *Engine) List(context.Context) ([]*runtime.Started, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []*runtime.Started
	for id, in := range e.sandboxes {
		if in.container == nil || in.hasEnded() {
			continue
		}
		pidfd, err := dup(in.pidfd)
		if err != nil {
			for _, s := range all {
				_ = s.Pidfd.Close()
			}
			return nil, err
		}
		all = append(all, &runtime.Started{
			ID: id, Enforced: in.enforced, Limits: in.spec.Limits, Deadline: in.spec.Deadline, Paused: in.paused != nil, Pidfd: pidfd,
		})
	}
	slices.SortFunc(all, func(a, b *runtime.Started) int { return strings.Compare(a.ID, b.ID) })
	return all, nil
}

// Leftovers implements runtime.Engine.
func (e *Engine) Leftovers(context.Context) ([]string, error) {
	entries, err := os.ReadDir(launcher.SandboxesDir)
	if err != nil {
		return nil, fmt.Errorf("read the sandboxes' directories: %w", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	var ids []string
	for _, entry := range entries {
		id := entry.Name()
		if in := e.sandboxes[id]; validID(id) == nil && (in == nil || in.hasEnded()) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

func (in *instance) hasEnded() bool {
	select {
	case <-in.ended:
		return true
	default:
		return false
	}
}

// find waits for a sandbox that is being created.
func (e *Engine) find(ctx context.Context, id string) (*instance, error) {
	e.mu.Lock()
	in := e.sandboxes[id]
	e.mu.Unlock()
	if in != nil {
		select {
		case <-in.ready:
		case <-ctx.Done():
			return nil, fmt.Errorf("sandbox %s: wait for its creation: %w", id, ctx.Err())
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if in == nil || in.container == nil {
		return nil, fmt.Errorf("sandbox %s: %w", id, runtime.ErrNotFound)
	}
	return in, nil
}

// Kill implements runtime.Engine.
func (e *Engine) Kill(ctx context.Context, id string) error {
	in, err := e.find(ctx, id)
	if err != nil {
		return err
	}
	return e.kill(ctx, in, id)
}

// kill ends every process of a sandbox and waits for it.
func (e *Engine) kill(ctx context.Context, in *instance, id string) error {
	if in.hasEnded() {
		return nil
	}
	if err := e.strike(in, id); err != nil {
		return fmt.Errorf("kill sandbox %s: %w", id, err)
	}
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	select {
	case <-in.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("kill sandbox %s: its processes have not ended: %w", id, ctx.Err())
	}
}

// strike kills every process of a sandbox.
func (e *Engine) strike(in *instance, id string) error {
	// The kernel ends everything in a PID namespace with its init. The init goes first, so that it
	// reports no end of others.
	if err := signal(in.pidfd, unix.SIGKILL); err != nil || !e.host.Cgroup {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sandboxes[id] == in { // or another has a cgroup of that name
		_ = cgroup.Kill(filepath.Join(launcher.CgroupDir, id)) // makes the end faster, no surer
	}
	return nil
}

// signal reaches the process of a pidfd. A process that has ended, or whose sandbox another call
// has deleted meanwhile, is no error. The descriptor's number is used only while the file is open,
// because it may be another sandbox's afterwards.
func signal(pidfd *os.File, sig unix.Signal) error {
	conn, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	if err := conn.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return nil //nolint:nilerr // closed: the sandbox is deleted
	}
	if errors.Is(sent, unix.ESRCH) {
		return nil
	}
	return sent
}

// Delete implements runtime.Engine.
func (e *Engine) Delete(ctx context.Context, id string) error {
	if err := validID(id); err != nil {
		return err
	}
	var in, gate *instance // the sandbox to delete, and the entry that keeps its id until its directory is gone
	for gate == nil {
		var err error
		if in, err = e.find(ctx, id); errors.Is(err, runtime.ErrNotFound) {
			in, err = nil, nil
		} else if err == nil {
			mounts := in.holdMounts()
			defer e.ended.close(mounts)
			err = e.kill(ctx, in, id)
		}
		if err != nil {
			return err
		}
		gate, err = e.reserve(id, in)
		if err != nil && !errors.Is(err, runtime.ErrExists) { // another Delete was faster, or it was started again
			return fmt.Errorf("delete sandbox %s: %w", id, err)
		}
	}
	next := (*instance)(nil)
	defer func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if delete(e.sandboxes, id); next != nil {
			e.sandboxes[id] = next
		}
		close(gate.ready)
	}()
	if in != nil {
		if err := e.forget(in); err != nil {
			next = in // to be tried again
			return fmt.Errorf("delete sandbox %s: %w", id, err)
		}
	}
	dir := filepath.Join(launcher.SandboxesDir, id)
	if _, err := os.Lstat(dir); errors.Is(err, os.ErrNotExist) && in == nil {
		return fmt.Errorf("sandbox %s: %w", id, runtime.ErrNotFound)
	}
	if err := removeTree(dir); err != nil {
		return fmt.Errorf("delete sandbox %s: remove its directory: %w", id, err)
	}
	return nil
}

// Close kills every sandbox and waits for them, and refuses new ones. Their directories stay.
func (e *Engine) Close(ctx context.Context) error {
	e.mu.Lock()
	e.closed = true
	ids := slices.Collect(maps.Keys(e.sandboxes))
	e.mu.Unlock()
	// Side by side: one that does not end must not use up the time of the others.
	errs := make([]error, len(ids)+1)
	slots := make(chan struct{}, closing)
	var ends sync.WaitGroup
	for i, id := range ids {
		slots <- struct{}{}
		ends.Go(func() {
			errs[i] = e.end(ctx, id)
			<-slots
		})
	}
	ends.Wait()
	errs[len(ids)] = e.ended.wait(ctx)
	return errors.Join(errs...)
}

// closing is the number of sandboxes that Close ends in parallel.
const closing = 16

// end is what Close does to one sandbox.
func (e *Engine) end(ctx context.Context, id string) error {
	err := e.Kill(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) {
		return nil // its creation failed, or it was deleted meanwhile
	}
	e.mu.Lock()
	in := e.sandboxes[id]
	delete(e.sandboxes, id)
	e.mu.Unlock()
	if err == nil && in != nil {
		err = in.container.Destroy()
	}
	return err
}

// Count returns the number of sandboxes that run or are being created.
func (e *Engine) Count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for _, in := range e.sandboxes {
		if !in.hasEnded() {
			n++
		}
	}
	return n
}

// memfile returns an anonymous file with v in it as JSON, for an heir that reads it from its start.
func memfile(name string, v any) (*os.File, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", name, err)
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make memfd for %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteAt(data, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("write %s: %w", name, err), f.Close())
	}
	return f, nil
}

// boundedFile is an anonymous file that cannot grow beyond size.
func boundedFile(name string, size int64) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make memfd for %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	err = f.Truncate(size)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("bound memfd for %s: %w", name, err), f.Close())
	}
	return f, nil
}

// complaintSize bounds the quoted part of a complaint, in bytes.
const complaintSize = 1000

// said returns the content of a bounded file for the end of an error message: one line, printable,
// and short. The process that becomes the sandbox has written it.
func said(f *os.File) string {
	buf := make([]byte, 4096)
	n, _ := f.ReadAt(buf, 0)
	return complaint(buf[:n])
}

func complaint(data []byte) string {
	text := strings.TrimSpace(strings.TrimRight(string(data), "\x00"))
	text = strings.ToValidUTF8(text[:min(len(text), complaintSize)], "?")
	text = strings.Map(func(r rune) rune {
		switch {
		case r == '\n':
			return ';'
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, text)
	if text == "" {
		return ""
	}
	return ": " + text
}

func dup(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("dup %s: %w", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}
