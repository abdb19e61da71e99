package functional

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// newContext starts a context of a sandbox.
func newContext(t *testing.T, d *harness.Daemon, s *harness.Sandbox, req api.CreateContext) *api.Context {
	t.Helper()
	c, err := d.Client(t).CreateContext(t.Context(), s.ID, req)
	if err != nil {
		t.Fatalf("create context: %v", err)
	}
	return c
}

// inContext runs code in a context and returns what it shows, in one line.
func inContext(t *testing.T, d *harness.Daemon, c *api.Context, code string) string {
	t.Helper()
	res, err := d.Client(t).RunCode(t.Context(), c.Sandbox, api.CodeRequest{Context: c.ID, Code: code})
	if err != nil {
		t.Fatalf("run %q: %v", code, err)
	}
	return shownOf(res)
}

func shownOf(res *api.CodeResult) string {
	parts := []string{res.Logs.Stdout + res.Logs.Stderr}
	for _, v := range res.Results {
		parts = append(parts, v.Text)
	}
	if res.Failure != nil {
		parts = append(parts, res.Failure.Name)
	}
	return strings.Join(parts, "|")
}

func TestContexts(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	c := newContext(t, d, s, api.CreateContext{Cwd: "/usr", Env: []string{"NAME=value"}})
	for _, run := range []struct{ code, want string }{
		{"import os\nx = 1", ""},
		{"os.getcwd(), os.environ['NAME'], x", "|('/usr', 'value', 1)"},
		{"os.system('echo $NAME')\n!pwd\n", "value\n/usr\n"},
		{"1/0", "|ZeroDivisionError"},
		{"x", "|1"},
	} {
		if got := inContext(t, d, c, run.code); got != run.want {
			t.Errorf("%q shows %q, want %q", run.code, got, run.want)
		}
	}
	// A limit of memory is the context's alone.
	small := newContext(t, d, s, api.CreateContext{Memory: 256 << 20})
	if got := inContext(t, d, small, "len(bytes(1 << 30))"); got != "|MemoryError" {
		t.Error(got)
	}
	if got := inContext(t, d, c, "len(bytes(1 << 29))"); got != "|536870912" {
		t.Error(got)
	}
	list, err := d.Client(t).ListContexts(t.Context(), s.ID)
	if err != nil || len(list) != 2 || list[0].ID != c.ID || list[0].ExecutionCount != 6 {
		t.Errorf("%+v, %v", list, err)
	}
	// A large result reaches the command line whole.
	if got := d.CLI(t, "code", "--in", s.ID, "--context", c.ID, "--code", "'x' * 5_000_000"); got.Code != 0 || strings.Count(got.Stdout, "x") != 5_000_000 {
		t.Errorf("exit code %d, %d bytes: %.200s", got.Code, len(got.Stdout), got.Stderr)
	}
	// Its processes end with it, also those that left their session.
	inContext(t, d, c, "import subprocess\np = subprocess.Popen(['sleep', '4711'], start_new_session=True)")
	if err := d.Client(t).DeleteContext(t.Context(), s.ID, c.ID); err != nil {
		t.Error(err)
	}
	if left := s.Sh(t, "ps ax | grep -v grep | grep -c 'sleep 4711' || true"); strings.TrimSpace(left) != "0" {
		t.Errorf("%s processes are left", left)
	}
	if _, err := d.Client(t).GetContext(t.Context(), s.ID, c.ID); !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		t.Error(err)
	}
}

// A run that the daemon could not send as a whole does not block its context, whether the client
// leaves or the daemon is killed.
func TestRunThatIsNotSent(t *testing.T) {
	testenv.SameForAll(t)
	d := harness.Start(t, harness.Options{})
	s := d.Create(t, api.CreateSandbox{})
	client := d.Client(t)
	for name, language := range map[string]struct{ name, set, get, want string }{
		"python": {"python", "x = 1", "x", "|1"},
		"bash":   {"bash", "x=1", "echo $x", "1\n"},
	} {
		c := newContext(t, d, s, api.CreateContext{Language: language.name})
		inContext(t, d, c, language.set)
		signal := func(sig string) {
			if err := client.SignalExec(t.Context(), s.ID, c.Exec, api.ExecSignal{Signal: sig}); err != nil {
				t.Fatal(err)
			}
		}
		// More than the pipe holds, to a process that does not read.
		begin := func() (leave func()) {
			signal("STOP")
			ctx, cancel := context.WithCancel(t.Context())
			started, done := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(done)
				_, _ = client.StreamCode(ctx, s.ID, api.CodeRequest{Context: c.ID, Code: "#" + strings.Repeat("x", 900_000) + "\n" + language.set + "1"}, func(e api.CodeEvent) error {
					if e.Type == api.CodeStarted {
						close(started)
					}
					return nil
				}) // it is cut off
			}()
			<-started
			return func() { cancel(); <-done }
		}
		begin()()
		signal("CONT")
		if got := inContext(t, d, c, language.get); got != language.want {
			t.Errorf("%s, after a client that has left: %q", name, got)
		}
		leave := begin()
		d.Kill9(t)
		leave()
		d.Launch(t)
		signal("CONT")
		if got := inContext(t, d, c, language.get); got != language.want {
			t.Errorf("%s, after a daemon that was killed: %q", name, got)
		}
	}
}

