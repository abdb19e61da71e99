package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// Each life of a sandbox is watched by one goroutine, which waits for one descriptor: the pidfd of
// its init. The read deadline of that descriptor is the timer of both the deadline and the idle
// timeout, so there is one wait and no second goroutine to stop.

// wakeAt returns the real time at which the supervisor's clock will show at: descriptors know no
// other clock.
func (s *Supervisor) wakeAt(at time.Time) time.Time { return time.Now().Add(at.Sub(s.now())) }

// arm sets the next time at which the watcher wakes up. It needs mu.
func (s *Supervisor) arm(sb *sandbox) {
	l := sb.life
	if l.pidfd == nil || l.ended() || l.dismissed || sb.endReason != "" {
		return
	}
	at := sb.rec.Deadline
	if idle := sb.idleAt(); sb.canIdle() && idle.Before(at) {
		at = idle
	}
	l.wake(s.wakeAt(at))
}

// wake makes the watcher wake up at a time of the real clock. It needs Supervisor.mu.
func (l *life) wake(at time.Time) {
	_ = l.pidfd.SetReadDeadline(at) // only a closed pidfd refuses, and then its watcher has returned
}

// dismiss makes the watcher return, whatever becomes of the sandbox. It needs Supervisor.mu.
func (l *life) dismiss() {
	if l.pidfd == nil {
		return
	}
	l.dismissed = true
	l.wake(time.Unix(1, 0)) // not Close: the poller's error for it cannot be told from others
}

// retryKill has the watcher kill a sandbox again whose end an operation could not bring about.
func (s *Supervisor) retryKill(l *life) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !l.ended() {
		l.wake(time.Now())
	}
}

// canIdle reports whether the idle time runs. A paused sandbox cannot be used, so its idle time
// does not.
func (sb *sandbox) canIdle() bool { return sb.leases == 0 && sb.rec.State == api.StateRunning }

func (sb *sandbox) idleAt() time.Time { return sb.idleSince.Add(sb.idleTimeout()) }

func (sb *sandbox) idleTimeout() time.Duration {
	return time.Duration(sb.rec.IdleTimeout * float64(time.Second))
}

// watch returns when the life has ended or the watcher is dismissed.
func (s *Supervisor) watch(ctx context.Context, sb *sandbox, l *life) {
	defer s.watchers.Done()
	defer close(l.watched)
	defer func() { _ = l.pidfd.Close() }() // never read or written
	for {
		err := waitReadable(l.pidfd)
		switch {
		case err == nil:
			s.ended(ctx, sb)
			return
		case errors.Is(err, os.ErrDeadlineExceeded):
			if s.expire(ctx, sb, l) {
				continue
			}
			if s.overtaken(sb, l) {
				s.ended(ctx, sb)
			}
			return
		default:
			// Cannot happen with a pidfd. The sandbox still has the launcher's own timer.
			s.log.Error("sandbox is no longer watched", "id", sb.rec.ID, "error", err)
			return
		}
	}
}

// overtaken reports whether the sandbox was killed and its watcher was dismissed before it saw the
// end. No other goroutine records why it ended, and the next daemon would take it for lost.
func (s *Supervisor) overtaken(sb *sandbox, l *life) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return sb.phase == phaseEnding && !l.ended() && l.processesGone()
}

// expire kills the sandbox if its time has come, and sets the next time to look if not. It returns
// false if the watcher has been dismissed.
func (s *Supervisor) expire(ctx context.Context, sb *sandbox, l *life) bool {
	now := s.now()
	s.mu.Lock()
	switch {
	case l.dismissed:
		s.mu.Unlock()
		return false
	case sb.endReason != "": // once more
	case !now.Before(sb.rec.Deadline):
		s.beginEnd(sb, reasonDeadline)
	case sb.canIdle() && !now.Before(sb.idleAt()) && s.isShared(sb):
		sb.idleSince = now // its guests use it: they share its network
		s.arm(sb)
		s.mu.Unlock()
		return true
	case sb.canIdle() && !now.Before(sb.idleAt()):
		s.beginEnd(sb, ReasonIdle+sb.idleTimeout().String())
	default:
		s.arm(sb)
		s.mu.Unlock()
		return true
	}
	reason := sb.endReason
	l.wake(time.Now().Add(killRetry))
	s.mu.Unlock()

	s.log.Info("sandbox is killed", "id", sb.rec.ID, "reason", reason)
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	if err := ignoreNotFound(s.engine.Kill(ctx, sb.rec.ID)); err != nil {
		s.log.Error("sandbox could not be killed, trying again", "id", sb.rec.ID, "error", err)
	}
	return true
}

