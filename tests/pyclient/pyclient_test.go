// Package pyclient runs the tests of the Python client, clients/python, against a daemon of the
// built binaries: each user's, with the python3 of this machine.
package pyclient

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

var daemon harness.Shared

func TestMain(m *testing.M) { os.Exit(daemon.Stop(m.Run())) }

// python runs a program of Python in the client's directory and fails the test if it fails. An
// empty socket stands for no daemon.
func python(t *testing.T, interpreter, socket string, args ...string) string {
	t.Helper()
	return pythonWith(t, nil, interpreter, socket, args...)
}

// pythonWith is python with more variables in the environment.
func pythonWith(t *testing.T, env []string, interpreter, socket string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*testenv.HungAfter)
	defer cancel()
	cmd := exec.CommandContext(ctx, interpreter, args...)
	cmd.Dir = filepath.Join(harness.Root(t), "clients", "python")
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH=.", "SANDBOXD_SOCKET="+socket)
	cmd.Env = append(cmd.Env, env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %s: %v\n%s", interpreter, strings.Join(args, " "), err, out.String())
	}
	return out.String()
}

func TestWithDaemon(t *testing.T) {
	testenv.RequireUserNS(t)
	d := daemon.Daemon(t)
	for _, module := range []string{"sandbox", "async", "code", "llm_sandbox", "samples", "documents", "frameworks"} {
		t.Run(module, func(t *testing.T) {
			t.Parallel()
			python(t, "python3", d.Socket, "-m", "unittest", "tests.test_"+module)
		})
	}
}

// TestAgentRuns plays the model, which cannot be had here: each server has the turns of one test.
func TestAgentRuns(t *testing.T) {
	testenv.RequireUserNS(t)
	t.Parallel()
	submit := llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}}
	bash := func(command string) llmtest.Turn {
		return llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash(command)}}
	}
	var env []string
	for name, turns := range map[string][]llmtest.Turn{
		"ANSWER":  {bash(`mkdir -p output/made/by; echo 42 > output/answer.txt; printf '\000\377' > output/made/by/it`), submit},
		"LINK":    {bash("mkdir -p output; ln -s /etc/passwd output/out"), submit},
		"HANGS":   {{Hang: true}},
		"RESUMED": {bash("mkdir -p output; echo later > output/answer.txt"), submit},
	} {
		env = append(env, "SANDBOXD_TEST_MODEL_"+name+"="+llmtest.Start(t, turns...).URL)
	}
	pythonWith(t, env, "python3", daemon.Daemon(t).Socket, "-m", "unittest", "tests.test_agent")
}

// TestWithoutDaemon also runs with the oldest Python that the package names, and the later ones,
// as far as this machine has them.
func TestWithoutDaemon(t *testing.T) {
	for _, interpreter := range []string{"python3", "python3.9", "python3.10", "python3.12", "python3.13", "python3.14"} {
		if interpreter != "python3" && exec.CommandContext(t.Context(), interpreter, "-c", "pass").Run() != nil {
			continue
		}
		t.Run(interpreter, func(t *testing.T) {
			python(t, interpreter, "", "-m", "unittest", "tests.test_http", "tests.test_models")
		})
	}
}

// TestTwins compares the package for threads with that for asyncio, of which it is made.
func TestTwins(t *testing.T) {
	python(t, "python3", "", filepath.Join(harness.Root(t), "hack", "pyclient.py"), "check")
}

// TestArchives builds the wheel and the sdist twice, which must be the same bytes, and has pip
// install each without a network.
func TestArchives(t *testing.T) {
	script := filepath.Join(harness.Root(t), "hack", "pyclient.py")
	one, two := t.TempDir(), t.TempDir()
	python(t, "python3", "", script, "build", one)
	python(t, "python3", "", script, "build", two)
	built, err := filepath.Glob(filepath.Join(one, "sandboxd-*"))
	if err != nil || len(built) != 2 {
		t.Fatalf("built %q: %v", built, err)
	}
	for _, path := range built {
		a, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(two, filepath.Base(path)))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(a, b) {
			t.Errorf("%s: two builds differ", filepath.Base(path))
		}
		site := filepath.Join(t.TempDir(), "site")
		python(t, "python3", "", "-m", "pip", "install", "--quiet", "--no-index", "--no-cache-dir", "--disable-pip-version-check", "--target", site, path)
		out := python(t, "python3", "", "-I", "-c", "import sys; sys.path.insert(0, sys.argv[1]); import sandboxd, sandboxd.llm_sandbox; print(sandboxd.__file__)", site)
		if strings.TrimSpace(out) != filepath.Join(site, "sandboxd", "__init__.py") {
			t.Errorf("imported %s", out)
		}
		if _, err := os.Stat(filepath.Join(site, "sandboxd", "py.typed")); err != nil {
			t.Error(err)
		}
	}
}