// A context that was started ahead is confined as one that was not: its process differs in nothing
// that the kernel tells of it.
func TestSpareContextIsConfined(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	req := api.CreateContext{User: "1000:1000", Cwd: "/usr", Env: []string{"NAME=value"}, Memory: 512 << 20, Preload: []string{"decimal"}}
	const code = `import os
kept = ('Uid', 'Gid', 'Groups', 'CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs', 'Seccomp', 'Seccomp_filters', 'Threads', 'SigBlk', 'SigIgn', 'SigCgt', 'PPid')
for line in open('/proc/self/status'):
    if line.split(':')[0] in kept: print(line, end='')
for name in ('limits', 'cgroup', 'oom_score_adj', 'environ'): print(open('/proc/self/' + name).read())
fds = os.listdir('/proc/self/fd')
print(sorted(map(int, fds)), os.getcwd(), os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid(), os.umask(0o22))`
	plain := newContext(t, d, s, req)
	want := inContext(t, d, plain, code)
	if !strings.Contains(want, "Uid:\t1000") || !strings.Contains(want, "NAME=value") || !strings.Contains(want, "/usr True") {
		t.Fatalf("a context shows %s", want)
	}
	c := newSpareContext(t, d, s, req)
	if got := inContext(t, d, c, code); got != want {
		t.Errorf("a context that was started ahead shows\n%s\nanother\n%s", got, want)
	}
	// Its limit holds, and its death is its own.
	if got := inContext(t, d, c, "x = bytearray(600 << 20)"); got != "|MemoryError" {
		t.Error(got)
	}
	if got := inContext(t, d, c, "os._exit(3)"); got != "|ContextDied" {
		t.Error(got)
	}
	if got := inContext(t, d, plain, "1"); got != "|1" {
		t.Error(got)
	}
}

// newSpareContext creates contexts until one is the interpreter that was started ahead.
func newSpareContext(t *testing.T, d *harness.Daemon, s *harness.Sandbox, req api.CreateContext) *api.Context {
	t.Helper()
	for {
		list, err := d.Client(t).ListExecs(t.Context(), s.ID)
		if err != nil {
			t.Fatal(err)
		}
		c := newContext(t, d, s, req)
		for _, x := range list {
			if x.ID == c.Exec {
				return c
			}
		}
		if err := d.Client(t).DeleteContext(t.Context(), s.ID, c.ID); err != nil {
			t.Fatal(err)
		}
	}
}

// A context without a run for its idle time goes, and so does its sandbox: a context that waits is
// no use of it.
func TestContextIdles(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	client := d.Client(t)
	for _, idle := range []float64{0.2, 0.001} { // the shorter one ends before the context is ready
		short := newContext(t, d, s, api.CreateContext{IdleTimeout: idle})
		harness.Eventually(t, func() error {
			if got, err := client.GetContext(t.Context(), s.ID, short.ID); !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
				return fmt.Errorf("the context is there: %+v, %w", got, err)
			}
			return nil
		})
	}
	newContext(t, d, s, api.CreateContext{})
	// Not before: it may pass while the test is not running.
	if err := d.Call(t.Context(), http.MethodPatch, "/v1/sandboxes/"+s.ID, api.UpdateSandbox{IdleTimeout: 1}, nil); err != nil {
		t.Fatal(err)
	}
	s.WaitState(t, api.StateStopped)
}

// A daemon that is killed loses no context: neither one that waits nor one in which code runs.
func TestKilledDaemonKeepsContexts(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	waits, busy := newContext(t, d, s, api.CreateContext{}), newContext(t, d, s, api.CreateContext{})
	inContext(t, d, waits, "x = 1")
	const rounds = 3
	for round := range rounds {
		began := make(chan struct{})
		var once sync.Once
		ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
		var running sync.WaitGroup
		running.Go(func() {
			// More output than is kept, so that the code waits for the next daemon.
			code := "n = globals().get('n', 0)\nfor i in range(50000): print(i)\nn += 1"
			_, err := d.Client(t).StreamCode(ctx, s.ID, api.CodeRequest{Context: busy.ID, Code: code}, func(e api.CodeEvent) error {
				if e.Type == api.CodeStdout {
					once.Do(func() { close(began) })
					<-ctx.Done()
				}
				return nil
			})
			if err == nil {
				t.Error("the run of a killed daemon was answered")
			}
		})
		select {
		case <-began:
		case <-ctx.Done():
			t.Fatal("the run does not begin")
		}
		d.Kill9(t)
		cancel()
		running.Wait()
		d.Launch(t)
		if got := inContext(t, d, waits, "x += 1\nx"); got != fmt.Sprint("|", round+2) {
			t.Errorf("after %d kills: %q", round+1, got)
		}
		if got := inContext(t, d, busy, "n"); got != fmt.Sprint("|", round+1) {
			t.Errorf("after %d kills the run has not ended: %q", round+1, got)
		}
	}
}

