package service_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// contextBench is a daemon with a sandbox, whose programs are those of this machine.
func contextBench(t *testing.T) (*daemontest.Running, api.Sandbox) {
	t.Helper()
	testenv.RequirePeer(t, "python3")
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	d := b.Start()
	return d, d.Create(api.CreateSandbox{IdleTimeout: 3600})
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
	err := r.API().StreamInContext(t.Context(), c.Sandbox, req, func(e api.CodeEvent) error {
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
	if got := summary(runReq(d, c, api.CodeRequest{Code: "print('part')\ntime.sleep(1000)", Timeout: 0.2})); got != `"part\n" "" KeyboardInterrupt: the run's timeout has ended` {
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
