package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/internal/service/output"
	"github.com/sandboxd/sandboxd/runtime"
)

// A health check is an exec that the daemon starts. It appears neither among the execs of its
// sandbox nor in the events, and is no use of the sandbox: one that nothing else uses becomes idle.
// One goroutine for each checked sandbox waits for the next check, runs it and records the result.
// The timeout is init's, as for any exec, so that everything that the check has started is killed.

// Bounds of health checks; the defaults are Docker's.
const (
	minHealthInterval   = 1 // seconds: each check costs the daemon an exec
	maxHealthRetries    = 1000
	healthInterval      = 30 * time.Second
	healthTimeout       = 30 * time.Second
	healthStartInterval = 5 * time.Second
	healthRetries       = 3
	healthResults       = 5
	healthOutput        = 4 << 10 // bytes of one result
)

// The first words of HealthCheck.Test.
const (
	testNone  = "NONE"
	testCmd   = "CMD"
	testShell = "CMD-SHELL"
)

// validateHealth checks the health check of a request.
func validateHealth(h *api.HealthCheck) error {
	if h == nil {
		return nil
	}
	if len(h.Test) > 0 {
		switch kind := h.Test[0]; {
		case kind == testNone && len(h.Test) == 1:
			if h.Interval != 0 || h.Timeout != 0 || h.StartPeriod != 0 || h.StartInterval != 0 || h.Retries != 0 {
				return class.Invalidf("health_check: the test is NONE, so nothing else can be set")
			}
		case kind == testCmd && len(h.Test) > 1, kind == testShell && len(h.Test) == 2:
			if err := validateCommand(h.Test[1:]); err != nil {
				return fmt.Errorf("health_check.test: %w", err)
			}
		default:
			return class.Invalidf("health_check.test: must be [%q, PROGRAM, ARG...], [%q, LINE] or [%q]", testCmd, testShell, testNone)
		}
	}
	for _, v := range []struct {
		name    string
		seconds float64
		least   float64
	}{
		{"interval", h.Interval, minHealthInterval},
		{"start_interval", h.StartInterval, minHealthInterval},
		{"timeout", h.Timeout, 0},
		{"start_period", h.StartPeriod, 0},
	} {
		if _, err := seconds("health_check."+v.name, v.seconds); err != nil {
			return err
		}
		if v.seconds != 0 && v.seconds < v.least {
			return class.Invalidf("health_check.%s %s: must be at least %s second", v.name, decimal(v.seconds), decimal(v.least))
		}
	}
	if h.Retries < 0 || h.Retries > maxHealthRetries {
		return class.Invalidf("health_check.retries %d: must be between 0 (the default) and %d", h.Retries, maxHealthRetries)
	}
	return nil
}

// imageHealth returns the HEALTHCHECK of an image as a request could have it; nil if it has none.
// Values are brought within the bounds, and LINE goes to the image's own shell.
func imageHealth(c *image.Config) *api.HealthCheck {
	h := c.Health
	if h == nil || len(h.Test) == 0 || h.Test[0] == testNone {
		return nil
	}
	bounded := func(d time.Duration, least float64) float64 {
		if d <= 0 {
			return 0
		}
		return min(max(d.Seconds(), least), maxTimeout.Seconds())
	}
	check := &api.HealthCheck{
		Test: h.Test, Interval: bounded(h.Interval, minHealthInterval), Timeout: bounded(h.Timeout, 0.001),
		StartPeriod: bounded(h.StartPeriod, 0.001), StartInterval: bounded(h.StartInterval, minHealthInterval),
		Retries: min(max(h.Retries, 0), maxHealthRetries),
	}
	if h.Test[0] == testShell && len(h.Test) == 2 && len(c.Shell) > 0 {
		check.Test = slices.Concat([]string{testCmd}, c.Shell, h.Test[1:])
	}
	return check
}

