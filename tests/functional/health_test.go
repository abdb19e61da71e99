package functional

import (
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// awaitHealth waits until the health of a sandbox is as wanted.
func awaitHealth(t *testing.T, s *harness.Sandbox, what string, ok func(h *api.SandboxHealth) bool) *api.SandboxHealth {
	t.Helper()
	var last *api.SandboxHealth
	harness.Eventually(t, func() error {
		sb, err := s.Inspect(t.Context())
		if err != nil {
			return err
		}
		if last = sb.Health; last == nil || !ok(last) {
			return fmt.Errorf("%s: not so: %s: %+v", what, sb.State, last)
		}
		return nil
	})
	return last
}

func healthy(h *api.SandboxHealth) bool   { return h.Status == api.HealthHealthy }
func unhealthy(h *api.SandboxHealth) bool { return h.Status == api.HealthUnhealthy }

// healthImage is an image with a HEALTHCHECK that looks for a file.
func healthImage(t *testing.T, name string) string {
	t.Helper()
	return harness.LyingRegistry(t, nil).Push(t, name, harness.Image(t, v1.Config{
		Env: []string{"PATH=/bin", "WHERE=/ok"}, Cmd: []string{"sleep", "1000"},
		Healthcheck: &v1.HealthConfig{Test: []string{"CMD-SHELL", `echo looking; test -e "$WHERE"`}, Interval: time.Second, Retries: 2},
	}, harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...))))
}

// The HEALTHCHECK of an image is run, shown and told, and the daemon after a killed one goes on
// with it.
func TestHealthOfImage(t *testing.T) {
	testenv.SameForAll(t)
	reference := healthImage(t, "test/health:1")
	d := harness.Start(t, harness.Options{})
	d.MustPull(t, reference)
	got := d.CLI(t, "run", "-d", "--name", "checked", reference)
	if got.Code != 0 {
		t.Fatalf("%+v", got)
	}
	c := d.Client(t)
	sb, err := c.GetSandbox(t.Context(), "checked")
	if err != nil {
		t.Fatal(err)
	}
	s := d.Sandbox(*sb)
	status := func() string {
		t.Helper()
		return strings.TrimSpace(d.CLI(t, "ps", "--filter", "name=checked", "--format", "{{.Status}}").Stdout)
	}
	if sb.Health == nil || sb.Health.StartedAt.IsZero() || sb.HealthCheck == nil || sb.HealthCheck.Interval != 1 {
		t.Fatalf("at the beginning: %+v, %+v", sb.Health, sb.HealthCheck)
	}
	bad := awaitHealth(t, s, "no file", unhealthy)
	if bad.FailingStreak < 2 || bad.Log[0].ExitCode != 1 || bad.Log[0].Output != "looking\n" {
		t.Errorf("%+v", bad)
	}
	if got := status(); got != "running (unhealthy)" {
		t.Errorf("ps: %q", got)
	}
	// The change is seen before it is on disk, and it is there before the next check.
	awaitHealth(t, s, "one more failure", func(h *api.SandboxHealth) bool { return h.FailingStreak > bad.FailingStreak })
	d.Kill9(t)
	d.Launch(t)
	if now, err := s.Inspect(t.Context()); err != nil || now.Health.Status != api.HealthUnhealthy || !now.Health.StartedAt.Equal(sb.Health.StartedAt) {
		t.Errorf("after a crash of the daemon: %v, %+v", err, now.Health)
	}
	s.Sh(t, "touch /ok")
	good := awaitHealth(t, s, "a file", healthy)
	if good.FailingStreak != 0 || len(good.Log) == 0 || good.Log[len(good.Log)-1].ExitCode != 0 {
		t.Errorf("%+v", good)
	}
	if got := status(); got != "running (healthy)" {
		t.Errorf("ps: %q", got)
	}
	if got := d.CLI(t, "ps", "-q", "--filter", "health=healthy").Stdout; got != s.ID+"\n" {
		t.Errorf("ps --filter: %q", got)
	}
	if got := d.CLI(t, "inspect", "--format", "{{.Health.Status}} {{.HealthCheck.Retries}}", "checked").Stdout; got != "healthy 2\n" {
		t.Errorf("inspect: %q", got)
	}
	awaitHealth(t, s, "five results", func(h *api.SandboxHealth) bool { return len(h.Log) == 5 && h.Log[0].ExitCode == 0 })
	told := d.CLI(t, "events", "--no-follow", "--since", "1h", "--filter", "action=health_status", "--format", "{{.Action}} {{.Name}} {{.Health}}").Stdout
	if want := "health_status checked unhealthy\nhealth_status checked healthy\n"; told != want {
		t.Errorf("events: %q, want %q", told, want)
	}
	// No check is an exec of the list, nor in the events.
	execs, err := c.ListExecs(t.Context(), s.ID)
	if err != nil || len(execs) != 1 {
		t.Errorf("execs: %+v, %v", execs, err)
	}
	if told := d.CLI(t, "events", "--no-follow", "--since", "1h", "--filter", "type=exec", "--format", "{{.Program}}").Stdout; told != "sleep\nsh\nsh\n" {
		t.Errorf("events of execs: %q", told)
	}
	// A paused sandbox is not checked, also by a daemon that finds it so; it goes on afterwards.
	s.MustTurn(t, "pause", nil, api.StatePaused)
	before := awaitHealth(t, s, "paused", healthy)
	d.Kill9(t)
	d.Launch(t)
	if now := awaitHealth(t, s, "paused still", healthy); now.Log[len(now.Log)-1].EndedAt.After(before.Log[len(before.Log)-1].EndedAt) {
		t.Errorf("%+v, and before %+v", now, before)
	}
	s.MustTurn(t, "resume", nil, api.StateRunning)
	s.Sh(t, "rm /ok")
	awaitHealth(t, s, "no file any more", unhealthy)
	// A new life begins anew.
	s.MustTurn(t, "stop", map[string]int{"grace": 0}, api.StateStopped)
	if got := status(); strings.Contains(got, "healthy") {
		t.Errorf("ps of a stopped one: %q", got)
	}
	started := s.MustTurn(t, "start", nil, api.StateRunning)
	if h := started.Health; h == nil || h.Status != api.HealthStarting || len(h.Log) > 0 || !h.StartedAt.After(sb.Health.StartedAt) {
		t.Errorf("started again: %+v", h)
	}
	s.Delete(t)
}

