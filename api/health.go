package api

import "time"

// HealthCheck is a program that the daemon runs in a sandbox again and again to learn if its
// service works. Zero values are those of the image's HEALTHCHECK, else the defaults.
type HealthCheck struct {
	// Test is ["CMD", PROGRAM, ARG...], ["CMD-SHELL", LINE], which /bin/sh runs, or ["NONE"]. Exit
	// code 0 means that the service works. Default: the image's.
	Test []string `json:"test,omitempty"`
	// Interval is the time in seconds between the end of a check and the next one, from 1 on; default
	// 30. The first one is an interval after the start.
	Interval float64 `json:"interval,omitempty"`
	// Timeout is the time in seconds after which a check is killed, and counts as failed; default 30.
	Timeout float64 `json:"timeout,omitempty"`
	// StartPeriod is the time in seconds after the start in which failed checks do not count; default
	// 0.
	StartPeriod float64 `json:"start_period,omitempty"`
	// StartInterval is the Interval during StartPeriod, from 1 on; default 5.
	StartInterval float64 `json:"start_interval,omitempty"`
	// Retries is the number of failures in a row that make the sandbox unhealthy; default 3.
	Retries int `json:"retries,omitempty"`
}

// HealthStatus is the outcome of a sandbox's health checks.
type HealthStatus string

// Statuses of health.
const (
	HealthStarting  HealthStatus = "starting"  // no check has succeeded yet, and too few have failed
	HealthHealthy   HealthStatus = "healthy"   // the last check succeeded, or too few have failed since
	HealthUnhealthy HealthStatus = "unhealthy" // as many checks in a row have failed as Retries says
)

// SandboxHealth is the outcome of a sandbox's health checks since it was started. Of a sandbox that
// has ended it is the last one.
type SandboxHealth struct {
	Status        HealthStatus `json:"status"`
	FailingStreak int          `json:"failing_streak"` // number of failed checks since the last success
	StartedAt     time.Time    `json:"started_at"`     // begin of the start period
	// Log has the last five results, oldest first. After a restart of the daemon the latest may be
	// missing.
	Log []HealthResult `json:"log,omitempty"`
}

// HealthResult is the outcome of one health check.
type HealthResult struct {
	StartedAt time.Time `json:"started_at"`
	EndedAt   time.Time `json:"ended_at"`
	// ExitCode is the exit code of the program; -1 if it could not be started or exceeded its timeout.
	ExitCode int    `json:"exit_code"`
	Output   string `json:"output,omitempty"` // first 4 KiB of stdout and stderr, or the reason for -1
}
