package runtime

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/sandboxd/sandboxd/api"
)

// reasonUnseen is the reason on record of a sandbox whose end no daemon has seen.
const reasonUnseen = "its processes ended while no daemon was running"

// MainEnded records how the main process of a sandbox ended, nil if that is unknown. It ends the
// sandbox with it for a reason that the record will show, unless that has ended or is being
// stopped. Life is that of the record when the process was started: the exit of another life
// changes nothing.
//
// When it returns, the record is on disk, or the operation that ends the sandbox is about to write
// it.
func (s *Supervisor) MainEnded(ctx context.Context, id string, life int, exit *api.SandboxExit, reason string) error {
	s.mu.Lock()
	sb := s.byID[id]
	if sb == nil || sb.phase == phaseDeleting || sb.rec.Life != life {
		s.mu.Unlock()
		return nil
	}
	if sb.rec.Exit == nil {
		sb.rec.Exit = exit
	}
	l := sb.life
	ended, stopping := l.ended(), sb.endReason != ""
	if ended && exit != nil && sb.rec.Reason == reasonUnseen { // now it is known
		sb.rec.State, sb.rec.Reason = api.StateStopped, reason
	}
	if !ended && !stopping {
		s.beginEnd(sb, cmp.Or(reason, "its main process ended"))
		l.kills.Add(1)
	}
	s.mu.Unlock()
	switch {
	case ended:
		return s.rewrite(sb, l)
	case stopping:
		return nil // its watcher writes the end, and this with it
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	err := ignoreNotFound(s.engine.Kill(ctx, id))
	l.kills.Done()
	if err != nil {
		s.retryKill(l)
		return fmt.Errorf("end sandbox %s with its main process: %w", id, err)
	}
	select {
	case <-l.watched:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of sandbox %s: %w", id, context.Cause(ctx))
	}
}

// rewrite puts the record of an ended sandbox on disk once more.
func (s *Supervisor) rewrite(sb *sandbox, l *life) error {
	if l.watched != nil {
		<-l.watched
	}
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	rec, mine := sb.rec.clone(), sb.phase != phaseDeleting && sb.life == l
	s.mu.Unlock()
	if !mine {
		return nil // deleted, or started again, which has written it
	}
	return s.putEnd(sb, &rec)
}

// WaitEnded returns when the sandbox with this id or name does not run, with its record, which is
// then on disk. If it is deleted meanwhile, it fails with ErrNotFound. It does not count as a use
// of the sandbox.
func (s *Supervisor) WaitEnded(ctx context.Context, ref string) (Record, error) {
	s.mu.Lock()
	sb, err := s.find(ref)
	s.mu.Unlock()
	if err != nil {
		return Record{}, err
	}
	for {
		s.mu.Lock()
		l, over, deletion := sb.life, sb.life.ended(), sb.deletion
		s.mu.Unlock()
		if over && deletion != nil {
			select {
			case <-deletion.done:
			case <-ctx.Done():
				return Record{}, context.Cause(ctx)
			}
		}
		if over {
			if l.watched != nil {
				<-l.watched // the record is on its way to the disk
			}
			rec, err := s.Get(sb.rec.ID)
			if err != nil || !lives(rec.State) {
				return rec, err
			}
			continue // it has been started again
		}
		select {
		case <-l.gone:
		case <-s.closing:
			return Record{}, ErrClosed
		case <-ctx.Done():
			return Record{}, context.Cause(ctx)
		}
	}
}

// SetMain records a process that runs as the main process of a sandbox that has none. It is on a
// terminal, with its stdin open. Life is that of the record when the process was started. When
// SetMain returns, the record is on disk.
func (s *Supervisor) SetMain(id string, life int, command []string) error {
	s.mu.Lock()
	sb := s.byID[id]
	if sb == nil || s.closed || sb.life.ended() || sb.rec.Life != life || len(sb.rec.Command) > 0 {
		s.mu.Unlock()
		return fmt.Errorf("%w: sandbox %s has ended, or has a main process", ErrState, id)
	}
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	if sb.life.ended() || len(sb.rec.Command) > 0 {
		s.mu.Unlock()
		return fmt.Errorf("%w: sandbox %s has ended, or has a main process", ErrState, id)
	}
	sb.rec.Command, sb.rec.TTY, sb.rec.StdinOpen = slices.Clone(command), true, true
	rec := sb.rec.clone()
	s.mu.Unlock()
	return s.records.put(&rec)
}
