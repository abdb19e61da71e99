package service_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestRestartPolicies(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ended := func(change func(*runtime.Record)) *runtime.Record {
		rec := &runtime.Record{Sandbox: api.Sandbox{
			State: api.StateStopped, Reason: "its main process exited with 3", Command: []string{"x"}, Deadline: now.Add(time.Hour),
			Exit: &api.SandboxExit{Exit: api.Exit{Code: 3}, StartedAt: now.Add(-time.Second), EndedAt: now},
		}}
		change(rec)
		return rec
	}
	for name, tt := range map[string]struct {
		change  func(*runtime.Record)
		booting bool
		want    string // the policies that start it: a: always, u: unless-stopped, f: on-failure, 2: on-failure:2
	}{
		"it failed":       {func(*runtime.Record) {}, false, "auf2"},
		"it succeeded":    {func(r *runtime.Record) { r.Exit.Code = 0 }, false, "au"},
		"it failed twice": {func(r *runtime.Record) { r.Restarts = 2 }, false, "auf"},
		"it was lost": {func(r *runtime.Record) {
			r.State, r.Exit, r.Reason = api.StateLost, nil, "the launcher that held it died"
		}, true, "auf2"},
		"it was stopped":          {func(r *runtime.Record) { r.Reason = runtime.ReasonStopped }, false, ""},
		"it was, long ago":        {func(r *runtime.Record) { r.Reason = runtime.ReasonStopped }, true, "a"},
		"it was, after its end":   {func(r *runtime.Record) { r.Settled = true }, false, ""},
		"so it was, long ago":     {func(r *runtime.Record) { r.Settled = true }, true, "a"},
		"its time was over":       {func(r *runtime.Record) { r.Reason = "deadline reached" }, true, ""},
		"it was idle":             {func(r *runtime.Record) { r.Reason = runtime.ReasonIdle + "10m0s" }, true, ""},
		"its deadline has passed": {func(r *runtime.Record) { r.Deadline = now.Add(-time.Second) }, true, ""},
		"its deadline comes":      {func(r *runtime.Record) { r.Deadline = now.Add(50 * time.Millisecond) }, false, ""},
		"it runs":                 {func(r *runtime.Record) { r.State = api.StateRunning }, true, ""},
		"it ran idle":             {func(r *runtime.Record) { r.Idle = true }, true, ""},
		"it has no program":       {func(r *runtime.Record) { r.Command = nil }, true, ""},
	} {
		got := ""
		for _, p := range []struct{ sign, text string }{{"", "no"}, {"", ""}, {"a", "always"}, {"u", "unless-stopped"}, {"f", "on-failure"}, {"2", "on-failure:2"}} {
			_, _, ok, err := service.NextStart(p.text, ended(tt.change), tt.booting, 0, now)
			if err != nil || ok && p.sign == "" {
				t.Errorf("%s, %s: %v, %v", name, p.text, ok, err)
			}
			if ok {
				got += p.sign
			}
		}
		if got != tt.want {
			t.Errorf("%s: %q start it, want %q", name, got, tt.want)
		}
	}
	for _, text := range []string{"never", "on-failure:0", "on-failure:-1", "on-failure:", "on-failure:x", "no:1", "always:", "on-failure:99999999999"} {
		if _, _, _, err := service.NextStart(text, ended(func(*runtime.Record) {}), false, 0, now); err == nil {
			t.Errorf("%q is a policy", text)
		}
	}
}

// Delays double from 0.1 s to a minute, and begin anew after a life of 10 s.
func TestRestartDelays(t *testing.T) {
	now := time.Now()
	rec := &runtime.Record{Sandbox: api.Sandbox{
		State: api.StateStopped, Command: []string{"x"}, Deadline: now.Add(time.Hour), Exit: &api.SandboxExit{StartedAt: now, EndedAt: now.Add(9 * time.Second)},
	}}
	want := 100 * time.Millisecond
	for n := range 40 {
		delay, short, ok, err := service.NextStart("always", rec, false, 0, now)
		if delay != want || short != n+1 || !ok || err != nil {
			t.Fatalf("restart %d: after %v, %d, %v, %v; want %v", n, delay, short, ok, err, want)
		}
		rec.ShortLives, want = short, min(2*want, time.Minute)
	}
	rec.Exit.EndedAt = now.Add(10 * time.Second)
	if delay, short, _, _ := service.NextStart("always", rec, false, 0, now); delay != 100*time.Millisecond || short != 1 {
		t.Errorf("%v, %d", delay, short)
	}
	// Starts that fail are on no record.
	want = 100 * time.Millisecond
	for failed := range 20 {
		if delay, _, ok, err := service.NextStart("always", rec, false, failed, now); delay != want || !ok || err != nil {
			t.Errorf("after %d failed starts: %v, %v, %v; want %v", failed, delay, ok, err, want)
		}
		want = min(2*want, time.Minute)
	}
	if _, _, ok, _ := service.NextStart("on-failure:3", rec, false, 3, now); ok {
		t.Error("a fourth start of three")
	}
	rec.FilesGone = true
	if _, _, ok, _ := service.NextStart("always", rec, true, 0, now); ok {
		t.Error("one without files is to be started")
	}
}