// ended records why the sandbox's processes are gone. Its watcher calls it, once a life.
func (s *Supervisor) ended(ctx context.Context, sb *sandbox) {
	s.mu.Lock()
	deleting := sb.phase == phaseDeleting
	s.mu.Unlock()
	var oom int
	var oomErr error
	var exceeded string
	if !deleting { // else the engine is busy with it, and no client reads the reason
		// A launcher that is about to die answers nothing, on a busy host for long.
		for range endTries {
			if oom, oomErr = s.countKills(ctx, sb.rec.ID); !errors.Is(oomErr, context.DeadlineExceeded) {
				break
			}
		}
		exceeded = s.excess(ctx, sb.rec.ID)
	}

	s.mu.Lock()
	deleting = sb.phase == phaseDeleting
	state, reason := api.StateStopped, sb.endReason
	switch {
	case reason != "":
	case deleting:
		reason = "its deletion had begun"
	case !s.now().Before(sb.rec.Deadline):
		reason = reasonDeadline // the launcher was first
	case errors.Is(oomErr, ErrUnavailable), errors.Is(oomErr, ErrNotFound): // gone, or replaced by a new one that knows nothing
		state, reason = api.StateLost, "the launcher that held it died"
	case exceeded != "":
		reason = exceeded
	case oom > 0 && sb.rec.Limits.OOMGroup:
		reason = "out of memory: the kernel ended all its processes"
	case oom > 0:
		reason = fmt.Sprintf("its init ended (processes killed for want of memory: %d)", oom)
	default:
		reason = "its init ended"
	}
	sb.rec.State, sb.rec.Reason, sb.rec.PID, sb.rec.EndedAt = state, reason, 0, s.now().UTC()
	if sb.rec.Idle && sb.rec.Exit == nil {
		sb.rec.Exit = sb.rec.ExitBefore
	}
	if !sb.life.ended() {
		if sb.untold = deleting; !deleting {
			s.tell(sb, api.Event{Action: api.ActionStopped})
		}
	}
	s.markEnded(sb)
	s.mu.Unlock()

	if deleting {
		return // the record is about to be removed
	}
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	rec := sb.rec.clone() // with the changes of an update meanwhile
	deleting = sb.phase == phaseDeleting
	s.mu.Unlock()
	if deleting {
		return // a deletion that fails writes it
	}
	s.log.Info("sandbox ended", "id", rec.ID, "state", state, "reason", reason)
	if err := s.sockets.remove(rec.ID); err != nil {
		s.log.Error("control socket is left", "id", rec.ID, "error", err)
	}
	if err := s.putEnd(sb, &rec); err != nil {
		s.log.Error("end of sandbox is not on disk, trying again", "id", rec.ID, "error", err)
	}
}

// endTries bounds the questions about one end, of undoTimeout each.
const endTries = 10

func (s *Supervisor) countKills(ctx context.Context, id string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	return s.engine.OOMKills(ctx, id)
}

// excess returns the reason why the engine has ended a sandbox for its use of disk or memory; empty
// if it has not, or cannot tell.
func (s *Supervisor) excess(ctx context.Context, id string) string {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	st, err := s.engine.Stats(ctx, id)
	switch {
	case err != nil:
	case st.Disk != nil && st.Disk.Exceeded != "":
		return ReasonDisk + st.Disk.Exceeded
	case st.Memory != nil && st.Memory.Exceeded != "":
		return ReasonMemory + st.Memory.Exceeded
	}
	return ""
}

// putEnd writes the record of a sandbox that has ended. If that fails (the disk is full), the
// reconciler tries again: else the end would be known until the daemon exits, and no longer. It
// needs sandbox.write.
func (s *Supervisor) putEnd(sb *sandbox, rec *Record) error {
	err := s.records.put(rec)
	s.mu.Lock()
	sb.unsaved = err != nil
	s.mu.Unlock()
	return err
}

// saveEnds writes the records of ended sandboxes that the disk has refused before.
func (s *Supervisor) saveEnds() error {
	s.mu.Lock()
	var late []*sandbox
	for _, sb := range s.byID {
		if sb.unsaved {
			late = append(late, sb)
		}
	}
	s.mu.Unlock()
	var errs []error
	for _, sb := range late {
		errs = append(errs, s.saveEnd(sb))
	}
	return errors.Join(errs...)
}

func (s *Supervisor) saveEnd(sb *sandbox) error {
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	rec, still := sb.rec.clone(), sb.unsaved && sb.phase != phaseDeleting
	s.mu.Unlock()
	if !still {
		return nil
	}
	if err := s.putEnd(sb, &rec); err != nil {
		return err
	}
	s.log.Info("end of sandbox is on disk at last", "id", rec.ID)
	return nil
}
