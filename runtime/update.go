package runtime

import (
	"context"
	"errors"
	"fmt"

	"github.com/sandboxd/sandboxd/api"
)

// Update changes a running sandbox. It calls edit with a copy of the record, and what edit makes of its limits, labels,
// deadline and idle timeout is applied as a whole or not at all; when Update returns, it holds and is on disk. Edit returns
// those limits that were asked for in so many words, and may refuse. It must not call the supervisor.
//
// Updates of one sandbox follow one another. One that began goes on although ctx ends.
func (s *Supervisor) Update(ctx context.Context, ref string, edit func(rec *Record) (explicit api.Limits, err error)) (Record, error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return Record{}, ErrClosed
	}
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()
	lease, err := s.Begin(ref) // a use, from whose end the idle time counts
	if err != nil {
		return Record{}, err
	}
	defer lease.End()
	sb := lease.sb
	<-sb.saved
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	_, err = s.usable(ref) // still
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
	next.Limits, next.Labels, next.Deadline, next.IdleTimeout = edited.Limits, edited.Labels, edited.Deadline, edited.IdleTimeout
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if next.Enforced, err = s.apply(ctx, &was, &next, explicit); err != nil {
		return Record{}, fmt.Errorf("update sandbox %s: %w", was.Name, err)
	}
	if err := s.records.put(&next); err != nil {
		if _, uerr := s.apply(ctx, &next, &was, api.Limits{}); uerr != nil {
			err = errors.Join(err, fmt.Errorf("undo: %w", uerr))
		}
		return Record{}, fmt.Errorf("update sandbox %s: %w", was.Name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	sb.rec.Limits, sb.rec.Labels, sb.rec.Enforced = next.Limits, next.Labels, next.Enforced
	sb.rec.Deadline, sb.rec.IdleTimeout = next.Deadline, next.IdleTimeout
	s.arm(sb)
	s.log.Info("sandbox updated", "id", sb.rec.ID, "name", sb.rec.Name)
	return sb.rec.clone(), nil
}

// apply tells the engine what is its business of the difference between two records.
func (s *Supervisor) apply(ctx context.Context, from, to *Record, explicit api.Limits) (api.Enforced, error) {
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