// A sandbox is started again as often as its policy says, and the daemon after this one goes on
// with it.
func TestRestartsAreKept(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	until := func(name string, ok func(api.Sandbox) bool) api.Sandbox {
		t.Helper()
		for {
			sb := daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/"+name, nil), http.StatusOK)
			if ok(sb) {
				return sb
			}
			select {
			case <-t.Context().Done():
				t.Fatalf("%+v", sb)
			case <-time.After(time.Millisecond):
			}
		}
	}
	r.Create(api.CreateSandbox{Name: "fails", Command: []string{"sh", "-c", "echo life; exit 3"}, Settings: api.Settings{Restart: "on-failure:2"}})
	r.Create(api.CreateSandbox{Name: "works", Command: []string{"sh", "-c", "exit 0"}, Settings: api.Settings{Restart: "on-failure"}})
	r.Create(api.CreateSandbox{Name: "stays", Command: []string{"sleep", "1000"}, Settings: api.Settings{Restart: "always"}})
	was := until("fails", func(sb api.Sandbox) bool { return sb.Restarts == 2 && sb.State == api.StateStopped })
	if text := r.Logs("fails", ""); text != "life\nlife\nlife\n" || was.State != api.StateStopped {
		t.Errorf("%q, %+v", text, was)
	}
	if sb := until("works", func(sb api.Sandbox) bool { return sb.State == api.StateStopped }); sb.Restarts != 0 {
		t.Errorf("%+v", sb)
	}
	// A start by a client counts anew.
	daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/fails/start", nil), http.StatusOK)
	until("fails", func(sb api.Sandbox) bool { return sb.Restarts == 2 && sb.State == api.StateStopped })
	// One that is stopped stays so until the next daemon.
	stopped := daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/stays/stop", nil), http.StatusOK)
	if stopped.State != api.StateStopped || r.D.Service().Due() != 0 {
		t.Errorf("%+v; %d are due", stopped, r.D.Service().Due())
	}
	r.Cancel()
	r.Wait()
	r = b.Start()
	now := until("stays", func(sb api.Sandbox) bool { return sb.State == api.StateRunning })
	if now.Restarts != 1 || !now.Deadline.Equal(stopped.Deadline) {
		t.Errorf("%+v, and its deadline was %v", now, stopped.Deadline)
	}
	if sb := until("fails", func(api.Sandbox) bool { return true }); sb.State != api.StateStopped || sb.Restarts != 2 {
		t.Errorf("%+v", sb)
	}
}

// A sandbox that waits for its restart can be stopped, also for the daemons to come, and deleted.
func TestStopWhileRestartIsDue(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	r := b.Start()
	sb := r.Create(api.CreateSandbox{Name: "one", Command: []string{"sh", "-c", "exit 3"}, Settings: api.Settings{Restart: "unless-stopped"}})
	r.WaitEnded("one")
	for r.Do("POST", "/v1/sandboxes/one/stop", nil).Status == http.StatusConflict { // it is being started
	}
	if rec, err := r.D.Service().Supervisor().Get(sb.ID); err != nil || !rec.Settled && rec.Reason != runtime.ReasonStopped {
		t.Errorf("%+v, %v", rec, err)
	}
	r.Cancel()
	r.Wait()
	r = b.Start()
	if rec, err := r.D.Service().Supervisor().Get(sb.ID); err != nil {
		t.Error(err)
	} else if _, _, again, err := service.NextStart(rec.Restart, &rec, true, 0, time.Now()); again || err != nil {
		t.Errorf("it is started again: %v", err)
	}
	if rep := r.Do("DELETE", "/v1/sandboxes/one", nil); rep.Status != http.StatusNoContent {
		t.Errorf("%s", rep.Body)
	}
}
