package functional

import (
	"fmt"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A policy can be changed while a sandbox runs, and when it has ended, and holds for a restart that
// is due.
func TestRestartPolicyIsUpdated(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	c := d.Client(t)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{Command: []string{"sh", "-c", "while [ ! -e /go ]; do sleep 0.01; done; exit 3"}})
	if got := d.CLI(t, "update", s.ID, "--restart", "always"); got.Code != 0 {
		t.Fatalf("%+v", got)
	}
	restarts := func(n int) {
		t.Helper()
		harness.Eventually(t, func() error {
			sb, err := c.GetSandbox(t.Context(), s.ID)
			if err == nil && (sb.Restarts < n || sb.Restart != "always") {
				err = fmt.Errorf("%d restarts, policy %q", sb.Restarts, sb.Restart)
			}
			return err
		})
	}
	_, _ = s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"touch", "/go"}}) // the sandbox may end first
	restarts(2)
	// At most moments a restart is due.
	if _, err := c.UpdateSandbox(t.Context(), s.ID, api.UpdateSandbox{Restart: new("no")}); err != nil {
		t.Fatal(err)
	}
	var ended *api.Sandbox
	harness.Eventually(t, func() (err error) {
		if ended, err = c.GetSandbox(t.Context(), s.ID); err == nil && ended.State != api.StateStopped {
			err = fmt.Errorf("it is %s", ended.State)
		}
		return err
	})
	// An ended one that is to be always up stays as it is until it is started.
	if _, err := c.UpdateSandbox(t.Context(), s.ID, api.UpdateSandbox{Restart: new("always")}); err != nil {
		t.Fatal(err)
	}
	now, err := c.GetSandbox(t.Context(), s.ID)
	if err != nil || now.State != api.StateStopped || now.Restarts != ended.Restarts || now.Restart != "always" {
		t.Fatalf("%+v, %v", now, err)
	}
	s.MustTurn(t, "start", nil, api.StateRunning)
	restarts(1)
	s.Delete(t)
	once := d.Create(t, api.CreateSandbox{Command: []string{"sleep", "600"}, Settings: api.Settings{AutoRemove: true}})
	_, err = c.UpdateSandbox(t.Context(), once.ID, api.UpdateSandbox{Restart: new("always")})
	wantProblem(t, err, api.CodeInvalid)
	once.Delete(t)
}

// Restart policies hold through kills of the daemon. The next one starts sandboxes that have ended
// meanwhile, and stopped ones as their policies say. The number of restarts is kept.
func TestRestartPoliciesOutliveTheDaemon(t *testing.T) {
	testenv.SameForAll(t)
	d := harness.Start(t, harness.Options{})
	start := func(name, policy, script string) *harness.Sandbox {
		t.Helper()
		if got := d.CLI(t, "run", "-d", "--name", name, "--restart", policy, "host", "sh", "-c", script); got.Code != 0 {
			t.Fatalf("%s: %+v", name, got)
		}
		sb, err := d.Client(t).GetSandbox(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		return d.Sandbox(*sb)
	}
	until := func(s *harness.Sandbox, what string, ok func(sb *api.Sandbox) bool) *api.Sandbox {
		t.Helper()
		var last *api.Sandbox
		harness.Eventually(t, func() error {
			sb, err := s.Inspect(t.Context())
			if err != nil {
				return err
			}
			if last = sb; !ok(sb) {
				return fmt.Errorf("%s: not so: %s, %q, %d restarts", what, sb.State, sb.Reason, sb.Restarts)
			}
			return nil
		})
		return last
	}
	runs := func(sb *api.Sandbox) bool { return sb.State == api.StateRunning }
	// Each life leaves a line in a file, and lasts as long as the file "go" is missing after that.
	const lives = `rm -f /go; echo life >>/lives; while [ ! -e /go ]; do sleep 0.01; done; exit 3`
	always, unless := start("always", "always", lives), start("unless", "unless-stopped", lives)
	failing := start("failing", "on-failure:2", "exit 5")
	fine := start("fine", "on-failure", "exit 0")
	stopped, kept := start("stopped", "always", lives), start("kept", "unless-stopped", lives)

	ended := until(failing, "two restarts", func(sb *api.Sandbox) bool { return sb.State == api.StateStopped && sb.Restarts == 2 })
	if ended.Exit == nil || ended.Exit.Code != 5 {
		t.Errorf("%+v", ended.Exit)
	}
	if sb := until(fine, "its end", func(sb *api.Sandbox) bool { return sb.State == api.StateStopped }); sb.Restarts != 0 {
		t.Errorf("a success was restarted %d times", sb.Restarts)
	}
	for _, s := range []*harness.Sandbox{always, unless} {
		until(s, "the first life", func(*api.Sandbox) bool { return strings.Count(s.Sh(t, "cat /lives || true"), "life") == 1 })
		// The sandbox may end before it has told the end of this program.
		_, _ = s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"touch", "/go"}})
		until(s, "one restart", func(sb *api.Sandbox) bool { return runs(sb) && sb.Restarts == 1 })
	}
	for _, s := range []*harness.Sandbox{stopped, kept} {
		s.MustTurn(t, "stop", map[string]int{"grace": 0}, api.StateStopped)
	}
	// They end while no daemon runs, or at the moment of its end.
	for _, s := range []*harness.Sandbox{always, unless} {
		until(s, "the second life", func(*api.Sandbox) bool { return strings.Count(s.Sh(t, "cat /lives"), "life") == 2 })
		if got := d.CLI(t, "exec", "-d", s.ID, "--", "sh", "-c", "sleep 0.5; touch /go"); got.Code != 0 {
			t.Errorf("%+v", got)
		}
	}
	d.Kill9(t)
	d.Launch(t)
	for _, s := range []*harness.Sandbox{always, unless} {
		sb := until(s, "two restarts", func(sb *api.Sandbox) bool { return runs(sb) && sb.Restarts == 2 })
		until(s, "the third life", func(*api.Sandbox) bool { return strings.Count(s.Sh(t, "cat /lives"), "life") == 3 })
		if sb.Restart == "" {
			t.Errorf("%+v", sb.Settings)
		}
	}
	until(stopped, "started with the daemon", runs)
	if sb := until(kept, "stopped", func(sb *api.Sandbox) bool { return sb.State == api.StateStopped }); sb.Reason != "stopped" {
		t.Errorf("%q", sb.Reason)
	}
	if sb, err := failing.Inspect(t.Context()); err != nil || sb.State != api.StateStopped || sb.Restarts != 2 {
		t.Errorf("on-failure:2: %+v, %v", sb, err)
	}
	// All are lost with the launcher, and those that want it start again.
	before := make(map[string]int)
	for _, s := range []*harness.Sandbox{always, unless, stopped} {
		before[s.ID] = until(s, "running", runs).Restarts
	}
	kill9(t, d.System(t).Launcher)
	for _, s := range []*harness.Sandbox{always, unless, stopped} {
		until(s, "after the launcher", func(sb *api.Sandbox) bool { return runs(sb) && sb.Restarts > before[s.ID] })
	}
}
