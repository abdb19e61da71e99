package runtime

import (
	"context"
	"errors"
	"fmt"

	"github.com/sandboxd/sandboxd/api"
)

// Update changes a running or paused sandbox. It calls edit with a copy of the record. Edit may
// change the limits, labels, deadline, idle timeout and network (that of the record only), which
// are applied as a whole or not at all; when Update returns, they hold and are on disk. Edit
// returns the limits that were asked for explicitly, and may refuse. It must not call the
// supervisor.
//
// A crash in the middle is the exception: the next daemon takes limits and deadline from the
// engine, all old or all new, and labels and idle timeout from the record, which may then be the
// old ones.
//
// Updates of one sandbox follow one another. An update that began goes on although ctx ends.
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
	lease := s.lease(found, true) // a use, from whose end the idle time counts
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()
	defer lease.End()
	sb := lease.sb
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	err = s.stillAlive(sb, ref)
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
	next := was // with nothing but these six
	next.Network, next.Restart = edited.Network, edited.Restart
	next.Explicit = explicit.WithDefaults(was.Explicit)
	next.Limits, next.Labels, next.Deadline, next.IdleTimeout = edited.Limits, edited.Labels, edited.Deadline, edited.IdleTimeout
	release, err := s.ask(sb, &was, &next)
	if err != nil {
		return Record{}, fmt.Errorf("update sandbox %s: %w", was.Name, err)
	}
	defer release()
	if err := s.change(context.WithoutCancel(ctx), sb, &was, &next, explicit); err != nil {
		return Record{}, fmt.Errorf("update sandbox %s: %w", was.Name, err)
	}
	s.log.Info("sandbox updated", "id", was.ID, "name", was.Name)
	return s.show(sb, &next), nil
}

// ask reserves the room for higher limits until release is called.
func (s *Supervisor) ask(sb *sandbox, was, next *Record) (release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if next.Limits.Memory > was.Limits.Memory || next.Limits.Pids > was.Limits.Pids {
		if err := s.admit(was.Tenant, &next.Limits, sb); err != nil {
			return nil, err
		}
	}
	sb.asked = next.Limits
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		sb.asked = api.Limits{}
	}, nil
}

// change makes next hold and puts it on disk, or leaves everything at was. It needs sandbox.write.
func (s *Supervisor) change(ctx context.Context, sb *sandbox, was, next *Record, explicit api.Limits) error {
	enforced, err := s.apply(ctx, was, next, explicit)
	if unclear(err) {
		// The answer is late or lost: the engine may have made the change all the same.
		held, serr := s.held(ctx, was)
		switch {
		case serr != nil:
			return fmt.Errorf("%w; the limits in force are not known: %w", err, serr)
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
				s.show(sb, &held) // the next daemon reads it from the engine
			}
		}
		return err
	}
	return nil
}

// show publishes the changed part of a record.
func (s *Supervisor) show(sb *sandbox, rec *Record) Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	sb.rec.Limits, sb.rec.Labels, sb.rec.Enforced = rec.Limits, rec.Labels, rec.Enforced
	sb.rec.Explicit, sb.rec.Network, sb.rec.Restart = rec.Explicit, rec.Network, rec.Restart
	sb.rec.Deadline, sb.rec.IdleTimeout = rec.Deadline, rec.IdleTimeout
	s.tell(sb, api.Event{Action: api.ActionUpdated})
	s.arm(sb)
	return sb.rec.clone()
}

// unclear reports whether an engine's error leaves open if the change was made. The errors of its
// contract do not.
func unclear(err error) bool {
	return err != nil && !errors.Is(err, ErrUnenforceable) && !errors.Is(err, ErrInUse) && !errors.Is(err, ErrNotFound)
}

// held returns the record with the limits and the deadline that the engine has in force.
func (s *Supervisor) held(ctx context.Context, rec *Record) (Record, error) {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	// An empty change waits for a change that is still being made.
	if _, err := s.engine.Update(ctx, rec.ID, &Change{}); err != nil {
		return Record{}, fmt.Errorf("wait for the end of the update: %w", err)
	}
	list, err := s.engine.List(ctx)
	if err != nil {
		return Record{}, fmt.Errorf("list running sandboxes: %w", err)
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

// sameHeld reports whether an engine holds equal limits and deadlines for two records.
func sameHeld(a, b *Record) bool {
	return a.Limits.Equal(&b.Limits) && a.Deadline.Equal(b.Deadline)
}

// apply has the engine make the difference between two records.
func (s *Supervisor) apply(ctx context.Context, from, to *Record, explicit api.Limits) (api.Enforced, error) {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	var change Change
	// Also an unchanged explicit limit: the default that it equals may be one that this host does not
	// enforce.
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
