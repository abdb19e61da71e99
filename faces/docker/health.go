package docker

import (
	"math"
	"time"

	"github.com/moby/moby/api/types/container"

	"github.com/sandboxd/sandboxd/api"
)

// noCheck is the first word of a test that keeps the image's check from being run.
const noCheck = "NONE"

// healthOf translates a health check. It returns nil for a request without one: the daemon runs the
// image's then. The daemon refuses a check that makes no sense.
func healthOf(h *container.HealthConfig) *api.HealthCheck {
	if h == nil {
		return nil
	}
	if len(h.Test) > 0 && h.Test[0] == noCheck {
		return &api.HealthCheck{Test: []string{noCheck}} // clients may send the image's times along
	}
	return &api.HealthCheck{
		Test: h.Test, Interval: h.Interval.Seconds(), Timeout: h.Timeout.Seconds(),
		StartPeriod: h.StartPeriod.Seconds(), StartInterval: h.StartInterval.Seconds(), Retries: h.Retries,
	}
}

// healthConfig undoes healthOf.
func healthConfig(h *api.HealthCheck) *container.HealthConfig {
	nanos := func(seconds float64) time.Duration { return time.Duration(math.Round(seconds * float64(time.Second))) }
	return &container.HealthConfig{
		Test: h.Test, Interval: nanos(h.Interval), Timeout: nanos(h.Timeout),
		StartPeriod: nanos(h.StartPeriod), StartInterval: nanos(h.StartInterval), Retries: h.Retries,
	}
}

// health returns the outcome of the checks of a container; nil if none are run.
func health(sb *api.Sandbox) *container.Health {
	if sb.Health == nil || stateOf(sb) == container.StateCreated {
		return nil
	}
	out := &container.Health{
		Status: container.HealthStatus(sb.Health.Status), FailingStreak: sb.Health.FailingStreak, Log: []*container.HealthcheckResult{},
	}
	if sb.State != api.StateRunning && sb.State != api.StatePaused {
		out.Status = container.Unhealthy
	}
	for i := range sb.Health.Log {
		r := &sb.Health.Log[i]
		out.Log = append(out.Log, &container.HealthcheckResult{Start: r.StartedAt, End: r.EndedAt, ExitCode: r.ExitCode, Output: r.Output})
	}
	return out
}

// healthStatus returns the status of a container for filters.
func healthStatus(sb *api.Sandbox) container.HealthStatus {
	if sb.Health == nil {
		return container.NoHealthcheck
	}
	return container.HealthStatus(sb.Health.Status)
}

// healthNote returns the words about health behind the status of a running container.
func healthNote(sb *api.Sandbox) string {
	switch healthStatus(sb) {
	case container.Starting:
		return " (health: starting)"
	case container.Healthy:
		return " (healthy)"
	case container.Unhealthy:
		return " (unhealthy)"
	case container.NoHealthcheck:
	}
	return ""
}
