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

// Retention says how long runs are kept that nobody works on.
type Retention struct {
	Age   time.Duration // since somebody last did; 0: for ever
	Limit int64         // of what they have on disk together; 0: any amount
	// Grace is how long each stays at least, and how long somebody must have been able to ask for it.
	Grace time.Duration
}

// idleRun is one that nobody works on.
type idleRun struct {
	id   string
	at   time.Time // see [Host.lastWork]
	size int64     // on disk
	// immense: it has more entries, or deeper ones, than are looked at.
	immense bool
}

// overdue are those of the runs that are not to be kept any longer, those that were worked on first before the others. Up is since when
// somebody can ask for them.
func (r Retention) overdue(now, up time.Time, runs []idleRun) []idleRun {
	worked := func(run idleRun) time.Time {
		if run.at.Sub(now) > r.Grace { // the clock was wrong when that was written, and it was written before the daemon began
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

// Retain removes runs that have been kept long enough, one after the other, with all that is left of them, and says which. One that cannot
// be removed is not tried again within the grace.
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
			continue // somebody has gone on with it
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
			continue // somebody was faster, and works on it or has removed it
		}
		h.kept[run.id] = now
		err = errors.Join(err, removeErr)
	}
	return removed, err
}

// removeInTime is remove for a run that is not to keep the others waiting.
func (h *Host) removeInTime(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, h.removeIn)
	defer cancel()
	return h.remove(ctx, id)
}

// idle are the runs that nobody works on and that can be looked at; the error is that of the first that cannot, and of those that may not
// be, once, which keeps nobody from the others. It is called by one at a time.
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

// lastWork is when somebody last worked on a run: when the last line of its record was written or, where there is no record that can be
// opened, when its directory last changed. It is not ok while somebody works on the run, may do so, or the run is gone.
func (h *Host) lastWork(id string) (at time.Time, ok bool, err error) {
	at, working, err := h.lastChange(id, RecordName)
	// Who has a lease on the record has it open, and may write to it.
	if err != nil && !passing(err) && !errors.Is(err, unix.EAGAIN) {
		at, working, err = h.lastChange(id, ".")
	}
	if err != nil && (passing(err) || errors.Is(err, unix.EACCES)) {
		return at, false, fmt.Errorf("look at the agent run %s: %w", id, err)
	}
	return at, err == nil && !working, nil
}

// lastChange is when a file of a run, or its directory, was last written to, and whether somebody who works on the run has it locked.
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
		// The worker may have set that to any time, but not the one at which it did.
		if st, ok := info.Sys().(*syscall.Stat_t); ok && time.Unix(st.Ctim.Unix()).Before(at) {
			at = time.Unix(st.Ctim.Unix())
		}
	}
	return at, false, errors.Join(err, f.Close())
}

// maxDeep and maxEntries bound what is looked at of a run. Its files are what programs have left that nobody trusts: what such a run may
// have collected is a hundred thousand entries, and no honest one of them lies so deep.
const (
	maxDeep    = 256 // directories within each other, each of which takes a descriptor meanwhile
	maxEntries = 1_000_000
)

var errImmense = errors.New("it has too much to be measured")

// size is how much the disk holds for a run. Links are not followed, a file with several names is counted once, and what goes away
// meanwhile, or cannot be read, is not counted.
func (h *Host) size(ctx context.Context, id string) (int64, error) {
	dir, err := h.open(id, ".")
	if err != nil && !passing(err) {
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

// measure is how much the disk holds for what is in dir, which it closes. Names are only looked up in the directory that is open: a
// path would lead elsewhere when somebody exchanges a part of it, and be long where it is deep.
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
		if err != nil && passing(err) {
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
				giveBack(dir, name)
			}
			fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
			if err != nil && passing(err) {
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
