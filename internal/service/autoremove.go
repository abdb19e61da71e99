package service

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// maxFinal bounds the removed sandboxes of one tenant whose end is still known.
const maxFinal = 256

// finals are the ends of sandboxes that were removed at their end, of each tenant the last
// maxFinal. A client that waits for a sandbox gets its exit from here.
type finals struct {
	mu  sync.Mutex
	all map[string][]api.Sandbox // by tenant, oldest first
}

// keep notes the end of a sandbox, the last one if it has had several. What may be large is left
// out.
func (f *finals) keep(rec *runtime.Record) {
	end := rec.Shown()
	end.Env, end.Labels, end.Command, end.Entrypoint, end.Cmd, end.Settings = nil, nil, nil, nil, nil, api.Settings{}
	end.Network = api.Network{Mode: rec.Network.Mode}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all == nil {
		f.all = map[string][]api.Sandbox{}
	}
	of := slices.DeleteFunc(f.all[rec.Tenant], func(earlier api.Sandbox) bool { return earlier.ID == end.ID })
	of = append(of, end)
	f.all[rec.Tenant] = of[max(0, len(of)-maxFinal):]
}

// find returns the end of the tenant's sandbox with this id.
func (f *finals) find(tenant, id string) (api.Sandbox, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	of := f.all[tenant]
	if i := slices.IndexFunc(of, func(end api.Sandbox) bool { return end.ID == id }); i >= 0 {
		return of[i], true
	}
	return api.Sandbox{}, false
}

// removeAtEnd removes a sandbox when it has ended, if it was created so. What a daemon leaves
// undone the next one does.
func (s *core) removeAtEnd(rec *runtime.Record) {
	if !rec.AutoRemove || rec.Unstarted {
		return
	}
	id := rec.ID
	s.work.Go(func() {
		for {
			rec, err := s.awaitEnd(s.work.Ctx, id)
			if err != nil {
				return // deleted, or the daemon stops
			}
			s.finals.keep(&rec)
			s.execs.AwaitReaders(id)
			ctx, cancel := context.WithTimeout(context.WithoutCancel(s.work.Ctx), closeTimeout)
			_, err = s.removeEnded(ctx, []runtime.Record{rec}, 0)
			cancel()
			if err != nil {
				s.log.Warn("a sandbox could not be removed at its end", "id", id, "error", err)
				return // its retention ends, or a daemon starts
			}
			if _, err := s.supervisor.Get(id); errors.Is(err, runtime.ErrNotFound) {
				s.log.Info("sandbox removed at its end", "id", id, "name", rec.Name)
				return
			} // else it was started meanwhile
		}
	})
}

// awaitEnd returns the record of a sandbox that has ended, with the exit of its main process.
func (s *core) awaitEnd(ctx context.Context, id string) (runtime.Record, error) {
	for {
		if _, err := s.supervisor.WaitEnded(ctx, id); err != nil {
			return runtime.Record{}, err
		}
		if err := s.execs.AwaitReport(ctx, id); err != nil {
			return runtime.Record{}, err
		}
		rec, err := s.supervisor.Get(id)
		if err != nil || rec.State == api.StateStopped || rec.State == api.StateLost {
			return rec, err
		}
	}
}

// checkRollback refuses to roll back a sandbox that is removed when it is stopped for it.
func checkRollback(rec *runtime.Record) error {
	if !rec.AutoRemove {
		return nil
	}
	return class.Mark(runtime.ErrState, errors.New("roll back sandbox "+rec.Name+": it is removed when it ends (auto_remove), and a rollback ends it; fork it instead"))
}