// Docker's flags change the image's check or name another, and say that there is none.
func TestHealthFlags(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	reference := healthImage(t, "test/health:2")
	d.MustPull(t, reference)
	c := d.Client(t)
	for _, tt := range []struct {
		flags []string
		want  string // test, interval, retries
	}{
		{nil, `["CMD-SHELL","echo looking; test -e \"$WHERE\""] 1 2`},
		{[]string{"--health-interval", "9s", "--health-retries=7"}, `["CMD-SHELL","echo looking; test -e \"$WHERE\""] 9 7`},
		{[]string{"--health-cmd", "exit 0", "--health-start-period=1m", "--health-start-interval=2s", "--health-timeout=3s"}, `["CMD-SHELL","exit 0"] 1 2`},
		{[]string{"--no-healthcheck"}, ""},
	} {
		got := d.CLI(t, append(append([]string{"run", "-d"}, tt.flags...), reference)...)
		sb, err := c.GetSandbox(t.Context(), strings.TrimSpace(got.Stdout))
		if err != nil {
			t.Fatalf("%q: %+v, %v", tt.flags, got, err)
		}
		seen := d.CLI(t, "inspect", "--format", "{{with .HealthCheck}}{{json .Test}} {{.Interval}} {{.Retries}}{{end}}", sb.ID)
		if strings.TrimSpace(seen.Stdout) != tt.want {
			t.Errorf("%q: %+v, want %q", tt.flags, seen, tt.want)
		}
		d.CLI(t, "rm", sb.ID)
	}
	for want, args := range map[string][]string{
		"give one of them":      {"--no-healthcheck", "--health-cmd", "true", "host", "true"},
		"nothing to run":        {"--health-retries", "3", "host", "true"},
		"interval 0.5: must be": {"--health-cmd", "true", "--health-interval", "500ms", "host", "true"},
	} {
		if got := d.CLI(t, append([]string{"run", "-d"}, args...)...); got.Code == 0 || !strings.Contains(got.Stderr, want) {
			t.Errorf("%q: %+v, want %q", args, got, want)
		}
	}
	// A sandbox that idles has no service to check, unless it is asked for; nor has the agent's.
	if idle := d.Create(t, api.CreateSandbox{Image: reference}); idle.Health != nil || idle.HealthCheck != nil {
		t.Errorf("an idle one: %+v, %+v", idle.Health, idle.HealthCheck)
	}
	// A program in the foreground is checked, too.
	cmd := exec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), "--socket", d.Socket, "run", "--name", "fore", reference, "sh", "-c", "touch /ok; echo ready; sleep 1000")
	expectLine(t, startCommand(t, cmd, false), "ready")
	sb, err := c.GetSandbox(t.Context(), "fore")
	if err != nil {
		t.Fatal(err)
	}
	awaitHealth(t, d.Sandbox(*sb), "in the foreground", healthy)
	if got := d.CLI(t, "rm", "fore"); got.Code != 0 {
		t.Errorf("%+v", got)
	}
	_ = cmd.Wait()
}

