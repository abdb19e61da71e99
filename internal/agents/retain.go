package agents

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Retention holds the limits for idle runs.
type Retention struct {
	Age   time.Duration // maximum time since the last work; zero means none
	Limit int64         // maximum size of all idle runs on disk, in bytes; zero means none
	// Grace is the minimum time that each run is kept, and that clients must have had to read it.
	Grace time.Duration
}

// idleRun is a run that no process works on.
type idleRun struct {
	id   string
	at   time.Time // see [Host.lastWork]
	size int64     // bytes on disk
	// immense reports that the run has more or deeper entries than are measured.
	immense bool
}

// overdue returns the expired runs, oldest first. up is the start of the grace period.
func (r Retention) overdue(now, up time.Time, runs []idleRun) []idleRun {
	worked := func(run idleRun) time.Time {
		if run.at.Sub(now) > r.Grace { // the clock was wrong when it was written, before the daemon started
			return up
		}
		return run.at
	}
	runs = slices.SortedFunc(slices.Values(runs), func(a, b idleRun) int { return cmp.Or(worked(a).Compare(worked(b)), cmp.Compare(a.id, b.id)) })
	var all int64
	for _, run := range runs {
		all += run.size
	}
	var out []idleRun
	for _, run := range runs {
		at := worked(run)
		readable := at
		if up.After(readable) {
			readable = up
		}
		if now.Sub(readable) < r.Grace {
			continue
		}
		if r.Age > 0 && now.Sub(at) >= r.Age || r.Limit > 0 && (all > r.Limit || run.immense) {
			out = append(out, run)
			all -= run.size
		}
	}
	return out
}

// Retain removes the expired runs one by one, and returns them. A failed removal is not retried
// within the grace period.
func (h *Host) Retain(ctx context.Context, r Retention, now, up time.Time) (removed []string, err error) {
	if r.Age == 0 && r.Limit == 0 {
		return nil, nil
	}
	runs, err := h.idle(ctx)
	if ctx.Err() != nil {
		return nil, err
	}
	for _, run := range r.overdue(now, up, runs) {
		if now.Sub(h.kept[run.id]) < r.Grace {
			continue
		}
		if again, ok, _ := h.lastWork(run.id); !ok || !again.Equal(run.at) {
			continue // it was resumed meanwhile
		}
		removeErr := h.removeInTime(ctx, run.id)
		if removeErr == nil {
			removed = append(removed, run.id)
			continue
		}
		if ctx.Err() != nil {
			return removed, errors.Join(err, context.Cause(ctx))
		}
		if _, ok, _ := h.lastWork(run.id); !ok {
			continue // it was resumed or removed meanwhile
		}
		h.kept[run.id] = now
		err = errors.Join(err, removeErr)
	}
	return removed, err
}

// removeInTime is remove with a time limit, because other runs wait.
func (h *Host) removeInTime(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, h.removeIn)
	defer cancel()
	return h.remove(ctx, id)
}

// idle returns the idle runs that can be examined. unknown is the error of the first one that
// cannot; a run without read permission is reported once. It must not be called concurrently.
func (h *Host) idle(ctx context.Context) (runs []idleRun, unknown error) {
	entries, err := os.ReadDir(h.opts.Dir)
	if err != nil {
		return nil, fmt.Errorf("list the agent runs: %w", err)
	}
	known := make(map[string]idleRun, len(entries))
	denied := map[string]bool{}
	for _, e := range entries {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if !IsID(e.Name()) || !e.IsDir() {
			continue
		}
		at, ok, err := h.lastWork(e.Name())
		if !ok && errors.Is(err, unix.EACCES) {
			if denied[e.Name()] = true; !h.denied[e.Name()] {
				unknown = errors.Join(unknown, err)
			}
			continue
		}
		if !ok {
			unknown = cmp.Or(unknown, err)
			continue
		}
		run := h.sizes[e.Name()]
		if !run.at.Equal(at) || run.id == "" {
			size, err := h.size(ctx, e.Name())
			immense := errors.Is(err, errImmense)
			if err != nil && !immense {
				unknown = cmp.Or(unknown, err)
				continue
			}
			run = idleRun{e.Name(), at, size, immense}
		}
		known[run.id] = run
		runs = append(runs, run)
	}
	h.sizes, h.denied = known, denied
	for id := range h.kept {
		if _, ok := known[id]; !ok {
			delete(h.kept, id)
		}
	}
	return runs, unknown
}

