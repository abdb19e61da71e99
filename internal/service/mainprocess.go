package service

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/exec"
	"github.com/sandboxd/sandboxd/internal/service/mainlog"
	"github.com/sandboxd/sandboxd/runtime"
)

// create makes a sandbox and starts its main process, if it has one.
func (s *core) create(ctx context.Context, r runtime.Request) (api.Sandbox, error) {
	if err := s.checkMounts(ctx, &r); err != nil {
		return api.Sandbox{}, err
	}
	release, err := s.prepareVolumes(ctx, &r)
	if err != nil {
		return api.Sandbox{}, err
	}
	// When Create returns, the supervisor has the sandbox, or there is none.
	defer func() { release(ctx) }()
	ports, err := s.networks.Publish(ctx, r.Ports)
	if err != nil {
		return api.Sandbox{}, err
	}
	inspection, err := s.networks.Inspect(r.Tenant, r.Network)
	if err != nil {
		return api.Sandbox{}, errors.Join(err, ports.Close())
	}
	bundle, secrets := inspection.Env()
	r.Ports, r.Trust, r.Env = ports.Mappings(), inspection.Trust(), mergeEnv(bundle, r.Env, secrets)
	var prepared string
	if inspection != nil && r.Network.HasGateway() {
		r.Prepare = func(id string) error { // a sandbox that shares its network needs it as soon as this one runs
			prepared = id
			return s.networks.Store(id, inspection)
		}
	}
	rec, err := s.supervisor.Create(ctx, r)
	if err != nil {
		if prepared != "" {
			err = errors.Join(err, s.networks.Forget(prepared))
		}
		return api.Sandbox{}, errors.Join(err, ports.Close())
	}
	if r.Stopped { // the start binds the ports
		if err := ports.Close(); err != nil {
			s.log.Warn("a port of a sandbox that is not started stays bound", "id", rec.ID, "error", err)
		}
		return rec.Shown(), nil
	}
	if err = s.connect(ctx, &rec, ports); err == nil {
		err = s.startMain(ctx, &rec)
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		derr := s.supervisor.Delete(undo, rec.ID)
		if errors.Is(derr, runtime.ErrNotFound) {
			derr = nil // deleted concurrently
		}
		s.forgetSandbox(undo, rec.ID)
		return api.Sandbox{}, errors.Join(err, derr)
	}
	s.removeAtEnd(&rec)   //nolint:contextcheck // the removal outlives the request
	s.watchHealth(rec.ID) //nolint:contextcheck // as the checks do
	return rec.Shown(), nil
}

// wantsMain reports whether a running sandbox should have a main process.
func wantsMain(rec *runtime.Record) bool {
	return len(rec.Command) > 0 && !rec.Idle && rec.State == api.StateRunning
}

// startMain starts the main process of a sandbox that has just begun to run, unless it has none or
// a concurrent call does.
func (s *core) startMain(ctx context.Context, rec *runtime.Record) error {
	if !wantsMain(rec) {
		return nil
	}
	lease, err := s.supervisor.Begin(rec.ID)
	if err != nil {
		return err
	}
	defer lease.End()
	req := api.ExecRequest{Argv: rec.Command, TTY: rec.TTY, StdinOpen: rec.StdinOpen, Detach: true, CwdCreate: true, OutputLimit: exec.MainRing}
	if err = validateExec(&req); err == nil {
		err = s.execs.StartMain(ctx, lease, req)
	}
	if err != nil {
		return fmt.Errorf("start the main process of sandbox %s: %w", rec.Name, err)
	}
	return nil
}

// startAgain is connect and startMain for a sandbox that existed before. If it fails, the sandbox
// is stopped. A sandbox that does not run, as after a rollback of a stopped one, needs nothing.
func (s *core) startAgain(ctx context.Context, rec *runtime.Record) (err error) {
	defer func() { //nolint:contextcheck // the checks outlive the request
		if err == nil {
			s.watchHealth(rec.ID)
		}
	}()
	if !wantsMain(rec) && (rec.State != api.StateRunning || !rec.HasGateway()) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	lease, err := s.supervisor.Rejoin(rec.ID)
	if err != nil {
		return err // it was stopped or deleted concurrently
	}
	defer lease.End()
	ports, err := s.networks.Connect(ctx, lease, nil)
	if err == nil {
		_, err = s.recordPorts(lease, rec, ports)
	}
	if err != nil {
		return errors.Join(err, lease.Kill(ctx, "it could not be given its network: "+err.Error()))
	}
	err = s.startMain(ctx, rec)
	if err == nil || errors.Is(err, class.ErrGone) || errors.Is(err, class.ErrStopping) { // the next daemon starts it
		return err
	}
	return errors.Join(err, lease.Kill(ctx, "its main process could not be started: "+err.Error()))
}

// startMissing starts main processes that a killed daemon did not start, and the sandboxes that
// their restart policies want.
func (s *core) startMissing() {
	for _, rec := range s.supervisor.List(runtime.Filter{AllTenants: true}) {
		s.removeAtEnd(&rec)
		s.watchHealth(rec.ID)
		if rec.State == api.StateStopped || rec.State == api.StateLost {
			s.considerRestart(rec.ID, true)
		}
		if !wantsMain(&rec) {
			continue
		}
		s.work.Go(func() {
			was := rec.Ports
			err := s.startAgain(s.work.Ctx, &rec)
			if !slices.Equal(was, rec.Ports) {
				s.publishPorts(&rec)
			}
			if err != nil && !errors.Is(err, class.ErrStopping) {
				s.log.Warn("a main process that should run could not be started", "id", rec.ID, "error", err)
				s.considerRestart(rec.ID, false)
			}
		})
	}
}

// sweepLogs removes logs of sandboxes that no longer exist.
func (s *core) sweepLogs() {
	err := s.logs.Sweep(func(id string) bool {
		rec, err := s.supervisor.Get(id)
		return err == nil && rec.ID == id
	})
	if err != nil {
		s.log.Error("logs of sandboxes that are no more could not be removed", "error", err)
	}
}

// WaitSandbox returns when the sandbox with this id or name has ended. Of one that was removed at
// its end the id is enough.
func (s *API) WaitSandbox(ctx context.Context, ref string) (api.Sandbox, error) {
	rec, err := s.lookup(ref)
	if errors.Is(err, runtime.ErrNotFound) {
		if end, ok := s.finals.find(s.caller.Tenant, ref); ok {
			return end, nil
		}
	}
	if err != nil {
		return api.Sandbox{}, err
	}
	ended, err := s.awaitEnd(ctx, rec.ID)
	if errors.Is(err, runtime.ErrNotFound) {
		if end, ok := s.finals.find(s.caller.Tenant, rec.ID); ok {
			return end, nil
		}
		err = class.Mark(class.ErrGone, fmt.Errorf("sandbox %s was deleted", rec.Name))
	}
	return ended.Shown(), err
}

// LogReader reads the log of a sandbox: see [API.Log].
type LogReader = mainlog.Reader

// LogOptions select entries of a log.
type LogOptions = mainlog.ReadOptions

// Log returns a reader of the output of main processes of the sandbox with this id or name.
func (s *API) Log(ctx context.Context, ref string, opts LogOptions) (*LogReader, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return nil, err
	}
	if len(rec.Command) == 0 {
		return nil, class.Mark(runtime.ErrState, fmt.Errorf("sandbox %s has no main process, whose output a log could have: it was created without a command", rec.Name))
	}
	return s.logs.Of(rec.ID).NewReader(ctx, opts)
}
