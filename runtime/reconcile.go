package runtime

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// The sandboxes of the engine and the records are compared when a supervisor opens, and every
// minute after. Faults in between, such as a lost answer or a failed clean-up, are repaired while
// the daemon runs.
//
// A mismatch is repaired only if the round before found it as well: between two answers of the
// engine, sandboxes are created and deleted by requests.

const reconcileEvery = time.Minute

// mismatch is one difference between engine and records; two rounds that find an equal one are
// about one life of the sandbox.
type mismatch struct {
	id, what string
	life     *life // nil if there is no record
}

const (
	mismatchUnknown = "it has no record"
	mismatchRuns    = "it runs, and is recorded as ended"
	mismatchMissing = "it is recorded as running, and does not exist"
)

// reconciler ends when the supervisor is closed.
func (s *Supervisor) reconciler(ctx context.Context) {
	defer s.watchers.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	tick := time.NewTicker(reconcileEvery)
	defer tick.Stop()
	found := map[mismatch]bool{}
	for {
		select {
		case <-s.closing:
			return
		case <-tick.C:
		}
		round := make(chan struct{})
		go func() {
			defer close(round)
			if now, err := s.reconcile(ctx, found); err != nil {
				s.log.Warn("records and engine could not be compared", "error", err)
			} else {
				found = now
			}
		}()
		select {
		case <-round:
		case <-s.closing:
			cancel()
			<-round
			return
		}
	}
}

// reconcile repairs the mismatches that were found before and still are, and returns the new ones.
func (s *Supervisor) reconcile(ctx context.Context, before map[mismatch]bool) (map[mismatch]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	if err := s.saveEnds(); err != nil { // no obstacle to the rest
		s.log.Warn("ends of sandboxes are still not on disk", "error", err)
	}
	running, leftovers, err := s.survey(ctx)
	for _, st := range running {
		_ = st.Pidfd.Close() // never read or written
	}
	if err != nil {
		return nil, err
	}
	var errs []error
	now := map[mismatch]bool{}
	for _, m := range s.compare(running, leftovers) {
		if !before[m] {
			now[m] = true
			continue
		}
		s.log.Warn("sandbox does not fit its record", "id", m.id, "what", m.what)
		if err := s.repair(ctx, m); err != nil {
			errs = append(errs, fmt.Errorf("sandbox %s: %s: %w", m.id, m.what, err))
		}
	}
	return now, errors.Join(errs...)
}

func (s *Supervisor) compare(running map[string]*Started, leftovers []string) []mismatch {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []mismatch
	for id := range running {
		switch sb := s.byID[id]; {
		case sb == nil && !s.owned(id):
			found = append(found, mismatch{id: id, what: mismatchUnknown})
		case sb != nil && sb.phase == phaseEnded:
			found = append(found, mismatch{id, mismatchRuns, sb.life})
		}
	}
	for _, id := range leftovers {
		if !s.owned(id) {
			found = append(found, mismatch{id: id, what: mismatchUnknown})
		}
	}
	for id, sb := range s.byID {
		if running[id] == nil && sb.shouldRun() {
			found = append(found, mismatch{id, mismatchMissing, sb.life})
		}
	}
	return found
}

// shouldRun reports whether a sandbox is to live, and its watcher has no reason to think otherwise.
// It needs Supervisor.mu.
func (sb *sandbox) shouldRun() bool {
	return sb.phase.live() && !sb.life.dismissed && !sb.life.processesGone()
}

// owned reports whether the supervisor knows a sandbox of the engine. It needs mu.
func (s *Supervisor) owned(id string) bool { return s.byID[id] != nil || s.pool.warm[id] != nil }

func (s *Supervisor) repair(ctx context.Context, m mismatch) error {
	s.mu.Lock()
	sb := s.byID[m.id]
	if m.what == mismatchUnknown && !s.owned(m.id) {
		s.mu.Unlock()
		if err := ignoreNotFound(s.engine.Delete(ctx, m.id)); err != nil {
			return err
		}
		return s.sockets.remove(m.id)
	}
	runs := m.what == mismatchRuns && sb != nil && sb.phase == phaseEnded
	missing := m.what == mismatchMissing && sb != nil && sb.shouldRun()
	if !runs && !missing || sb.life != m.life {
		s.mu.Unlock()
		return nil // an operation has repaired it meanwhile
	}
	defer func() {
		s.mu.Lock()
		s.enterIf(sb, phaseStarting, phaseEnded)
		s.mu.Unlock()
	}()
	if runs {
		s.enter(sb, phaseStarting) // keeps starts and deletions out meanwhile
		s.mu.Unlock()
		return ignoreNotFound(s.engine.Kill(ctx, m.id))
	}
	sb.rec.State, sb.rec.Reason, sb.rec.PID, sb.rec.EndedAt = api.StateLost, "the launcher does not know of it any more", 0, s.now().UTC()
	sb.life.dismiss()
	s.markEnded(sb)
	s.tell(sb, api.Event{Action: api.ActionStopped})
	s.enter(sb, phaseStarting)
	s.mu.Unlock()
	<-m.life.watched
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	rec, deleting := sb.rec.clone(), sb.phase == phaseDeleting
	s.mu.Unlock()
	if deleting { // by Close
		return nil
	}
	return errors.Join(s.sockets.remove(rec.ID), s.putEnd(sb, &rec))
}
