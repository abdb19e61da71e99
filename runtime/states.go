package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// StartRequest holds the parameters of a start that the record does not have.
type StartRequest struct {
	Profile Profile       // the record's, resolved as for a creation
	Timeout time.Duration // from now on; zero means the timeout of its creation
	Idle    bool          // see [Record]
	Trust   []byte        // see [Spec.Trust]
	// Restart means that no client has asked for it, but a policy: the deadline stays, and the start is
	// counted. ShortLives is the record's new number.
	Restart    bool
	ShortLives int
}

// Start runs a sandbox that has stopped or was lost once more: with its own files, id, name, labels
// and limits. Its deadline begins anew. When it returns the sandbox runs, and its record is on
// disk; on error it has ended, as before.
//
// Nothing is written before: a daemon that starts after a crash adopts a sandbox that runs,
// whatever its record says.
func (s *Supervisor) Start(ctx context.Context, ref string, req StartRequest) (_ Record, err error) {
	sb, rec, release, err := s.takeEnded(ref, true)
	if err != nil {
		return Record{}, err
	}
	defer func() {
		release()
		if err != nil {
			err = fmt.Errorf("start sandbox %s: %w", rec.Name, err)
		}
	}()
	if rec.FilesGone {
		return Record{}, errFilesGone(&rec)
	}
	if len(rec.Rootfs.Layers) == 0 {
		return Record{}, fmt.Errorf("%w: it is of an earlier version of sandboxd, whose records do not name the layers of its root", ErrState)
	}
	var undo cleanup
	defer undo.unwind(&err)
	was := rec.clone()
	if !req.Restart {
		rec.Deadline = s.now().UTC().Add(cmp.Or(req.Timeout, rec.Timeout, s.defaults.Load().Timeout))
	}
	spec := &Spec{
		ID: rec.ID, Rootfs: rec.Rootfs, Hostname: rec.Name, Profile: req.Profile,
		Limits: rec.Limits, Explicit: rec.Explicit.Matching(&rec.Limits), IODevice: s.opts.IODevice, Deadline: rec.Deadline, Fresh: rec.Fresh,
		Network: rec.Network.HasGateway(), Trust: req.Trust,
	}
	spec.set(&rec.Settings)
	if err := s.join(spec, rec.Tenant, &rec.Network); err != nil {
		return Record{}, err
	}
	if spec.Volumes, err = s.volumes(rec.Tenant, &rec.Settings); err != nil {
		return Record{}, err
	}
	if err := s.sockets.remove(rec.ID); err != nil {
		return Record{}, err
	}
	control, err := s.sockets.listen(rec.ID)
	if err != nil {
		return Record{}, err
	}
	undo.add("remove control socket", func() error { return s.sockets.remove(rec.ID) })
	undo.add("end sandbox", func() error { // the engine may have come any distance
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return ignoreNotFound(s.engine.Kill(ctx, rec.ID))
	})
	// As in create: a start that the engine has not begun cannot be ended, and it would begin after
	// that.
	making, done := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer done()
	started, err := s.engine.Start(making, spec, control)
	cerr := control.Close()          // init alone holds it, see create
	if errors.Is(err, ErrNotFound) { // the sandbox exists; its layers do not
		return Record{}, fmt.Errorf("%w: its files are gone: %v", ErrState, err) //nolint:errorlint // another class
	}
	if err != nil {
		return Record{}, err
	}
	if ctx.Err() != nil {
		return Record{}, errors.Join(context.Cause(ctx), started.Pidfd.Close())
	}
	if req.Idle {
		rec.ExitBefore = cmp.Or(rec.Exit, rec.ExitBefore)
	} else {
		rec.ExitBefore, rec.StartedAt, rec.Unstarted = nil, s.now().UTC(), false
	}
	rec.Fresh, rec.Idle, rec.Exit, rec.EndedAt = false, req.Idle, nil, time.Time{}
	rec.Settled, rec.ShortLives = false, req.ShortLives
	if rec.Restarts++; !req.Restart {
		rec.Restarts = 0
	}
	rec.Life++
	rec.Health = freshHealth(&rec.Settings, rec.Idle, s.now())
	rec.State, rec.Reason, rec.Enforced, rec.PID = api.StateRunning, "", started.Enforced, PIDOf(started.Pidfd)
	undo.add("restore record", func() error { return s.records.put(&was) })
	if err := errors.Join(cerr, s.records.put(&rec)); err != nil {
		return Record{}, errors.Join(err, started.Pidfd.Close())
	}
	if err := s.run(ctx, sb, &rec, started, api.ActionStarted); err != nil {
		return Record{}, err
	}
	undo.release()
	s.log.Info("sandbox started", "id", rec.ID, "name", rec.Name)
	return rec, nil
}