// lastWork returns the time of the last work on a run: the last write to its record, or the last
// change of its directory if the record cannot be opened. ok is false if the run is gone, or is or
// may be in progress.
func (h *Host) lastWork(id string) (at time.Time, ok bool, err error) {
	at, working, err := h.lastChange(id, RecordName)
	// A process with a lease on the record has it open, and may write to it.
	if err != nil && !isTransient(err) && !errors.Is(err, unix.EAGAIN) {
		at, working, err = h.lastChange(id, ".")
	}
	if err != nil && (isTransient(err) || errors.Is(err, unix.EACCES)) {
		return at, false, fmt.Errorf("examine the agent run %s: %w", id, err)
	}
	return at, err == nil && !working, nil
}

// lastChange returns the time of the last write to a file or directory of a run, and whether a
// process has it locked.
func (h *Host) lastChange(id, name string) (at time.Time, working bool, err error) {
	if working, err = h.locked(id, name); err != nil || working {
		return at, working, err
	}
	f, err := h.open(id, name)
	if err != nil {
		return at, false, err
	}
	info, err := f.Stat()
	if err == nil {
		at = info.ModTime()
		// A worker can set mtime to any value, but not ctime, the time at which it did.
		if st, ok := info.Sys().(*syscall.Stat_t); ok && time.Unix(st.Ctim.Unix()).Before(at) {
			at = time.Unix(st.Ctim.Unix())
		}
	}
	return at, false, errors.Join(err, f.Close())
}

// maxDeep and maxEntries limit the measuring of a run, whose files come from untrusted programs.
// The agent collects at most a hundred thousand entries, and no ordinary run nests them so deep.
const (
	maxDeep    = 256 // nested directories, each of which takes a descriptor
	maxEntries = 1_000_000
)

var errImmense = errors.New("too many or too deep entries to measure")

// size returns the disk space of a run. Links are not followed, hard links are counted once, and
// files that vanish or cannot be read are not counted.
func (h *Host) size(ctx context.Context, id string) (int64, error) {
	dir, err := h.open(id, ".")
	if err != nil && !isTransient(err) {
		return 0, nil
	}
	var size int64
	if err == nil {
		left := maxEntries
		size, err = measure(ctx, dir, maxDeep, &left)
	}
	if err != nil {
		return 0, fmt.Errorf("measure the agent run %s: %w", id, err)
	}
	return size, nil
}

// measure returns the disk space of a directory's entries, and closes it. It looks names up in the
// open directory only: a path could be redirected meanwhile, and would be too long at depth.
func measure(ctx context.Context, dir *os.File, deep int, left *int) (size int64, err error) {
	defer dir.Close()
	if deep == 0 {
		return 0, errImmense
	}
	for {
		names, err := dir.Readdirnames(1000)
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		if err != nil && isTransient(err) {
			return 0, err
		}
		if len(names) == 0 {
			return size, nil
		}
		for _, name := range names {
			if *left--; *left < 0 {
				return 0, errImmense
			}
			var st unix.Stat_t
			if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				continue
			}
			held := st.Blocks * 512
			if st.Mode&unix.S_IFMT != unix.S_IFDIR {
				size += held / max(int64(st.Nlink), 1) //nolint:gosec // no file has so many names
				continue
			}
			size += held
			if st.Mode&0o500 != 0o500 {
				restoreMode(dir, name)
			}
			fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
			if err != nil && isTransient(err) {
				return 0, err
			}
			if err != nil {
				continue
			}
			below, err := measure(ctx, os.NewFile(uintptr(fd), name), deep-1, left)
			if err != nil {
				return 0, err
			}
			size += below
		}
	}
}
