package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// StartRequest is what [Supervisor.Start] needs beside the record.
type StartRequest struct {
	Profile Profile       // the record's, resolved as for a creation
	Timeout time.Duration // from now on; 0: as long as it was given when it was created
	Idle    bool          // see [Record]
}

// Start runs a sandbox that has stopped or was lost once more: with its own files, id, name, labels and limits. Its deadline
// begins anew. When it returns the sandbox runs, and its record is on disk; on error it is what it was.
//
// Nothing is written before: a daemon that starts after a crash takes what runs for what it is, whatever the record says.
func (s *Supervisor) Start(ctx context.Context, ref string, req StartRequest) (_ Record, err error) {
	sb, rec, release, err := s.takeEnded(ref)
	if err != nil {
		return Record{}, err
	}
	defer func() {
		release()
		if err != nil {
			err = fmt.Errorf("start sandbox %s: %w", rec.Name, err)
		}
	}()
	if len(rec.Rootfs.Layers) == 0 {
		return Record{}, fmt.Errorf("%w: it is of an earlier version of sandboxd, which did not note what its root is made of", ErrState)
	}
	var undo cleanup
	defer undo.unwind(&err)
	if err := s.sockets.remove(rec.ID); err != nil {
		return Record{}, err
	}
	control, err := s.sockets.listen(rec.ID)
	if err != nil {
		return Record{}, err
	}
	undo.add("remove control socket", func() error { return s.sockets.remove(rec.ID) })
	undo.add("end sandbox", func() error { // nobody knows how far the engine came
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return ignoreNotFound(s.engine.Kill(ctx, rec.ID))
	})
	was := rec.clone()
	rec.Deadline = time.Now().UTC().Add(cmp.Or(req.Timeout, rec.Timeout, s.opts.Timeout))
	// As in create: what the engine has not begun cannot be ended, and it would begin after that.
	making, done := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer done()
	started, err := s.engine.Start(making, &Spec{
		ID: rec.ID, Rootfs: rec.Rootfs, Hostname: rec.Name, Profile: req.Profile,
		Limits: rec.Limits, Explicit: stillExplicit(rec.Explicit, rec.Limits), IODevice: s.opts.IODevice, Deadline: rec.Deadline, Fresh: rec.Fresh,
	}, control)
	cerr := control.Close()          // as in Create
	if errors.Is(err, ErrNotFound) { // it is there; what it was made of is not
		return Record{}, fmt.Errorf("%w: its files are gone: %v", ErrState, err) //nolint:errorlint // another class
	}
	if err != nil {
		return Record{}, err
	}
	if ctx.Err() != nil {
		return Record{}, errors.Join(context.Cause(ctx), started.Pidfd.Close())
	}
	rec.Fresh, rec.Idle, rec.Exit, rec.EndedAt = false, req.Idle, nil, time.Time{}
	rec.Life++
	rec.State, rec.Reason, rec.Enforced, rec.PID = api.StateRunning, "", started.Enforced, PIDOf(started.Pidfd)
	undo.add("restore record", func() error { return s.records.put(&was) })
	if err := errors.Join(cerr, s.records.put(&rec)); err != nil {
		return Record{}, errors.Join(err, started.Pidfd.Close())
	}
	if err := s.run(ctx, sb, &rec, started); err != nil {
		return Record{}, err
	}
	undo.release()
	s.log.Info("sandbox started", "id", rec.ID, "name", rec.Name)
	return rec, nil
}

// takeEnded claims a sandbox that has ended, with its record: until release is called nobody else writes that, or starts or
// deletes the sandbox. It waits until the end is on disk.
func (s *Supervisor) takeEnded(ref string) (sb *sandbox, rec Record, release func(), err error) {
	sb, err = s.beginStart(ref)
	if err != nil {
		return nil, Record{}, nil, err
	}
	<-sb.saved
	if sb.watched != nil {
		<-sb.watched
	}
	sb.kills.Wait()
	sb.write.Lock()
	s.mu.Lock()
	defer s.mu.Unlock()
	return sb, sb.rec.clone(), func() {
		sb.write.Unlock()
		s.mu.Lock()
		sb.starting = false
		s.mu.Unlock()
		s.ops.Done()
	}, nil
}

