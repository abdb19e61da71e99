package service

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
)

// Checks follow one another by their intervals, and their results make the status that Docker's
// would: failures in the start period do not count, and so many in a row make it unhealthy.
func TestHealthByTheClock(t *testing.T) {
	for name, tt := range map[string]struct {
		check api.HealthCheck
		takes time.Duration // of one check
		codes string        // exit code of each check, or p for a paused sandbox
		want  string        // for each check its second, and the status and streak after it
	}{
		"defaults":                         {api.HealthCheck{}, 0, "1110", "30 starting 1, 60 starting 2, 90 unhealthy 3, 120 healthy 0"},
		"the interval counts from the end": {api.HealthCheck{Interval: 10}, 5 * time.Second, "00", "10 healthy 0, 25 healthy 0"},
		"a start period": {
			api.HealthCheck{Interval: 20, StartPeriod: 12, Retries: 1},
			0, "111",
			"5 starting 0, 10 starting 0, 15 unhealthy 1",
		},
		"healthy in the start period": {
			api.HealthCheck{Interval: 20, StartPeriod: 100, StartInterval: 2, Retries: 2},
			0, "1011",
			"2 starting 0, 4 healthy 0, 24 healthy 1, 44 unhealthy 2",
		},
		"paused": {api.HealthCheck{Interval: 2, Retries: 1}, 0, "0pp1", "2 healthy 0, 8 unhealthy 1"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				begun := time.Now()
				var got []string
				next := 0
				m := &healthMonitor{check: &tt.check}
				m.probe = func(context.Context) (api.HealthResult, bool) {
					if next == len(tt.codes) {
						cancel()
						return api.HealthResult{}, false
					}
					code := tt.codes[next]
					next++
					at := time.Now()
					time.Sleep(tt.takes) // of the bubble's clock
					return api.HealthResult{StartedAt: at, EndedAt: time.Now(), ExitCode: int(code - '0')}, code != 'p'
				}
				m.save = func(h *api.SandboxHealth) {
					last := h.Log[len(h.Log)-1]
					got = append(got, strings.Join([]string{decimal(last.StartedAt.Sub(begun).Seconds()), string(h.Status), decimal(float64(h.FailingStreak))}, " "))
				}
				m.run(ctx, &api.SandboxHealth{Status: api.HealthStarting, StartedAt: begun})
				if diff := cmp.Diff(tt.want, strings.Join(got, ", ")); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		})
	}
}

// A daemon that goes on with the checks of the last one waits for the rest of the interval, and
// only for an interval if the clock was set.
func TestHealthGoesOn(t *testing.T) {
	now := time.Now()
	check := &api.HealthCheck{Interval: 10}
	for ago, want := range map[time.Duration]time.Duration{
		4 * time.Second: 6 * time.Second, time.Hour: 0, -time.Hour: 10 * time.Second,
	} {
		h := &api.SandboxHealth{Status: api.HealthHealthy, StartedAt: now.Add(-2 * time.Hour), Log: []api.HealthResult{{EndedAt: now.Add(-ago)}}}
		if got := healthWait(check, h, now); got != want {
			t.Errorf("the last one %v ago: %v, want %v", ago, got, want)
		}
	}
}

// Five results are kept, and the health before stays as it was: readers have it.
func TestHealthLog(t *testing.T) {
	h := &api.SandboxHealth{Status: api.HealthStarting}
	all := []*api.SandboxHealth{h}
	for i := range 8 {
		h = nextHealth(&api.HealthCheck{Retries: 100}, h, api.HealthResult{ExitCode: i})
		all = append(all, h)
	}
	for n, h := range all {
		var codes []int
		for _, r := range h.Log {
			codes = append(codes, r.ExitCode)
		}
		var want []int
		for i := max(0, n-5); i < n; i++ {
			want = append(want, i)
		}
		if diff := cmp.Diff(want, codes); diff != "" {
			t.Errorf("after %d results (-want +got):\n%s", n, diff)
		}
	}
}

// The request's values replace the image's one by one.
func TestHealthCheckOf(t *testing.T) {
	of := imageHealth(&image.Config{Shell: []string{"/bin/bash", "-ec"}, Health: &image.Health{
		Test: []string{"CMD-SHELL", "curl"}, Interval: time.Millisecond, Timeout: 5 * time.Second, Retries: -1,
	}})
	whole := &api.HealthCheck{Test: []string{"CMD", "/bin/bash", "-ec", "curl"}, Interval: 1, Timeout: 5}
	for name, tt := range map[string]struct {
		ask     *api.HealthCheck
		hasMain bool
		want    *api.HealthCheck
	}{
		"a service":        {nil, true, whole},
		"an idle sandbox":  {nil, false, nil},
		"asked for":        {&api.HealthCheck{}, false, whole},
		"none":             {&api.HealthCheck{Test: []string{"NONE"}}, true, nil},
		"another interval": {&api.HealthCheck{Interval: 7}, true, &api.HealthCheck{Test: whole.Test, Interval: 7, Timeout: 5}},
		"another test":     {&api.HealthCheck{Test: []string{"CMD", "true"}}, true, &api.HealthCheck{Test: []string{"CMD", "true"}, Interval: 1, Timeout: 5}},
	} {
		got, err := healthCheck(tt.ask, of, tt.hasMain)
		if diff := cmp.Diff(tt.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
	if got, err := healthCheck(&api.HealthCheck{Interval: 7}, nil, true); err == nil {
		t.Errorf("no test: %+v", got)
	}
	if got := imageHealth(&image.Config{Health: &image.Health{Test: []string{"NONE"}, Interval: time.Second}}); got != nil {
		t.Errorf("the image's NONE: %+v", got)
	}
}

func TestHealthCheckIsValidated(t *testing.T) {
	for text, h := range map[string]api.HealthCheck{
		"test: must be":         {Test: []string{"RUN", "x"}},
		"must be [\"CMD\"":      {Test: []string{"CMD"}},
		"[\"CMD-SHELL\", LINE]": {Test: []string{"CMD-SHELL", "a", "b"}},
		"or [\"NONE\"]":         {Test: []string{"NONE", "x"}},
		"nothing else":          {Test: []string{"NONE"}, Retries: 1},
		"command[0] is empty":   {Test: []string{"CMD", ""}},
		"interval 0.5: must be": {Interval: 0.5},
		"start_interval -1":     {StartInterval: -1},
		"timeout 99999999999":   {Timeout: 99999999999},
		"start_period -2":       {StartPeriod: -2},
		"retries -1":            {Retries: -1},
		"retries 100000":        {Retries: 100000},
	} {
		if err := validateHealth(&h); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%+v: %v, want %q", h, err, text)
		}
	}
}
