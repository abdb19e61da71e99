package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// Create makes a sandbox, or claims a warm one that fits, and returns when it runs and its record
// is on disk. On error nothing of it is left.
func (s *Supervisor) Create(ctx context.Context, req Request) (Record, error) {
	sb, p, err := s.reserve(req, !req.Stopped)
	if err != nil {
		return Record{}, err
	}
	if req.Stopped {
		defer s.ops.Done()
		return s.createStopped(sb, req.Prepare)
	}
	if p != nil {
		rec, err := s.claim(ctx, sb, p, &req)
		s.ops.Done()
		if err == nil || ctx.Err() != nil {
			return rec, err
		}
		// It has just ended, or cannot be changed as the request asks. If no sandbox can be, the error of
		// a new one says why.
		s.log.Info("a warm sandbox could not be claimed", "id", p.id, "error", err)
		if sb, _, err = s.reserve(req, false); err != nil {
			return Record{}, err
		}
	}
	defer s.ops.Done()
	return s.create(ctx, sb, req)
}

// createStopped makes the record of a sandbox under a reserved entry, and no more. It takes over
// sandbox.write.
func (s *Supervisor) createStopped(sb *sandbox, prepare func(id string) error) (_ Record, err error) {
	defer sb.write.Unlock()
	rec := sb.rec
	var undo cleanup
	defer undo.unwind(&err)
	undo.add("release name", func() error { s.forget(sb); return nil })
	if prepare != nil {
		if err := prepare(rec.ID); err != nil {
			return Record{}, fmt.Errorf("create sandbox %s: %w", rec.Name, err)
		}
	}
	rec.State, rec.Reason, rec.EndedAt = api.StateStopped, ReasonCreated, rec.CreatedAt
	rec.Fresh, rec.Settled, rec.Unstarted = true, true, true
	if err := s.records.put(&rec); err != nil {
		return Record{}, fmt.Errorf("create sandbox %s: %w", rec.Name, err)
	}
	undo.release()
	s.mu.Lock()
	defer s.mu.Unlock()
	sb.rec = rec
	sb.life.end()
	s.enter(sb, phaseEnded)
	s.tell(sb, api.Event{Action: api.ActionCreated})
	s.log.Info("sandbox created", "id", rec.ID, "name", rec.Name, "image", rec.Image, "profile", rec.Profile, "stopped", true)
	return rec.clone(), nil
}

// create starts a new sandbox under a reserved entry. It takes over sandbox.write.
func (s *Supervisor) create(ctx context.Context, sb *sandbox, req Request) (_ Record, err error) {
	rec := sb.rec // changed here alone while the phase is creating; readers see sb.rec
	id := rec.ID
	defer func() {
		if err != nil {
			err = fmt.Errorf("create sandbox %s: %w", rec.Name, err)
		}
	}()
	var undo cleanup
	defer undo.unwind(&err)
	undo.add("release name", func() error { s.forget(sb); return nil })
	spec := req.spec(id, rec.Name, rec.Deadline)
	spec.IODevice = s.opts.IODevice
	if err := s.join(spec, req.Tenant, &req.Network); err != nil {
		return Record{}, err
	}
	if spec.Volumes, err = s.volumes(req.Tenant, &req.Settings); err != nil {
		return Record{}, err
	}
	if req.Prepare != nil {
		if err := req.Prepare(id); err != nil {
			return Record{}, err
		}
	}

	// The intent goes to disk while the engine works: a daemon that starts after a crash then knows
	// what to take back.
	intent := make(chan error, 1)
	go func(rec Record) { intent <- s.records.put(&rec) }(rec)
	intended := sync.OnceValue(func() error { return <-intent })
	undo.add("remove record", func() error {
		_ = intended() // reported at the call below
		return s.records.remove(id)
	})

	control, err := s.sockets.listen(id)
	if err != nil {
		return Record{}, err
	}
	undo.add("remove control socket", func() error { return s.sockets.remove(id) })

	// Also after a failure: if ctx ended or the connection broke, the engine may have made the
	// sandbox.
	undo.add("delete sandbox", func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return ignoreNotFound(s.engine.Delete(ctx, id))
	})
	// The engine's answer is awaited although the client hangs up: a deletion before the engine has
	// begun would find nothing, and the creation would begin after it.
	making, done := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer done()
	started, err := s.engine.Create(making, spec, control)
	// From here init alone holds the socket: a copy kept here would let connections hang after init
	// died.
	cerr := control.Close()
	if err != nil {
		return Record{}, err
	}
	if cerr != nil {
		return Record{}, errors.Join(fmt.Errorf("close control socket: %w", cerr), started.Pidfd.Close())
	}
	if ctx.Err() != nil {
		return Record{}, errors.Join(context.Cause(ctx), started.Pidfd.Close())
	}
	if err := intended(); err != nil {
		return Record{}, errors.Join(err, started.Pidfd.Close())
	}
	rec.State, rec.Enforced, rec.PID, rec.StartedAt = api.StateRunning, started.Enforced, PIDOf(started.Pidfd), s.now().UTC()
	if err := s.run(ctx, sb, &rec, started, api.ActionCreated); err != nil {
		return Record{}, err
	}
	undo.release()
	// The answer does not wait for a second write: the next daemon takes a sandbox that runs for
	// running, although its record says "creating". Later writers wait for sandbox.write.
	s.ops.Go(func() {
		defer sb.write.Unlock()
		if err := s.records.put(&rec); err != nil {
			s.log.Error("start of sandbox is not on disk", "id", id, "error", err)
		}
	})
	s.log.Info("sandbox created", "id", id, "name", rec.Name, "image", rec.Image, "profile", rec.Profile)
	return rec.clone(), nil
}

