package daemon

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// maxGrace is how long a stop may wait for the processes of a sandbox.
const maxGrace = 10 * time.Minute

// StopSandbox ends every process of the sandbox with this id or name and keeps its files.
func (s *Service) StopSandbox(ctx context.Context, ref string, req api.StopSandbox) (api.Sandbox, error) {
	grace := float64(api.DefaultGrace)
	if req.Grace != nil {
		grace = *req.Grace
	}
	if !(grace >= 0 && grace <= maxGrace.Seconds()) { // NaN too
		return api.Sandbox{}, invalidf("grace %v: must be 0 to %v seconds", grace, maxGrace.Seconds())
	}
	rec, err := s.supervisor.Stop(ctx, ref, time.Duration(grace*float64(time.Second)))
	if err == nil {
		err = s.told(ctx, rec.ID)
	}
	if err == nil {
		if now, gerr := s.supervisor.Get(rec.ID); gerr == nil {
			rec = now
		}
	}
	return rec.Sandbox, err
}

// profileOf is the profile of a sandbox as it is now: a daemon that was started with other ones may have another, or none, of
// the name.
func (s *Service) profileOf(rec *runtime.Record) (runtime.Profile, api.Limits, error) {
	profile, defaults, err := s.opts.Profile(rec.Profile)
	if err != nil {
		return profile, defaults, classify(errProfileGone, fmt.Errorf("profile %q of sandbox %s: %w", rec.Profile, rec.Name, err))
	}
	return profile, defaults, nil
}

// StartSandbox runs a sandbox that has ended once more.
func (s *Service) StartSandbox(ctx context.Context, ref string, req api.StartSandbox) (api.Sandbox, error) {
	timeout, err := seconds("timeout", req.Timeout)
	if err != nil {
		return api.Sandbox{}, err
	}
	rec, err := s.supervisor.Get(ref)
	if err != nil {
		return api.Sandbox{}, err
	}
	profile, _, err := s.profileOf(&rec)
	if err != nil {
		return api.Sandbox{}, err
	}
	rec, err = s.supervisor.Start(ctx, rec.ID, runtime.StartRequest{Profile: profile, Timeout: timeout, Idle: req.Idle})
	if err == nil {
		err = s.startAgain(ctx, &rec)
	}
	return rec.Sandbox, err
}

// PauseSandbox makes every process of the sandbox with this id or name stand still.
func (s *Service) PauseSandbox(ctx context.Context, ref string, _ struct{}) (api.Sandbox, error) {
	rec, err := s.supervisor.Pause(ctx, ref)
	return rec.Sandbox, err
}

// ResumeSandbox lets a paused sandbox go on.
func (s *Service) ResumeSandbox(ctx context.Context, ref string, _ struct{}) (api.Sandbox, error) {
	rec, err := s.supervisor.Resume(ctx, ref)
	if err != nil {
		return api.Sandbox{}, err
	}
	// It may have been paused before its main process was started, by a daemon that was killed then. What that daemon had
	// started is known only after the adoption.
	if wantsMain(&rec) {
		if err := s.adoption(ctx); err != nil {
			return api.Sandbox{}, err
		}
		if err := s.startAgain(ctx, &rec); err != nil {
			return api.Sandbox{}, err
		}
	}
	return rec.Sandbox, nil
}

func (d *Daemon) postPause(w http.ResponseWriter, r *http.Request) error {
	return turn(w, r, d.service.PauseSandbox)
}

func (d *Daemon) postResume(w http.ResponseWriter, r *http.Request) error {
	return turn(w, r, d.service.ResumeSandbox)
}

func (d *Daemon) postStop(w http.ResponseWriter, r *http.Request) error {
	return turn(w, r, d.service.StopSandbox)
}

func (d *Daemon) postStart(w http.ResponseWriter, r *http.Request) error {
	return turn(w, r, d.service.StartSandbox)
}

// turn answers a request that brings a sandbox into another state. Its body may be left out.
func turn[T any](w http.ResponseWriter, r *http.Request, f func(ctx context.Context, ref string, req T) (api.Sandbox, error)) error {
	var req T
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxBody, &req); err != nil {
			return err
		}
	}
	sb, err := f(r.Context(), r.PathValue("id"), req)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, sb)
}
