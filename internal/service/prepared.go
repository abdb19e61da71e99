package service

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/execlog"
	"github.com/sandboxd/sandboxd/runtime"
)

// Bounds of prepared execs, which are in memory only, and of clients that wait for a start.
const (
	maxPrepared      = 64       // of one sandbox; older ones are dropped
	maxPreparedBytes = 64 << 20 // of all; older ones are dropped
	preparedBytes    = 8 << 10  // of a record, besides its request
	maxUpcoming      = 64       // clients that wait for one start
)

// prepared is an exec that a client has described and not started, or whose start has failed.
type prepared struct {
	record ExecRecord
	req    api.ExecRequest
	size   int // bytes in memory, at most
}

// sizeOf returns the size of a prepared exec with this request.
func sizeOf(req *api.ExecRequest) int {
	const header = 16 // of a string
	size := preparedBytes + len(req.Stdin) + len(req.Cwd) + len(req.User)
	for _, text := range slices.Concat(req.Argv, req.Env) {
		size += header + len(text)
	}
	return size
}

// PrepareExec keeps the request for an exec, whose program [API.StartPrepared] starts. A daemon
// that ends forgets it.
func (s *API) PrepareExec(ref string, req api.ExecRequest) (ExecRecord, error) {
	req.Detach = true
	if err := validateExec(&req); err != nil {
		return ExecRecord{}, err
	}
	lease, err := s.begin(ref) // it runs
	if err != nil {
		return ExecRecord{}, err
	}
	defer lease.End()
	rec := &lease.Record
	p := &prepared{req: req, size: sizeOf(&req)}
	p.record.Exec = api.Exec{
		ID: newExecID(), Sandbox: rec.ID, Argv: shortened(req.Argv), User: req.User, Cwd: req.Cwd, TTY: req.TTY,
		Detached: true, StdinOpen: req.StdinOpen, Annotations: req.Annotations, State: api.ExecPrepared, StartedAt: time.Now().UTC(),
	}
	out := p.record // before a concurrent start changes it
	if err := s.execs.prepare(p, s.execsQuota(rec.Tenant)); err != nil {
		return ExecRecord{}, err
	}
	return out, s.stillThere(rec.ID)
}

// stillThere fails if a concurrent deletion of the sandbox was faster, whose end forgets prepared
// execs and waits. It is called after one of them was added.
func (s *core) stillThere(sandbox string) error {
	_, err := s.supervisor.Get(sandbox)
	if errors.Is(err, runtime.ErrNotFound) {
		s.execs.forgetUpcoming(sandbox)
	}
	return err
}

// prepare lists a prepared exec. Older ones make room for it: of its sandbox, of its tenant, then
// of all. Those that are being started stay.
func (e *execs) prepare(p *prepared, q quota) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dropPrepared(func(other *prepared) bool { return other.record.Sandbox == p.record.Sandbox }, func(number, _ int) bool {
		return number < maxPrepared
	})
	if len(e.prepared[p.record.Sandbox]) >= maxPrepared {
		return class.Mark(runtime.ErrInUse, fmt.Errorf("prepare an exec: %d of this sandbox are being started, which is the most", maxPrepared))
	}
	// One is always a tenant's, whatever its size.
	e.dropPrepared(func(other *prepared) bool { return q.own == nil || q.own[other.record.Sandbox] }, func(_, size int) bool {
		return size+p.size <= maxPreparedBytes/q.parts
	})
	if fits := e.dropPrepared(func(*prepared) bool { return true }, func(_, size int) bool { return size+p.size <= maxPreparedBytes }); !fits {
		return class.Mark(runtime.ErrInUse, errors.New("prepare an exec: too many others are being started"))
	}
	of := e.prepared[p.record.Sandbox]
	if of == nil {
		of = make(map[string]*prepared)
		if e.prepared == nil {
			e.prepared = make(map[string]map[string]*prepared)
		}
		e.prepared[p.record.Sandbox] = of
	}
	of[p.record.ID] = p
	return nil
}

