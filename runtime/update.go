package runtime

import (
	"context"
	"errors"
	"fmt"

	"github.com/sandboxd/sandboxd/api"
)

// Update changes a running or paused sandbox. It calls edit with a copy of the record, and what edit makes of its limits, labels,
// deadline and idle timeout is applied as a whole or not at all; when Update returns, it holds and is on disk. Edit returns
// those limits that were asked for in so many words, and may refuse. It must not call the supervisor.
//
// A crash in the middle is the exception: the next daemon takes limits and deadline from the engine, all old or all new, and
// labels and idle timeout from the record, which may be the old ones then.
//
// Updates of one sandbox follow one another. One that began goes on although ctx ends.
func (s *Supervisor) Update(ctx context.Context, ref string, edit func(rec *Record) (explicit api.Limits, err error)) (Record, error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return Record{}, ErrClosed
	}
	found, err := s.alive(ref)
	if err != nil {
		s.mu.Unlock()
		return Record{}, err
	}
	lease := s.lease(found) // a use, from whose end the idle time counts
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()
	defer lease.End()
	sb := lease.sb
	<-sb.saved
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	now, err := s.alive(sb.rec.ID) // still; its name may be another's by now
	if err == nil && now != sb {
		err = fmt.Errorf("%w: %q", ErrNotFound, ref)
	}
	was := sb.rec.clone()
	s.mu.Unlock()
	if err != nil {
		return Record{}, err
	}
	edited := was.clone()
	explicit, err := edit(&edited)
	if err != nil {
		return Record{}, err
	}
	next := was // nothing but the four
	next.Explicit = mergeLimits(explicit, was.Explicit)
	next.Limits, next.Labels, next.Deadline, next.IdleTimeout = edited.Limits, edited.Labels, edited.Deadline, edited.IdleTimeout
	if err := s.change(context.WithoutCancel(ctx), sb, &was, &next, explicit); err != nil {
		return Record{}, fmt.Errorf("update sandbox %s: %w", was.Name, err)
	}
	s.log.Info("sandbox updated", "id", was.ID, "name", was.Name)
	return s.show(sb, &next), nil
}

// change makes next hold and puts it on disk, or leaves everything at was. It needs sandbox.write.
func (s *Supervisor) change(ctx context.Context, sb *sandbox, was, next *Record, explicit api.Limits) error {
	enforced, err := s.apply(ctx, was, next, explicit)
	if unclear(err) {
		// The answer is late or lost: perhaps the change was made all the same.
		held, serr := s.held(ctx, was)
		switch {
		case serr != nil:
			return fmt.Errorf("%w; what holds now is not known: %w", err, serr)
		case sameHeld(&held, next):
			enforced, err = held.Enforced, nil
		case !sameHeld(&held, was):
			if perr := s.records.put(&held); perr != nil {
				err = errors.Join(err, perr)
			}
			s.show(sb, &held)
		}
	}
	if err != nil {
		return err
	}
	next.Enforced = enforced
	if err := s.records.put(next); err != nil {
		if _, uerr := s.apply(ctx, next, was, api.Limits{}); uerr != nil {
			err = errors.Join(err, fmt.Errorf("undo: %w", uerr))
			if held, herr := s.held(ctx, was); herr == nil {
				s.show(sb, &held) // the next daemon learns it from the engine
			}
		}
		return err
	}
	return nil
}

// show makes what everybody sees of a sandbox say what holds.
func (s *Supervisor) show(sb *sandbox, rec *Record) Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	sb.rec.Limits, sb.rec.Labels, sb.rec.Enforced = rec.Limits, rec.Labels, rec.Enforced
	sb.rec.Explicit = rec.Explicit
	sb.rec.Deadline, sb.rec.IdleTimeout = rec.Deadline, rec.IdleTimeout
	s.arm(sb)
	return sb.rec.clone()
}

// unclear says that an engine's error does not tell whether the change was made. Those that do are the ones of its contract.
func unclear(err error) bool {
	return err != nil && !errors.Is(err, ErrUnenforceable) && !errors.Is(err, ErrInUse) && !errors.Is(err, ErrNotFound)
}

// held is the record with what the engine holds of it.
func (s *Supervisor) held(ctx context.Context, rec *Record) (Record, error) {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	// An empty change waits for one that is still being made.
	if _, err := s.engine.Update(ctx, rec.ID, &Change{}); err != nil {
		return Record{}, fmt.Errorf("wait for the end of the update: %w", err)
	}
	list, err := s.engine.List(ctx)
	if err != nil {
		return Record{}, fmt.Errorf("list what runs: %w", err)
	}
	err = fmt.Errorf("%w: %s", ErrNotFound, rec.ID)
	held := rec.clone()
	for _, st := range list {
		if st.ID == rec.ID {
			held.Limits, held.Deadline, held.Enforced, err = st.Limits, st.Deadline, st.Enforced, nil
		}
		_ = st.Pidfd.Close() // never read or written
	}
	return held, err
}

// sameHeld compares what an engine holds of two records.
func sameHeld(a, b *Record) bool {
	return sameLimits(a.Limits, b.Limits) && a.Deadline.Equal(b.Deadline)
}

// apply tells the engine what is its business of the difference between two records.
func (s *Supervisor) apply(ctx context.Context, from, to *Record, explicit api.Limits) (api.Enforced, error) {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	var change Change
	// Also one that is what it was: it may be a wish of the defaults that this host does not hold.
	if to.Limits != from.Limits || explicit != (api.Limits{}) {
		change.Limits, change.Explicit = &to.Limits, explicit
	}
	if !to.Deadline.Equal(from.Deadline) {
		change.Deadline = to.Deadline
	}
	if change == (Change{}) {
		return from.Enforced, nil
	}
	return s.engine.Update(ctx, from.ID, &change)
}
