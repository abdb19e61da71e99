package functional

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A stopped sandbox has its files and nothing else; started again it is the same one, with a life that begins anew.
func TestStoppedSandboxIsStartedAgain(t *testing.T) {
	d := start(t)
	d.Warm(t)
	before := d.Snapshot(t)
	s := d.Create(t, api.CreateSandbox{
		Name: "one", Labels: map[string]string{"a": "b"}, Env: []string{"WHO=me"}, Cwd: "/srv/x", Timeout: 600, Limits: api.Limits{Nofile: 100},
	})
	first := s.Exec(t, api.ExecRequest{Cwd: "/", Argv: []string{"sh", "-c",
		"mkdir -p /srv/x; echo mine >/srv/x/file; rm -rf /etc/alternatives; chmod 751 /; mkfifo /srv/x/fifo; nohup setsid sleep 600 >/dev/null 2>&1 &"}})
	if first.Exit.Code != 0 {
		t.Fatalf("%+v", first)
	}
	for round := range 3 {
		pids := s.Processes(t)
		now := s.MustTurn(t, "stop", nil, api.StateStopped)
		if now.Reason != "stopped" || now.PID != 0 {
			t.Errorf("stopped: %+v", now)
		}
		for _, pid := range pids {
			if err := gone(pid); err != nil {
				t.Error(err)
			}
		}
		_, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"true"}})
		wantProblem(t, err, api.CodeConflict, "one", "stopped")
		if round == 1 { // stopped is stopped
			d.Kill9(t)
			d.Launch(t)
			if now, err := s.Inspect(t.Context()); err != nil || now.State != api.StateStopped || now.Reason != "stopped" {
				t.Errorf("after a restart of the daemon: %+v, %v", now, err)
			}
		}
		asked := time.Now()
		now = s.MustTurn(t, "start", nil, api.StateRunning)
		if now.ID != s.ID || now.Name != "one" || now.Labels["a"] != "b" || now.Reason != "" || now.Limits.Nofile != 100 || now.Limits.Pids != s.Limits.Pids {
			t.Errorf("started: %+v", now)
		}
		if left := now.Deadline.Sub(asked); left < 590*time.Second || left > 660*time.Second {
			t.Errorf("it has %s left of ten minutes", left)
		}
		got := s.Sh(t, `cat file; ls -d /etc/alternatives 2>/dev/null; stat -c %a /; echo $WHO; ulimit -n; cat /proc/[0-9]*/cmdline | tr '\0' ' ' | grep -o 'sleep 6[0]0' || true`)
		if got != "mine\n751\nme\n100\n" {
			t.Errorf("round %d: %q", round, got)
		}
		_, err = s.Turn(t.Context(), "start", nil)
		wantProblem(t, err, api.CodeConflict, "one", "running")
		s.Sh(t, "nohup setsid sleep 600 >/dev/null 2>&1 &")
	}
	s.MustTurn(t, "stop", nil, api.StateStopped)
	if got := diffOf(t, d, s.ID); len(got) == 0 {
		t.Error("a stopped sandbox has changed nothing")
	}
	s.Delete(t)
	d.NothingLeaked(t, before)
}

// What ends by itself, and what the launcher's death has ended, is started again too.
func TestLostAndExpiredSandboxesAreStartedAgain(t *testing.T) {
	d := start(t)
	expired := d.Create(t, api.CreateSandbox{Timeout: 2})
	lost := d.Create(t, api.CreateSandbox{})
	expired.Sh(t, "echo mine >/file")
	lost.Sh(t, "echo mine >/file")
	expired.WaitState(t, testenv.Patience(20*time.Second), api.StateStopped)
	kill9(t, d.System(t).Launcher)
	lost.WaitState(t, testenv.Patience(20*time.Second), api.StateLost)
	for _, s := range []*harness.Sandbox{expired, lost} {
		now := s.MustTurn(t, "start", api.StartSandbox{Timeout: 300}, api.StateRunning)
		if left := time.Until(now.Deadline); left < 200*time.Second {
			t.Errorf("it has %s left", left)
		}
		if got := s.Sh(t, "cat /file"); got != "mine\n" {
			t.Errorf("its file: %q", got)
		}
	}
}