// healthCheck returns the health check of a new sandbox: the request's, with the image's values
// where it has none. It is nil if there is nothing to run.
func healthCheck(ask, of *api.HealthCheck, hasMain bool) (*api.HealthCheck, error) {
	switch {
	case ask == nil && !hasMain:
		return nil, nil //nolint:nilnil // an idle sandbox has no service
	case ask == nil:
		return of, nil
	case len(ask.Test) > 0 && ask.Test[0] == testNone:
		return nil, nil //nolint:nilnil // as asked for
	case len(ask.Test) == 0 && of == nil && (ask.Interval != 0 || ask.Timeout != 0 || ask.StartPeriod != 0 || ask.StartInterval != 0 || ask.Retries != 0):
		return nil, class.Invalidf("health_check: there is nothing to run: the image has no HEALTHCHECK, so name the test")
	case of == nil && len(ask.Test) == 0:
		return nil, nil //nolint:nilnil // the image's was asked for, and it has none
	case of == nil:
		of = new(api.HealthCheck)
	}
	check := &api.HealthCheck{
		Test: of.Test, Interval: cmp.Or(ask.Interval, of.Interval), Timeout: cmp.Or(ask.Timeout, of.Timeout),
		StartPeriod: cmp.Or(ask.StartPeriod, of.StartPeriod), StartInterval: cmp.Or(ask.StartInterval, of.StartInterval),
		Retries: cmp.Or(ask.Retries, of.Retries),
	}
	if len(ask.Test) > 0 {
		check.Test = ask.Test
	}
	return check, nil
}

// healthArgv returns the program of a valid test.
func healthArgv(test []string) []string {
	if test[0] == testShell {
		return []string{"/bin/sh", "-c", test[1]}
	}
	return test[1:]
}

// duration returns seconds of a record as a duration, or the default of zero.
func duration(s float64, otherwise time.Duration) time.Duration {
	if s == 0 {
		return otherwise
	}
	return time.Duration(min(s*float64(time.Second), math.MaxInt64/2))
}

// nextHealth returns the health after one more result. It is pure.
func nextHealth(check *api.HealthCheck, was *api.SandboxHealth, result api.HealthResult) *api.SandboxHealth {
	now := &api.SandboxHealth{Status: was.Status, FailingStreak: was.FailingStreak, StartedAt: was.StartedAt}
	now.Log = append(slices.Clone(was.Log), result)
	if len(now.Log) > healthResults {
		now.Log = now.Log[len(now.Log)-healthResults:]
	}
	switch {
	case result.ExitCode == 0:
		now.Status, now.FailingStreak = api.HealthHealthy, 0
	case was.Status == api.HealthStarting && result.StartedAt.Sub(was.StartedAt) < duration(check.StartPeriod, 0):
	default:
		if now.FailingStreak++; now.FailingStreak >= cmp.Or(check.Retries, healthRetries) {
			now.Status = api.HealthUnhealthy
		}
	}
	return now
}

// healthWait returns the time until the next check. It is pure.
func healthWait(check *api.HealthCheck, h *api.SandboxHealth, now time.Time) time.Duration {
	interval := duration(check.Interval, healthInterval)
	if h.Status == api.HealthStarting && now.Sub(h.StartedAt) < duration(check.StartPeriod, 0) {
		interval = duration(check.StartInterval, healthStartInterval)
	}
	last := h.StartedAt
	if n := len(h.Log); n > 0 {
		last = h.Log[n-1].EndedAt
	}
	// At most an interval although the clock was set back, or a check was left out.
	return min(max(last.Add(interval).Sub(now), 0), interval)
}

// healthMonitor runs the health checks of one life of a sandbox.
type healthMonitor struct {
	check *api.HealthCheck
	// probe runs the check once. It returns false if there is no result: the sandbox is paused.
	probe func(ctx context.Context) (api.HealthResult, bool)
	save  func(h *api.SandboxHealth)
}