// Checks are no use of a sandbox: one that nothing else uses becomes idle.
func TestHealthChecksAreNoUse(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Settings: api.Settings{HealthCheck: &api.HealthCheck{Test: []string{"CMD", "true"}, Interval: 1}}})
	awaitHealth(t, s, "a check", healthy) // or the time could pass before the first
	if err := d.Call(t.Context(), http.MethodPatch, "/v1/sandboxes/"+s.ID, api.UpdateSandbox{IdleTimeout: 3}, nil); err != nil {
		t.Fatal(err)
	}
	ended := s.WaitState(t, api.StateStopped)
	if !strings.HasPrefix(ended.Reason, "idle for") || ended.Health == nil || len(ended.Health.Log) == 0 {
		t.Errorf("%q, %+v", ended.Reason, ended.Health)
	}
}

// A check that floods, forks without end, refuses to die or cannot be started costs its own sandbox
// only, and is killed with all that it has started.
func TestHostileHealthChecks(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	other := d.Create(t, api.CreateSandbox{})
	for name, tt := range map[string]struct {
		test []string
		want string // in the output
	}{
		"flood":       {[]string{"CMD-SHELL", "exec yes"}, "took longer than 1s"},
		"refuses":     {[]string{"CMD-SHELL", "trap '' TERM HUP INT; (setsid sleep 1000 &); while :; do sleep 1; done"}, "took longer than 1s"},
		"forks":       {[]string{"CMD-SHELL", "f() { f | f & }; f; sleep 1000"}, ""},
		"not there":   {[]string{"CMD", "/not/there"}, "/not/there"},
		"not text":    {[]string{"CMD-SHELL", `printf '\377\000x'; exit 3`}, "x"},
		"kills inits": {[]string{"CMD-SHELL", "kill -9 1; kill -9 -1; exit 1"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := d.Create(t, api.CreateSandbox{
				Limits:   api.Limits{Pids: 64},
				Settings: api.Settings{HealthCheck: &api.HealthCheck{Test: tt.test, Interval: 1, Timeout: 1, Retries: 1}},
			})
			// A machine that stands still makes any check too long: one says what it should.
			h := awaitHealth(t, s, name, func(h *api.SandboxHealth) bool {
				return unhealthy(h) && strings.Contains(h.Log[len(h.Log)-1].Output, tt.want)
			})
			if last := h.Log[len(h.Log)-1]; !strings.Contains(last.Output, tt.want) || len(last.Output) > 5<<10 || last.ExitCode == 0 {
				t.Errorf("%d: %.200q, want %q", last.ExitCode, last.Output, tt.want)
			}
			if got := other.Sh(t, "echo fine"); got != "fine\n" {
				t.Errorf("the neighbour: %q", got)
			}
			s.Delete(t)
		})
	}
}

// A HEALTHCHECK instruction is in the image that is built, and NONE takes the base's away.
func TestHealthOfBuild(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	reference := healthImage(t, "test/health:3")
	d.MustPull(t, reference)
	for instruction, want := range map[string]string{
		"LABEL a=b":        `["CMD-SHELL","echo looking; test -e \"$WHERE\""] 1`,
		"HEALTHCHECK NONE": "",
		`HEALTHCHECK --interval=4s --start-interval=3s CMD ["true", "x"]`: `["CMD","true","x"] 4`,
		"HEALTHCHECK --interval=5s CMD test -e /x":                        `["CMD-SHELL","test -e /x"] 5`,
	} {
		d.MustBuild(t, harness.Tar(t, harness.File{Name: "Dockerfile", Body: "FROM " + reference + "\n" + instruction + "\n"}), api.Build{Tags: []string{"test/built:health"}})
		id := strings.TrimSpace(d.CLI(t, "run", "-d", "test/built:health").Stdout)
		got := d.CLI(t, "inspect", "--format", "{{with .HealthCheck}}{{json .Test}} {{.Interval}}{{end}}", id)
		if strings.TrimSpace(got.Stdout) != want || got.Code != 0 {
			t.Errorf("%s: %+v, want %q", instruction, got, want)
		}
		d.CLI(t, "rm", id)
	}
}
