package runtime

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// adopt compares the records with the sandboxes that the engine runs. Apart from the watchers that
// it starts, no other goroutine knows s yet.
func (s *Supervisor) adopt(ctx context.Context) error {
	recs, err := s.records.all()
	if err != nil {
		return err
	}
	running, leftovers, err := s.survey(ctx)
	// Sandboxes that no record claims are closed at the end, on every path.
	defer func() {
		for _, st := range running {
			_ = st.Pidfd.Close() // never read or written
		}
	}()
	if err != nil {
		return err
	}
	for _, rec := range recs {
		st := running[rec.ID]
		switch {
		case rec.Ephemeral:
			removed, err := s.removeUnanswered(ctx, rec, "sandbox of a request that was cut off")
			if err != nil {
				return err
			}
			if !removed {
				continue
			}
			if st != nil {
				_ = st.Pidfd.Close() // never read or written
				delete(running, rec.ID)
			}
			leftovers = slices.DeleteFunc(leftovers, func(id string) bool { return id == rec.ID })
			continue
		case rec.State == api.StateCreating && st == nil && !slices.Contains(leftovers, rec.ID):
			// Its creation came to nothing and was never answered, so no client knows of it. One that has
			// left something may have been answered, and is listed like any other that has ended.
			if _, err := s.removeUnanswered(ctx, rec, "half-made sandbox"); err != nil {
				return err
			}
			continue
		case st != nil && s.sockets.exists(rec.ID):
			delete(running, rec.ID)
			if err := s.adoptRunning(ctx, rec, st); err != nil {
				return err
			}
			continue
		case st != nil:
			// It runs, but cannot be reached: a cleaner of temporary files took its socket.
			if err := s.engine.Kill(ctx, rec.ID); err != nil && !errors.Is(err, ErrNotFound) {
				return fmt.Errorf("kill unreachable sandbox %s: %w", rec.ID, err)
			}
			rec.State, rec.Reason = api.StateLost, "its control socket was removed while no daemon was running"
			_ = st.Pidfd.Close() // never read or written
			delete(running, rec.ID)
		case rec.State == api.StateStopped || rec.State == api.StateLost:
			// It had ended before.
		case s.now().After(rec.Deadline):
			rec.State, rec.Reason = api.StateStopped, reasonDeadline+" while no daemon was running"
		default:
			rec.State, rec.Reason = api.StateLost, reasonUnseen
			if exceeded := s.excess(ctx, rec.ID); exceeded != "" {
				rec.State, rec.Reason = api.StateStopped, exceeded
			}
		}
		s.adoptEnded(rec)
	}
	s.deleteStrays(ctx, running, leftovers)
	return s.sockets.removeStale(func(id string) bool {
		s.mu.Lock() // an adopted sandbox may be ending already
		defer s.mu.Unlock()
		sb := s.byID[id]
		return sb != nil && lives(sb.rec.State)
	})
}

// survey lists the sandboxes that the engine runs, by their ids, and those that have left
// something. The caller closes the pidfds, also after an error.
func (s *Supervisor) survey(ctx context.Context) (running map[string]*Started, leftovers []string, err error) {
	list, err := s.engine.List(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("list running sandboxes: %w", err)
	}
	running = make(map[string]*Started, len(list))
	for _, st := range list {
		running[st.ID] = st
	}
	if leftovers, err = s.engine.Leftovers(ctx); err != nil {
		return running, nil, fmt.Errorf("list leftovers of sandboxes: %w", err)
	}
	return running, leftovers, nil
}

// removeUnanswered deletes a sandbox that no client knows of, and its record. If the engine
// refuses, the sandbox is treated as one without a record, and the record goes when the next daemon
// starts.
func (s *Supervisor) removeUnanswered(ctx context.Context, rec *Record, what string) (removed bool, err error) {
	if err := ignoreNotFound(s.engine.Delete(ctx, rec.ID)); err != nil {
		s.log.Error(what+" could not be deleted", "id", rec.ID, "error", err)
		return false, nil
	}
	if err := s.records.remove(rec.ID); err != nil {
		return false, err
	}
	s.log.Info(what+" removed", "id", rec.ID)
	return true, nil
}

// adoptRunning watches a sandbox that runs, whatever its record says: a client was told that it is
// created, started, paused or resumed, or was about to be.
func (s *Supervisor) adoptRunning(ctx context.Context, rec *Record, st *Started) error {
	var action api.EventAction // of a change that the last daemon did not come to tell
	if state := liveState(st); rec.State != state {
		switch {
		case state == api.StatePaused:
			action = api.ActionPaused
		case rec.State == api.StatePaused:
			action = api.ActionResumed
		case !lives(rec.State) && rec.State != api.StateCreating:
			action = api.ActionStarted
		}
		if !lives(rec.State) && rec.State != api.StateCreating { // the exit on record is of an earlier life
			rec.Exit, rec.ExitBefore, rec.Idle, rec.Unstarted, rec.Health = nil, nil, false, false, freshHealth(&rec.Settings, false, s.now())
			rec.StartedAt = s.now().UTC() // nothing has its time
			rec.Life++
		}
		if rec.State == api.StateCreating {
			rec.StartedAt = rec.CreatedAt
		}
		rec.State, rec.Reason, rec.Fresh, rec.EndedAt = state, "", false, time.Time{}
		if err := s.records.put(rec); err != nil {
			return errors.Join(err, st.Pidfd.Close())
		}
	}
	// The engine may have applied an update that the crash kept from the record. The engine is right;
	// the next write of the record has it.
	if !st.Deadline.IsZero() {
		rec.Limits, rec.Deadline = st.Limits, st.Deadline
	}
	rec.PID = PIDOf(st.Pidfd)
	sb := s.insert(*rec, phaseCreating)
	if err := s.run(ctx, sb, rec, st, action); err != nil {
		return fmt.Errorf("watch sandbox %s: %w", rec.ID, err)
	}
	s.log.Info("sandbox adopted", "id", rec.ID, "name", rec.Name)
	return nil
}

// adoptEnded keeps the record of a sandbox that does not run.
func (s *Supervisor) adoptEnded(rec *Record) {
	rec.PID = 0
	unseen := rec.EndedAt.IsZero()
	if unseen { // clients can read of its end from now on
		rec.EndedAt = s.now().UTC()
	}
	sb := s.insert(*rec, phaseEnded)
	sb.life.end()
	if unseen {
		s.tell(sb, api.Event{Action: api.ActionStopped})
	}
	if err := s.putEnd(sb, &sb.rec); err != nil { // a full disk is no reason to run no sandbox
		s.log.Error("end of sandbox is not on disk, trying again", "id", rec.ID, "error", err)
	}
}

// deleteStrays deletes the sandboxes and leftovers that no record claims: a crash of daemon and
// launcher together can leave those of a creation whose record was not yet written. One that cannot
// be deleted does not keep the daemon from starting: the reconciler tries again.
func (s *Supervisor) deleteStrays(ctx context.Context, running map[string]*Started, leftovers []string) {
	stray := func(id, what string) {
		if err := ignoreNotFound(s.engine.Delete(ctx, id)); err != nil {
			s.log.Error(what+" could not be deleted, trying again", "id", id, "error", err)
			return
		}
		s.log.Warn(what+" deleted", "id", id)
	}
	for id := range running {
		stray(id, "sandbox without a record")
	}
	for _, id := range leftovers {
		if s.byID[id] == nil { // else it has ended, and its user has not deleted it
			stray(id, "leftover of a sandbox without a record")
		}
	}
}
