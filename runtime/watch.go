package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// The life of a running sandbox is watched by one goroutine each, which waits for one descriptor: the pidfd of its init.
// The read deadline of that descriptor is the timer for both the deadline and the idle timeout, so there is one wait and
// no second goroutine to stop.

// arm sets when the watcher wakes up next. It needs mu.
func (s *Supervisor) arm(sb *sandbox) {
	if sb.pidfd == nil || sb.isGone || sb.killing != "" || sb.dismissed {
		return
	}
	at := sb.rec.Deadline
	if idle := sb.idleAt(); sb.canIdle() && idle.Before(at) {
		at = idle
	}
	// Only a closed pidfd refuses a deadline, and then nobody waits.
	_ = sb.pidfd.SetReadDeadline(at)
}

// dismiss makes the watcher end, whatever becomes of the sandbox. It needs mu.
func (s *Supervisor) dismiss(sb *sandbox) {
	if sb.pidfd == nil {
		return
	}
	sb.dismissed = true
	// Not Close: the poller's error for it cannot be told from others.
	_ = sb.pidfd.SetReadDeadline(time.Unix(1, 0)) // fails only where the watcher has ended
}

// canIdle says that the idle time runs. That of a paused sandbox does not: nobody can use it.
func (sb *sandbox) canIdle() bool { return sb.active == 0 && sb.rec.State == api.StateRunning }

func (sb *sandbox) idleAt() time.Time { return sb.idleSince.Add(sb.idleTimeout()) }

func (sb *sandbox) idleTimeout() time.Duration {
	return time.Duration(sb.rec.IdleTimeout * float64(time.Second))
}

// watch returns when the sandbox has ended or the watcher is dismissed.
func (s *Supervisor) watch(ctx context.Context, sb *sandbox) {
	defer s.watchers.Done()
	defer close(sb.watched)
	defer func() { _ = sb.pidfd.Close() }() // never read or written
	for {
		err := waitReadable(sb.pidfd)
		switch {
		case err == nil:
			s.ended(ctx, sb)
			return
		case errors.Is(err, os.ErrDeadlineExceeded):
			if s.expire(ctx, sb) {
				continue
			}
			if s.overtaken(sb) {
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

// overtaken says that the sandbox has ended of its being killed, and that its watcher was dismissed before he saw it: nobody
// else would say why, and the next daemon would take it for lost.
func (s *Supervisor) overtaken(sb *sandbox) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return sb.killing != "" && !sb.isGone && sb.deletion == nil && sb.over()
}

// over says that the sandbox has ended, or that its watcher has. It needs mu.
func (sb *sandbox) over() bool {
	conn, err := sb.pidfd.SyscallConn()
	if err != nil {
		return true // closed by its watcher
	}
	ended := true
	err = conn.Control(func(fd uintptr) { ended, _ = readable(int(fd)) })
	return err != nil || ended
}

// expire kills the sandbox if its time has come, and sets the next time to look if not. It returns false to a watcher
// that has been dismissed.
func (s *Supervisor) expire(ctx context.Context, sb *sandbox) bool {
	now := time.Now()
	s.mu.Lock()
	switch {
	case sb.dismissed:
		s.mu.Unlock()
		return false
	case sb.killing != "": // once more
	case !now.Before(sb.rec.Deadline):
		sb.killing = "deadline reached"
	case sb.canIdle() && !now.Before(sb.idleAt()):
		sb.killing = fmt.Sprintf("idle for %s", sb.idleTimeout())
	default:
		s.arm(sb)
		s.mu.Unlock()
		return true
	}
	reason := sb.killing
	_ = sb.pidfd.SetReadDeadline(now.Add(killRetry)) // as in arm
	s.mu.Unlock()

	s.log.Info("sandbox is killed", "id", sb.rec.ID, "reason", reason)
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	if err := ignoreNotFound(s.engine.Kill(ctx, sb.rec.ID)); err != nil {
		s.log.Error("sandbox could not be killed, trying again", "id", sb.rec.ID, "error", err)
	}
	return true
}

// ended records why the sandbox's processes are gone.
func (s *Supervisor) ended(ctx context.Context, sb *sandbox) {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	s.mu.Lock()
	deleting := sb.deletion != nil
	s.mu.Unlock()
	var oom int
	var oomErr error
	if !deleting { // whose engine is busy, and nobody is told the reason
		oom, oomErr = s.engine.OOMKills(ctx, sb.rec.ID)
	}

	s.mu.Lock()
	deleting = sb.deletion != nil
	state, reason := api.StateStopped, sb.killing
	switch {
	case reason != "":
	case deleting:
		reason = "its deletion had begun"
	case !time.Now().Before(sb.rec.Deadline):
		reason = "deadline reached" // the launcher was first
	case errors.Is(oomErr, ErrUnavailable), errors.Is(oomErr, ErrNotFound): // gone, or replaced by a new one that knows nothing
		state, reason = api.StateLost, "the launcher that held it died"
	case oom > 0 && sb.rec.Limits.OOMGroup:
		reason = "out of memory: the kernel ended all its processes"
	case oom > 0:
		reason = fmt.Sprintf("its init ended (processes killed for want of memory: %d)", oom)
	default:
		reason = "its init ended"
	}
	sb.rec.State, sb.rec.Reason, sb.rec.PID, sb.rec.EndedAt = state, reason, 0, time.Now().UTC()
	sb.markGone()
	s.mu.Unlock()

	if deleting {
		return // the record is about to be removed
	}
	<-sb.saved
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	rec := sb.rec.clone() // with what an update has changed meanwhile
	deleting = sb.deletion != nil
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

// putEnd writes the record of a sandbox that has ended. Where that fails (the disk is full) the reconciler tries again: else
// how it ended would be known until the daemon ends, and no longer. It needs sandbox.write.
func (s *Supervisor) putEnd(sb *sandbox, rec *Record) error {
	err := s.records.put(rec)
	s.mu.Lock()
	sb.unsaved = err != nil
	s.mu.Unlock()
	return err
}

// saveEnds writes the records of sandboxes that have ended and that the disk has refused before.
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
	rec, still := sb.rec.clone(), sb.unsaved && sb.deletion == nil
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