// dropPrepared forgets prepared execs, oldest first, until the number and the size of the chosen
// ones fit; it reports whether they do. It needs mu.
func (e *execs) dropPrepared(chosen func(*prepared) bool, fit func(number, size int) bool) bool {
	var idle []*prepared
	number, size := 0, 0
	for _, of := range e.prepared {
		for _, p := range of {
			if !chosen(p) {
				continue
			}
			number, size = number+1, size+p.size
			if p.record.State != api.ExecRunning {
				idle = append(idle, p)
			}
		}
	}
	if fit(number, size) {
		return true
	}
	slices.SortFunc(idle, func(a, b *prepared) int { return a.record.StartedAt.Compare(b.record.StartedAt) })
	for _, p := range idle {
		e.forgetPrepared(p)
		if number, size = number-1, size-p.size; fit(number, size) {
			return true
		}
	}
	return false
}

// forgetPrepared removes a prepared exec, and ends the waits for its start unless it has begun. It
// needs mu.
func (e *execs) forgetPrepared(p *prepared) {
	sandbox, id := p.record.Sandbox, p.record.ID
	if e.prepared[sandbox][id] != p {
		return
	}
	delete(e.prepared[sandbox], id)
	if len(e.prepared[sandbox]) == 0 {
		delete(e.prepared, sandbox)
	}
	if p.record.State != api.ExecRunning {
		e.dropUpcoming(upcomingKey{sandbox, id})
	}
}

// deletePrepared forgets a prepared exec, or one whose start has failed. It reports whether there
// was one.
func (e *execs) deletePrepared(sandbox, id string) (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.prepared[sandbox][id]
	switch {
	case p == nil:
		return false, nil
	case p.record.State == api.ExecRunning:
		return false, class.Mark(runtime.ErrState, fmt.Errorf("delete exec %s: it is being started", id))
	}
	e.forgetPrepared(p)
	return true, nil
}

// ExecRecordOf returns the record of an exec, also of one that is prepared or could not be started.
func (s *API) ExecRecordOf(ref, id string) (ExecRecord, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return ExecRecord{}, err
	}
	s.execs.mu.Lock()
	var out ExecRecord
	p := s.execs.prepared[rec.ID][id]
	if p != nil {
		out = p.record
	}
	s.execs.mu.Unlock()
	if p != nil {
		return out, nil
	}
	x, err := s.Exec(rec.ID, id)
	if err != nil {
		return ExecRecord{}, err
	}
	return x.Record(), nil
}

// StartPrepared starts the program of a prepared exec, as a detached one. If that fails the record
// keeps the reason.
func (s *API) StartPrepared(ctx context.Context, ref, id string, size api.TerminalSize) (ExecRecord, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return ExecRecord{}, err
	}
	s.execs.mu.Lock()
	p := s.execs.prepared[rec.ID][id]
	fresh, failed := p != nil && p.record.State == api.ExecPrepared, p != nil && p.record.State == api.ExecLost
	if fresh {
		p.record.State = api.ExecRunning // of concurrent starts one succeeds
	}
	s.execs.mu.Unlock()
	if p == nil {
		if _, err := s.Exec(rec.ID, id); err != nil {
			return ExecRecord{}, err
		}
	}
	if failed {
		return ExecRecord{}, class.Mark(runtime.ErrState, fmt.Errorf("start exec %s: its start has failed, prepare another one", id))
	}
	if !fresh {
		return ExecRecord{}, class.Mark(runtime.ErrState, fmt.Errorf("start exec %s: it has been started already", class.Clip(id)))
	}
	req := p.req
	if size.Rows > 0 && size.Cols > 0 {
		req.Rows, req.Cols = size.Rows, size.Cols
	}
	started, err := s.detach(ctx, &rec, req, detachAs{id: id})
	s.execs.mu.Lock()
	defer s.execs.mu.Unlock()
	if err == nil {
		s.execs.forgetPrepared(p)
		return started, nil
	}
	p.req, p.size = api.ExecRequest{}, preparedBytes
	p.record.State, p.record.Failure, p.record.EndedAt = api.ExecLost, failureOf(err), time.Now().UTC()
	s.execs.dropUpcoming(upcomingKey{rec.ID, id})
	return ExecRecord{}, err
}

// upcomingKey is a sandbox's id and the id of a prepared exec, or [api.MainExec].
type upcomingKey struct{ sandbox, exec string }

// Upcoming is a client that has attached to a program before its start, so that it misses nothing.
type Upcoming struct {
	execs   *execs
	key     upcomingKey
	hold    *execlog.Hold
	started chan *Detached // closed without one if there will be no start
}