// takeEnded reserves a sandbox that has ended, with its record: until it runs or release is called,
// no other operation starts or deletes the sandbox. The record is the caller's to write until
// release. It waits until the end is on disk. One that runs is admitted before.
func (s *Supervisor) takeEnded(ref string, runs bool) (sb *sandbox, rec Record, release func(), err error) {
	sb, err = s.beginStart(ref, runs)
	if err != nil {
		return nil, Record{}, nil, err
	}
	l := sb.life // its own until it runs
	if l.watched != nil {
		<-l.watched
	}
	l.kills.Wait()
	sb.write.Lock()
	s.mu.Lock()
	defer s.mu.Unlock()
	return sb, sb.rec.clone(), func() {
		sb.write.Unlock()
		s.mu.Lock()
		if sb.life == l { // a life that began may have ended, and the next start have reserved it
			s.enterIf(sb, phaseStarting, phaseEnded)
		}
		s.mu.Unlock()
		s.ops.Done()
	}, nil
}

// beginStart reserves a sandbox that has ended, and counts an operation that the caller ends with
// ops.Done.
func (s *Supervisor) beginStart(ref string, runs bool) (*sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	sb, err := s.find(ref)
	switch {
	case err != nil:
		return nil, err
	case sb.phase == phaseDeleting:
		return nil, sb.errState()
	case sb.phase == phaseStarting:
		return nil, fmt.Errorf("%w: %s (%s) is being started", ErrState, sb.rec.Name, sb.rec.ID)
	case sb.phase != phaseEnded:
		return nil, fmt.Errorf("%w: %s (%s) is %s", ErrNotEnded, sb.rec.Name, sb.rec.ID, sb.rec.State)
	}
	if runs {
		if err := s.admit(sb.rec.Tenant, &sb.rec.Limits, sb); err != nil {
			return nil, err
		}
	}
	s.enter(sb, phaseStarting)
	sb.filesUsed = s.now()
	s.ops.Add(1)
	return sb, nil
}

// Settle has the restart policy of a sandbox that has ended leave it so, until a start. It does
// nothing to one that runs.
func (s *Supervisor) Settle(id string) error {
	s.mu.Lock()
	sb := s.byID[id]
	if sb == nil || s.closed || sb.phase != phaseEnded || sb.rec.Settled {
		s.mu.Unlock()
		return nil
	}
	sb.rec.Settled = true
	l := sb.life
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()
	return s.rewrite(sb, l)
}

// The reasons on record of sandboxes that were created stopped, that a client stopped, whose main
// process exited, which is
// followed by its code, that were idle, which is followed by the time, and that used too much disk
// space, or memory of the kernel's that no limit counts, which are followed by the limit.
const (
	ReasonCreated = "created"
	ReasonStopped = "stopped"
	ReasonExited  = "its main process exited with "
	ReasonIdle    = "idle for "
	ReasonDisk    = "disk: "
	ReasonMemory  = "memory: "

	reasonDeadline = "deadline reached" // and more
)

// Stop ends a sandbox and keeps its files, for Start or Delete. Its processes are asked to end, and
// those that have not when the grace is over are killed. If the sandbox has ended already, or is
// started again meanwhile, Stop returns its record. When it returns, the end is on disk. It goes on
// although ctx ends; when the supervisor is closed the grace is over.
func (s *Supervisor) Stop(ctx context.Context, ref string, grace time.Duration) (Record, error) {
	return s.StopBy(ctx, ref, Ask{Grace: grace})
}

