package service_test

import (
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// parkedBench is a daemon with a pool of this size, in whose sandboxes interpreters wait.
func parkedBench(t *testing.T, size int, context string) (*daemontest.Bench, *daemontest.Running) {
	t.Helper()
	testenv.RequirePeer(t, "python3")
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	b.Options.Pools = []service.Pool{{Image: api.HostImage, Size: size, Context: context}}
	return b, pooled(b)
}

// untilParked waits until an interpreter is ready in each sandbox of the pool, and returns their
// pids by sandbox.
func untilParked(t *testing.T, r *daemontest.Running) map[string]int {
	t.Helper()
	waitPool(t, r, "furnished", func(p api.Pool) bool { return p.Ready == p.Size && p.Context.Ready == p.Size })
	pids := make(map[string]int)
	for _, id := range r.Engine.IDs() {
		if pid := r.API().ParkedPID(id); pid != 0 {
			pids[id] = pid
		}
	}
	return pids
}

// gone waits until a sandbox has no process with this pid.
func gone(r *daemontest.Running, sandbox string, pid int) {
	r.T.Helper()
	r.Await(func() string { return fmt.Sprintf("process %d goes on", pid) }, func() bool { return !runs(r, sandbox, pid) })
}

// runs reports whether a sandbox has a process with this pid.
func runs(r *daemontest.Running, sandbox string, pid int) bool {
	r.T.Helper()
	list := daemontest.Decode[api.ProcessList](r.T, r.Do("GET", "/v1/sandboxes/"+sandbox+"/processes", nil), http.StatusOK)
	return slices.ContainsFunc(list.Processes, func(p api.Process) bool { return p.PID == pid })
}

func pidOf(r *daemontest.Running, c api.Context) int {
	r.T.Helper()
	return daemontest.Decode[api.Exec](r.T, r.Do("GET", "/v1/sandboxes/"+c.Sandbox+"/execs/"+c.Exec, nil), http.StatusOK).PID
}

// The first context of a claimed sandbox is the process that waited there. Until then it is no
// exec, and afterwards like any context.
func TestParkedInterpreterIsTheFirstContext(t *testing.T) {
	_, d := parkedBench(t, 2, "python+decimal+json.tool")
	req := api.CreateContext{Language: "py", Preload: []string{"decimal", "json.tool"}, IdleTimeout: 3600}
	const code = "import os, sys, random\n(os.getpid(), random.random(), hash('x'), 'decimal' in sys.modules, 'decimal' in globals())"
	seen := map[string]bool{}
	for i := range 3 {
		pids := untilParked(t, d)
		sb := d.Create(api.CreateSandbox{Labels: map[string]string{"a": "b"}, Timeout: 3600})
		if pids[sb.ID] == 0 || d.API().ParkedPID(sb.ID) != pids[sb.ID] {
			t.Fatalf("created %s, parked were %v", sb.ID, pids)
		}
		if list := daemontest.Decode[api.ExecList](t, d.Do("GET", "/v1/sandboxes/"+sb.ID+"/execs", nil), http.StatusOK); len(list.Execs) != 0 {
			t.Errorf("%+v", list)
		}
		c := newContext(d, sb.ID, req)
		if got := pidOf(d, c); got != pids[sb.ID] {
			t.Errorf("the context's process is %d, and %d waited", got, pids[sb.ID])
		}
		if hits := poolOf(t, d).Context.Hits; hits != int64(i+1) {
			t.Errorf("%d hits", hits)
		}
		res := runIn(d, c, code)
		if got := summary(res); seen[got] || !strings.HasSuffix(got, "True, False)]*") || res.ExecutionCount != 1 {
			t.Error(got)
		} else {
			seen[got] = true
		}
		second := newContext(d, sb.ID, api.CreateContext{})
		if pidOf(d, second) == pids[sb.ID] || summary(runIn(d, second, "1")) != `"" "" [1]*` {
			t.Errorf("%+v", second)
		}
		if rep := d.Do("POST", "/v1/sandboxes/"+sb.ID+"/contexts/"+c.ID+"/restart", nil); rep.Status != http.StatusOK {
			t.Errorf("%s", rep.Body)
		}
		gone(d, sb.ID, pids[sb.ID])
		if got := summary(runIn(d, c, "'os' in globals()")); got != `"" "" [False]*` {
			t.Error(got)
		}
		if rep := d.Do("DELETE", "/v1/sandboxes/"+sb.ID, nil); rep.Status != http.StatusNoContent {
			t.Errorf("%s", rep.Body)
		}
	}
}

// An interpreter that could tell the difference is not used. It has ended when the request returns
// that used its sandbox otherwise.
func TestParkedInterpreterThatDoesNotFit(t *testing.T) {
	_, d := parkedBench(t, 1, "python")
	file := t.TempDir() + "/x"
	do := func(method, path string, body any) func(string) {
		return func(id string) {
			if rep := d.Do(method, "/v1/sandboxes/"+id+path, body); rep.Status/100 != 2 {
				t.Errorf("%s %s: %s", method, path, rep.Body)
			}
		}
	}
	for name, tc := range map[string]struct {
		sandbox api.CreateSandbox
		before  func(id string)
		context api.CreateContext
	}{
		"environment":     {sandbox: api.CreateSandbox{Env: []string{"A=1"}}},
		"directory":       {sandbox: api.CreateSandbox{Cwd: "/usr"}},
		"limits":          {sandbox: api.CreateSandbox{Limits: api.Limits{Memory: 256 << 20}}},
		"name":            {sandbox: api.CreateSandbox{Name: "mine"}},
		"hostname":        {sandbox: api.CreateSandbox{Settings: api.Settings{Hostname: "mine"}}},
		"resource limits": {sandbox: api.CreateSandbox{Settings: api.Settings{Rlimits: map[string]api.Rlimit{"core": {}}}}},
		"main process":    {sandbox: api.CreateSandbox{Command: []string{"sleep", "1000"}}},

		"an exec":         {before: do("POST", "/exec", api.ExecRequest{Argv: []string{"true"}})},
		"a detached exec": {before: do("POST", "/exec", api.ExecRequest{Argv: []string{"true"}, Detach: true})},
		"code":            {before: do("POST", "/code", api.CodeRequest{Code: "1"})},
		"a file":          {before: do("PUT", "/files?path="+file, "x")},
		"a change":        {before: do("PATCH", "", api.UpdateSandbox{Timeout: 600})},
		"a pause": {before: func(id string) {
			do("POST", "/pause", nil)(id)
			do("POST", "/resume", nil)(id)
		}},
		"another language": {context: api.CreateContext{Language: "bash"}},
		"modules":          {context: api.CreateContext{Preload: []string{"json"}}},
		"own environment":  {context: api.CreateContext{Env: []string{"A=1"}}},
		"own directory":    {context: api.CreateContext{Cwd: "/usr"}},
		"address space":    {context: api.CreateContext{Memory: 1 << 30}},
	} {
		pids := untilParked(t, d)
		sb := d.Create(tc.sandbox)
		waited := pids[sb.ID]
		if waited == 0 {
			t.Fatalf("%s: created %s, parked were %v", name, sb.ID, pids)
		}
		if tc.before != nil {
			if d.API().ParkedPID(sb.ID) != waited {
				t.Errorf("%s: the interpreter does not wait", name)
			}
			tc.before(sb.ID)
		}
		if reflect.DeepEqual(tc.context, api.CreateContext{}) {
			if pid := d.API().ParkedPID(sb.ID); pid != 0 {
				t.Errorf("%s: the interpreter waits", name)
			}
			if runs(d, sb.ID, waited) {
				t.Errorf("%s: the interpreter goes on", name)
			}
		}
		c := newContext(d, sb.ID, tc.context)
		if pidOf(d, c) == waited {
			t.Errorf("%s: the interpreter that waited is the context", name)
		}
		if runs(d, sb.ID, waited) {
			t.Errorf("%s: the interpreter goes on beside the context", name)
		}
		if rep := d.Do("DELETE", "/v1/sandboxes/"+sb.ID, nil); rep.Status != http.StatusNoContent {
			t.Errorf("%s", rep.Body)
		}
	}
	if p := poolOf(t, d); p.Context.Hits != 0 || p.Misses != 0 {
		t.Errorf("%+v", p)
	}
}

// One that has died is no error of the context. It ends with its sandbox and its daemon, and a
// sandbox that is started again has none.
func TestParkedInterpreterThatEnds(t *testing.T) {
	b, d := parkedBench(t, 2, "python")
	untilParked(t, d)
	sb := d.Create(api.CreateSandbox{})
	d.Await(func() string { return "the interpreter goes on" }, d.API().KillParked(sb.ID))
	c := newContext(d, sb.ID, api.CreateContext{})
	if got := summary(runIn(d, c, "1")); got != `"" "" [1]*` || poolOf(t, d).Context.Hits != 0 {
		t.Error(got)
	}

	untilParked(t, d)
	deleted := d.Create(api.CreateSandbox{})
	if rep := d.Do("DELETE", "/v1/sandboxes/"+deleted.ID, nil); rep.Status != http.StatusNoContent {
		t.Errorf("%s", rep.Body)
	}
	if pid := d.API().ParkedPID(deleted.ID); pid != 0 {
		t.Errorf("process %d waits in a sandbox that was deleted", pid)
	}

	untilParked(t, d)
	again := d.Create(api.CreateSandbox{})
	for _, action := range []string{"stop", "start"} {
		if rep := d.Do("POST", "/v1/sandboxes/"+again.ID+"/"+action, nil); rep.Status != http.StatusOK {
			t.Fatalf("%s: %s", action, rep.Body)
		}
	}
	c = newContext(d, again.ID, api.CreateContext{})
	if got := summary(runIn(d, c, "1")); got != `"" "" [1]*` || poolOf(t, d).Context.Hits != 0 {
		t.Error(got)
	}

	pids := untilParked(t, d)
	claimed := d.Create(api.CreateSandbox{})
	d.D.Shutdown(api.Shutdown{KeepSandboxes: true})
	d.Wait()
	second := b.Start()
	gone(second, claimed.ID, pids[claimed.ID])
	if c := newContext(second, claimed.ID, api.CreateContext{}); summary(runIn(second, c, "1")) != `"" "" [1]*` {
		t.Errorf("%+v", c)
	}
}

// The reason why there is no interpreter is told.
func TestParkedInterpreterThatDoesNotStart(t *testing.T) {
	_, d := parkedBench(t, 1, "python+no_such_module")
	waitPool(t, d, "complaining", func(p api.Pool) bool {
		return p.Ready == 1 && p.Context.Ready == 0 && strings.Contains(p.Context.Error, "No module named 'no_such_module'")
	})
	if c := newContext(d, d.Create(api.CreateSandbox{}).ID, api.CreateContext{}); summary(runIn(d, c, "1")) != `"" "" [1]*` {
		t.Errorf("%+v", c)
	}
	for _, bad := range []string{"cobol", "bash+os", "python+", "python+a;b"} {
		if err := service.CheckPool(&service.Pool{Image: api.HostImage, Context: bad}); err == nil {
			t.Errorf("a pool with context %q", bad)
		}
	}
}

// A sandbox that is claimed between the look at the pool and the start of an interpreter has none.
func TestParkedInterpreterOfASandboxClaimedBeforeItsStart(t *testing.T) {
	testenv.RequirePeer(t, "python3")
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Pools = []service.Pool{{Image: api.HostImage, Size: 1, Context: "python"}}
	var d *daemontest.Running
	var once sync.Once
	started, claimed := make(chan struct{}), make(chan string, 1)
	b.Options.SpareMemory = func() error {
		<-started
		if len(d.Engine.IDs()) == 1 { // else a sandbox is about to be parked, not to get an interpreter
			once.Do(func() { claimed <- d.Create(api.CreateSandbox{}).ID })
		}
		return nil
	}
	d = b.Start()
	close(started)
	id := <-claimed
	pids := untilParked(t, d) // of another sandbox, which comes next
	if poolOf(t, d).Hits != 1 || len(pids) != 1 || pids[id] != 0 {
		t.Errorf("%s was claimed, and interpreters wait: %v", id, pids)
	}
}

// An interpreter that does not start is tried again after a pause, whatever wakes its pool.
func TestParkedInterpreterIsTriedAgainAfterAPause(t *testing.T) {
	testenv.RequirePeer(t, "python3")
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Pools = []service.Pool{
		{Image: api.HostImage, Size: 1, Context: "python+no_such_module"},
		{Image: api.HostImage, Size: 1, Context: "python", Network: true},
	}
	var looks atomic.Int64
	b.Options.SpareMemory = func() error {
		looks.Add(1)
		return nil
	}
	d := b.Start()
	waitPool(t, d, "complaining", func(p api.Pool) bool { return strings.Contains(p.Context.Error, "no_such_module") })
	d.Await(func() string { return "the other pool is not furnished" }, func() bool {
		other := daemontest.Decode[api.SystemInfo](t, d.Do("GET", "/v1/system", nil), http.StatusOK).Pools[1]
		return other.Ready == 1 && other.Context.Ready == 1
	})
	before := looks.Load()
	if err := d.API().Furnish(t.Context(), &b.Options.Pools[0]); err == nil || !strings.Contains(err.Error(), "no_such_module") {
		t.Errorf("the next look: %v", err)
	}
	if n := looks.Load() - before; n != 0 {
		t.Errorf("%d starts within the pause", n)
	}
}

// A kernel whose messages stand between output is known by its key.
func TestParkedShellIsTheFirstContext(t *testing.T) {
	testenv.RequirePeer(t, "bash")
	_, d := parkedBench(t, 1, "bash")
	pids := untilParked(t, d)
	// Empty lists are none.
	ask := map[string]any{"language": "sh", "env": []string{}, "preload": []string{}}
	c := daemontest.Decode[api.Context](t, d.Do("POST", "/v1/sandboxes/"+d.Create(api.CreateSandbox{}).ID+"/contexts", ask), http.StatusCreated)
	if got := summary(runIn(d, c, "x=1\necho $x")); got != `"1\n" ""` || pidOf(d, c) != pids[c.Sandbox] {
		t.Error(got)
	}
}
