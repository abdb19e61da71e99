package service_test

import (
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/interpreter"
)

// contextBench is a daemon with a sandbox, whose programs are those of this machine.
func contextBench(t *testing.T) (*daemontest.Running, api.Sandbox) {
	t.Helper()
	d := contextDaemons(t).Start()
	return d, d.Create(withScratch(t))
}

// contextDaemons starts daemons that hold contexts, and kill none that is interrupted: it ends
// however slow this machine is.
func contextDaemons(t *testing.T) *daemontest.Bench {
	t.Helper()
	testenv.RequirePeer(t, "python3")
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	b.Options.InterruptGrace = testenv.HungAfter
	return b
}

// withScratch requests a sandbox whose programs, which see this machine's files, have a directory
// for temporary ones: R leaves its own when it is killed.
func withScratch(t *testing.T) api.CreateSandbox {
	t.Helper()
	return api.CreateSandbox{IdleTimeout: 3600, Env: []string{"TMPDIR=" + t.TempDir()}}
}

func newContext(r *daemontest.Running, sandbox string, req api.CreateContext) api.Context {
	r.T.Helper()
	return daemontest.Decode[api.Context](r.T, r.Do("POST", "/v1/sandboxes/"+sandbox+"/contexts", req), http.StatusCreated)
}

func runIn(r *daemontest.Running, c api.Context, code string) api.CodeResult {
	r.T.Helper()
	return runReq(r, c, api.CodeRequest{Code: code})
}

func runReq(r *daemontest.Running, c api.Context, req api.CodeRequest) api.CodeResult {
	r.T.Helper()
	req.Context = c.ID
	return daemontest.Decode[api.CodeResult](r.T, r.Do("POST", "/v1/sandboxes/"+c.Sandbox+"/code", req), http.StatusOK)
}

// timedOut runs code that says something and then does not end by itself. How long it takes to say
// so is not judged: a timeout, in seconds, that was too short for it is doubled.
func timedOut(r *daemontest.Running, c api.Context, timeout float64, says, code string) api.CodeResult {
	r.T.Helper()
	for {
		res := runReq(r, c, api.CodeRequest{Code: code, Timeout: timeout})
		if strings.Contains(res.Logs.Stdout, says) || timeout > testenv.HungAfter.Seconds() {
			return res
		}
		timeout *= 2
	}
}

// summary is a result in one line: stdout, stderr, texts of results, error.
func summary(res api.CodeResult) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%q %q", res.Logs.Stdout, res.Logs.Stderr)
	for _, v := range res.Results {
		fmt.Fprintf(&b, " [%s]", v.Text)
		if v.Main {
			b.WriteString("*")
		}
	}
	if res.Failure != nil {
		fmt.Fprintf(&b, " %s: %s", res.Failure.Name, res.Failure.Value)
	}
	return b.String()
}

func TestContextKeepsState(t *testing.T) {
	d, sb := contextBench(t)
	c := newContext(d, sb.ID, api.CreateContext{})
	if c.Language != "python" || c.State != api.ContextIdle || c.Exec == "" {
		t.Errorf("%+v", c)
	}
	for i, run := range []struct{ code, want string }{
		{"x = 20", `"" ""`},
		{"print(x)\nx + 1", `"20\n" "" [21]*`},
		{"_ * 2", `"" "" [42]*`},
		{"'text'", `"" "" [text]*`},
		{"x;", `"" ""`},
		{"__name__", `"" "" [__main__]*`},
		{"display(1, 2)\n3", `"" "" [1] [2] [3]*`},
		{"import os, sys\nprint('a')\nos.system('echo b; echo c >&2')\nprint('d')\nprint('e', file=sys.stderr)", `"a\nb\nd\n" "c\ne\n"`},
		{"1/0", `"" "" ZeroDivisionError: division by zero`},
		{"x = (", `"" "" SyntaxError: '(' was never closed (<cell 10>, line 1)`},
		{"raise SystemExit(3)", `"" "" SystemExit: 3`},
		{"x", `"" "" [20]*`},
		{"import asyncio\nawait asyncio.sleep(0, 'slept')", `"" "" [slept]*`},
		{"input()", `"" "" EOFError: EOF when reading a line`},
		{"!echo $((1+1))", `"2\n" ""`},
		{"%nosuch", `"" "" UsageError: %nosuch needs IPython, which this image lacks`},
		{"", `"" ""`},
	} {
		res := runIn(d, c, run.code)
		if got := summary(res); got != run.want {
			t.Errorf("%s\n got %s\nwant %s", run.code, got, run.want)
		}
		if res.ExecutionCount != i+1 {
			t.Errorf("execution count %d, want %d", res.ExecutionCount, i+1)
		}
	}
	res := runIn(d, c, "def f():\n    return 1/0\n\nf()")
	want := "Traceback (most recent call last):\n  File \"<cell 18>\", line 4, in <module>\n    f()\n  File \"<cell 18>\", line 2, in f\n    return 1/0\n           ~^~\nZeroDivisionError: division by zero"
	if res.Failure == nil || res.Failure.Traceback != want || res.Exit.Code != 1 {
		t.Errorf("%+v %s", res.Failure, res.Failure.Traceback)
	}
}

