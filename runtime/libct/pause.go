package libct

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
)

// How a sandbox is paused, its init included: a request that is under way must not make a process
// after the others stand.
//
// Where it has a cgroup the kernel's freezer does it, and nothing inside can tell or undo it.
//
// Elsewhere every process gets SIGSTOP, the init first, and is checked until all stand. A process
// with a pending SIGSTOP cannot fork any more, so rounds are repeated until two find every process
// stopped. Processes that were stopped before are left alone at the end. It is a weaker pause: a
// parent sees that its child has stopped, and a program can arrange for SIGCONT to reach it (a
// timer, a parent's death), and go on.

// pauseTimeout bounds the wait for a sandbox to stand still. A process in an uninterruptible sleep
// can exceed it.
const pauseTimeout = 10 * time.Second

// pause holds the means to make a paused sandbox go on.
type pause struct {
	thaw   func() error // of the freezer; nil without a cgroup
	before map[int]bool // stopped before
}

// Pause implements runtime.Engine.
func (e *Engine) Pause(ctx context.Context, id string) error {
	in, err := e.find(ctx, id)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, pauseTimeout)
	defer cancel()
	in.pausing.Lock()
	defer in.pausing.Unlock()
	if in.hasEnded() {
		return fmt.Errorf("pause sandbox %s: %w", id, errHasEnded)
	}
	if in.isPaused(e) {
		return nil
	}
	var p pause
	if e.host.Cgroup && e.host.hasFile("cgroup.freeze") {
		p.thaw, _, err = e.freezer.Freeze(ctx, filepath.Join(launcher.CgroupDir, id))
	} else {
		p.before, err = in.halt(ctx)
	}
	if err == nil && in.hasEnded() {
		err = errHasEnded
		if p.thaw != nil {
			err = errors.Join(err, p.thaw())
		}
	}
	if err != nil {
		return fmt.Errorf("pause sandbox %s: %w", id, in.blame(err))
	}
	e.mu.Lock()
	in.paused = &p
	e.mu.Unlock()
	return nil
}

func (in *instance) isPaused(e *Engine) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return in.paused != nil
}

// Resume implements runtime.Engine.
func (e *Engine) Resume(ctx context.Context, id string) error {
	in, err := e.find(ctx, id)
	if err != nil {
		return err
	}
	if in.hasEnded() {
		return fmt.Errorf("resume sandbox %s: %w", id, errHasEnded)
	}
	if err := e.resume(in); err != nil {
		return fmt.Errorf("resume sandbox %s: %w", id, in.blame(err))
	}
	return nil
}

var errHasEnded = fmt.Errorf("it has ended: %w", runtime.ErrNotFound)

// blame reports whether an error is due to the sandbox's just ending: the kernel shows little
// of a process then.
func (in *instance) blame(err error) error {
	select {
	case <-in.ended:
		return errHasEnded
	case <-time.After(time.Second):
		return err
	}
}

// resume lets a paused sandbox go on. For one that has ended it gives back the pause's resources.
func (e *Engine) resume(in *instance) error {
	in.pausing.Lock()
	defer in.pausing.Unlock()
	e.mu.Lock()
	p := in.paused
	e.mu.Unlock()
	switch {
	case p == nil:
		return nil
	case p.thaw != nil:
		if err := p.thaw(); err != nil {
			return err
		}
	case !in.hasEnded():
		if err := in.goOn(p.before); err != nil {
			return err
		}
	}
	e.mu.Lock()
	in.paused = nil
	e.mu.Unlock()
	return nil
}

// halt stops every process by SIGSTOP and returns when all stand, with those that had been stopped
// before. On error they go on.
func (in *instance) halt(ctx context.Context) (before map[int]bool, err error) {
	t, err := in.tree()
	if err != nil {
		return nil, err
	}
	defer t.close()
	before = map[int]bool{}
	sent := map[int]bool{}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.goOn(in, before))
		}
	}()
	if err := signal(in.pidfd, unix.SIGSTOP); err != nil {
		return nil, fmt.Errorf("stop its init: %w", err)
	}
	for clean := 0; clean < 2; {
		stands := standing(in.pid, true)
		err := t.each(func(pid, pidfd int) {
			switch is := standing(pid, sent[pid]); {
			case is && !sent[pid]:
				before[pid] = true
			case !is:
				stands, sent[pid] = false, true
				delete(before, pid) // another process has woken it since
				_ = unix.PidfdSendSignal(pidfd, unix.SIGSTOP, nil, 0)
			}
			_ = unix.Close(pidfd)
		})
		if err != nil {
			return nil, err
		}
		if clean++; !stands {
			clean = 0
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for its processes to stop: %w", ctx.Err())
		}
	}
	return before, nil
}

// standing reports whether no thread of a process runs its program before a signal wakes it. One
// that the kernel keeps from running, for a disk or until its child executes, stands if a SIGSTOP
// awaits it. A process that has ended stands.
func standing(pid int, sent bool) bool {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return true
	}
	stands := "TtZX"
	if sent {
		stands += "D"
	}
	for _, task := range tasks {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/stat", pid, task.Name()))
		if err != nil {
			continue // it has ended
		}
		// "pid (name) state ...": a name may hold anything but is not followed by another parenthesis.
		end := strings.LastIndexByte(string(stat), ')')
		if end < 0 || len(stat) < end+3 || !strings.ContainsRune(stands, rune(stat[end+2])) {
			return false
		}
	}
	return true
}

// goOn wakes every process but those that had been stopped before, and the init.
func (in *instance) goOn(before map[int]bool) error {
	t, err := in.tree()
	if err != nil {
		return err
	}
	defer t.close()
	return t.goOn(in, before)
}

func (t *tree) goOn(in *instance, before map[int]bool) error {
	err := t.each(func(pid, pidfd int) {
		if !before[pid] {
			_ = unix.PidfdSendSignal(pidfd, unix.SIGCONT, nil, 0) // it may have been killed
		}
		_ = unix.Close(pidfd)
	})
	return errors.Join(err, signal(in.pidfd, unix.SIGCONT))
}