// Upcoming attaches to the next main process of a sandbox, or to a prepared exec. Close ends it.
func (s *API) Upcoming(ref, exec string) (*Upcoming, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return nil, err
	}
	if exec == api.MainExec && len(rec.Command) == 0 {
		return nil, class.Mark(runtime.ErrState, fmt.Errorf("sandbox %s has no main process, whose start could be waited for: it was created without a command", rec.Name))
	}
	u, err := s.execs.await(&rec, exec)
	if err != nil {
		return nil, err
	}
	if err := s.stillThere(rec.ID); err != nil {
		u.Close()
		return nil, err
	}
	return u, nil
}

// await lists a client that waits for a start.
func (e *execs) await(rec *runtime.Record, exec string) (*Upcoming, error) {
	key := upcomingKey{rec.ID, exec}
	e.mu.Lock()
	defer e.mu.Unlock()
	if p := e.prepared[rec.ID][exec]; exec != api.MainExec && (p == nil || p.record.State != api.ExecPrepared) {
		return nil, class.Mark(class.ErrNoExec, fmt.Errorf("exec %q of sandbox %s: %w that is prepared and not started", class.Clip(exec), rec.Name, class.ErrNoExec))
	}
	if len(e.upcoming[key]) >= maxUpcoming {
		return nil, class.Mark(runtime.ErrInUse, fmt.Errorf("%d clients wait for that start, which is the most", maxUpcoming))
	}
	u := &Upcoming{execs: e, key: key, started: make(chan *Detached, 1)}
	if e.upcoming == nil {
		e.upcoming = make(map[upcomingKey][]*Upcoming)
	}
	e.upcoming[key] = append(e.upcoming[key], u)
	return u, nil
}

// errNotStarted is the error of a client that waited for a start which has failed, or will not be.
var errNotStarted = class.Mark(class.ErrGone, errors.New("the program was not started"))

// Wait returns the execution when it has started.
func (u *Upcoming) Wait(ctx context.Context) (*Detached, error) {
	select {
	case x, ok := <-u.started:
		if !ok {
			return nil, errNotStarted
		}
		return x, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Close ends the wait. If the program has started it no longer waits for this client.
func (u *Upcoming) Close() {
	u.execs.mu.Lock()
	if all := u.execs.upcoming[u.key]; slices.Contains(all, u) {
		u.execs.upcoming[u.key] = slices.DeleteFunc(all, func(other *Upcoming) bool { return other == u })
		if len(u.execs.upcoming[u.key]) == 0 {
			delete(u.execs.upcoming, u.key)
		}
	}
	u.execs.mu.Unlock()
	select {
	case _, ok := <-u.started:
		if ok {
			u.hold.Release()
		}
	default:
	}
}

// deliver gives an execution whose output is not taken yet to those that wait for it.
func (e *execs) deliver(x *Detached) {
	key := upcomingKey{x.record.Sandbox, x.record.ID}
	if x.main != nil {
		key.exec = api.MainExec
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, u := range e.upcoming[key] {
		u.hold = x.log.Hold(0)
		u.started <- x
	}
	delete(e.upcoming, key)
}

// dropUpcoming ends the waits for a start that will not be. It needs mu.
func (e *execs) dropUpcoming(key upcomingKey) {
	for _, u := range e.upcoming[key] {
		close(u.started)
	}
	delete(e.upcoming, key)
}

// forgetUpcoming ends all waits for programs of a sandbox that is deleted, and its prepared execs.
func (e *execs) forgetUpcoming(sandbox string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.prepared, sandbox)
	for key := range e.upcoming {
		if key.sandbox == sandbox {
			e.dropUpcoming(key)
		}
	}
}

// failMain ends the waits for the main process of a sandbox whose start has failed.
func (e *execs) failMain(sandbox string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dropUpcoming(upcomingKey{sandbox, api.MainExec})
}

// awaitReaders waits until the clients that hold the output of a sandbox's main process have read
// it, for as long as they read and no longer than a step.
func (s *core) awaitReaders(id string) {
	s.execs.mu.Lock()
	x := s.execs.mains[id].x
	s.execs.mu.Unlock()
	if x == nil {
		return
	}
	timer := time.NewTimer(stepTimeout)
	defer timer.Stop()
	for changed := x.log.Held(); changed != nil; changed = x.log.Held() {
		select {
		case <-changed:
		case <-timer.C:
			return
		case <-s.work.Context().Done():
			return
		}
	}
}
