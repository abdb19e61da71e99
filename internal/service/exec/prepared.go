package exec

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
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
	record Record
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

// Prepare keeps a valid request for an exec of a sandbox that runs. [Registry.StartPrepared] starts
// its program. A daemon that ends forgets it.
func (r *Registry) Prepare(rec *runtime.Record, req api.ExecRequest) (Record, error) {
	p := &prepared{req: req, size: sizeOf(&req)}
	p.record.Exec = api.Exec{
		ID: NewID(), Sandbox: rec.ID, Argv: shortened(req.Argv), User: req.User, Cwd: req.Cwd, TTY: req.TTY,
		Detached: true, StdinOpen: req.StdinOpen, Annotations: req.Annotations, State: api.ExecPrepared, StartedAt: time.Now().UTC(),
	}
	out := p.record // before a concurrent start changes it
	if err := r.prepare(p, r.quotaOf(rec.Tenant)); err != nil {
		return Record{}, err
	}
	return out, r.stillThere(rec.ID)
}

// stillThere fails if a concurrent deletion of the sandbox was faster, whose end forgets prepared
// execs and waits. It is called after one of them was added.
func (r *Registry) stillThere(sandbox string) error {
	_, err := r.opts.Supervisor.Get(sandbox)
	if errors.Is(err, runtime.ErrNotFound) {
		r.forgetUpcoming(sandbox)
	}
	return err
}

// prepare lists a prepared exec. Older ones make room for it: of its sandbox, of its tenant, then
// of all. Those that are being started stay.
func (r *Registry) prepare(p *prepared, q quota) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropPrepared(func(other *prepared) bool { return other.record.Sandbox == p.record.Sandbox }, func(number, _ int) bool {
		return number < maxPrepared
	})
	if len(r.prepared[p.record.Sandbox]) >= maxPrepared {
		return class.Mark(runtime.ErrInUse, fmt.Errorf("prepare an exec: %d of this sandbox are being started, which is the most", maxPrepared))
	}
	// One is always a tenant's, whatever its size.
	r.dropPrepared(func(other *prepared) bool { return q.own == nil || q.own[other.record.Sandbox] }, func(_, size int) bool {
		return size+p.size <= maxPreparedBytes/q.parts
	})
	if fits := r.dropPrepared(func(*prepared) bool { return true }, func(_, size int) bool { return size+p.size <= maxPreparedBytes }); !fits {
		return class.Mark(runtime.ErrInUse, errors.New("prepare an exec: too many others are being started"))
	}
	of := r.prepared[p.record.Sandbox]
	if of == nil {
		of = make(map[string]*prepared)
		r.prepared[p.record.Sandbox] = of
	}
	of[p.record.ID] = p
	return nil
}

// dropPrepared forgets prepared execs, oldest first, until the number and the size of the chosen
// ones fit; it reports whether they do. It needs mu.
func (r *Registry) dropPrepared(chosen func(*prepared) bool, fit func(number, size int) bool) bool {
	var idle []*prepared
	number, size := 0, 0
	for _, of := range r.prepared {
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
		r.forgetPrepared(p)
		if number, size = number-1, size-p.size; fit(number, size) {
			return true
		}
	}
	return false
}

// forgetPrepared removes a prepared exec, and ends the waits for its start unless it has begun. It
// needs mu.
func (r *Registry) forgetPrepared(p *prepared) {
	sandbox, id := p.record.Sandbox, p.record.ID
	if r.prepared[sandbox][id] != p {
		return
	}
	delete(r.prepared[sandbox], id)
	if len(r.prepared[sandbox]) == 0 {
		delete(r.prepared, sandbox)
	}
	if p.record.State != api.ExecRunning {
		r.dropUpcoming(upcomingKey{sandbox, id})
	}
}

// deletePrepared forgets a prepared exec, or one whose start has failed. It reports whether there
// was one.
func (r *Registry) deletePrepared(sandbox, id string) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.prepared[sandbox][id]
	switch {
	case p == nil:
		return false, nil
	case p.record.State == api.ExecRunning:
		return false, class.Mark(runtime.ErrState, fmt.Errorf("delete exec %s: it is being started", id))
	}
	r.forgetPrepared(p)
	return true, nil
}

// RecordOf returns the record of an exec, also of one that is prepared or could not be started.
func (r *Registry) RecordOf(rec *runtime.Record, id string) (Record, error) {
	r.mu.Lock()
	var out Record
	p := r.prepared[rec.ID][id]
	if p != nil {
		out = p.record
	}
	r.mu.Unlock()
	if p != nil {
		return out, nil
	}
	x, err := r.Find(rec, id)
	if err != nil {
		return Record{}, err
	}
	return x.Record(), nil
}

// StartPrepared starts the program of a prepared exec, as a detached one. If that fails the record
// keeps the reason.
func (r *Registry) StartPrepared(ctx context.Context, rec *runtime.Record, id string, size api.TerminalSize) (Record, error) {
	r.mu.Lock()
	p := r.prepared[rec.ID][id]
	fresh, failed := p != nil && p.record.State == api.ExecPrepared, p != nil && p.record.State == api.ExecLost
	if fresh {
		p.record.State = api.ExecRunning // of concurrent starts one succeeds
	}
	r.mu.Unlock()
	if p == nil {
		if _, err := r.Find(rec, id); err != nil {
			return Record{}, err
		}
	}
	if failed {
		return Record{}, class.Mark(runtime.ErrState, fmt.Errorf("start exec %s: its start has failed, prepare another one", id))
	}
	if !fresh {
		return Record{}, class.Mark(runtime.ErrState, fmt.Errorf("start exec %s: it has been started already", class.Clip(id)))
	}
	req := p.req
	if size.Rows > 0 && size.Cols > 0 {
		req.Rows, req.Cols = size.Rows, size.Cols
	}
	started, err := r.Detach(ctx, rec, req, As{id: id})
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		r.forgetPrepared(p)
		return started, nil
	}
	p.req, p.size = api.ExecRequest{}, preparedBytes
	p.record.State, p.record.Failure, p.record.EndedAt = api.ExecLost, failureOf(err), time.Now().UTC()
	r.dropUpcoming(upcomingKey{rec.ID, id})
	return Record{}, err
}