// beginStart claims a sandbox that has ended, and counts an operation that the caller ends with ops.Done.
func (s *Supervisor) beginStart(ref string) (*sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	sb, err := s.find(ref)
	switch {
	case err != nil:
		return nil, err
	case sb.deletion != nil:
		return nil, fmt.Errorf("%w: %s (%s) is being deleted", ErrState, sb.rec.Name, sb.rec.ID)
	case sb.starting:
		return nil, fmt.Errorf("%w: %s (%s) is being started", ErrState, sb.rec.Name, sb.rec.ID)
	case sb.rec.State != api.StateStopped && sb.rec.State != api.StateLost:
		return nil, fmt.Errorf("%w: %s (%s) is %s", ErrNotEnded, sb.rec.Name, sb.rec.ID, sb.rec.State)
	}
	sb.starting, sb.read = true, time.Now()
	s.ops.Add(1)
	return sb, nil
}

// stillExplicit are those of the limits asked for in so many words that no later change has replaced by a default.
func stillExplicit(explicit, limits api.Limits) api.Limits {
	keep := func(asked, is int64) int64 {
		if asked != is {
			return 0
		}
		return asked
	}
	e := explicit
	e.Memory, e.MemoryHigh = keep(e.Memory, limits.Memory), keep(e.MemoryHigh, limits.MemoryHigh)
	e.CPUWeight, e.Pids = keep(e.CPUWeight, limits.CPUWeight), keep(e.Pids, limits.Pids)
	e.IO.Weight = keep(e.IO.Weight, limits.IO.Weight)
	e.IO.ReadBPS, e.IO.WriteBPS = keep(e.IO.ReadBPS, limits.IO.ReadBPS), keep(e.IO.WriteBPS, limits.IO.WriteBPS)
	e.IO.ReadIOPS, e.IO.WriteIOPS = keep(e.IO.ReadIOPS, limits.IO.ReadIOPS), keep(e.IO.WriteIOPS, limits.IO.WriteIOPS)
	if e.Swap != nil && (limits.Swap == nil || *limits.Swap != *e.Swap) {
		e.Swap = nil
	}
	e.OOMGroup = e.OOMGroup && limits.OOMGroup
	if e.CPUs != limits.CPUs {
		e.CPUs = 0
	}
	if e.CPUSet != limits.CPUSet {
		e.CPUSet = ""
	}
	if e.Nofile != limits.Nofile {
		e.Nofile = 0
	}
	return e
}

// reasonStopped is what the record says of a sandbox that somebody stopped.
const reasonStopped = "stopped"

// Stop ends a sandbox and keeps its files, for Start or Delete. Its processes are asked to end, and those that have not when
// the grace is over are killed. Of one that has ended, or that somebody has started again meanwhile, it returns the record as it is.
// When it returns, the end is on disk. It goes on although ctx ends; when the supervisor is closed the grace is over.
func (s *Supervisor) Stop(ctx context.Context, ref string, grace time.Duration) (Record, error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return Record{}, ErrClosed
	}
	sb, err := s.find(ref)
	switch {
	case err != nil:
	case sb.deletion != nil:
		err = fmt.Errorf("%w: %s (%s) is being deleted", ErrState, sb.rec.Name, sb.rec.ID)
	case sb.starting, sb.rec.State == api.StateCreating:
		err = fmt.Errorf("%w: %s (%s) is being started", ErrState, sb.rec.Name, sb.rec.ID)
	}
	if err != nil {
		s.mu.Unlock()
		return Record{}, err
	}
	id, watched := sb.rec.ID, sb.watched
	if sb.isGone {
		rec := sb.rec.clone()
		s.mu.Unlock()
		return rec, nil
	}
	if sb.killing != "" { // by somebody else, who may give it a longer time
		grace = 0
	}
	sb.killing = cmp.Or(sb.killing, reasonStopped) // from here on nothing new begins in it
	_ = sb.pidfd.SetReadDeadline(sb.rec.Deadline)  // only a closed pidfd refuses, and then nobody waits; it is not idle
	s.ops.Add(1)
	sb.kills.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace+undoTimeout)
	defer cancel()
	if grace > 0 {
		asking, stop := context.WithCancel(ctx)
		over := make(chan struct{})
		go func() {
			defer close(over)
			select {
			case <-s.closing:
				stop()
			case <-asking.Done():
			}
		}()
		err = s.engine.Stop(asking, id, grace)
		stop()
		<-over
	}
	if grace == 0 || err != nil { // not asked, or its answer was not waited for
		err = s.engine.Kill(ctx, id)
	}
	sb.kills.Done()
	if err = ignoreNotFound(err); err != nil {
		s.mu.Lock()
		if !sb.isGone {
			_ = sb.pidfd.SetReadDeadline(time.Now()) // the watcher tries on
		}
		s.mu.Unlock()
		return Record{}, fmt.Errorf("stop sandbox %s: %w", id, err)
	}
	select {
	case <-watched: // the end is on disk
	case <-ctx.Done():
		return Record{}, fmt.Errorf("wait for the end of sandbox %s: %w", id, context.Cause(ctx))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if lives(sb.rec.State) && sb.watched == watched { // nobody has watched it to its end; else somebody has started it again
		return Record{}, fmt.Errorf("%w: %s was deleted meanwhile", ErrNotFound, id)
	}
	return sb.rec.clone(), nil
}