// run checks until ctx ends. H is the health so far.
func (m *healthMonitor) run(ctx context.Context, h *api.SandboxHealth) {
	timer := time.NewTimer(healthWait(m.check, h, time.Now()))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		result, ok := m.probe(ctx)
		if ctx.Err() != nil {
			return
		}
		wait := duration(m.check.Interval, healthInterval)
		if ok {
			h = nextHealth(m.check, h, result)
			m.save(h)
			wait = healthWait(m.check, h, time.Now())
		}
		timer.Reset(wait)
	}
}

// monitored is the registry of the sandboxes whose health is checked. The zero value is ready.
type monitored struct {
	mu   sync.Mutex
	gone map[string]<-chan struct{} // by the sandbox's id; closed when it ceases to run
}

// watchHealth begins to check a sandbox that runs or is paused, unless it has no health check or
// is being checked.
func (s *core) watchHealth(id string) {
	lease, err := s.supervisor.Observe(id)
	if err != nil {
		return // it has ended
	}
	defer lease.End()
	rec := &lease.Record
	if rec.HealthCheck == nil || rec.Health == nil {
		return
	}
	s.monitored.mu.Lock()
	begun := s.monitored.gone[id] == lease.Gone
	if s.monitored.gone == nil {
		s.monitored.gone = make(map[string]<-chan struct{})
	}
	s.monitored.gone[id] = lease.Gone
	s.monitored.mu.Unlock()
	if begun {
		return
	}
	m := &healthMonitor{
		check: rec.HealthCheck,
		probe: func(ctx context.Context) (api.HealthResult, bool) { return s.probeHealth(ctx, rec) },
		save: func(h *api.SandboxHealth) {
			if err := s.supervisor.SetHealth(id, rec.Life, h); err != nil {
				s.log.Error("the health of a sandbox is not on disk", "id", id, "error", err)
			}
		},
	}
	s.work.Go(func() {
		ctx, cancel := guests.WithGone(s.work.Ctx, lease)
		defer cancel()
		m.run(ctx, rec.Health)
		s.monitored.mu.Lock()
		defer s.monitored.mu.Unlock()
		if s.monitored.gone[id] == lease.Gone {
			delete(s.monitored.gone, id)
		}
	})
}

// probeHealth runs a health check once.
func (s *core) probeHealth(ctx context.Context, rec *runtime.Record) (result api.HealthResult, ok bool) {
	result = api.HealthResult{StartedAt: time.Now().UTC(), ExitCode: -1}
	lease, err := s.supervisor.Probe(rec.ID)
	if err != nil {
		return result, false // it is paused, or is ending
	}
	timeout := duration(rec.HealthCheck.Timeout, healthTimeout)
	exit, output, err := s.runProbe(ctx, lease, api.ExecRequest{Argv: healthArgv(rec.HealthCheck.Test), Timeout: timeout.Seconds()})
	result.EndedAt = time.Now().UTC()
	switch {
	case ctx.Err() != nil, errors.Is(err, class.ErrGone), lease.Held().After(result.StartedAt):
		return result, false // a check that a pause has delayed is no failure
	case err != nil:
		result.Output = class.Clip(strings.ToValidUTF8(err.Error(), "\uFFFD"))
	case exit.Timeout:
		result.Output = "the check took longer than " + timeout.String() + "\n" + output
	default:
		result.ExitCode, result.Output = exit.Code, output
	}
	return result, true
}

// runProbe runs a program that no client sees, and keeps the beginning of its output. It takes over
// the lease.
func (s *core) runProbe(ctx context.Context, lease *runtime.Lease, req api.ExecRequest) (api.Exit, string, error) {
	x, err := s.execs.StartUnlisted(ctx, lease, req, host.ExecRequest{NoStdin: true, Whole: true})
	if err != nil {
		return api.Exit{}, "", err
	}
	defer x.Close()
	out := output.Head{Limit: healthOutput}
	exit, _, err := x.Stream(ctx, x.KeepIn(&out, &out))
	text, _ := out.Result()
	return exit, text, err
}
