package runtime_test

import (
	"errors"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// A probe is no use of a sandbox: neither while it lasts nor from its end does the idle time begin
// anew. Like any use it needs a sandbox that runs; to observe needs one that is alive.
func TestProbesAreNoUse(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request(""))
	const idle = 40 * time.Second
	idlesAfter(t, s, rec.ID, idle)
	b.advance(s, idle/2)
	probe, err := s.Probe(rec.ID)
	if err != nil {
		t.Fatal(err)
	}
	probe.End()
	if _, err := s.Pause(t.Context(), rec.ID); err != nil {
		t.Fatal(err)
	}
	if l, err := s.Probe(rec.ID); !errors.Is(err, runtime.ErrPaused) {
		t.Errorf("a probe of a paused one: %+v, %v", l, err)
	}
	seen, err := s.Observe(rec.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer seen.End()
	if _, err := s.Resume(t.Context(), rec.ID); err != nil { // the idle time begins anew
		t.Fatal(err)
	}
	b.advance(s, idle-1)
	if probe, err = s.Probe(rec.ID); err != nil {
		t.Fatal(err)
	}
	defer probe.End()
	b.advance(s, 1)
	select {
	case <-probe.Gone:
	case <-time.After(patience):
		t.Fatal("a sandbox that is only probed does not become idle")
	}
}

// Health is of one life: a result that comes after its end changes nothing of the next one. A
// changed status is on disk, and so are others after a while.
func TestHealthIsOfOneLife(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	req := request("checked")
	req.HealthCheck = &api.HealthCheck{Test: []string{"CMD", "true"}}
	rec := create(t, s, req)
	if rec.Health == nil || rec.Health.Status != api.HealthStarting {
		t.Fatalf("at the beginning: %+v", rec.Health)
	}
	set := func(life, streak int, status api.HealthStatus) *api.SandboxHealth {
		t.Helper()
		if err := s.SetHealth(rec.ID, life, &api.SandboxHealth{Status: status, FailingStreak: streak}); err != nil {
			t.Fatal(err)
		}
		now, err := s.Get(rec.ID)
		if err != nil {
			t.Fatal(err)
		}
		return now.Health
	}
	if got := set(rec.Life, 3, api.HealthUnhealthy); got.Status != api.HealthUnhealthy {
		t.Errorf("%+v", got)
	}
	if got := set(rec.Life, 4, api.HealthUnhealthy); got.FailingStreak != 4 {
		t.Errorf("%+v", got)
	}
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	if now, err := s.Get(rec.ID); err != nil || now.Health == nil || now.Health.Status != api.HealthUnhealthy || now.Health.FailingStreak != 3 {
		t.Errorf("on disk: %+v, %v", now.Health, err)
	}
	if _, err := s.Stop(t.Context(), rec.ID, 0); err != nil {
		t.Fatal(err)
	}
	if got := set(rec.Life, 0, api.HealthHealthy); got.Status != api.HealthUnhealthy {
		t.Errorf("after the end: %+v", got)
	}
	again, err := s.Start(t.Context(), rec.ID, runtime.StartRequest{})
	if err != nil || again.Health.Status != api.HealthStarting {
		t.Fatalf("%+v, %v", again.Health, err)
	}
	if got := set(rec.Life, 0, api.HealthHealthy); got.Status != api.HealthStarting {
		t.Errorf("of the life before: %+v", got)
	}
	if got := set(again.Life, 0, api.HealthHealthy); got.Status != api.HealthHealthy {
		t.Errorf("of this life: %+v", got)
	}
}