// StopBy is [Supervisor.Stop] with more to say about how the processes are asked.
func (s *Supervisor) StopBy(ctx context.Context, ref string, ask Ask) (Record, error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return Record{}, ErrClosed
	}
	sb, err := s.find(ref)
	switch {
	case err != nil:
	case sb.phase == phaseDeleting:
		err = sb.errState()
	case sb.phase == phaseStarting, sb.phase == phaseCreating:
		err = fmt.Errorf("%w: %s (%s) is being started", ErrState, sb.rec.Name, sb.rec.ID)
	}
	if err != nil {
		s.mu.Unlock()
		return Record{}, err
	}
	id, l := sb.rec.ID, sb.life
	if l.ended() {
		rec := sb.rec.clone()
		s.mu.Unlock()
		return rec, nil
	}
	if sb.phase == phaseEnding { // by another stop, perhaps with a longer grace
		ask.Grace = 0
	}
	s.beginEnd(sb, ReasonStopped)
	l.wake(s.wakeAt(sb.rec.Deadline)) // it cannot idle any more
	s.ops.Add(1)
	l.kills.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ask.Grace+undoTimeout)
	defer cancel()
	if ask.Grace > 0 {
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
		err = s.engine.Stop(asking, id, ask)
		stop()
		<-over
	}
	if ask.Grace == 0 || err != nil { // not asked, or its answer was not waited for
		err = s.engine.Kill(ctx, id)
	}
	l.kills.Done()
	if err = ignoreNotFound(err); err != nil {
		s.retryKill(l)
		return Record{}, fmt.Errorf("stop sandbox %s: %w", id, err)
	}
	select {
	case <-l.watched: // the end is on disk
	case <-ctx.Done():
		return Record{}, fmt.Errorf("wait for the end of sandbox %s: %w", id, context.Cause(ctx))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if lives(sb.rec.State) && sb.life == l { // its watcher was dismissed
		return Record{}, fmt.Errorf("%w: %s was deleted meanwhile", ErrNotFound, id)
	}
	return sb.rec.clone(), nil
}

// Pause freezes every process of a running sandbox until [Supervisor.Resume]. Meanwhile it cannot
// be used and is not idle. Time goes on: its deadline comes, and timers of its programs fire when
// it goes on. A paused sandbox stays as it is. When Pause returns, the record is on disk.
func (s *Supervisor) Pause(ctx context.Context, ref string) (Record, error) {
	return s.changeTo(ctx, ref, &pausing, s.engine.Pause, s.engine.Resume)
}

// Resume lets a paused sandbox go on; its idle time begins anew. A running sandbox stays as it is.
func (s *Supervisor) Resume(ctx context.Context, ref string) (Record, error) {
	return s.changeTo(ctx, ref, &resuming, s.engine.Resume, s.engine.Pause)
}

// step is the way between running and paused.
type step struct {
	verb              string
	from, during, end phase
	state             api.SandboxState // at the end
	action            api.EventAction
}

var (
	pausing  = step{"pause", phaseRunning, phasePausing, phasePaused, api.StatePaused, api.ActionPaused}
	resuming = step{"resume", phasePaused, phaseResuming, phaseRunning, api.StateRunning, api.ActionResumed}
)

// changeTo pauses or resumes a sandbox. It goes on although ctx ends.
func (s *Supervisor) changeTo(ctx context.Context, ref string, step *step, do, undo func(context.Context, string) error) (_ Record, err error) {
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
	sb.write.Lock()
	defer sb.write.Unlock()

	s.mu.Lock()
	err = s.stillAlive(sb, ref)
	rec := sb.rec.clone()
	if err != nil || sb.phase == step.end {
		s.mu.Unlock()
		return rec, err
	}
	s.enter(sb, step.during) // from here on nothing new begins in it, and its silence is no fault
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	defer func() {
		s.mu.Lock()
		s.enterIf(sb, step.during, step.from) // unless it has succeeded
		sb.heldUntil = time.Now()
		s.mu.Unlock()
		if err != nil {
			err = fmt.Errorf("%s sandbox %s: %w", step.verb, rec.Name, err)
		}
	}()
	if err := do(ctx, rec.ID); err != nil {
		return Record{}, errors.Join(err, ignoreNotFound(s.undoUnclear(ctx, rec.ID, err, undo)))
	}
	rec.State = step.state
	if err := s.records.put(&rec); err != nil {
		return Record{}, errors.Join(err, ignoreNotFound(undo(ctx, rec.ID)))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if sb.life.ended() { // the write of its end waits for this one
		return Record{}, fmt.Errorf("%w: it has ended: %s", ErrState, sb.rec.Reason)
	}
	sb.rec.State = step.state
	s.enterIf(sb, step.during, step.end)
	s.tell(sb, api.Event{Action: step.action})
	sb.idleSince = s.now()
	s.arm(sb)
	s.log.Info("sandbox "+step.verb+"d", "id", rec.ID, "name", rec.Name)
	return sb.rec.clone(), nil
}

// undoUnclear undoes a change whose answer is late or lost: the engine may have made it all the
// same.
func (s *Supervisor) undoUnclear(ctx context.Context, id string, err error, undo func(context.Context, string) error) error {
	if !unclear(err) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return undo(ctx, id)
}
