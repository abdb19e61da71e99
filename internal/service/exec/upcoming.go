package exec

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/execlog"
	"github.com/sandboxd/sandboxd/runtime"
)

// upcomingKey is a sandbox's id and the id of a prepared exec, or [api.MainExec].
type upcomingKey struct{ sandbox, exec string }

// Upcoming is a client that has attached to a program before its start, so that it misses nothing.
type Upcoming struct {
	r       *Registry
	key     upcomingKey
	hold    *execlog.Hold
	started chan *Detached // closed without one if there will be no start
}

// Upcoming attaches to the next main process of a sandbox, or to a prepared exec. Close ends it.
func (r *Registry) Upcoming(rec *runtime.Record, exec string) (*Upcoming, error) {
	if exec == api.MainExec && len(rec.Command) == 0 {
		return nil, class.Mark(runtime.ErrState, fmt.Errorf("sandbox %s has no main process, whose start could be waited for: it was created without a command", rec.Name))
	}
	u, err := r.await(rec, exec)
	if err != nil {
		return nil, err
	}
	if err := r.stillThere(rec.ID); err != nil {
		u.Close()
		return nil, err
	}
	return u, nil
}

// await lists a client that waits for a start.
func (r *Registry) await(rec *runtime.Record, exec string) (*Upcoming, error) {
	key := upcomingKey{rec.ID, exec}
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.prepared[rec.ID][exec]; exec != api.MainExec && (p == nil || p.record.State != api.ExecPrepared) {
		return nil, class.Mark(class.ErrNoExec, fmt.Errorf("exec %q of sandbox %s: %w that is prepared and not started", class.Clip(exec), rec.Name, class.ErrNoExec))
	}
	if len(r.upcoming[key]) >= maxUpcoming {
		return nil, class.Mark(runtime.ErrInUse, fmt.Errorf("%d clients wait for that start, which is the most", maxUpcoming))
	}
	u := &Upcoming{r: r, key: key, started: make(chan *Detached, 1)}
	r.upcoming[key] = append(r.upcoming[key], u)
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
	u.r.mu.Lock()
	if all := u.r.upcoming[u.key]; slices.Contains(all, u) {
		u.r.upcoming[u.key] = slices.DeleteFunc(all, func(other *Upcoming) bool { return other == u })
		if len(u.r.upcoming[u.key]) == 0 {
			delete(u.r.upcoming, u.key)
		}
	}
	u.r.mu.Unlock()
	select {
	case _, ok := <-u.started:
		if ok {
			u.hold.Release()
		}
	default:
	}
}

// deliver gives an execution whose output is not taken yet to those that wait for it.
func (r *Registry) deliver(x *Detached) {
	key := upcomingKey{x.record.Sandbox, x.record.ID}
	if x.main != nil {
		key.exec = api.MainExec
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, u := range r.upcoming[key] {
		u.hold = x.log.Hold(0)
		u.started <- x
	}
	delete(r.upcoming, key)
}

// dropUpcoming ends the waits for a start that will not be. It needs mu.
func (r *Registry) dropUpcoming(key upcomingKey) {
	for _, u := range r.upcoming[key] {
		close(u.started)
	}
	delete(r.upcoming, key)
}

// forgetUpcoming ends all waits for programs of a sandbox that is deleted, and its prepared execs.
func (r *Registry) forgetUpcoming(sandbox string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.prepared, sandbox)
	for key := range r.upcoming {
		if key.sandbox == sandbox {
			r.dropUpcoming(key)
		}
	}
}

// FailMain ends the waits for the main process of a sandbox whose start has failed.
func (r *Registry) FailMain(sandbox string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropUpcoming(upcomingKey{sandbox, api.MainExec})
}
