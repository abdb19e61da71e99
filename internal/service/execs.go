package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/exec"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/runtime"
)

// Exec returns one exec of the sandbox with this id or name, for its record or to work with it. The
// caller does not close it.
func (s *API) Exec(ref, id string) (Exec, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return nil, err
	}
	return s.execs.Find(&rec, id)
}

// Execs lists the execs of the sandbox with this id or name, oldest first.
func (s *API) Execs(ref string) ([]ExecRecord, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return nil, err
	}
	return s.execs.List(rec.ID), nil
}

// Detached returns a detached exec of the sandbox with this id or name. Of another kind, the error
// is of the class ErrState.
func (s *API) Detached(ref, id string) (*Detached, error) {
	x, err := s.Exec(ref, id)
	if err != nil {
		return nil, err
	}
	d, ok := x.(*Detached)
	if !ok {
		return nil, class.Mark(runtime.ErrState, fmt.Errorf("attach to exec %s: it is not detached, its output goes to the client that started it", x.ID()))
	}
	return d, nil
}

// StartDetached starts a program that goes on without the caller.
func (s *API) StartDetached(ctx context.Context, ref string, req api.ExecRequest) (ExecRecord, error) {
	if err := validateExec(&req); err != nil {
		return ExecRecord{}, err
	}
	if !req.Detach {
		return ExecRecord{}, errDetach
	}
	rec, err := s.lookup(ref)
	if err != nil {
		return ExecRecord{}, err
	}
	return s.execs.Detach(ctx, &rec, req, exec.As{})
}

// DeleteExec ends an exec, with everything that it has started, if it runs, and forgets it.
func (s *API) DeleteExec(ctx context.Context, ref, id string) error {
	rec, err := s.lookup(ref)
	if err != nil {
		return err
	}
	return s.execs.Delete(ctx, &rec, id)
}

// forgetSandbox removes what the service has of a deleted sandbox: its execs, contexts and flows.
func (s *core) forgetSandbox(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	s.contexts.forget(id)
	s.parked.drop(id)
	s.execs.ForgetSandbox(ctx, id)
	if err := s.networks.Forget(id); err != nil {
		s.log.Error("the flows of a deleted sandbox are left until the next start", "id", id, "error", err)
	}
	s.collectVolumes(ctx)
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
	return s.execs.Prepare(&lease.Record, req)
}

// ExecRecordOf returns the record of an exec, also of one that is prepared or could not be started.
func (s *API) ExecRecordOf(ref, id string) (ExecRecord, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return ExecRecord{}, err
	}
	return s.execs.RecordOf(&rec, id)
}

// StartPrepared starts the program of a prepared exec, as a detached one. If that fails the record
// keeps the reason.
func (s *API) StartPrepared(ctx context.Context, ref, id string, size api.TerminalSize) (ExecRecord, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return ExecRecord{}, err
	}
	return s.execs.StartPrepared(ctx, &rec, id, size)
}

// Upcoming attaches to the next main process of a sandbox, or to a prepared exec, before its start.
// Close ends the wait.
func (s *API) Upcoming(ref, id string) (*Upcoming, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return nil, err
	}
	return s.execs.Upcoming(&rec, id)
}

// Processes lists the processes of the sandbox with this id or name.
func (s *API) Processes(ctx context.Context, ref string) (api.ProcessList, error) {
	lease, err := s.begin(ref)
	if err != nil {
		return api.ProcessList{}, err
	}
	defer lease.End()
	ctx, cancel := guests.WithGone(ctx, lease)
	defer cancel()
	found, err := guests.Of(lease).Processes(ctx)
	switch {
	case errors.Is(err, guests.ErrEnded):
		return api.ProcessList{}, s.guests.Ended(lease)
	case err != nil:
		return api.ProcessList{}, s.guests.Lost(ctx, lease, err)
	}
	from := s.execs.Running(lease.Record.ID)
	now := time.Now().UTC()
	list := api.ProcessList{Processes: make([]api.Process, 0, len(found))}
	for i := range found {
		p := &found[i]
		out := api.Process{
			PID: p.PID, PPID: p.PPID, UID: p.UID, State: p.State, StartedAt: now.Add(-p.Age), CPUMS: float64(p.CPU.Microseconds()) / 1000,
			RSS: p.RSS, Name: p.Name, Truncated: p.Cut, Exec: from[p.Main],
		}
		for _, a := range p.Argv {
			out.Argv = append(out.Argv, strings.ToValidUTF8(a, "\uFFFD"))
		}
		list.Processes = append(list.Processes, out)
	}
	slices.SortFunc(list.Processes, func(a, b api.Process) int { return cmp.Compare(a.PID, b.PID) })
	return list, nil
}

// adoptRetry is the interval at which the launcher is asked again for execs.
const adoptRetry = 2 * time.Second

// adoptExecs adopts the execs of the last daemon, then starts missing main processes. The daemon
// starts without them: if the launcher does not answer, it is asked again until it does.
func (s *core) adoptExecs(ctx context.Context) {
	err := s.execs.Adopt(ctx)
	if err == nil {
		s.startMissing() //nolint:contextcheck // removals outlive what starts them
		return
	}
	s.log.Warn("detached execs are not adopted yet, trying again", "error", err)
	s.work.Go(func() { //nolint:contextcheck // see above
		tick := time.NewTicker(adoptRetry)
		defer tick.Stop()
		for s.execs.Adopt(s.work.Ctx) != nil {
			select {
			case <-tick.C:
			case <-s.work.Ctx.Done():
				return
			}
		}
		s.startMissing() // not before: what runs is not missing
	})
}
