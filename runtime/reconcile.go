package runtime

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// What the engine has and what the records say is compared when a supervisor opens, and every minute after: whatever went
// wrong in between, an answer that was lost, a clean-up that failed, is put right while the daemon runs.
//
// Something is wrong only if it was so a round before as well: between two answers of the engine sandboxes are created and
// deleted by those whose business it is.

const reconcileEvery = time.Minute

// oddity is one thing that does not fit; two rounds that find the same one are about the same life of the sandbox.
type oddity struct {
	id, what string
	gone     <-chan struct{} // of that life; nil where no record tells of it
}

const (
	oddUnknown = "nobody knows of it"
	oddRuns    = "it runs, and is recorded as ended"
	oddMissing = "it is recorded as running, and does not exist"
)

// reconciler ends when the supervisor is closed.
func (s *Supervisor) reconciler(ctx context.Context) {
	defer s.watchers.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	tick := time.NewTicker(reconcileEvery)
	defer tick.Stop()
	odd := map[oddity]bool{}
	for {
		select {
		case <-s.closing:
			return
		case <-tick.C:
		}
		round := make(chan struct{})
		go func() {
			defer close(round)
			if now, err := s.reconcile(ctx, odd); err != nil {
				s.log.Warn("records and engine could not be compared", "error", err)
			} else {
				odd = now
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

// reconcile puts right what was wrong before and still is, and returns what is wrong now.
func (s *Supervisor) reconcile(ctx context.Context, before map[oddity]bool) (map[oddity]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	if err := s.saveEnds(); err != nil {
		s.log.Warn("ends of sandboxes are still not on disk", "error", err) // which keeps nothing else from being put right
	}
	list, err := s.engine.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list what runs: %w", err)
	}
	running := make(map[string]bool, len(list))
	for _, st := range list {
		_ = st.Pidfd.Close() // never read or written
		running[st.ID] = true
	}
	leftovers, err := s.engine.Leftovers(ctx)
	if err != nil {
		return nil, fmt.Errorf("list what is left of sandboxes: %w", err)
	}
	var errs []error
	now := map[oddity]bool{}
	for _, o := range s.compare(running, leftovers) {
		if !before[o] {
			now[o] = true
			continue
		}
		s.log.Warn("sandbox does not fit its record", "id", o.id, "what", o.what)
		if err := s.putRight(ctx, o); err != nil {
			errs = append(errs, fmt.Errorf("sandbox %s: %s: %w", o.id, o.what, err))
		}
	}
	return now, errors.Join(errs...)
}

func (s *Supervisor) compare(running map[string]bool, leftovers []string) []oddity {
	s.mu.Lock()
	defer s.mu.Unlock()
	var odd []oddity
	for id := range running {
		switch sb := s.byID[id]; {
		case sb == nil && !s.owned(id):
			odd = append(odd, oddity{id: id, what: oddUnknown})
		case sb != nil && sb.isGone && !sb.starting && sb.deletion == nil:
			odd = append(odd, oddity{id, oddRuns, sb.gone})
		}
	}
	for _, id := range leftovers {
		if !s.owned(id) {
			odd = append(odd, oddity{id: id, what: oddUnknown})
		}
	}
	for id, sb := range s.byID {
		if !running[id] && sb.stands() {
			odd = append(odd, oddity{id, oddMissing, sb.gone})
		}
	}
	return odd
}

// stands says that a sandbox is to live, and that its watcher has no reason to think otherwise. It needs Supervisor.mu.
func (sb *sandbox) stands() bool {
	if !lives(sb.rec.State) || sb.deletion != nil || sb.killing != "" || sb.dismissed {
		return false
	}
	return !sb.over()
}

// owned says that a sandbox of the engine is somebody's. It needs mu.
func (s *Supervisor) owned(id string) bool { return s.byID[id] != nil || s.pool.parked[id] != nil }

func (s *Supervisor) putRight(ctx context.Context, o oddity) error {
	s.mu.Lock()
	sb := s.byID[o.id]
	if o.what == oddUnknown && !s.owned(o.id) {
		s.mu.Unlock()
		if err := ignoreNotFound(s.engine.Delete(ctx, o.id)); err != nil {
			return err
		}
		return s.sockets.remove(o.id)
	}
	runs := o.what == oddRuns && sb != nil && sb.isGone && !sb.starting && sb.deletion == nil
	missing := o.what == oddMissing && sb != nil && sb.stands()
	if !runs && !missing || sb.gone != o.gone {
		s.mu.Unlock()
		return nil // it has been put right by others
	}
	sb.starting = true // nobody starts or deletes it meanwhile
	defer func() {
		s.mu.Lock()
		sb.starting = false
		s.mu.Unlock()
	}()
	if runs {
		s.mu.Unlock()
		return ignoreNotFound(s.engine.Kill(ctx, o.id))
	}
	sb.rec.State, sb.rec.Reason, sb.rec.PID, sb.rec.EndedAt = api.StateLost, "the launcher does not know of it any more", 0, time.Now().UTC()
	s.dismiss(sb)
	sb.markGone()
	s.mu.Unlock()
	<-sb.watched
	<-sb.saved
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	rec, deleting := sb.rec.clone(), sb.deletion != nil
	s.mu.Unlock()
	if deleting { // by Close
		return nil
	}
	return errors.Join(s.sockets.remove(rec.ID), s.putEnd(sb, &rec))
}
