package functional

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A stopped sandbox has its files and nothing else; started again it is the same one, with a life
// that begins anew.
func TestStoppedSandboxIsStartedAgain(t *testing.T) {
	d := start(t)
	d.Warm(t)
	before := d.Snapshot(t)
	s := d.Create(t, api.CreateSandbox{
		Name: "one", Labels: map[string]string{"a": "b"}, Env: []string{"WHO=me"}, Cwd: "/srv/x", Timeout: 600, Limits: api.Limits{Nofile: 100},
	})
	first := s.Exec(t, api.ExecRequest{Cwd: "/", Argv: []string{
		"sh", "-c",
		"mkdir -p /srv/x; echo mine >/srv/x/file; rm -rf /etc/alternatives; chmod 751 /; mkfifo /srv/x/fifo; nohup setsid sleep 600 >/dev/null 2>&1 &",
	}})
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
		answered := time.Now()
		if now.ID != s.ID || now.Name != "one" || now.Labels["a"] != "b" || now.Reason != "" || now.Limits.Nofile != 100 || now.Limits.Pids != s.Limits.Pids {
			t.Errorf("started: %+v", now)
		}
		s.PID = now.PID // the processes of this life; the pid of the last one may be another's by now
		// Ten minutes from the start, which came between request and answer.
		if from := now.Deadline.Add(-10 * time.Minute); from.Before(asked.Add(-time.Second)) || from.After(answered.Add(time.Second)) {
			t.Errorf("its ten minutes begin at %s; the start was asked for at %s and answered at %s", from, asked, answered)
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

// Sandboxes that ended by themselves, or with their launcher, are started again too.
func TestLostAndExpiredSandboxesAreStartedAgain(t *testing.T) {
	d := start(t)
	expired, lost := d.Create(t, api.CreateSandbox{}), d.Create(t, api.CreateSandbox{})
	expired.Sh(t, "echo mine >/file")
	lost.Sh(t, "echo mine >/file")
	setTimeout(t, d, expired, 1)
	expired.WaitState(t, api.StateStopped)
	kill9(t, d.System(t).Launcher)
	lost.WaitState(t, api.StateLost)
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

// setTimeout gives a sandbox a deadline that it is ready for.
func setTimeout(t *testing.T, d *harness.Daemon, s *harness.Sandbox, seconds float64) {
	t.Helper()
	if err := d.Call(t.Context(), http.MethodPatch, "/v1/sandboxes/"+s.ID, api.UpdateSandbox{Timeout: seconds}, nil); err != nil {
		t.Fatal(err)
	}
}

// A program that waits for a signal stops long before its grace is up, shells that ignore SIGTERM
// too. One that tidies up gets the time, and one that does not end is killed after it.
func TestStopEndsThingsTheWayTheyWant(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	interactive := func(argv ...string) api.ExecRequest { return api.ExecRequest{Argv: argv, TTY: true} }
	// A grace that is longer than any wait of a test, and so are the programs: a stop that sat it
	// out, or waited for their own ends, would count as hung.
	const long = 600.0
	for name, test := range map[string]struct {
		run   api.ExecRequest
		up    string // it says when it is there
		grace float64
		least time.Duration
		left  string
	}{
		"nothing":            {grace: long},
		"sleep":              {run: api.ExecRequest{Argv: []string{"sleep", "7200"}}, grace: long},
		"waiting shell":      {run: api.ExecRequest{Argv: []string{"sh", "-c", "echo up; sleep 7200; true"}}, grace: long},
		"interactive bash":   {run: interactive("bash", "-i"), up: "# ", grace: long},
		"interactive sh":     {run: interactive("sh", "-i"), up: "# ", grace: long},
		"python":             {run: interactive("python3"), up: ">>> ", grace: long},
		"ignores SIGTERM":    {run: api.ExecRequest{Argv: []string{"sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done"}}, grace: long},
		"stands still":       {run: api.ExecRequest{Argv: []string{"sh", "-c", "echo up; kill -STOP $$; sleep 7200"}}, grace: long},
		"tidies up":          {run: api.ExecRequest{Argv: []string{"sh", "-c", "trap 'sleep 1; echo tidy >/done; exit' TERM; echo up; while :; do sleep 0.1; done"}}, grace: long, least: time.Second, left: "tidy\n"},
		"ignores everything": {run: api.ExecRequest{Argv: []string{"sh", "-c", "trap '' TERM HUP; echo up; while :; do sleep 1; done"}}, grace: 5, least: 5 * time.Second},
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
			s.MustTurn(t, "stop", api.StopSandbox{Grace: &test.grace}, api.StateStopped)
			took := time.Since(began)
			t.Logf("took %s", took)
			if took < test.least {
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
	testenv.SameForAll(t)
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

// ticks is a program that counts in a file, with a child that does so too.
const ticks = `setsid sh -c 'tick() { i=0; while :; do i=$((i+1)); echo $i >/tmp/tick.$1; sleep 0.02; done; }; tick a & tick b' </dev/null >/dev/null 2>&1 &
while ! [ -s /tmp/tick.a ] || ! [ -s /tmp/tick.b ]; do sleep 0.02; done`

// A paused sandbox stands still, refuses to run anything and names the remedy, and goes on where
// it was.
func TestPausedSandboxStandsStill(t *testing.T) {
	d := start(t)
	d.Warm(t)
	before := d.Snapshot(t)
	s := d.Create(t, api.CreateSandbox{Name: "one"})
	s.Sh(t, ticks)
	s.Sh(t, "nohup setsid sh -c 'kill -STOP $$; echo woken >/tmp/woken' >/dev/null 2>&1 & until grep -q '^State:.T' /proc/$!/status; do sleep 0.02; done")
	// An exec that is under way stands still like everything.
	var under sync.WaitGroup
	var late *api.ExecResult
	under.Go(func() {
		var err error
		if late, err = s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", "echo up >/tmp/up; sleep 0.2; echo late"}}); err != nil {
			t.Error(err)
		}
	})
	s.Sh(t, "while ! [ -s /tmp/up ]; do sleep 0.02; done")
	s.MustTurn(t, "pause", nil, api.StatePaused)
	s.MustTurn(t, "pause", nil, api.StatePaused)
	frozen := hostTimes(t, s)
	for range 20 { // ten times as long as one tick
		select {
		case <-time.After(10 * time.Millisecond):
		case <-t.Context().Done():
		}
		stands(t, s, frozen)
	}
	for _, err := range []error{
		func() error { _, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"true"}}); return err }(),
		func() error {
			response, err := s.Get(t.Context(), "/tmp/tick.a")
			if err == nil {
				_ = response.Body.Close()
			}
			return err
		}(),
		s.Put(t.Context(), "/tmp/x", []byte("x")),
	} {
		wantProblem(t, err, api.CodeConflict, "one", "paused", "resume")
	}
	if got := d.CLI(t, "ps"); !strings.Contains(got.Stdout, "paused") {
		t.Errorf("ps: %+v", got)
	}
	if got := diffOf(t, d, s.ID); len(got) == 0 {
		t.Error("what it has changed cannot be read")
	}
	stands(t, s, frozen) // reading its changes has not woken it
	s.MustTurn(t, "resume", nil, api.StateRunning)
	under.Wait()
	if late == nil || late.Stdout != "late\n" || late.Exit.Code != 0 {
		t.Errorf("the exec that was under way: %+v", late)
	}
	// It is adopted in its state.
	s.MustTurn(t, "pause", nil, api.StatePaused)
	d.Kill9(t)
	d.Launch(t)
	if now, err := s.Inspect(t.Context()); err != nil || now.State != api.StatePaused {
		t.Errorf("after a restart of the daemon: %+v, %v", now, err)
	}
	s.MustTurn(t, "resume", nil, api.StateRunning)
	goesOn(t, s)
	if got := s.Sh(t, "ls /tmp/woken 2>&1 | grep -c '^/tmp/woken' || true"); got != "0\n" {
		t.Error("what had been stopped before was woken")
	}
	s.MustTurn(t, "resume", nil, api.StateRunning)
	// It ends like any other.
	s.MustTurn(t, "pause", nil, api.StatePaused)
	long := 600.0 // longer than MustTurn waits
	s.MustTurn(t, "stop", api.StopSandbox{Grace: &long}, api.StateStopped)
	s.MustTurn(t, "start", nil, api.StateRunning)
	s.Sh(t, "true")
	s.MustTurn(t, "pause", nil, api.StatePaused)
	s.Delete(t)
	d.NothingLeaked(t, before)
}

// hostTimes are the ticks of processor time that a sandbox's processes have used, by the pids that
// the host sees.
func hostTimes(t *testing.T, s *harness.Sandbox) map[int]int {
	t.Helper()
	all := map[int]int{}
	for _, pid := range s.Processes(t) {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
		for _, field := range fields[11:13] { // utime, stime
			ticks, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			all[pid] += ticks
		}
	}
	return all
}

// stands fails the test if a process of the sandbox has run since before, or a new one does. The
// kernel counts the last moments of a process when that has left its processor: they may complete a
// tick.
func stands(t *testing.T, s *harness.Sandbox, before map[int]int) {
	t.Helper()
	now := hostTimes(t, s)
	stands := len(now) == len(before)
	for pid, ticks := range now {
		was, ok := before[pid]
		stands = stands && ok && ticks <= was+1
	}
	if !stands {
		t.Fatalf("it stood: %v, now: %v", before, now)
	}
}

// The deadline of a paused sandbox comes.
func TestPausedSandboxEndsAtItsDeadline(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, ticks)
	s.MustTurn(t, "pause", nil, api.StatePaused)
	setTimeout(t, d, s, 1) // not before: it may have come by the time that it is paused
	now := s.WaitState(t, api.StateStopped)
	if !strings.Contains(now.Reason, "deadline") {
		t.Errorf("it ended: %s", now.Reason)
	}
}

// A fork bomb is paused and resumed as a whole.
func TestPauseOfWhatForks(t *testing.T) {
	s := shared(t).Create(t, api.CreateSandbox{})
	s.Sh(t, "nohup setsid sh -c 'while :; do (true; (true; true) & ) & done' >/dev/null 2>&1 &")
	for range 3 {
		s.MustTurn(t, "pause", nil, api.StatePaused)
		still := hostTimes(t, s)
		select {
		case <-time.After(200 * time.Millisecond):
		case <-t.Context().Done():
		}
		stands(t, s, still)
		s.MustTurn(t, "resume", nil, api.StateRunning)
	}
}

// A commit freezes the sandbox while it reads. A paused one is paused afterwards, and a running
// one goes on.
func TestCommitOfAPausedSandbox(t *testing.T) {
	d := shared(t)
	base := mountBase(t, "test/paused:1")
	d.MustPull(t, base)
	s := d.Create(t, api.CreateSandbox{Image: base})
	s.Sh(t, "mkdir -p /tmp; "+ticks)
	s.MustTurn(t, "pause", nil, api.StatePaused)
	still := hostTimes(t, s)
	commit := func(reference string) {
		t.Helper()
		if err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/commit", api.CommitSandbox{Reference: reference}, nil); err != nil {
			t.Fatal(err)
		}
	}
	commit("local/paused:1")
	select {
	case <-time.After(200 * time.Millisecond):
	case <-t.Context().Done():
	}
	stands(t, s, still)
	if now, err := s.Inspect(t.Context()); err != nil || now.State != api.StatePaused {
		t.Errorf("after the commit: %+v, %v", now, err)
	}
	s.MustTurn(t, "resume", nil, api.StateRunning)
	commit("local/paused:2")
	goesOn(t, s)
	s.MustTurn(t, "stop", nil, api.StateStopped)
	s.MustTurn(t, "start", nil, api.StateRunning)
	s.Sh(t, ticks)
	goesOn(t, s)
	// Nothing of a pause outlives the sandbox's end: the commit of its next life is the last one that
	// wants it frozen.
	s.MustTurn(t, "pause", nil, api.StatePaused)
	none := 0.0
	s.MustTurn(t, "stop", api.StopSandbox{Grace: &none}, api.StateStopped)
	s.MustTurn(t, "start", nil, api.StateRunning)
	s.Sh(t, ticks)
	commit("local/paused:3")
	goesOn(t, s)
	if got := d.Create(t, api.CreateSandbox{Image: "local/paused:1"}).Sh(t, "ls /tmp/tick.a"); got == "" { // which may have been paused between its truncation and its next line
		t.Error("the image has nothing of it")
	}
}

// goesOn fails unless both ticks do.
func goesOn(t *testing.T, s *harness.Sandbox) {
	t.Helper()
	got := s.Sh(t, `for f in a b; do
	i=0; was=$(cat /tmp/tick.$f)
	while now=$(cat /tmp/tick.$f); [ "$now" = "$was" ] && [ $i -lt 500 ]; do i=$((i+1)); sleep 0.02; done
	[ "$now" != "$was" ] && echo on
done`)
	if got != "on\non\n" {
		t.Errorf("it does not go on: %q", got)
	}
}