// A run in a context installs its libraries in the context's directory and environment. The package
// manager is a script here; code.TestTable has real ones.
func TestLibrariesInAContext(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, `mkdir -p /srv/bin /srv/lib /srv/work; cat >/srv/bin/uv <<'end'
#!/bin/sh
for name; do :; done
case $name in
none) echo "no $name" >&2; exit 5;;
slow) exec sleep 31536000;;
esac
echo "args = '$OF_CONTEXT $OF_RUN $*'" >$name.py
end
chmod +x /srv/bin/uv`)
	c := newContext(t, d, s, api.CreateContext{Cwd: "/srv/work", Env: []string{"PATH=/srv/bin:/usr/bin:/bin", "OF_CONTEXT=c"}})
	run := func(req api.CodeRequest) (*api.CodeResult, error) {
		req.Context = c.ID
		return d.Client(t).RunCode(t.Context(), s.ID, req)
	}
	if got := inContext(t, d, c, "import os\nos.chdir('/')\nx = 1\nimport lib1"); got != "|ModuleNotFoundError" {
		t.Error(got)
	}
	res, err := run(api.CodeRequest{
		Code: "import sys; sys.path.append('/srv/work')\nimport lib1\nlib1.args, x", Libraries: []string{"lib1"}, LibraryDir: "/srv/lib", Env: []string{"OF_RUN=r"}, Timeout: 600,
	})
	if err != nil || shownOf(res) != "|('c r pip install --system --break-system-packages --quiet --no-index --find-links /srv/lib -- lib1', 1)" {
		t.Fatalf("%+v, %v", res, err)
	}
	for _, test := range []struct {
		req  api.CodeRequest
		code api.Code
		says string
	}{
		{api.CodeRequest{Code: "x = 2", Libraries: []string{"none"}}, api.CodeLibraries, "no none"},
		{api.CodeRequest{Code: "x = 2", Libraries: []string{"slow"}, Timeout: 0.5}, api.CodeLibraries, "timeout"},
		{api.CodeRequest{Code: "x = 2", Libraries: []string{"--index-url=x"}}, api.CodeInvalid, "--index-url"},
		{api.CodeRequest{Code: "x = 2", LibraryDir: "/srv/lib"}, api.CodeInvalid, "library_dir"},
		{api.CodeRequest{Code: "x = 2", Libraries: []string{"lib2"}, LibraryDir: "/no/such"}, api.CodeNotFound, "/no/such"},
		{api.CodeRequest{Code: "x = 2", Libraries: []string{"lib2"}, Policy: "{version: 1, modules: [{module: lib2}]}"}, api.CodeRefused, "lib2"},
	} {
		_, err := run(test.req)
		wantProblem(t, err, test.code, test.says)
	}
	// The time goes on after the installation. One that was too short for that is doubled.
	for timeout := 3.0; ; timeout *= 2 {
		res, err = run(api.CodeRequest{Code: "import time; time.sleep(31536000)", Libraries: []string{"lib3"}, Timeout: timeout})
		if !errors.Is(err, &api.Problem{Code: api.CodeLibraries}) || timeout > testenv.HungAfter.Seconds() {
			break
		}
	}
	if err != nil || !res.Exit.Timeout {
		t.Errorf("%+v, %v", res, err)
	}
	if got := inContext(t, d, c, "x, sorted(os.listdir('/srv/work'))"); got != "|(1, ['__pycache__', 'lib1.py', 'lib3.py'])" {
		t.Error(got)
	}
}

// 200 contexts in 20 sandboxes, each of which counts for itself.
func TestManyContexts(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	sandboxes, each := 20, 10
	if testing.Short() {
		sandboxes = 4
	}
	var mu sync.Mutex
	var all []*api.Context
	var work sync.WaitGroup
	slots := make(chan struct{}, 4)
	each1 := func(list int, do func(i int)) {
		for i := range list {
			work.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				do(i)
			})
		}
		work.Wait()
	}
	each1(sandboxes, func(int) {
		s := d.Create(t, api.CreateSandbox{})
		for range each {
			c := newContext(t, d, s, api.CreateContext{})
			mu.Lock()
			all = append(all, c)
			mu.Unlock()
		}
	})
	if len(all) != sandboxes*each {
		t.Fatalf("%d contexts", len(all))
	}
	for round := range 3 {
		order := slices.Clone(all)
		each1(len(order), func(i int) {
			c := order[(i*7)%len(order)]
			if got, want := inContext(t, d, c, fmt.Sprintf("me = globals().get('me', %q)\nn = globals().get('n', 0) + 1\nme + str(n)", c.ID)), fmt.Sprint("|", c.ID, round+1); got != want {
				t.Errorf("%q, want %q", got, want)
			}
		})
	}
}