// streamed runs code and passes events on, until the last.
func streamed(t *testing.T, r *daemontest.Running, req api.CodeRequest, c api.Context, on func(api.CodeEvent)) api.CodeEvent {
	t.Helper()
	req.Context = c.ID
	var last api.CodeEvent
	err := r.API().StreamCode(t.Context(), c.Sandbox, req, func(e api.CodeEvent) error {
		last = e
		if on != nil {
			on(e)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("run %q: %v", req.Code, err)
	}
	return last
}

func TestInterruptedRun(t *testing.T) {
	d, sb := contextBench(t)
	c := newContext(d, sb.ID, api.CreateContext{})
	runIn(d, c, "import time, re, threading\nx = 1")
	for _, code := range []string{
		"print('now', flush=True)\ntime.sleep(1000)",
		"print('now', flush=True)\nre.match('(a*)*b', 'a' * 60)",
		"print('now', flush=True)\nwhile True: pass",
		"print('now', flush=True)\nwhile True: print('x' * 100)",
		"print('now', flush=True)\nthreading.Event().wait()",
		"print('now', flush=True)\nimport subprocess\nsubprocess.run(['sleep', '1000'])",
		"print('now', flush=True)\nimport asyncio\nawait asyncio.sleep(1000)",
	} {
		var failure *api.CodeFailure
		asked := false
		end := streamed(t, d, api.CodeRequest{Code: code}, c, func(e api.CodeEvent) {
			if e.Type == api.CodeStdout && !asked {
				asked = true
				if rep := d.Do("POST", "/v1/sandboxes/"+sb.ID+"/contexts/"+c.ID+"/interrupt", nil); rep.Status != http.StatusOK {
					t.Errorf("interrupt: %s", rep.Body)
				}
			}
			if e.Failure != nil {
				failure = e.Failure
			}
		})
		if failure == nil || failure.Name != "KeyboardInterrupt" || end.Exit.Code != 1 || end.Exit.Timeout {
			t.Errorf("%s: %+v, %+v", code, failure, end.Exit)
		}
		if got := summary(runIn(d, c, "x")); got != `"" "" [1]*` {
			t.Errorf("after %s: %s", code, got)
		}
	}
	if got := summary(timedOut(d, c, 0.2, "part\n", "print('part')\ntime.sleep(1000)")); got != `"part\n" "" KeyboardInterrupt: the run's timeout has ended` {
		t.Error(got)
	}
	if got := summary(runIn(d, c, "x")); got != `"" "" [1]*` {
		t.Error(got)
	}
}

func TestContextThatDies(t *testing.T) {
	d, sb := contextBench(t)
	c := newContext(d, sb.ID, api.CreateContext{})
	state := func() api.ContextState {
		return daemontest.Decode[api.Context](t, d.Do("GET", "/v1/sandboxes/"+sb.ID+"/contexts/"+c.ID, nil), http.StatusOK).State
	}
	for _, death := range []struct{ code, says string }{
		{"import os\nprint('before')\nos._exit(4)", "exit code 4"},
		{"import os\nprint('before')\nos.kill(os.getpid(), 9)", "killed by SIGKILL"},
		{"import ctypes\nprint('before')\nctypes.string_at(0)", "killed by SIGSEGV: Fatal Python error: Segmentation fault"},
		{"print('before')\n__import__('sys').modules['os'].abort()", "killed by SIGABRT"},
	} {
		runIn(d, c, "x = 1")
		res := runIn(d, c, death.code)
		if res.Failure == nil || res.Failure.Name != "ContextDied" || !strings.Contains(res.Failure.Value, death.says) || res.Logs.Stdout != "before\n" {
			t.Errorf("%s: %s", death.code, summary(res))
		}
		if got := state(); got != api.ContextDead {
			t.Error(got)
		}
		// It was told, so the next run runs, in a new process.
		if got := runIn(d, c, "'x' in globals()"); summary(got) != `"" "" [False]*` || got.ExecutionCount != 1 {
			t.Error(summary(got))
		}
	}
	// One that dies between runs is told of by the next run, which does not run.
	c = daemontest.Decode[api.Context](t, d.Do("GET", "/v1/sandboxes/"+sb.ID+"/contexts/"+c.ID, nil), http.StatusOK)
	d.Do("POST", "/v1/sandboxes/"+sb.ID+"/execs/"+c.Exec+"/signal", api.ExecSignal{Signal: "KILL"})
	d.Until(api.Exec{ID: c.Exec, Sandbox: sb.ID}, daemontest.Exited)
	if got := state(); got != api.ContextDead {
		t.Error(got)
	}
	res := runIn(d, c, "print('not')")
	if res.Failure == nil || res.Failure.Name != "ContextDied" || !strings.Contains(res.Failure.Value, "did not run: its process had ended: killed by SIGKILL") || res.Logs.Stdout != "" {
		t.Error(summary(res))
	}
	if got := summary(runIn(d, c, "print('runs')")); got != `"runs\n" ""` {
		t.Error(got)
	}
	if rep := d.Do("DELETE", "/v1/sandboxes/"+sb.ID+"/contexts/"+c.ID, nil); rep.Status != http.StatusNoContent {
		t.Errorf("%s", rep.Body)
	}
	daemontest.Problem(t, d.Do("GET", "/v1/sandboxes/"+sb.ID+"/contexts/"+c.ID, nil), api.CodeNotFound)
	list := daemontest.Decode[api.ContextList](t, d.Do("GET", "/v1/sandboxes/"+sb.ID+"/contexts", nil), http.StatusOK)
	execs := daemontest.Decode[api.ExecList](t, d.Do("GET", "/v1/sandboxes/"+sb.ID+"/execs", nil), http.StatusOK)
	if len(list.Contexts) != 0 || len(execs.Execs) != 0 {
		t.Errorf("%+v %+v", list, execs)
	}
}

// A run that does not heed its interrupt is killed. Its timeout does not strike the process that
// replaces the killed one.
func TestDeafRunIsKilled(t *testing.T) {
	b := contextDaemons(t)
	b.Options.InterruptGrace = time.Millisecond
	d := b.Start()
	c := newContext(d, d.Create(withScratch(t)).ID, api.CreateContext{})
	const deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf')\nwhile True: pass"
	// An interrupt before it is deaf could end it.
	if res := timedOut(d, c, 0.5, "deaf\n", deaf); res.Failure == nil || res.Failure.Name != "ContextRestarted" {
		t.Error(summary(res))
	}
	if c := daemontest.Decode[api.Context](t, d.Do("GET", "/v1/sandboxes/"+c.Sandbox+"/contexts/"+c.ID, nil), http.StatusOK); c.State != api.ContextIdle {
		t.Errorf("%+v", c)
	}
}

// A kernel that the user's code has taken over harms its own context only, and the daemon's memory
// stays bounded.
func TestHostileKernel(t *testing.T) {
	d, sb := contextBench(t)
	other := newContext(d, sb.ID, api.CreateContext{})
	runIn(d, other, "y = 2")
	c := newContext(d, sb.ID, api.CreateContext{})
	// k is the kernel, and put writes to its protocol.
	const take = "import gc, os, struct\n" +
		"k = [o for o in gc.get_objects() if type(o).__name__ == 'Kernel'][0]\n" +
		"def put(kind, data=b'', size=None, run=None):\n" +
		"    data = struct.pack('>IcI', len(data) if size is None else size, kind, k.seq if run is None else run) + data\n" +
		"    while data: data = data[os.write(k.answers, data):]\n"
	for _, attack := range []struct {
		code, want string
		hangs      bool // until the timeout
	}{
		{code: "os.write(k.answers, b'nonsense and more of it')", want: "ContextRestarted"},
		{code: "put(b'?')", want: "ContextRestarted"},
		{code: "put(b'o', size=1<<31)", want: "ContextRestarted"},
		{code: "put(b'o', b'x' * 60000)", want: "ContextRestarted"},
		{code: "put(b'o', b'for another', run=k.seq + 1)", want: "ContextRestarted"},
		{code: "put(b'h', b'{}')", want: "ContextRestarted"},
		{code: "put(b'r', b'{\"text\": 5}')", want: "ContextRestarted"},
		{code: "put(b'r', b'{\"nosuch\": 5}')", want: "ContextRestarted"},
		{code: "put(b'r', b'{} {}')", want: "ContextRestarted"},
		{code: "put(b'r', b'{\"text\": \"\\xff\"}')", want: "ContextRestarted"},
		{code: "put(b'r', b'[' * 40000)", want: "ContextRestarted"},
		{code: "put(b'+', b'')", want: "ContextRestarted"},
		{code: "put(b'+', b'x')\nput(b'o', b'x')", want: "ContextRestarted"},
		{code: "while True: put(b'+', b'x' * 40000)", want: "ContextRestarted"},
		{code: "put(b'x', b'{\"name\": \"Forged\", \"value\": \"\"}')", want: "Forged"},
		{code: "put(b'd', b'{\"ok\": true, \"count\": -1, \"cpu_ms\": 1e300, \"memory_peak\": 9e18}')", want: "ContextRestarted"},
		{code: "os.close(k.answers)", want: "ContextDied"},
		{code: "os.set_blocking(k.answers, False)\nwhile True: os.write(k.answers, b'')\n", want: "KeyboardInterrupt", hangs: true},
	} {
		if res := runIn(d, c, take); res.Failure != nil {
			t.Errorf("before %s: %s", attack.code, summary(res))
		}
		var res api.CodeResult
		switch {
		case !attack.hangs:
			res = runReq(d, c, api.CodeRequest{Code: attack.code, Timeout: testenv.HungAfter.Seconds()})
		default:
			res = runReq(d, c, api.CodeRequest{Code: attack.code, Timeout: 0.5})
		}
		name := ""
		if res.Failure != nil {
			name = res.Failure.Name
		}
		if name != attack.want {
			t.Errorf("%s: %s", attack.code, summary(res))
		}
		if got := summary(runIn(d, other, "y")); got != `"" "" [2]*` {
			t.Errorf("after %s: another context says %s", attack.code, got)
		}
	}
	// A run that claims to be finished goes on in the kernel. What it says then is refused in the next.
	runIn(d, c, take)
	if res := runIn(d, c, "put(b'd', b'{\"ok\": true}')\nput(b'o', b'forged')\nwhile True: pass"); res.Failure != nil || res.Exit.Code != 0 {
		t.Error(summary(res))
	}
	if res := runIn(d, c, "1"); res.Failure == nil || res.Failure.Name != "ContextRestarted" || res.Logs.Stdout != "" {
		t.Error(summary(res))
	}
	if got := summary(runIn(d, c, "1")); got != `"" "" [1]*` {
		t.Error(got)
	}
}

// Of results that their clients do not read, the daemon holds the bytes of its quota, whatever the
// number of contexts. The others are omitted, and it holds nothing afterwards.
func TestResultsAreBounded(t *testing.T) {
	d, sb := contextBench(t)
	const contexts, size, room = 6, 1 << 20, 3<<20 + 1<<19
	results := d.API().Results()
	results.Sandbox, results.Tenant, results.All = room, 2*room, 4*room
	var wg sync.WaitGroup
	got, read := make(chan int), make(chan struct{})
	for range contexts {
		c := newContext(d, sb.ID, api.CreateContext{})
		wg.Go(func() {
			end := streamed(t, d, api.CodeRequest{Code: "'x' * 1048576"}, c, func(e api.CodeEvent) {
				if e.Result == nil {
					return
				}
				if text := e.Result.Text; len(text) != size && !strings.Contains(text, " bytes, for which the daemon had no memory") {
					t.Errorf("%.200q", text)
				}
				got <- len(e.Result.Text)
				<-read
			})
			if end.Exit == nil || end.Exit.Code != 0 {
				t.Errorf("%+v", end)
			}
		})
	}
	whole := 0
	for range contexts {
		if <-got == size {
			whole++
		}
	}
	if held := results.Held(); whole == 0 || whole*size > room || held < whole*size || held > room {
		t.Errorf("%d results of %d bytes are held as %d bytes, of %d", whole, size, held, room)
	}
	close(read)
	wg.Wait()
	if held := results.Held(); held != 0 {
		t.Errorf("%d bytes are held", held)
	}
	// A buffered answer keeps results, small ones too, until it has left.
	c := newContext(d, sb.ID, api.CreateContext{})
	res, done, err := d.API().RunCode(t.Context(), sb.ID, api.CodeRequest{Context: c.ID, Code: "for i in range(20): display('x' * 250000)"})
	if err != nil {
		t.Fatal(err)
	}
	kept := 0
	for _, v := range res.Results {
		kept += len(v.Text)
	}
	if held := results.Held(); kept < room/2 || kept > held || held > room {
		t.Errorf("%d bytes of results, %d are held, of %d", kept, held, room)
	}
	done()
	if held := results.Held(); held != 0 {
		t.Errorf("%d bytes are held", held)
	}
	// Of a run that fails nothing stays.
	runIn(d, c, "display('x' * 1048576)\nimport os\nos._exit(1)")
	if held := results.Held(); held != 0 {
		t.Errorf("%d bytes are held", held)
	}
}

// Output that comes faster than a client reads waits: nothing is lost, however much it is.
func TestContextOutputFlood(t *testing.T) {
	d, sb := contextBench(t)
	c := newContext(d, sb.ID, api.CreateContext{})
	var got strings.Builder
	streamed(t, d, api.CodeRequest{Code: "for i in range(200000): print(i)"}, c, func(e api.CodeEvent) { got.WriteString(e.Text) })
	var want strings.Builder
	for i := range 200000 {
		fmt.Fprintln(&want, i)
	}
	if got.String() != want.String() {
		t.Errorf("%d bytes, want %d", got.Len(), want.Len())
	}
	// From a process of its own, by both streams.
	n := map[api.CodeEventType]int{}
	streamed(t, d, api.CodeRequest{Code: "import os\nos.system('head -c 3000000 /dev/zero; head -c 2000000 /dev/zero >&2')"}, c, func(e api.CodeEvent) {
		n[e.Type] += len(e.Text) + len(e.Data)
	})
	if n[api.CodeStdout] != 3000000 || n[api.CodeStderr] != 2000000 {
		t.Error(n)
	}
	// A result of some megabytes, and one that is too large.
	res := runIn(d, c, "'x' * 5_000_000")
	if len(res.Results) != 1 || len(res.Results[0].Text) != 5_000_000 {
		t.Error(len(res.Results))
	}
	if res = runIn(d, c, "'x' * 20_000_000"); len(res.Results) != 1 || !strings.HasSuffix(res.Results[0].Text, "[a result of 20000036 bytes, more than 16777216]") {
		t.Error(len(res.Results), res.Results[0].Text[len(res.Results[0].Text)-100:])
	}
	// NaN is no JSON.
	res = runIn(d, c, "class J:\n    def _repr_json_(self): return float('nan')\n    def __repr__(self): return 'J'\nJ()")
	if got := summary(res); got != `"" "" [J]*` {
		t.Error(got)
	}
	// A process that is left behind and writes without end does not delay the end of the run.
	// What it wrote until then may be more than a buffered answer takes.
	for _, step := range []struct{ code, want string }{
		{"import subprocess\np = subprocess.Popen(['yes'])\nprint('left')", "left\n"},
		{"p.kill(); p.wait()\nprint('killed')", "killed\n"},
	} {
		var text strings.Builder
		if end := streamed(t, d, api.CodeRequest{Code: step.code}, c, func(e api.CodeEvent) { text.WriteString(e.Text) }); end.Exit == nil || end.Exit.Code != 0 {
			t.Error(end)
		}
		if got := strings.ReplaceAll(text.String(), "y\n", ""); !strings.Contains(got, step.want) {
			t.Errorf("%q: %d bytes, among them %.100q", step.code, text.Len(), got)
		}
	}
	// What a thread prints later comes with the next run.
	runIn(d, c, "import threading\nready = threading.Event()\ndef late():\n    ready.wait()\n    print('late')\nth = threading.Thread(target=late)\nth.start()")
	runIn(d, c, "threading.Timer(0, ready.set).start()")
	if res = runIn(d, c, "th.join()\nprint('then')"); res.Logs.Stdout != "late\nthen\n" && !strings.HasSuffix(res.Logs.Stdout, "then\n") {
		t.Error(summary(res))
	}
}

// A daemon that ends leaves its contexts to the next one: those that wait, those that run, those
// that have died.
func TestContextsAreHandedOn(t *testing.T) {
	b := contextDaemons(t)
	first := b.Start()
	sb := first.Create(withScratch(t))
	waits := newContext(first, sb.ID, api.CreateContext{Env: []string{"NAME=value"}})
	busy := newContext(first, sb.ID, api.CreateContext{})
	dead := newContext(first, sb.ID, api.CreateContext{})
	preloaded := newContext(first, sb.ID, api.CreateContext{Preload: []string{"json"}})
	untilSpare(first, sb.ID)
	spared := newContext(first, sb.ID, api.CreateContext{Preload: []string{"json"}})
	runIn(first, spared, "x = 5")
	spare := untilSpare(first, sb.ID)
	var others []api.Context
	for _, l := range tongues {
		if _, err := exec.LookPath(l.peer); err == nil { // else TestContextLanguages says so
			c := newContext(first, sb.ID, api.CreateContext{Language: l.name})
			runIn(first, c, l.runs[0].code)
			others = append(others, c)
		}
	}
	runIn(first, waits, "x = 1")
	runIn(first, busy, "import time, os\nx = 2")
	runIn(first, dead, "x = 3")
	first.Do("POST", "/v1/sandboxes/"+sb.ID+"/execs/"+dead.Exec+"/signal", api.ExecSignal{Signal: "KILL"})
	first.Until(api.Exec{ID: dead.Exec, Sandbox: sb.ID}, daemontest.Exited)
	// The run is interrupted as its client goes with the daemon, and writes on until then.
	began := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- first.API().StreamCode(t.Context(), sb.ID, api.CodeRequest{Context: busy.ID, Code: `
try:
    while True: print('x' * 1000)
except KeyboardInterrupt:
    for i in range(1000): print('y' * 1000)
    x = 4`}, func(e api.CodeEvent) error {
			if e.Type == api.CodeStdout {
				select {
				case <-began:
					return fmt.Errorf("gone")
				default:
					close(began)
				}
			}
			return nil
		})
	}()
	<-began
	if err := <-ended; err == nil {
		t.Error("a run whose client left was answered")
	}
	// A daemon that stops before it has seen the client leave would let the run go on.
	first.Do("POST", "/v1/sandboxes/"+sb.ID+"/contexts/"+busy.ID+"/interrupt", nil)
	first.Cancel()
	first.Wait()

	second := b.Start()
	list := daemontest.Decode[api.ContextList](t, second.Do("GET", "/v1/sandboxes/"+sb.ID+"/contexts", nil), http.StatusOK)
	if len(list.Contexts) != 5+len(others) || list.Contexts[0].ID != waits.ID || list.Contexts[0].State != api.ContextIdle || list.Contexts[0].ExecutionCount != 1 ||
		list.Contexts[2].State != api.ContextDead || list.Contexts[3].ID != preloaded.ID || list.Contexts[4].ID != spared.ID {
		t.Errorf("%+v", list)
	}
	if got := summary(runIn(second, spared, "x")); got != `"" "" [5]*` {
		t.Error(got)
	}
	// An interpreter that waits for its request ends.
	if rep := second.Do("GET", "/v1/sandboxes/"+sb.ID+"/execs/"+spare, nil); rep.Status != http.StatusNotFound {
		t.Errorf("%s", rep.Body)
	}
	second.Await(func() string { return "an interpreter of no context is left" }, func() bool {
		list := daemontest.Decode[api.ProcessList](t, second.Do("GET", "/v1/sandboxes/"+sb.ID+"/processes", nil), http.StatusOK)
		return !slices.ContainsFunc(list.Processes, func(p api.Process) bool {
			return p.Exec == "" && strings.Contains(fmt.Sprint(p.Argv), "no kernel on stdin")
		})
	})
	if got := summary(runIn(second, waits, "print(os.environ['NAME']) if 'os' in globals() else print(__import__('os').environ['NAME'])\nx")); got != `"value\n" "" [1]*` {
		t.Error(got)
	}
	for _, c := range others {
		l := tongues[slices.IndexFunc(tongues, func(l tongue) bool { return interpreter.Find(l.name).Name == c.Language })]
		if got := summary(runIn(second, c, l.runs[1].code)); got != l.runs[1].want {
			t.Errorf("%s: %s", c.Language, got)
		}
	}
	if got := summary(runIn(second, busy, "x")); got != `"" "" [4]*` {
		t.Error(got)
	}
	if res := runIn(second, dead, "x"); res.Failure == nil || res.Failure.Name != "ContextDied" {
		t.Error(summary(res))
	}
	if got := summary(runIn(second, dead, "'x' in globals()")); got != `"" "" [False]*` {
		t.Error(got)
	}
}

// Runs of one context take turns, and those of many contexts do not see each other.
func TestContextsAreApart(t *testing.T) {
	d, sb := contextBench(t)
	const contexts, runs = 6, 5
	var all []api.Context
	for i := range contexts {
		c := newContext(d, sb.ID, api.CreateContext{})
		runIn(d, c, fmt.Sprintf("me, n = %d, 0", i))
		all = append(all, c)
	}
	var work sync.WaitGroup
	for i, c := range all {
		for range runs {
			work.Go(func() {
				res, done, err := d.API().RunCode(t.Context(), sb.ID, api.CodeRequest{Context: c.ID, Code: "n += 1\nprint(me, end='')"})
				if err != nil {
					t.Error(err)
					return
				}
				defer done()
				if res.Logs.Stdout != fmt.Sprint(i) || res.Failure != nil {
					t.Errorf("context %d: %+v", i, res)
				}
			})
		}
	}
	work.Wait()
	for i, c := range all {
		if got := summary(runIn(d, c, "me, n")); got != fmt.Sprintf(`"" "" [(%d, %d)]*`, i, runs) {
			t.Error(got)
		}
	}
}

func TestBashContext(t *testing.T) {
	d, sb := contextBench(t)
	c := newContext(d, sb.ID, api.CreateContext{Language: "sh", Env: []string{"A=a"}})
	for _, run := range []struct {
		code, want string
		exit       int
	}{
		{"x=5; f() { echo \"f $1 $x\"; }; cd /usr", `"" ""`, 0},
		{"f 1; pwd; echo $A", `"f 1 5\n/usr\na\n" ""`, 0},
		{"echo out; echo err >&2; false", `"out\n" "err\n"`, 1},
		{"exit 3; echo not", `"" ""`, 3},
		{"(exit 4)", `"" ""`, 4},
		{"g() { exit 5; }; g; echo not", `"" ""`, 5},
		{"echo $x", `"5\n" ""`, 0},
		{"set -e; false; echo goes on", `"goes on\n" ""`, 0},
		{"set +e; cat", `"" ""`, 0},
		{"", `"" ""`, 0},
		{"printf 'a\\0b'", `"a\x00b" ""`, 0},
		{"echo '\\n  \t%s $x'", `"\\n  \t%s $x\n" ""`, 0},
		{"IFS=,", `"" ""`, 0},
		{"echo still", `"still\n" ""`, 0},
		{"unset IFS; set -e", `"" ""`, 0},
		{"set +e; echo on", `"on\n" ""`, 0},
		{"exec >/dev/null; echo lost", `"" ""`, 0},
		{"cat <<E\nline\nE", `"" ""`, 0},
		{"exec >/proc/self/fd/2; echo there", `"" "there\n"`, 0},
	} {
		res := runIn(d, c, run.code)
		if got := summary(res); got != run.want || res.Exit.Code != run.exit {
			t.Errorf("%q\n got %s, exit %d\nwant %s, exit %d", run.code, got, res.Exit.Code, run.want, run.exit)
		}
	}
	res := runIn(d, c, "echo\necho\nnosuchcommand")
	if !strings.Contains(res.Logs.Stderr, "line 3: nosuchcommand: command not found") || res.Exit.Code != 127 {
		t.Error(summary(res))
	}
	if res = runReq(d, c, api.CodeRequest{Code: "echo $B", Env: []string{"B=b c"}}); res.Logs.Stderr != "\n\nb c\n" && res.Logs.Stderr != "b c\n" {
		t.Error(summary(res))
	}
	c = newContext(d, sb.ID, api.CreateContext{Language: "bash"})
	runIn(d, c, "x=1; f() { while :; do :; done; echo no; }")
	for _, code := range []string{"while :; do :; done; echo no", "f; echo no", "sleep 1000; echo no", "for i in 1 2; do sleep 1000; done", "y=$(sleep 1000); echo no", "yes; echo no"} {
		res := runReq(d, c, api.CodeRequest{Code: code, Timeout: 0.3})
		if res.Failure == nil || res.Failure.Name != "KeyboardInterrupt" || !res.Exit.Timeout || res.Exit.Code != 130 || strings.Contains(res.Logs.Stdout, "no") {
			t.Errorf("%s: %.200s %+v", code, summary(res), res.Exit)
		}
	}
	if got := summary(runIn(d, c, "echo $x")); got != `"1\n" ""` {
		t.Error(got)
	}
	// Output that looks like messages is output.
	if got := summary(runIn(d, c, "printf '\\0KEY:d 1 2\\n{}'; printf '\\0'; printf '\\0' >&2")); got != `"\x00KEY:d 1 2\n{}\x00" "\x00"` {
		t.Error(got)
	}
	// Messages of the user's own are the context's alone.
	if res := runIn(d, c, "__sbx_say d 999 '{}'"); res.Failure == nil || res.Failure.Name != "ContextRestarted" {
		t.Error(summary(res))
	}
	if res := runIn(d, c, "kill -9 $$"); res.Failure == nil || res.Failure.Name != "ContextDied" {
		t.Error(summary(res))
	}
	n := map[api.CodeEventType]int{}
	streamed(t, d, api.CodeRequest{Code: "head -c 3000000 /dev/zero; head -c 2000000 /dev/zero >&2"}, c, func(e api.CodeEvent) {
		n[e.Type] += len(e.Text) + len(e.Data)
	})
	if n[api.CodeStdout] != 3000000 || n[api.CodeStderr] != 2000000 {
		t.Error(n)
	}
}

// The files that a run writes into its output directory are its artifacts, with a context and
// without.
func TestArtifacts(t *testing.T) {
	d, sb := contextBench(t)
	c := newContext(d, sb.ID, api.CreateContext{})
	out := t.TempDir() + "/out" // programs see this machine's files
	at := func(text string) string { return strings.ReplaceAll(text, "/tmp/out", out) }
	for _, of := range []api.CodeRequest{{Language: "python"}, {Context: c.ID}} {
		for _, run := range []struct{ code, want string }{
			{"import os, shutil\nshutil.rmtree('/tmp/out', ignore_errors=True)", ""},
			{"import os\nos.makedirs('/tmp/out/sub')\nopen('/tmp/out/a.csv', 'w').write('1,2')\nopen('/tmp/out/sub/B.PNG', 'w')\nopen('/tmp/out/c', 'w')\nos.symlink('c', '/tmp/out/l');", "/tmp/out/a.csv 3 text/csv, /tmp/out/c 0 application/octet-stream, /tmp/out/sub/B.PNG 0 image/png"},
			{"open('/tmp/out/a.csv').read();", ""},
			{"open('/tmp/out/a.csv', 'a').write(',3');", "/tmp/out/a.csv 5 text/csv"},
			{"import os\nos.utime('/tmp/out/c', (5, 5));", "/tmp/out/c 0 application/octet-stream"},
			{"open('/tmp/out/d.json', 'w')\n1 / 0", "/tmp/out/d.json 0 application/json"},
			{"import shutil\nshutil.rmtree('/tmp/out')\nopen('/tmp/out', 'w');", ""},
			{"import os\nos.remove('/tmp/out')\nos.symlink('/tmp/out', '/tmp/out')", "missed"},
		} {
			req := of
			req.Code, req.OutputDir = at(run.code), out
			res := daemontest.Decode[api.CodeResult](t, d.Do("POST", "/v1/sandboxes/"+sb.ID+"/code", req), http.StatusOK)
			var got []string
			for _, a := range res.Artifacts {
				got = append(got, fmt.Sprintf("%s %d %s", a.Path, a.Size, a.MediaType))
			}
			if res.ArtifactsMissed {
				got = append(got, "missed")
			}
			if got := strings.Join(got, ", "); got != at(run.want) {
				t.Errorf("%s\n got %s\nwant %s", run.code, got, run.want)
			}
		}
		req := of
		req.Code, req.OutputDir = at("import os\nos.remove('/tmp/out')"), ""
		daemontest.Decode[api.CodeResult](t, d.Do("POST", "/v1/sandboxes/"+sb.ID+"/code", req), http.StatusOK)
		req.Code, req.OutputDir = "pass", "relative"
		daemontest.Problem(t, d.Do("POST", "/v1/sandboxes/"+sb.ID+"/code", req), api.CodeInvalid)
	}
	end := streamed(t, d, api.CodeRequest{Code: at("import os\nos.makedirs('/tmp/out')\nopen('/tmp/out/e', 'w');"), OutputDir: out}, c, nil)
	if len(end.Artifacts) != 1 || end.Artifacts[0].Path != out+"/e" {
		t.Errorf("%+v", end)
	}
}

// untilSpare waits until an interpreter is ready for the next context of a sandbox, and returns its
// exec.
func untilSpare(r *daemontest.Running, sandbox string) (id string) {
	r.T.Helper()
	r.Await(func() string { return "no interpreter is ready" }, func() bool {
		id = r.API().SpareExec(sandbox)
		return id != ""
	})
	return id
}

// A spare becomes the context of an equal request, once: each context has a process and random
// numbers of its own. Any other request gets a process that is started for it.
func TestSpareContexts(t *testing.T) {
	d, sb := contextBench(t)
	const code = "import os, random, decimal, json\n(os.getpid(), random.random(), hash('x'), os.environ.get('A'), os.getcwd())"
	req := api.CreateContext{Preload: []string{"decimal", "json.tool"}, Env: []string{"A=1"}, Cwd: "/tmp"}
	first := newContext(d, sb.ID, req)
	seen := map[string]bool{summary(runIn(d, first, code)): true}
	for range 2 {
		id := untilSpare(d, sb.ID)
		timed := req
		timed.IdleTimeout = 3600
		c := newContext(d, sb.ID, timed)
		if c.Exec != id || c.ID == first.ID || c.ExecutionCount != 0 || c.State != api.ContextIdle || c.CreatedAt.Before(first.CreatedAt) {
			t.Errorf("the spare exec %s, and the context %+v", id, c)
		}
		res := runIn(d, c, "import sys\nprint('decimal' in sys.modules, 'decimal' in globals(), 'json.tool' in sys.modules)")
		if summary(res) != `"True False True\n" ""` || res.ExecutionCount != 1 {
			t.Error(summary(res))
		}
		got := summary(runIn(d, c, code))
		if seen[got] || !strings.HasSuffix(got, `'1', '/tmp')]*`) {
			t.Error(got)
		}
		seen[got] = true
	}
	// Others start a process of their own, and the last kind has the spare.
	id := untilSpare(d, sb.ID)
	other := req
	other.Env = []string{"A=2"}
	c := newContext(d, sb.ID, other)
	if c.Exec == id || !strings.HasSuffix(summary(runIn(d, c, code)), `'2', '/tmp')]*`) {
		t.Errorf("%+v", c)
	}
	d.Await(func() string { return "the spare of another request goes on" }, func() bool {
		return d.Do("GET", "/v1/sandboxes/"+sb.ID+"/execs/"+id, nil).Status == http.StatusNotFound
	})
	if next := untilSpare(d, sb.ID); newContext(d, sb.ID, other).Exec != next {
		t.Error("the other spare was not used")
	}
	// One that has died becomes no context.
	id = untilSpare(d, sb.ID)
	d.Do("POST", "/v1/sandboxes/"+sb.ID+"/execs/"+id+"/signal", api.ExecSignal{Signal: "KILL"})
	d.Until(api.Exec{ID: id, Sandbox: sb.ID}, daemontest.Exited)
	if c := newContext(d, sb.ID, other); c.Exec == id || summary(runIn(d, c, "1")) != `"" "" [1]*` {
		t.Errorf("%+v", c)
	}
	untilSpare(d, sb.ID)
	// A spare is no context.
	list := daemontest.Decode[api.ContextList](t, d.Do("GET", "/v1/sandboxes/"+sb.ID+"/contexts", nil), http.StatusOK)
	if len(list.Contexts) != 6 {
		t.Errorf("%d contexts", len(list.Contexts))
	}
	// A module that is not there, and one that ends the interpreter, are errors, and leave nothing.
	for _, name := range []string{"no_such_module", "antigravity.none"} {
		p := daemontest.Problem(t, d.Do("POST", "/v1/sandboxes/"+sb.ID+"/contexts", api.CreateContext{Preload: []string{name}}), api.CodeConflict)
		if !strings.Contains(p.Detail, "preload "+name+": ModuleNotFoundError: No module named") {
			t.Error(p.Detail)
		}
	}
	for _, bad := range []api.CreateContext{
		{Preload: []string{"os;1"}},
		{Preload: []string{""}},
		{Preload: []string{"../x"}},
		{Preload: []string{"a."}},
		{Preload: slices.Repeat([]string{"os"}, 33)},
		{Preload: []string{"os"}, Language: "bash"},
	} {
		daemontest.Problem(t, d.Do("POST", "/v1/sandboxes/"+sb.ID+"/contexts", bad), api.CodeInvalid)
	}
	// It ends with its sandbox.
	if rep := d.Do("DELETE", "/v1/sandboxes/"+sb.ID, nil); rep.Status != http.StatusNoContent {
		t.Errorf("%s", rep.Body)
	}
	if id := d.API().SpareExec(sb.ID); id != "" {
		t.Errorf("the spare exec %s is left", id)
	}
}
