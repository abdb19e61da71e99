package runtime

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// Delete ends the sandbox with this id or name, and removes everything of it. If several callers
// delete one sandbox, all wait for one deletion and get its outcome. A deletion that began goes on
// although ctx ends; one that failed may be repeated.
func (s *Supervisor) Delete(ctx context.Context, ref string) error {
	return s.deleteIf(ctx, ref, func(*sandbox) error { return nil })
}

// DeleteEnded deletes the sandbox of a record if it has ended and has not been started since.
// Otherwise it fails with ErrNotEnded. It does so too if its files were used within the last
// unread: a read for a snapshot or a fork, which the deletion would cut off, a rollback, or an
// attempt to start it.
func (s *Supervisor) DeleteEnded(ctx context.Context, rec *Record, unread time.Duration) error {
	return s.deleteIf(ctx, rec.ID, func(sb *sandbox) error {
		switch {
		case !sb.life.ended() || sb.phase == phaseStarting || sb.rec.Life != rec.Life:
			return fmt.Errorf("%w: %s (%s) has been started again", ErrNotEnded, sb.rec.Name, sb.rec.ID)
		case !sb.filesUsed.IsZero() && s.now().Sub(sb.filesUsed) < unread:
			return fmt.Errorf("%w: %s (%s) is in use", ErrNotEnded, sb.rec.Name, sb.rec.ID)
		}
		return nil
	})
}

// deleteIf deletes a sandbox unless check, which is called with mu, refuses. It waits for a start
// under way: a restart by the sandbox's policy would make a client's request fail by chance.
func (s *Supervisor) deleteIf(ctx context.Context, ref string, check func(*sandbox) error) error {
	s.mu.Lock()
	sb, err := s.deletable(ref, check)
	for err == nil && sb.phase == phaseStarting {
		id, started := sb.rec.ID, sb.started
		s.mu.Unlock()
		select {
		case <-started:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		s.mu.Lock()
		sb, err = s.deletable(id, check)
	}
	if err != nil {
		s.mu.Unlock()
		return err
	}
	if d := sb.deletion; d != nil {
		s.mu.Unlock()
		select {
		case <-d.done:
			return d.err
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if sb.phase == phaseCreating {
		s.mu.Unlock()
		return fmt.Errorf("%w: %s is still being created", ErrState, sb.rec.Name)
	}
	d := s.beginDeletion(sb)
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	d.err = s.delete(ctx, sb)
	close(d.done)
	return d.err
}

// deletable finds a sandbox for deleteIf. It needs mu.
func (s *Supervisor) deletable(ref string, check func(*sandbox) error) (*sandbox, error) {
	if s.closed {
		return nil, ErrClosed
	}
	sb, err := s.find(ref)
	if err == nil {
		err = check(sb)
	}
	return sb, err
}

// beginDeletion needs mu.
func (s *Supervisor) beginDeletion(sb *sandbox) *deletion {
	if sb.deletion == nil {
		close(sb.filesGone)
		s.enter(sb, phaseDeleting)
	}
	sb.deletion = &deletion{done: make(chan struct{})}
	return sb.deletion
}

// delete removes the sandbox, which is in phaseDeleting. If it fails, phase and record give the
// sandbox's present state.
func (s *Supervisor) delete(ctx context.Context, sb *sandbox) error {
	err := s.remove(ctx, sb)
	if err == nil {
		return nil
	}
	// The phase first: a watcher that has still seen the deletion has updated sb.rec before, and any
	// other writes it itself.
	s.mu.Lock()
	sb.deletion, sb.filesGone = nil, make(chan struct{})
	if sb.untold {
		sb.untold = false
		s.tell(sb, api.Event{Action: api.ActionStopped})
	}
	switch {
	case sb.life.ended():
		s.enter(sb, phaseEnded)
	case sb.endReason != "":
		s.enter(sb, phaseEnding)
	default:
		s.enter(sb, phaseOf(sb.rec.State))
	}
	s.mu.Unlock()
	return errors.Join(err, s.restore(sb))
}

func (s *Supervisor) remove(ctx context.Context, sb *sandbox) error {
	id, l := sb.rec.ID, sb.life
	// The record goes while the engine works: the next daemon removes the traces of a crash, for which
	// there is no record.
	removed := make(chan error, 1)
	go func() {
		sb.write.Lock() // an update that is under way writes before; none writes afterwards
		defer sb.write.Unlock()
		removed <- s.records.remove(id)
	}()
	err := ignoreNotFound(s.engine.Delete(ctx, id))
	if err := errors.Join(err, <-removed); err != nil {
		return fmt.Errorf("delete sandbox %s: %w", id, err)
	}
	if err := s.sockets.remove(id); err != nil {
		return fmt.Errorf("delete sandbox %s: %w", id, err)
	}
	if l.watched != nil {
		s.mu.Lock()
		l.dismiss()
		s.mu.Unlock()
		<-l.watched
	}
	s.forget(sb)
	s.log.Info("sandbox deleted", "id", id, "name", sb.rec.Name)
	return nil
}

// restore writes the record of a sandbox that could not be deleted.
func (s *Supervisor) restore(sb *sandbox) error {
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	rec, again := sb.rec.clone(), sb.phase == phaseDeleting
	s.mu.Unlock()
	if again {
		return nil // the next deletion has its outcome
	}
	return s.records.put(&rec)
}
