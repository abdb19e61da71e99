package runtime

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// reasonUnseen is what the record says of a sandbox whose end nobody has seen.
const reasonUnseen = "its processes ended while no daemon was running"

// MainEnded notes how the main process of a sandbox ended, nil if nobody knows, and ends the sandbox with it for a reason that
// the record will show, unless it has ended or is being stopped. Life is that of the record when the process was started:
// what another one left behind changes nothing.
//
// When it returns, the record is on disk, or whoever ends the sandbox is about to write it.
func (s *Supervisor) MainEnded(ctx context.Context, id string, life int, exit *api.SandboxExit, reason string) error {
	s.mu.Lock()
	sb := s.byID[id]
	if sb == nil || sb.deletion != nil || sb.rec.Life != life {
		s.mu.Unlock()
		return nil
	}
	if sb.rec.Exit == nil {
		sb.rec.Exit = exit
	}
	if sb.isGone && exit != nil && sb.rec.Reason == reasonUnseen { // now it is known
		sb.rec.State, sb.rec.Reason = api.StateStopped, reason
	}
	ended, stopping, watched := sb.isGone, sb.killing != "", sb.watched
	if !ended && !stopping {
		sb.killing = cmp.Or(reason, "its main process ended")
		sb.kills.Add(1)
	}
	s.mu.Unlock()
	switch {
	case ended:
		return s.rewrite(sb, life, watched)
	case stopping:
		return nil // its watcher writes the end, and this with it
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	err := ignoreNotFound(s.engine.Kill(ctx, id))
	sb.kills.Done()
	if err != nil {
		s.mu.Lock()
		if !sb.isGone {
			_ = sb.pidfd.SetReadDeadline(time.Now()) // the watcher tries on
		}
		s.mu.Unlock()
		return fmt.Errorf("end sandbox %s with its main process: %w", id, err)
	}
	select {
	case <-watched:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of sandbox %s: %w", id, context.Cause(ctx))
	}
}

// rewrite puts the record of an ended sandbox on disk once more.
func (s *Supervisor) rewrite(sb *sandbox, life int, watched <-chan struct{}) error {
	<-sb.saved
	if watched != nil {
		<-watched
	}
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	rec, mine := sb.rec.clone(), sb.deletion == nil && sb.isGone && sb.rec.Life == life
	s.mu.Unlock()
	if !mine {
		return nil // deleted, or started again, and with it written
	}
	return s.putEnd(sb, &rec)
}

// WaitEnded returns when the sandbox with this id or name does not run, with its record, which is then on disk. One that
// is deleted meanwhile is ErrNotFound. It does not count as a use of the sandbox.
func (s *Supervisor) WaitEnded(ctx context.Context, ref string) (Record, error) {
	s.mu.Lock()
	sb, err := s.find(ref)
	s.mu.Unlock()
	if err != nil {
		return Record{}, err
	}
	for {
		s.mu.Lock()
		gone, watched, over, deletion := sb.gone, sb.watched, sb.isGone, sb.deletion
		s.mu.Unlock()
		if over && deletion != nil {
			select {
			case <-deletion.done:
			case <-ctx.Done():
				return Record{}, context.Cause(ctx)
			}
		}
		if over {
			if watched != nil {
				<-watched // on its way to the disk
			}
			rec, err := s.Get(sb.rec.ID)
			if err != nil || !lives(rec.State) {
				return rec, err
			}
			continue // somebody has started it again
		}
		select {
		case <-gone:
		case <-s.closing:
			return Record{}, ErrClosed
		case <-ctx.Done():
			return Record{}, context.Cause(ctx)
		}
	}
}
