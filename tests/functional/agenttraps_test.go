package functional

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// What a model leaves outside of its output directory is named at the end of the run, in
// directories of its own making too, and what --collect names comes out. A link of the output that
// leads out of it does not.
func TestAgentOutputElsewhere(t *testing.T) {
	testenv.SameForAll(t)
	model := llmtest.Start(t,
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("echo 42 > output/answer.txt; ln -s /etc/passwd output/link; ln -s /testbed/output/answer.txt output/same")}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("echo 1 > /testbed/work.py; mkdir -p /testbed/lib /tmp/own; echo 2 > /testbed/lib/a; echo 3 > /tmp/own/b")}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}})
	got, dir := agentRun(t, shared(t), "--query", "q", "--llm_name", "m", "--llm_base_url", model.URL, "--collect", "work.py", "--collect", "/testbed/lib")
	if got.Code != 0 || !strings.Contains(got.Stderr, "changed elsewhere: 3 files") || !strings.Contains(got.Stderr, "/tmp/own/b\n") ||
		!strings.Contains(got.Stderr, "/testbed/work.py  (collected)") || !strings.Contains(got.Stderr, "left out: link: link that leads out to /etc/passwd") {
		t.Errorf("the run ended with %+v", got)
	}
	for name, want := range map[string]string{"files/same": "42\n", "collected/testbed/work.py": "1\n", "collected/testbed/lib/a": "2\n"} {
		if data, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(data) != want {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
	for _, name := range []string{"files/link", "collected/tmp"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s has come out: %v", name, err)
		}
	}
}

// A run that the daemon hosts is listed, followed, cancelled, shown and removed by the command
// line.
func TestHostedRunsByTheCommandLine(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	g := newGate()
	model := llmtest.Start(t,
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("echo one")}},
		g.turn(llmtest.Bash("echo two")))
	run := mustStart(t, apiClient(t, d), api.StartAgentRun{Query: "count", Model: scripted(model)})
	<-g.asked
	agent := func(code int, want string, args ...string) {
		t.Helper()
		if got := d.CLI(t, append([]string{"agent"}, args...)...); got.Code != code || !strings.Contains(got.Stdout+got.Stderr, want) {
			t.Errorf("%v: %+v", args, got)
		}
	}
	agent(0, run.ID, "list")
	agent(0, "--- turn 1", "logs", run.ID)
	agent(1, "is in progress", "rm", run.ID)
	agent(0, run.ID+": is asked to end", "cancel", run.ID)
	agent(0, "ended: interrupted", "logs", "-f", run.ID)
	close(g.open)
	agent(0, "ended: interrupted", "show", run.ID)
	agent(0, "interrupted", "list")
	agent(0, run.ID+": removed", "rm", run.ID)
	agent(1, "there is no run", "show", run.ID)
}
