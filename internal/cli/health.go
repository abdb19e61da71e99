package cli

import (
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// healthFlags are the health check of a sandbox, in Docker's words.
type healthFlags struct {
	cmd           string
	interval      cmdline.Seconds
	timeout       cmdline.Seconds
	startPeriod   cmdline.Seconds
	startInterval cmdline.Seconds
	retries       uint16
	none          bool
}

func (h *healthFlags) addFlags(f *pflag.FlagSet) {
	f.StringVar(&h.cmd, "health-cmd", "", "check the health of the sandbox with a `line` for its shell (default: the image's HEALTHCHECK)")
	f.Var(&h.interval, "health-interval", "time between two health checks (default: the image's, else 30s)")
	f.Var(&h.timeout, "health-timeout", "time after which a health check has failed (default: the image's, else 30s)")
	f.Var(&h.startPeriod, "health-start-period", "time after the start in which failed health checks do not count (default: the image's, else none)")
	f.Var(&h.startInterval, "health-start-interval", "time between two health checks in the start period (default: the image's, else 5s)")
	f.Uint16Var(&h.retries, "health-retries", 0, "`number` of failures in a row that make a sandbox unhealthy (default: the image's, else 3)")
	f.BoolVar(&h.none, "no-healthcheck", false, "run no health checks, whatever the image says")
}

// check returns the health check for a create request, nil if nothing is said about it.
func (h *healthFlags) check() (*api.HealthCheck, error) {
	set := api.HealthCheck{
		Interval: float64(h.interval), Timeout: float64(h.timeout), StartPeriod: float64(h.startPeriod),
		StartInterval: float64(h.startInterval), Retries: int(h.retries),
	}
	others := set.Interval != 0 || set.Timeout != 0 || set.StartPeriod != 0 || set.StartInterval != 0 || set.Retries != 0
	switch {
	case h.none && (others || h.cmd != ""):
		return nil, cmdline.Usagef("--no-healthcheck runs no health checks, and --health-… say how to; give one of them")
	case h.none:
		return &api.HealthCheck{Test: []string{"NONE"}}, nil
	case h.cmd != "":
		set.Test = []string{"CMD-SHELL", h.cmd}
	case !others:
		return nil, nil //nolint:nilnil // the daemon decides
	}
	return &set, nil
}
