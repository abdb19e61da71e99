package service

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestWhatIsOverdue(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	long := now.Add(-1000 * time.Hour) // that the daemon has run
	ended := func(id string, ago time.Duration, change ...func(*runtime.Record)) runtime.Record {
		rec := runtime.Record{Sandbox: api.Sandbox{ID: id, State: api.StateStopped, EndedAt: now.Add(-ago)}}
		for _, f := range change {
			f(&rec)
		}
		return rec
	}
	state := func(s api.SandboxState) func(*runtime.Record) { return func(r *runtime.Record) { r.State = s } }
	label := func(v string) func(*runtime.Record) {
		return func(r *runtime.Record) { r.Labels = map[string]string{api.LabelKeep: v} }
	}
	all := []runtime.Record{
		ended("runs", 99*time.Hour, state(api.StateRunning)),
		ended("paused", 99*time.Hour, state(api.StatePaused)),
		ended("creating", 99*time.Hour, state(api.StateCreating)),
		ended("request", 99*time.Hour, func(r *runtime.Record) { r.Ephemeral = true }),
		ended("kept", 99*time.Hour, label("")),
		ended("not kept", 98*time.Hour, label("false")),
		ended("minutes", 10*time.Minute),
		ended("lost", 50*time.Hour, state(api.StateLost)),
		ended("hours", 2*time.Hour),
	}
	for _, test := range []struct {
		name string
		r    retention
		up   time.Time
		want []string
	}{
		{"nothing is asked for", retention{}, long, nil},
		{"age", retention{age: 24 * time.Hour}, long, []string{"not kept", "lost"}},
		{"an age below the grace", retention{age: 5 * time.Minute}, long, []string{"not kept", "lost", "hours", "minutes"}},
		{"number", retention{limit: 3}, long, []string{"not kept"}},
		{"a number does not shorten the grace", retention{limit: 1}, long, []string{"not kept", "lost", "hours"}},
		{"both", retention{age: 60 * time.Hour, limit: 2}, long, []string{"not kept", "lost"}},
		{"nobody could read it before", retention{age: 24 * time.Hour, limit: 1}, now.Add(-59 * time.Minute), nil},
		{"now everybody could", retention{age: 24 * time.Hour}, now.Add(-time.Hour), []string{"not kept", "lost"}},
		{"a short age is a short grace", retention{age: 5 * time.Minute}, now.Add(-5 * time.Minute), []string{"not kept", "lost", "hours", "minutes"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, rec := range test.r.overdue(now, test.up, all) {
				got = append(got, rec.ID)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("removed %q, want %q", got, test.want)
			}
		})
	}
}

// A tenant with many ended sandboxes loses its own before another one does.
func TestEndedLimitOfTenants(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	var all []runtime.Record
	for i, tenant := range []string{"a", "b", "a", "b", "b", "b"} {
		at := now.Add(time.Duration(i-100) * time.Hour)
		all = append(all, runtime.Record{Sandbox: api.Sandbox{ID: fmt.Sprint(tenant, i), State: api.StateStopped, EndedAt: at}, Tenant: tenant})
	}
	var got []string
	for _, rec := range (retention{limit: 3}).overdue(now, now.Add(-99*time.Hour), all) {
		got = append(got, rec.ID)
	}
	if !slices.Equal(got, []string{"a0", "b1", "b3"}) {
		t.Errorf("removed %q", got)
	}
}

// All means all, whatever the clock said when it ended.
func TestPruneOfAllLooksAtNoClock(t *testing.T) {
	now, zero, week := time.Now(), 0.0, 604800.0
	for _, test := range []struct {
		olderThan *float64
		at        time.Time
		want      bool
	}{
		{&zero, now, true},
		{&zero, now.Add(87600 * time.Hour), true},
		{nil, now.Add(time.Hour), true},
		{&week, now.Add(-6 * 24 * time.Hour), false},
		{&week, now.Add(-8 * 24 * time.Hour), true},
	} {
		before, err := pruneBefore(test.olderThan, 0, nil)
		if err != nil || test.at.Before(before) != test.want {
			t.Errorf("older than %v: %s is before %s: %v", test.olderThan, test.at, before, err)
		}
	}
}

// A host that has slept for a month, or whose clock was wrong, is as one whose daemon was off.
func TestClockThatJumps(t *testing.T) {
	up := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	now := up.Add(1000 * time.Hour)
	for _, test := range []struct {
		told, passed time.Duration
		want         time.Time
	}{
		{time.Minute, time.Minute, up},
		{time.Minute + 3*time.Second, time.Minute, up}, // as it is set right a little
		{10 * time.Minute, 10 * time.Minute, up},       // a round that took long
		{30 * 24 * time.Hour, time.Minute, now},
		{-30 * 24 * time.Hour, time.Minute, up}, // what ended is younger then
	} {
		if got := upSince(up, now, test.told, test.passed); !got.Equal(test.want) {
			t.Errorf("%s by the clock in %s: %s", test.told, test.passed, got)
		}
	}
}
