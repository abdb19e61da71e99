package functional

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// runCode runs code in a sandbox.
func runCode(t *testing.T, d *harness.Daemon, s *harness.Sandbox, req api.CodeRequest) *api.CodeResult {
	t.Helper()
	res, err := d.Client(t).RunCode(t.Context(), s.ID, req)
	if err != nil {
		t.Fatalf("run %s: %v", req.Language, err)
	}
	return res
}

// noCodeLeft fails if files of a code run are left in the sandbox.
func noCodeLeft(t *testing.T, s *harness.Sandbox) {
	t.Helper()
	if left := s.Sh(t, "ls -d /tmp/.code-* /dev/shm/.code-* 2>/dev/null || true"); left != "" {
		t.Errorf("left in the sandbox: %s", left)
	}
}

func TestCode(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Env: []string{"PYTHONPATH=/nowhere", "KEPT=yes"}})
	for _, c := range []struct {
		name string
		req  api.CodeRequest
		want api.CodeResult // without usage and traceback
	}{
		{"output", api.CodeRequest{Code: "import sys\nprint('ä')\nsys.stderr.write('e\\n')"}, api.CodeResult{Logs: api.CodeLogs{Stdout: "ä\n", Stderr: "e\n"}}},
		{"exit code", api.CodeRequest{Code: "raise SystemExit(3)"}, api.CodeResult{Exit: api.Exit{Code: 3}}},
		{"stdin", api.CodeRequest{Code: "print(input()[::-1])", Stdin: []byte("abc")}, api.CodeResult{Logs: api.CodeLogs{Stdout: "cba\n"}}},
		{"arguments", api.CodeRequest{Code: "import sys; print(sys.argv[1:])", Args: []string{"-c", "b c"}}, api.CodeResult{Logs: api.CodeLogs{Stdout: "['-c', 'b c']\n"}}},
		{"environment", api.CodeRequest{Code: "import os; print(os.environ['KEPT'], os.environ['A'])", Env: []string{"A=b"}}, api.CodeResult{Logs: api.CodeLogs{Stdout: "yes b\n"}}},
		{"modules of the working directory", api.CodeRequest{Code: "import sys; print(sys.path[1:3])", Cwd: "/usr"}, api.CodeResult{Logs: api.CodeLogs{Stdout: "['/usr', '/nowhere']\n"}}},
		{"user", api.CodeRequest{Code: "import os; print(os.getuid(), os.stat(__file__).st_uid, oct(os.stat(os.path.dirname(__file__)).st_mode & 0o777))", User: "0"}, api.CodeResult{Logs: api.CodeLogs{Stdout: "0 0 0o700\n"}}},
		{"exception", api.CodeRequest{Code: "def f():\n  return {}['k']\nf()"}, api.CodeResult{Exit: api.Exit{Code: 1}, Failure: &api.CodeFailure{Name: "KeyError", Value: "'k'"}}},
		{"signal", api.CodeRequest{Code: "import os; os.kill(os.getpid(), 15)"}, api.CodeResult{Exit: api.Exit{Code: 143, Signal: "SIGTERM"}}},
		{"bash", api.CodeRequest{Language: "bash", Code: "echo $0 $1 | sed 's/-.*main/-main/'; exit 4", Args: []string{"x"}}, api.CodeResult{Exit: api.Exit{Code: 4}, Logs: api.CodeLogs{Stdout: "/tmp/.code-main.sh x\n"}}},
		{"alias", api.CodeRequest{Language: "SH", Code: "echo hi"}, api.CodeResult{Logs: api.CodeLogs{Stdout: "hi\n"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := runCode(t, d, s, c.req)
			failed := got.Failure != nil && c.want.Failure != nil
			if failed && (got.Failure.Name != c.want.Failure.Name || got.Failure.Value != c.want.Failure.Value || got.Failure.Traceback != got.Logs.Stderr) {
				t.Errorf("failure %+v, want %+v", got.Failure, c.want.Failure)
			}
			if failed {
				c.want.Logs = got.Logs
			}
			if got.Exit != c.want.Exit || got.Logs != c.want.Logs || (got.Failure != nil) != (c.want.Failure != nil) || got.Results == nil {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
	noCodeLeft(t, s)
}

// A timeout kills all that the code has started, keeps the output until then, and leaves no files.
func TestCodeTimeout(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	// A timeout that is too short for the start is doubled: a slow machine is no fault.
	got := &api.CodeResult{}
	for limit := 1.0; got.Logs.Stdout == "" && limit < testenv.HungAfter.Seconds(); limit *= 2 {
		got = runCode(t, d, s, api.CodeRequest{Timeout: limit, Code: `
import subprocess, time
print("before")
subprocess.Popen(["sleep", "4711"], start_new_session=True)
time.sleep(4712)`})
		if !got.Exit.Timeout || got.Failure != nil {
			t.Fatalf("not ended by the timeout: %+v", got)
		}
	}
	if got.Logs.Stdout != "before\n" {
		t.Errorf("%+v", got)
	}
	if err := shErr(t, s, "! grep -q '471[12]' /proc/[0-9]*/cmdline 2>/dev/null || [ $(grep -l '471[12]' /proc/[0-9]*/cmdline | wc -l) -le 1 ]"); err != nil {
		t.Errorf("a child runs on: %v", err)
	}
	noCodeLeft(t, s)
}

// Output comes as it is printed; a client that leaves ends the code.
func TestCodeStream(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	gone := errors.New("the client leaves")
	var types []api.CodeEventType
	_, err := d.Client(t).StreamCode(t.Context(), s.ID, api.CodeRequest{Code: "import time\nprint('first')\ntime.sleep(4713)"}, func(e api.CodeEvent) error {
		types = append(types, e.Type)
		if e.Type == api.CodeStdout {
			return gone
		}
		return nil
	})
	if !errors.Is(err, gone) || len(types) != 2 || types[0] != api.CodeStarted {
		t.Errorf("%v, %v", err, types)
	}
	// The directory too, which is removed after its files.
	eventually(t, func() error { return shErr(t, s, "! ls -d /tmp/.code-* >/dev/null 2>&1") })
	types = nil
	end, err := d.Client(t).StreamCode(t.Context(), s.ID, api.CodeRequest{Code: "print('\\u2603', end='')\nx"}, func(e api.CodeEvent) error {
		types = append(types, e.Type)
		return nil
	})
	if err != nil || end.Exit.Code != 1 || types[len(types)-1] != api.CodeEnded || types[len(types)-2] != api.CodeFailed {
		t.Errorf("%v, %+v, %v", err, end, types)
	}
	// What is wrong before the start is an answer, not an event.
	_, err = d.Client(t).StreamCode(t.Context(), s.ID, api.CodeRequest{Code: "1", Language: "r", Env: []string{"PATH=/none"}}, func(api.CodeEvent) error { return nil })
	wantProblem(t, err, api.CodeNoLanguage, "images/polyglot")
	noCodeLeft(t, s)
}

// A language that is missing, an installation that fails: errors that say what was tried.
func TestCodeErrors(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	_, err := d.Client(t).RunCode(t.Context(), s.ID, api.CodeRequest{Code: "1", Env: []string{"PATH=/none"}})
	wantProblem(t, err, api.CodeNoLanguage, "python3 or python", "images/python")
	s.Sh(t, "mkdir -p /tmp/bin /tmp/lib; printf '#!/bin/sh\necho tried \"$@\" >&2; exit 5\n' >/tmp/bin/uv; chmod +x /tmp/bin/uv")
	_, err = d.Client(t).RunCode(t.Context(), s.ID, api.CodeRequest{
		Code: "print(1)", Env: []string{"PATH=/tmp/bin:/usr/bin:/bin"}, Libraries: []string{"a>=1", "b"}, LibraryDir: "/tmp/lib",
	})
	wantProblem(t, err, api.CodeLibraries, "exit code 5", "--no-index --find-links /tmp/lib -- a>=1 b")
	noCodeLeft(t, s)
}

// A read-only root has room for code in its shared memory.
func TestCodeOnAReadOnlyRoot(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Settings: api.Settings{ReadOnly: true}})
	got := runCode(t, d, s, api.CodeRequest{Code: "print(__file__.rsplit('-', 1)[0])"})
	if got.Logs.Stdout != "/dev/shm/.code\n" && got.Logs.Stdout != "/tmp/.code\n" {
		t.Errorf("%+v", got)
	}
	noCodeLeft(t, s)
}

func TestCodeCommand(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	dir := t.TempDir()
	file := filepath.Join(dir, "a.sh")
	if err := os.WriteFile(file, []byte("echo \"[$1]\"; cat; exit 7\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		stdin string
		args  []string
		code  int
		out   string
		says  string // in stderr
	}{
		{"stdin", "print(6 * 7)", []string{"code", "-"}, 0, "42\n", ""},
		{"text", "", []string{"code", "--lang", "bash", "--code", "echo $1; exit 3", "--", "--timeout"}, 3, "--timeout\n", ""},
		{"sandbox", "", []string{"code", "--in", s.ID, "--code", "import os; print(os.environ['A'])"}, 1, "", "KeyError"},
		{"sandbox with a variable", "", []string{"code", "--in", s.ID, "-e", "A=b", "--code", "import os; print(os.environ['A'])"}, 0, "b\n", ""},
		{"failure", "", []string{"code", "--code", "\n1/0"}, 1, "", "line 2"},
		{"timeout", "", []string{"code", "--timeout", "1s", "--code", "import time; time.sleep(999)"}, 124, "", "timeout"},
		{"no language", "", []string{"code", "--lang", "cobol", "--code", "x"}, 125, "", "cobol"},
		{"language that is not there", "", []string{"code", "-e", "PATH=/none", "--code", "1"}, 127, "", "images/python"},
		{"no file", "", []string{"code", "/no/such.py"}, 125, "", "no such file"},
		{"nothing", "", []string{"code"}, 125, "", "no source"},
		{"sandbox flag in a sandbox", "", []string{"code", "--in", s.ID, "--memory", "1g", "-"}, 125, "", "--memory"},
		{"list", "", []string{"code", "--list"}, 0, "python ", ""},
		{"JSON", "", []string{"code", "--json", "--code", "print(1)"}, 0, `"stdout": "1\n"`, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := d.CLIInput(t, strings.NewReader(c.stdin), c.args...)
			if got.Code != c.code || !strings.Contains(got.Stdout, c.out) || !strings.Contains(got.Stderr, c.says) {
				t.Errorf("%+v, want %d, %q and %q", got, c.code, c.out, c.says)
			}
		})
	}
	if got := d.CLIInput(t, strings.NewReader("in"), "code", "-i", file, "x y"); got.Code != 7 || got.Stdout != "[x y]\nin" {
		t.Errorf("a file: %+v", got)
	}
}
