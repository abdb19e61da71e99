package libct

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime/quota"
)

// How limits on disk space hold (docs/decisions/0029).
//
// The launcher counts: it can read the files of every user of a sandbox, which an ordinary user's
// daemon cannot, and it outlives the daemon. A sandbox that exceeds its limit is killed, because
// nothing else stops a program that holds open files: a mount with such files cannot be made
// read-only, and a resource limit on sizes covers neither holes nor directories.

const (
	// inodeReserve is the maximum of the reserve of inodes, inodeParts the part of all inodes that it
	// otherwise is.
	inodeReserve = 10_000
	inodeParts   = 100
)

// openDisk returns the watch of the sandboxes' file system, of which the reserve is kept.
func openDisk(reserve int64) (*quota.Watch, error) {
	watch := quota.New(
		func() (quota.Free, error) { return quota.ReadFree(launcher.SandboxesDir) },
		func(message string, err error) { slog.Error(message, "error", err) },
	)
	if reserve == 0 {
		return watch, nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(launcher.SandboxesDir, &st); err != nil {
		return nil, fmt.Errorf("read the size of the disk: %w", err)
	}
	watch.SetReserve(quota.Reserve{Bytes: reserve, Inodes: min(inodeReserve, int64(st.Files)/inodeParts)}) //nolint:gosec // G115: no disk has so many
	return watch, nil
}

// counted returns the directories of a sandbox whose content counts for its limits: with the
// volumes that go with it. Others are subjects of their own. Below are the roots of these volumes'
// mounts.
func (e *Engine) counted(in *instance, id string) (dirs, below []string) {
	dirs = []string{filepath.Join(launcher.SandboxesDir, id)}
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range in.spec.Volumes {
		if m := &in.spec.Volumes[i]; m.Own {
			dirs, below = append(dirs, volumeData(m.ID)), append(below, volumeRoot(m.ID))
		}
	}
	return dirs, below
}

// watchDisk counts the disk space of a sandbox from now on. Since is the time of its start, by the
// clock of the file system. It needs no lock; the instance must be valid.
func (e *Engine) watchDisk(in *instance, id string, limits *api.Limits, since unix.Timespec) {
	limit := quota.Usage{Bytes: limits.Disk, Inodes: limits.ImpliedInodes()}
	e.mu.Lock()
	in.since = since
	e.mu.Unlock()
	if limit == (quota.Usage{}) && e.host.DiskReserve == 0 {
		e.disk.Remove(id)
		return
	}
	e.disk.Set(id, quota.Subject{
		Limit:   limit,
		Measure: func(limit quota.Usage) (quota.Usage, error) { return e.measure(in, id, limit, since) },
		Hold:    func(ctx context.Context) (func(), error) { return e.hold(ctx, in, id) },
		End: func(reason string) {
			e.mu.Lock()
			if in.exceeded == "" {
				in.exceeded = reason
			}
			e.mu.Unlock()
			_ = e.strike(in, id) // tried again while it runs
		},
	})
	if in.hasEnded() {
		e.disk.Remove(id)
	}
}

// unwatchDisk notes the last usage of a sandbox that has ended.
func (e *Engine) unwatchDisk(in *instance, id string) {
	used, ok := e.disk.Used(id)
	e.disk.Remove(id)
	if ok {
		e.mu.Lock()
		in.used = used
		e.mu.Unlock()
	}
}

// measure returns the disk space of a sandbox's directories and of its open files without a name.
func (e *Engine) measure(in *instance, id string, limit quota.Usage, since unix.Timespec) (quota.Usage, error) {
	dirs, below := e.counted(in, id)
	used, err := quota.Measure(dirs, limit)
	if err != nil || used.Exceeds(limit) {
		return used, err
	}
	held := quota.Processes{Proc: "/proc", Since: since, Below: below}.Measure(in.processes())
	return quota.Usage{Bytes: used.Bytes + held.Bytes, Inodes: used.Inodes + held.Inodes}, nil
}

// processes returns the pids of a sandbox's programs; none if it has ended.
func (in *instance) processes() (pids []int) {
	t, err := in.tree()
	if err != nil {
		return nil
	}
	defer t.close()
	_ = t.each(func(pid, pidfd int) {
		pids = append(pids, pid)
		_ = unix.Close(pidfd)
	})
	return pids
}

var errPausing = errors.New("it is being paused or resumed")

// hold makes the processes of a sandbox stand still until release is called. A paused one does
// already.
func (e *Engine) hold(ctx context.Context, in *instance, id string) (release func(), err error) {
	if !in.pausing.TryLock() { // a pause takes seconds, and other sandboxes are to be watched
		return nil, errPausing
	}
	switch {
	case in.isPaused(e), in.hasEnded():
		return in.pausing.Unlock, nil
	case e.host.Cgroup && e.host.hasFile("cgroup.freeze"):
		thaw, _, err := e.freezer.Freeze(ctx, filepath.Join(launcher.CgroupDir, id))
		if err != nil {
			in.pausing.Unlock()
			return nil, err
		}
		return func() {
			defer in.pausing.Unlock()
			_ = thaw() // fails only for a cgroup that is gone
		}, nil
	}
	before, err := in.halt(ctx)
	if err != nil {
		in.pausing.Unlock()
		return nil, err
	}
	return func() {
		defer in.pausing.Unlock()
		_ = in.goOn(before) // it has ended
	}, nil
}

// diskStats returns the disk usage of a sandbox; nil if none is counted.
func (e *Engine) diskStats(in *instance, id string) *api.DiskStats {
	e.mu.Lock()
	current, used, exceeded, limits := e.sandboxes[id] == in, in.used, in.exceeded, in.spec.Limits
	e.mu.Unlock()
	if limits.Disk == 0 && limits.Inodes == 0 && exceeded == "" {
		return nil
	}
	if current && !in.hasEnded() {
		used, _ = e.disk.Used(id)
	}
	return &api.DiskStats{Bytes: used.Bytes, Inodes: used.Inodes, Exceeded: exceeded}
}
