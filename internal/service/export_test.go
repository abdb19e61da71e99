package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/exec"
	"github.com/sandboxd/sandboxd/internal/service/execlog"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/internal/service/share"
	"github.com/sandboxd/sandboxd/runtime"
)

// Inner names for tests that drive the service over a socket.

const (
	DefaultProfile = defaultProfile
	MaxBuilds      = maxBuilds
	MaxOutputLimit = maxOutputLimit
	MaxCommand     = maxCommand
	MaxLabels      = maxLabels
)

var (
	ExecError = execError
	FileError = fileError
	GuestOf   = guests.Of
	UserError = userError
)

type Retention = retention

func NewRetention(age time.Duration, snapshot time.Duration) Retention {
	return retention{age: age, snapshot: snapshot}
}

// Due returns the number of restarts that are due.
func (s *Service) Due() int {
	s.core.restarts.mu.Lock()
	defer s.core.restarts.mu.Unlock()
	return len(s.core.restarts.due)
}

// NextStart is the decision of a restart policy.
func NextStart(text string, rec *runtime.Record, booting bool, failed int, now time.Time) (delay time.Duration, short int, ok bool, err error) {
	p, err := parseRestart(text)
	if err != nil {
		return 0, 0, false, err
	}
	delay, short, ok = p.next(rec, booting, failed, now)
	return delay, short, ok, nil
}

func (s *Service) Supervisor() *runtime.Supervisor { return s.core.supervisor }

func (s *Service) Builds() chan struct{} { return s.core.builds.of("") }

func (s *Service) Own() *API { return s.For(Caller{Rights: Administer}) }

func (s *Service) WakePools() { s.core.pools.Changed() }

func (s *Service) RemoveEnded(ctx context.Context, recs []runtime.Record, unread time.Duration) (int, error) {
	removed, err := s.core.removeEnded(ctx, recs, unread)
	return len(removed), err
}

func (s *Service) RemoveOverdue(ctx context.Context, r Retention, now, up time.Time) {
	s.core.removeOverdue(ctx, r, now, up)
}

// MeasuresDisk makes the service one whose disk f measures, with a reserve of one byte.
func (s *Service) MeasuresDisk(f func() (Disk, error)) {
	s.core.disk.reserve, s.core.disk.measure = 1, f
}

func (s *Service) Closing() <-chan struct{} { return s.core.disk.closing }

func (s *Service) SpareDisk(ctx context.Context) error { return s.core.spareDisk(ctx) }

func (s *Service) StartAgain(ctx context.Context, rec *runtime.Record) error {
	return s.core.startAgain(ctx, rec)
}

func (s *Service) WriteChanges(ctx context.Context, id string) error {
	return s.Own().inBuild().writeChanges(ctx, id, time.Time{}, discard{})
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// Execs returns the registry of all execs.
func (s *Service) Execs() *exec.Registry { return s.core.execs }

// Stopping makes the service one that starts nothing any more.
func (s *Service) Stopping() { s.core.work.Close() }

// ForgetBegins makes the record of a context one of a daemon that had no field Begins.
func ForgetBegins(files []*os.File) error {
	var rec map[string]any
	if ok, err := execlog.ReadDocument(files[1], execlog.Context, &rec); err != nil || !ok {
		return errors.Join(errors.New("no record"), err)
	}
	if rec["Begins"] != true {
		return fmt.Errorf("a record without Begins: %v", rec)
	}
	delete(rec, "Begins")
	log, err := execlog.Adopt(files[0], files[1], 1<<20)
	if err != nil {
		return err
	}
	return log.Write(execlog.Context, rec)
}

// RewriteInit changes the pid of the init in the record of an exec that runs, and removes its end.
func RewriteInit(files []*os.File, pid int) error {
	var rest map[string]any
	if ok, err := execlog.ReadDocument(files[1], execlog.Record, &rest); err != nil || !ok {
		return errors.Join(errors.New("no record"), err)
	}
	rest["Init"] = pid
	log, err := execlog.Adopt(files[0], files[1], 1<<20)
	if err != nil {
		return err
	}
	_, err = files[1].WriteAt(make([]byte, 8), int64(execlog.End))
	return errors.Join(err, log.Write(execlog.Record, rest))
}

// Results returns the quota of bytes of results.
func (s *API) Results() *share.Quota { return s.results }

// SpareExec returns the exec of the interpreter that is ready for the next context of a sandbox.
func (s *API) SpareExec(sandbox string) string {
	s.contexts.mu.Lock()
	defer s.contexts.mu.Unlock()
	if sp := s.contexts.spares[sandbox]; sp != nil && sp.c != nil {
		return sp.c.process().ID()
	}
	return ""
}

// ParkedPID returns the pid of the interpreter that is ready for the first context of a sandbox; 0
// if there is none.
func (s *API) ParkedPID(sandbox string) int {
	s.parked.mu.Lock()
	defer s.parked.mu.Unlock()
	if sp := s.parked.of[sandbox]; sp != nil && sp.guest != nil {
		return sp.guest.PID
	}
	return 0
}

// Furnish starts the missing interpreters of a pool.
func (s *API) Furnish(ctx context.Context, w *Pool) error {
	w2 := *w
	w2.Profile = cmp.Or(w2.Profile, defaultProfile)
	return s.furnish(ctx, &w2)
}

// KillParked kills the interpreter that is ready for the first context of a sandbox, and returns a
// function that reports whether it has ended.
func (s *API) KillParked(sandbox string) (ended func() bool) {
	s.parked.mu.Lock()
	defer s.parked.mu.Unlock()
	x := s.parked.of[sandbox].guest
	_ = x.Kill() // as in collect
	return x.Reported
}

// Rejoin changes the networks of a sandbox as [API.ConnectNetwork] does, with an edit of the
// test's.
func (s *API) Rejoin(ctx context.Context, ref, name string, edit func(rec *runtime.Record) (api.Network, error)) error {
	return s.rejoin(ctx, ref, name, api.ActionConnected, edit)
}