// reserve inserts an entry with an id and a name, and counts an operation that the caller ends with
// ops.Done. With pooled it takes a warm sandbox that fits, if there is one, and its id. The
// caller holds sandbox.write.
func (s *Supervisor) reserve(req Request, pooled bool) (*sandbox, *warmSandbox, error) {
	now := s.now().UTC()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, ErrClosed
	}
	if err := s.admitNumber(req.Tenant); err != nil {
		return nil, nil, err
	}
	if !req.Stopped { // else its start is admitted
		limits := req.Limits.WithDefaults(req.Defaults)
		if err := s.admit(req.Tenant, &limits, nil); err != nil {
			return nil, nil, err
		}
	}
	if req.Name != "" && s.nameTaken(req.Tenant, req.Name) {
		return nil, nil, fmt.Errorf("%w: the name %q is taken", ErrExists, req.Name)
	}
	var p *warmSandbox
	id, name := s.unusedID(req.Tenant), req.Name
	if pooled {
		if p = s.take(&req); p != nil {
			id, name = p.id, cmp.Or(name, p.name)
		}
	}
	if name == "" || name != req.Name && s.nameTaken(req.Tenant, name) {
		for name = newName(); s.nameTaken(req.Tenant, name); {
			name += "-" + newID()[:3]
		}
	}
	sb := s.insert(req.record(id, name, now, s.defaults.Load()), phaseCreating)
	sb.write.Lock()
	s.ops.Add(1)
	return sb, p, nil
}

// admitNumber fails if there are too many sandboxes for one more of the tenant. It needs mu.
func (s *Supervisor) admitNumber(tenant string) error {
	if tenant != "" {
		own, most := 0, max(1, s.opts.MaxSandboxes/TenantParts)
		for _, sb := range s.byID {
			if sb.rec.Tenant == tenant {
				own++
			}
		}
		if own >= most {
			return fmt.Errorf("%w: you have %d, which is the most of one tenant", ErrTooMany, own)
		}
	}
	if len(s.byID) < s.opts.MaxSandboxes {
		return nil
	}
	if tenant != "" { // the number tells of others
		return fmt.Errorf("%w: this daemon holds no more", ErrTooMany)
	}
	return fmt.Errorf("%w: %d exist, which is the most this daemon holds", ErrTooMany, len(s.byID))
}

// nameTaken reports whether name already refers to a sandbox that the tenant can look up. Ids and
// names of a tenant share one space, so that neither can hide the other. The ids of other tenants
// are free to it: a conflict would tell that they exist. The daemon's own tenant shares the space
// with every id, because most methods find a sandbox by id or own name. It needs mu.
func (s *Supervisor) nameTaken(tenant, name string) bool {
	if s.names[tenantName{tenant, name}] != nil {
		return true
	}
	if sb := s.byID[name]; sb != nil && (tenant == "" || sb.rec.Tenant == tenant) {
		return true
	}
	p := s.pool.warm[name]
	return p != nil && (tenant == "" || p.fixed.Tenant == tenant)
}

// unusedID returns an id for a sandbox of the tenant. It needs mu.
func (s *Supervisor) unusedID(tenant string) string {
	for {
		id := newID()
		if s.byID[id] == nil && s.pool.warm[id] == nil && !s.nameTaken(tenant, id) && !s.nameTaken("", id) {
			return id
		}
	}
}

// run begins a life of the sandbox with rec as its record, which has the PID of its init, watches
// it, and tells of action; empty tells nothing. It takes over the pidfd.
func (s *Supervisor) run(ctx context.Context, sb *sandbox, rec *Record, started *Started, action api.EventAction) error {
	pidfd, err := pollable(started.Pidfd)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if sb.life.ended() { // started again
		sb.life, sb.endReason = newLife(), ""
	}
	l := sb.life
	l.pidfd, l.watched = pidfd, make(chan struct{})
	sb.idleSince = s.now()
	sb.rec.State, sb.rec.Reason, sb.rec.Deadline = liveState(started), "", rec.Deadline
	sb.rec.Enforced, sb.rec.PID, sb.rec.Fresh = started.Enforced, rec.PID, false
	sb.rec.Life, sb.rec.Idle, sb.rec.Exit, sb.rec.EndedAt = rec.Life, rec.Idle, rec.Exit, time.Time{}
	sb.rec.Settled, sb.rec.ShortLives, sb.rec.Restarts = rec.Settled, rec.ShortLives, rec.Restarts
	sb.rec.StartedAt, sb.rec.Unstarted, sb.rec.ExitBefore = rec.StartedAt, rec.Unstarted, rec.ExitBefore
	sb.rec.Health, sb.unsaved = rec.Health, false
	s.enter(sb, phaseOf(sb.rec.State))
	s.tell(sb, api.Event{Action: action})
	s.arm(sb)
	s.watchers.Add(1)
	go s.watch(context.WithoutCancel(ctx), sb, l) // it outlives the request, and ends when it is dismissed
	return nil
}

// liveState returns the state that the engine reports: a crash may have been between its pause and
// the record.
func liveState(started *Started) api.SandboxState {
	if started.Paused {
		return api.StatePaused
	}
	return api.StateRunning
}