// Pause makes every process of a running sandbox stand still until [Supervisor.Resume]. Nothing can be asked of it
// meanwhile, it is not idle, and what runs in it is late: time goes on, its deadline comes, and those of what runs in it
// strike when it goes on. One that is paused is left as it is. When Pause returns, it is on disk.
func (s *Supervisor) Pause(ctx context.Context, ref string) (Record, error) {
	return s.turn(ctx, ref, "pause", api.StatePaused, s.engine.Pause, s.engine.Resume)
}

// Resume lets a paused sandbox go on; its idle time begins anew. One that runs is left as it is.
func (s *Supervisor) Resume(ctx context.Context, ref string) (Record, error) {
	return s.turn(ctx, ref, "resume", api.StateRunning, s.engine.Resume, s.engine.Pause)
}

// turn takes a sandbox to one of the two states of those that live. It goes on although ctx ends.
func (s *Supervisor) turn(ctx context.Context, ref, verb string, to api.SandboxState, do, undo func(context.Context, string) error) (_ Record, err error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return Record{}, ErrClosed
	}
	sb, err := s.alive(ref)
	if err != nil {
		s.mu.Unlock()
		return Record{}, err
	}
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()
	<-sb.saved
	sb.write.Lock()
	defer sb.write.Unlock()

	s.mu.Lock()
	now, err := s.alive(sb.rec.ID) // still; its name may be another's by now
	if err == nil && now != sb {
		err = fmt.Errorf("%w: %q", ErrNotFound, ref)
	}
	rec := sb.rec.clone()
	if err != nil || rec.State == to {
		s.mu.Unlock()
		return rec, err
	}
	sb.turning = verb // from here on nothing new begins in it, and nobody is to blame that nothing comes of what has begun
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	defer func() {
		s.mu.Lock()
		sb.turning = ""
		sb.heldUntil = time.Now()
		s.mu.Unlock()
		if err != nil {
			err = fmt.Errorf("%s sandbox %s: %w", verb, rec.Name, err)
		}
	}()
	if err := do(ctx, rec.ID); err != nil {
		return Record{}, errors.Join(err, ignoreNotFound(s.undoTurn(ctx, rec.ID, err, undo)))
	}
	rec.State = to
	if err := s.records.put(&rec); err != nil {
		return Record{}, errors.Join(err, ignoreNotFound(undo(ctx, rec.ID)))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if sb.isGone { // its end waits for us to write it
		return Record{}, fmt.Errorf("%w: it has ended: %s", ErrState, sb.rec.Reason)
	}
	sb.rec.State = to
	sb.idleSince = time.Now()
	s.arm(sb)
	s.log.Info("sandbox "+verb+"d", "id", rec.ID, "name", rec.Name)
	return sb.rec.clone(), nil
}

// undoTurn is for an answer that is late or lost: perhaps it was done all the same.
func (s *Supervisor) undoTurn(ctx context.Context, id string, err error, undo func(context.Context, string) error) error {
	if !unclear(err) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return undo(ctx, id)
}