// Whatever may wait for a signal that ends it stops in milliseconds, shells that ignore SIGTERM too; who tidies up gets the
// time, and who will not end is killed after it.
func TestStopEndsThingsTheWayTheyWant(t *testing.T) {
	d := start(t)
	interactive := func(argv ...string) api.ExecRequest { return api.ExecRequest{Argv: argv, TTY: true} }
	for name, test := range map[string]struct {
		run         api.ExecRequest
		up          string // it says when it is there
		least, most time.Duration
		left        string
	}{
		"nothing":            {most: 3 * time.Second},
		"sleep":              {run: api.ExecRequest{Argv: []string{"sleep", "600"}}, most: 3 * time.Second},
		"waiting shell":      {run: api.ExecRequest{Argv: []string{"sh", "-c", "echo up; sleep 600; true"}}, most: 3 * time.Second},
		"interactive bash":   {run: interactive("bash", "-i"), up: "# ", most: 3 * time.Second},
		"interactive sh":     {run: interactive("sh", "-i"), up: "# ", most: 3 * time.Second},
		"python":             {run: interactive("python3"), up: ">>> ", most: 3 * time.Second},
		"ignores SIGTERM":    {run: api.ExecRequest{Argv: []string{"sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done"}}, most: 3 * time.Second},
		"stands still":       {run: api.ExecRequest{Argv: []string{"sh", "-c", "echo up; kill -STOP $$; sleep 600"}}, most: 3 * time.Second},
		"tidies up":          {run: api.ExecRequest{Argv: []string{"sh", "-c", "trap 'sleep 1; echo tidy >/done; exit' TERM; echo up; while :; do sleep 0.1; done"}}, least: time.Second, most: 5 * time.Second, left: "tidy\n"},
		"ignores everything": {run: api.ExecRequest{Argv: []string{"sh", "-c", "trap '' TERM HUP; echo up; while :; do sleep 1; done"}}, least: 5 * time.Second, most: 9 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			s := d.Create(t, api.CreateSandbox{})
			var running sync.WaitGroup
			defer running.Wait()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if test.run.Argv != nil {
				up := make(chan struct{})
				var once sync.Once
				var said string
				running.Go(func() {
					_ = s.Stream(ctx, test.run, func(e api.ExecEvent) { // it ends with the sandbox
						if said += e.Text; test.run.Argv[0] == "sleep" || strings.Contains(said, test.up) && said != "" {
							once.Do(func() { close(up) })
						}
					})
					once.Do(func() { close(up) })
				})
				<-up
			}
			began := time.Now()
			grace := 5.0
			s.MustTurn(t, "stop", api.StopSandbox{Grace: &grace}, api.StateStopped)
			took := time.Since(began)
			t.Logf("took %s", took)
			if took < test.least || took > testenv.Patience(test.most) {
				t.Errorf("it took %s to stop", took)
			}
			if test.left != "" {
				s.MustTurn(t, "start", nil, api.StateRunning)
				if got := s.Sh(t, "cat /done"); got != test.left {
					t.Errorf("it left %q", got)
				}
			}
			s.Delete(t)
		})
	}
}

// The command line says the same.
func TestStopAndStartCommands(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{Name: "work"})
	if got := d.CLI(t, "stop", "-t", "2", "work"); got.Code != 0 || strings.TrimSpace(got.Stdout) != s.ID {
		t.Errorf("stop: %+v", got)
	}
	if got := d.CLI(t, "ps"); !strings.Contains(got.Stdout, "stopped") {
		t.Errorf("ps: %+v", got)
	}
	if got := d.CLI(t, "start", "work", "nonesuch"); got.Code != 1 || strings.TrimSpace(got.Stdout) != s.ID || !strings.Contains(got.Stderr, "nonesuch") {
		t.Errorf("start: %+v", got)
	}
	if got := d.CLI(t, "exec", "work", "--", "echo", "up"); got.Stdout != "up\n" {
		t.Errorf("exec: %+v", got)
	}
}
