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
}

// Start runs a sandbox that has stopped or was lost once more: with its own files, id, name, labels and limits. Its deadline
// begins anew. When it returns the sandbox runs, and its record is on disk; on error it is what it was.
//
// Nothing is written before: a daemon that starts after a crash takes what runs for what it is, whatever the record says.
func (s *Supervisor) Start(ctx context.Context, ref string, req StartRequest) (_ Record, err error) {
	sb, err := s.beginStart(ref)
	if err != nil {
		return Record{}, err
	}
	defer s.ops.Done()
	defer func() {
		s.mu.Lock()
		sb.starting = false
		s.mu.Unlock()
		if err != nil {
			err = fmt.Errorf("start sandbox %s: %w", sb.rec.Name, err)
		}
	}()
	<-sb.saved
	if sb.watched != nil {
		<-sb.watched // its end is on disk
	}
	// Nobody else writes the record of a sandbox that has ended, or lets it run.
	s.mu.Lock()
	rec := sb.rec.clone()
	s.mu.Unlock()
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
	rec.Deadline = time.Now().UTC().Add(cmp.Or(req.Timeout, rec.Timeout, s.opts.Timeout))
	started, err := s.engine.Start(ctx, &Spec{
		ID: rec.ID, Rootfs: rec.Rootfs, Hostname: rec.Name, Profile: req.Profile,
		Limits: rec.Limits, Explicit: stillExplicit(rec.Explicit, rec.Limits), IODevice: s.opts.IODevice, Deadline: rec.Deadline,
	}, control)
	cerr := control.Close() // as in Create
	if err != nil {
		return Record{}, err
	}
	was := rec.clone()
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
	sb.starting = true
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
// the grace is over are killed. Of one that has ended it returns the record as it is. When it returns, the end is on
// disk. It goes on although ctx ends; when the supervisor is closed the grace is over.
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
	return sb.rec.clone(), nil
}
