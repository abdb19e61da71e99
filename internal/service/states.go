package service

import (
	"context"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// maxGrace is how long a stop may wait for the processes of a sandbox.
const maxGrace = 10 * time.Minute

// StopSandbox ends every process of the sandbox with this id or name and keeps its files.
func (s *API) StopSandbox(ctx context.Context, ref string, req api.StopSandbox) (api.Sandbox, error) {
	grace := float64(api.DefaultGrace)
	if req.Grace != nil {
		grace = *req.Grace
	}
	if !(grace >= 0 && grace <= maxGrace.Seconds()) { // NaN too
		return api.Sandbox{}, class.Invalidf("grace %v: must be 0 to %v seconds", grace, maxGrace.Seconds())
	}
	ask := runtime.Ask{Grace: time.Duration(grace * float64(time.Second)), Signal: runtime.SignalNumber(req.Signal)}
	if req.Signal != "" && ask.Signal == 0 {
		return api.Sandbox{}, class.Invalidf("signal %q: no such signal", class.Clip(req.Signal))
	}
	rec, err := s.lookup(ref)
	if err != nil {
		return api.Sandbox{}, err
	}
	if req.Main && len(rec.Command) > 0 {
		if x, err := s.Detached(rec.ID, api.MainExec); err == nil {
			ask.Main = x.PID
		}
	}
	s.restarts.cancel(rec.ID)
	rec, err = s.supervisor.StopBy(ctx, rec.ID, ask)
	if err == nil {
		err = s.execs.AwaitReport(ctx, rec.ID)
	}
	if err == nil && rec.Restart != "" && rec.EndedItself() { // it had ended before
		err = s.supervisor.Settle(rec.ID)
	}
	if err == nil {
		if now, gerr := s.supervisor.Get(rec.ID); gerr == nil {
			rec = now
		}
	}
	return rec.Shown(), err
}

// profileOf returns the current profile of a sandbox: a later daemon may have another profile of
// the name, or none.
func (s *core) profileOf(rec *runtime.Record) (runtime.Profile, api.Limits, error) {
	profile, defaults, err := s.opts.Profile(rec.Profile)
	if err != nil {
		return profile, defaults, class.Mark(class.ErrProfileGone, fmt.Errorf("profile %q of sandbox %s: %w", rec.Profile, rec.Name, err))
	}
	return profile, defaults, nil
}

// StartSandbox runs a sandbox that has ended once more.
func (s *API) StartSandbox(ctx context.Context, ref string, req api.StartSandbox) (api.Sandbox, error) {
	if err := s.spareDisk(ctx); err != nil {
		return api.Sandbox{}, err
	}
	timeout, err := s.lifetime(req.Timeout)
	if err != nil {
		return api.Sandbox{}, err
	}
	rec, err := s.lookup(ref)
	if err != nil {
		return api.Sandbox{}, err
	}
	profile, _, err := s.profileOf(&rec)
	if err != nil {
		return api.Sandbox{}, err
	}
	trust, err := s.networks.Restore(&rec)
	if err != nil {
		return api.Sandbox{}, err
	}
	first := rec.Unstarted && !req.Idle
	rec, err = s.supervisor.Start(ctx, rec.ID, runtime.StartRequest{Profile: profile, Timeout: timeout, Idle: req.Idle, Trust: trust})
	if err == nil {
		err = s.startAgain(ctx, &rec)
	}
	if first && rec.ID != "" { // it has run, if only for a moment
		s.removeAtEnd(&rec) //nolint:contextcheck // the removal outlives the request
	}
	if err != nil {
		if rec.ID != "" && !req.Idle {
			s.execs.FailMain(rec.ID)
		}
		return api.Sandbox{}, err
	}
	s.publishPorts(&rec)
	return rec.Shown(), nil
}

// PauseSandbox makes every process of the sandbox with this id or name stand still.
func (s *API) PauseSandbox(ctx context.Context, ref string, _ struct{}) (api.Sandbox, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return api.Sandbox{}, err
	}
	s.parked.drop(rec.ID) // a frozen init could not end it later
	rec, err = s.supervisor.Pause(ctx, rec.ID)
	return rec.Shown(), err
}

// ResumeSandbox lets a paused sandbox go on.
func (s *API) ResumeSandbox(ctx context.Context, ref string, _ struct{}) (api.Sandbox, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return api.Sandbox{}, err
	}
	rec, err = s.supervisor.Resume(ctx, rec.ID)
	if err != nil {
		return api.Sandbox{}, err
	}
	// It may have been paused before a daemon that was then killed started its main process. The
	// adoption shows which processes that daemon had started.
	if wantsMain(&rec) {
		if err := s.execs.Adopt(ctx); err != nil {
			return api.Sandbox{}, err
		}
		if err := s.startAgain(ctx, &rec); err != nil {
			return api.Sandbox{}, err
		}
	}
	return rec.Shown(), nil
}
