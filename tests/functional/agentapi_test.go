package functional

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// plantedKey is a model's key that must be nowhere but in requests to the model. It is this
// program's own: the same tests run as another user at the same time, and have commands with
// theirs.
var plantedKey = "sk-planted-" + rand.Text() + "-do-not-keep"

func apiClient(t *testing.T, d *harness.Daemon) *client.Client {
	t.Helper()
	c := d.Client(t)
	t.Cleanup(c.Close)
	return c
}

// scripted is a model as a request names it.
func scripted(srv *llmtest.Server) api.AgentModel {
	return api.AgentModel{Name: "scripted", BaseURL: srv.URL, Key: plantedKey}
}

// gate is a turn of a model that is not answered until it is opened.
type gate struct{ asked, open chan struct{} }

func newGate() gate { return gate{make(chan struct{}), make(chan struct{})} }

func (g gate) turn(calls ...llmtest.Call) llmtest.Turn {
	return llmtest.Turn{Calls: calls, Check: func(llmtest.Request) error {
		close(g.asked)
		<-g.open
		return nil
	}}
}

func mustStart(t *testing.T, c *client.Client, req api.StartAgentRun) *api.AgentRun {
	t.Helper()
	run, err := c.StartAgentRun(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return run
}

// follow waits for the end of a run.
func follow(t *testing.T, c *client.Client, id string, from int) (*api.AgentRun, []api.AgentRunEvent) {
	t.Helper()
	var events []api.AgentRunEvent
	run, err := c.AgentRunEvents(t.Context(), id, from, func(e api.AgentRunEvent) error {
		events = append(events, e)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return run, events
}

// secretIn looks for the planted key below a directory and in the arguments and environments of
// all processes that can be read.
func secretIn(t *testing.T, dir string) {
	t.Helper()
	secretInFiles(t, dir, plantedKey)
	for _, name := range []string{"cmdline", "environ"} {
		files, err := filepath.Glob("/proc/[0-9]*/" + name)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if data, err := os.ReadFile(file); err == nil && strings.Contains(string(data), plantedKey) {
				t.Errorf("the key is in %s: %q", file, data)
			}
		}
	}
}

// secretInFiles looks for a secret below a directory.
func secretInFiles(t *testing.T, dir, secret string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil //nolint:nilerr // what goes away meanwhile has no secret
		}
		if data, err := os.ReadFile(path); err == nil && strings.Contains(string(data), secret) {
			t.Errorf("the key is in %s", path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// workers are the processes that work on runs below this daemon's directory.
func workers(t *testing.T, d *harness.Daemon) []int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(data), d.Socket+"\x00agent\x00worker") {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(file, "/proc/%d/", &pid); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// A run that the daemon hosts: its record is streamed, a client that goes away and comes back
// misses nothing, and the key is nowhere.
func TestAgentRunOverTheAPI(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	c := apiClient(t, d)
	g := newGate()
	model := llmtest.Start(t,
		llmtest.Turn{Content: "Looking. " + plantedKey + strings.Repeat("<", 1<<20), PromptTokens: 100, Calls: []llmtest.Call{llmtest.Bash("echo " + plantedKey + "; mkdir -p output; echo 42 > output/answer.txt")}},
		g.turn(llmtest.Bash("cat output/answer.txt")),
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}},
	)
	model.Key = plantedKey // which the model insists on
	run := mustStart(t, c, api.StartAgentRun{Query: "what is it?", Model: scripted(model), Budget: api.AgentBudget{Turns: 9}, Policy: "careful"})
	if run.State != api.AgentRunning || run.ID == "" || run.SandboxID == "" || run.Query != "what is it?" {
		t.Errorf("%+v", run)
	}
	// Until the model is asked the second time, and then this client goes away.
	enough := errors.New("enough")
	last := 0
	_, err := c.AgentRunEvents(t.Context(), run.ID, 1, func(e api.AgentRunEvent) error {
		if e.N != last+1 {
			t.Errorf("line %d follows %d", e.N, last)
		}
		last = e.N
		if strings.Contains(string(e.Event), `"turn":2,"request"`) {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) {
		t.Fatalf("%v after line %d", err, last)
	}
	<-g.asked
	secretIn(t, d.DataDir)
	if n := len(workers(t, d)); n != 1 {
		t.Errorf("%d processes work on it", n)
	}
	if err := c.DeleteAgentRun(t.Context(), run.ID); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		t.Errorf("removed while it goes on: %v", err)
	}
	if _, err := c.ResumeAgentRun(t.Context(), run.ID, api.ResumeAgentRun{}); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		t.Errorf("resumed while it goes on: %v", err)
	}
	close(g.open)
	ended, rest := follow(t, c, run.ID, last+1)
	if ended.State != api.AgentEnded || ended.ExitReason != "submitted" || ended.Turns != 3 || ended.ToolCalls != 3 || len(rest) == 0 || rest[0].N != last+1 {
		t.Errorf("%+v, %d more lines", ended, len(rest))
	}
	record, err := os.ReadFile(filepath.Join(ended.Dir, "record.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(string(record), "\n"), "\n")
	for _, e := range rest {
		if diff := cmp.Diff(lines[e.N-1], string(e.Event)); diff != "" {
			t.Errorf("line %d (-in the record +streamed):\n%s", e.N, diff)
		}
	}
	if len(lines) != last+len(rest) {
		t.Errorf("the record has %d lines, %d were streamed", len(lines), last+len(rest))
	}
	if answer, err := os.ReadFile(filepath.Join(ended.Dir, "files/answer.txt")); err != nil || string(answer) != "42\n" {
		t.Errorf("answer %q, %v", answer, err)
	}
	secretIn(t, d.DataDir)
	if strings.Contains(d.Log(), plantedKey) {
		t.Error("the key is in the daemon's log")
	}
	runs, err := c.AgentRuns(t.Context())
	if err != nil || len(runs) != 1 || runs[0].ID != run.ID {
		t.Errorf("list %+v, %v", runs, err)
	}
	if text, err := json.Marshal(runs); err != nil || strings.Contains(string(text), plantedKey) {
		t.Errorf("the list has the key: %s", text)
	}
	if _, err := c.ResumeAgentRun(t.Context(), run.ID, api.ResumeAgentRun{Model: scripted(model)}); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		t.Errorf("a submitted run was resumed: %v", err)
	}
	if err := c.DeleteAgentRun(t.Context(), run.ID); err != nil {
		t.Error(err)
	}
	if _, err := c.GetAgentRun(t.Context(), run.ID); !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		t.Errorf("it is still there: %v", err)
	}
	if _, err := os.Stat(ended.Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its directory is still there: %v", err)
	}
}

// A run whose record is damaged is removed on request, with its sandbox and with the snapshots of
// its turns that the rest of its record names. One whose record is of a newer version goes too.
func TestAgentRunWithoutAReadableRecordIsRemoved(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	c := apiClient(t, d)
	model := llmtest.Start(t, llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("echo 1")}}, llmtest.Turn{Hang: true}, llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}})
	left := mustStart(t, c, api.StartAgentRun{Query: "q", Model: scripted(model), SnapshotTurns: true})
	eventually(t, func() error {
		snapshots, err := c.Snapshots(t.Context(), left.SandboxID)
		if err == nil && len(snapshots) == 0 {
			err = errors.New("no turn has ended")
		}
		if err == nil && model.Left() > 1 { // or the next run would be answered by the turn that hangs
			err = errors.New("the second turn has not begun")
		}
		return err
	})
	if _, err := c.CancelAgentRun(t.Context(), left.ID, api.CancelAgentRun{Keep: true}); err != nil {
		t.Fatal(err)
	}
	left, _ = follow(t, c, left.ID, 1)
	newer := mustStart(t, c, api.StartAgentRun{Query: "q", Model: scripted(model)})
	newer, _ = follow(t, c, newer.ID, 1)
	for run, change := range map[*api.AgentRun][2]string{left: {`"request":`, `"req`}, newer: {`"v":1`, `"v":1000`}} {
		path := filepath.Join(run.Dir, "record.jsonl")
		record, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(strings.ReplaceAll(string(record), change[0], change[1])), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := c.DeleteAgentRun(t.Context(), run.ID); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(run.Dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("its directory is still there: %v", err)
		}
	}
	if sandboxes, err := c.ListSandboxes(t.Context(), client.ListOptions{}); err != nil || len(sandboxes) > 0 {
		t.Errorf("sandboxes are left: %+v, %v", sandboxes, err)
	}
	if snapshots, err := c.Snapshots(t.Context(), ""); err != nil || len(snapshots) > 0 {
		t.Errorf("snapshots are left: %+v, %v", snapshots, err)
	}
}

// Cancel ends what runs and collects the output; with keep, resume goes on in the sandbox.
func TestAgentRunIsCancelled(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	c := apiClient(t, d)
	model := llmtest.Start(t,
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("mkdir -p output; echo begun | tee output/answer.txt > /tmp/mine; touch /tmp/here; sleep 600")}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("cat /tmp/mine >> output/answer.txt")}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}},
		llmtest.Turn{Hang: true},
	)
	began := func(run *api.AgentRun) {
		t.Helper()
		eventually(t, func() error {
			_, err := c.StatFile(t.Context(), run.SandboxID, "/tmp/here", true)
			return err
		})
	}
	run := mustStart(t, c, api.StartAgentRun{Query: "q", Model: scripted(model)})
	began(run)
	if _, err := c.CancelAgentRun(t.Context(), run.ID, api.CancelAgentRun{Keep: true}); err != nil {
		t.Fatal(err)
	}
	ended, _ := follow(t, c, run.ID, 1)
	if ended.State != api.AgentEnded || ended.ExitReason != "interrupted" || !strings.Contains(ended.ExitDetail, "cancelled") {
		t.Errorf("%+v", ended)
	}
	if answer, err := os.ReadFile(filepath.Join(ended.Dir, "files/answer.txt")); err != nil || string(answer) != "begun\n" {
		t.Errorf("answer %q, %v", answer, err)
	}
	if sb, err := c.GetSandbox(t.Context(), run.SandboxID); err != nil || sb.State != api.StateStopped {
		t.Fatalf("the sandbox that was to be kept: %+v, %v", sb, err)
	}
	if _, err := c.ResumeAgentRun(t.Context(), run.ID, api.ResumeAgentRun{Model: scripted(model)}); err != nil {
		t.Fatal(err)
	}
	ended, _ = follow(t, c, run.ID, 1)
	if ended.ExitReason != "submitted" {
		t.Errorf("resumed: %+v", ended)
	}
	if answer, err := os.ReadFile(filepath.Join(ended.Dir, "files/answer.txt")); err != nil || string(answer) != "begun\nbegun\n" {
		t.Errorf("answer %q, %v", answer, err)
	}

	// Without keep, nothing is left. And a run that has ended is cancelled in vain.
	run = mustStart(t, c, api.StartAgentRun{Query: "q", Model: scripted(model)})
	if _, err := c.CancelAgentRun(t.Context(), run.ID, api.CancelAgentRun{}); err != nil {
		t.Fatal(err)
	}
	ended, _ = follow(t, c, run.ID, 1)
	if _, err := c.GetSandbox(t.Context(), run.SandboxID); ended.ExitReason != "interrupted" || !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		t.Errorf("%+v; the sandbox: %v", ended, err)
	}
	if again, err := c.CancelAgentRun(t.Context(), run.ID, api.CancelAgentRun{}); err != nil || again.State != api.AgentEnded {
		t.Errorf("%+v, %v", again, err)
	}
}

// A killed daemon takes no run along: the run goes on if it needs nothing of the daemon meanwhile.
// One whose process is killed too is stopped, and is resumed.
func TestAgentRunOutlivesTheDaemon(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	c := apiClient(t, d)
	first, second := newGate(), newGate()
	model := llmtest.Start(t,
		first.turn(llmtest.Bash("echo once >> /tmp/count; mkdir -p output; cp /tmp/count output/answer.txt")),
		second.turn(llmtest.Submit()),
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}},
	)
	run := mustStart(t, c, api.StartAgentRun{Query: "q", Model: scripted(model)})
	<-first.asked
	d.Kill9(t)
	d.Launch(t)
	c = apiClient(t, d)
	if now, err := c.GetAgentRun(t.Context(), run.ID); err != nil || now.State != api.AgentRunning {
		t.Fatalf("after a kill -9 of the daemon: %+v, %v", now, err)
	}
	close(first.open)
	<-second.asked
	pids := workers(t, d)
	if len(pids) != 1 {
		t.Fatalf("workers %v", pids)
	}
	d.Kill9(t)
	if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	close(second.open)
	d.Launch(t)
	c = apiClient(t, d)
	eventually(t, func() error {
		now, err := c.GetAgentRun(t.Context(), run.ID)
		if err == nil && (now.State != api.AgentStopped || now.Turns != 1) {
			err = fmt.Errorf("it is %+v", now)
		}
		return err
	})
	if _, err := c.ResumeAgentRun(t.Context(), run.ID, api.ResumeAgentRun{Model: scripted(model)}); err != nil {
		t.Fatal(err)
	}
	ended, _ := follow(t, c, run.ID, 1)
	if answer, err := os.ReadFile(filepath.Join(ended.Dir, "files/answer.txt")); err != nil || string(answer) != "once\n" || ended.ExitReason != "submitted" || ended.Turns != 2 {
		t.Errorf("%+v, answer %q, %v", ended, answer, err)
	}
}

// A daemon that is told to end interrupts its runs, and those of a daemon before it, which the
// next can go on with.
func TestAgentRunAndAnEndingDaemon(t *testing.T) {
	testenv.SameForAll(t)
	t.Parallel()
	for name, others := range map[string]bool{"its own": false, "of a daemon before": true} {
		t.Run(name, func(t *testing.T) {
			d := start(t)
			c := apiClient(t, d)
			g := newGate()
			model := llmtest.Start(t,
				llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("mkdir -p output; echo first > output/answer.txt")}},
				llmtest.Turn{Hang: true, Check: func(llmtest.Request) error { close(g.asked); return nil }},
				llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}})
			run := mustStart(t, c, api.StartAgentRun{Query: "q", Model: scripted(model)})
			<-g.asked
			if others {
				d.Kill9(t)
				d.Launch(t)
			}
			if err := syscall.Kill(d.PID(), syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			d.WaitExit(t)
			d.Launch(t)
			c = apiClient(t, d)
			now, err := c.GetAgentRun(t.Context(), run.ID)
			if err != nil || now.State != api.AgentEnded || now.ExitReason != "interrupted" {
				t.Fatalf("%+v, %v", now, err)
			}
			if answer, err := os.ReadFile(filepath.Join(now.Dir, "files/answer.txt")); err != nil || string(answer) != "first\n" {
				t.Errorf("answer %q, %v", answer, err)
			}
			if _, err := c.ResumeAgentRun(t.Context(), run.ID, api.ResumeAgentRun{Model: scripted(model)}); err != nil {
				t.Fatal(err)
			}
			if ended, _ := follow(t, c, run.ID, 1); ended.ExitReason != "submitted" {
				t.Errorf("resumed: %+v", ended)
			}
		})
	}
}

// The number of runs at a time is limited, and those of an earlier daemon count. Contradictory
// requests are refused before anything begins.
func TestAgentRunsAreLimited(t *testing.T) {
	testenv.SameForAll(t)
	d := startWith(t, harness.Options{Args: []string{"--agent-runs", "1"}})
	c := apiClient(t, d)
	model := llmtest.Start(t, llmtest.Turn{Hang: true})
	for name, req := range map[string]api.StartAgentRun{
		"no query":         {Model: scripted(model)},
		"no model":         {Query: "q"},
		"a policy":         {Query: "q", Model: scripted(model), Policy: "rules: [{when: 'nonsense(', action: deny}]"},
		"a relative input": {Query: "q", Model: scripted(model), InputDir: "here"},
		"a bad budget":     {Query: "q", Model: scripted(model), Budget: api.AgentBudget{Turns: -1}},
		"an unheld limit":  {Query: "q", Model: scripted(model), Limits: api.Limits{Nofile: 7}},
		"a bad prompt":     {Query: "q", Model: scripted(model), PromptConfig: "working_dir: relative"},
		"a bad address":    {Query: "q", Model: api.AgentModel{Name: "m", BaseURL: "nowhere " + plantedKey, Key: plantedKey}},
	} {
		_, err := c.StartAgentRun(t.Context(), req)
		if !errors.Is(err, &api.Problem{Code: api.CodeInvalid}) || strings.Contains(err.Error(), plantedKey) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if runs, err := c.AgentRuns(t.Context()); err != nil || len(runs) != 0 {
		t.Errorf("left behind: %+v, %v", runs, err)
	}
	for _, id := range []string{"..", "x", "20260116_143000", "20260116_143000%2f..", ".."} {
		if _, err := c.GetAgentRun(t.Context(), id); err == nil {
			t.Errorf("there is a run %q", id)
		}
	}
	run := mustStart(t, c, api.StartAgentRun{Query: "q", Model: scripted(model)})
	if _, err := c.StartAgentRun(t.Context(), api.StartAgentRun{Query: "q", Model: scripted(model)}); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) || !strings.Contains(err.Error(), "--agent-runs") {
		t.Errorf("a second run: %v", err)
	}
	d.Kill9(t)
	d.Launch(t)
	c = apiClient(t, d)
	if _, err := c.StartAgentRun(t.Context(), api.StartAgentRun{Query: "q", Model: scripted(model)}); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		t.Errorf("a second run beside one of the daemon before: %v", err)
	}
	if _, err := c.CancelAgentRun(t.Context(), run.ID, api.CancelAgentRun{}); err != nil {
		t.Fatal(err)
	}
	follow(t, c, run.ID, 1)

	// A client that goes away before there is a run leaves none.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.StartAgentRun(ctx, api.StartAgentRun{Query: "q", Model: scripted(model)}); err == nil {
		t.Error("a run for a client that is gone")
	}
}

// recorded is a trajectory.json with one command and a submit.
func recorded(t *testing.T, command string) string {
	t.Helper()
	step := func(function string, parameters map[string]string) map[string]any {
		return map[string]any{"action": map[string]any{"function": function, "parameters": parameters}}
	}
	text, err := json.Marshal(map[string]any{"problem_statement": "q", "steps": []any{
		step("execute_bash", map[string]string{"command": command}), step("submit", nil),
	}})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// All inputs of a run on the daemon's host lie below directories that the daemon was started with,
// however they are named.
func TestAgentRunReadsWhatTheDaemonAllows(t *testing.T) {
	testenv.SameForAll(t)
	t.Parallel()
	testenv.RequireUserNS(t)
	inputs, outside := t.TempDir(), t.TempDir()
	for path, content := range map[string]string{
		filepath.Join(inputs, "task", "number"): "42\n", filepath.Join(outside, "number"): "43\n",
		filepath.Join(inputs, "recorded.json"): recorded(t, "cat input/number > output/answer.txt"),
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Symlink(outside, filepath.Join(inputs, "out")), os.Symlink(filepath.Join(inputs, "recorded.json"), filepath.Join(outside, "in.json"))); err != nil {
		t.Fatal(err)
	}
	d := harness.Start(t, harness.Options{Args: []string{"--agent-inputs", inputs}})
	c := apiClient(t, d)
	run := mustStart(t, c, api.StartAgentRun{Query: "q", Model: api.AgentModel{Replay: filepath.Join(outside, "in.json")}, InputDir: filepath.Join(inputs, "task")})
	ended, _ := follow(t, c, run.ID, 1)
	if answer, err := os.ReadFile(filepath.Join(ended.Dir, "files/answer.txt")); err != nil || string(answer) != "42\n" || ended.ExitReason != "submitted" {
		t.Errorf("%+v, answer %q, %v", ended, answer, err)
	}
	replay := api.AgentModel{Replay: filepath.Join(inputs, "recorded.json")}
	for name, req := range map[string]api.StartAgentRun{
		"input elsewhere":       {Query: "q", Model: replay, InputDir: outside},
		"input by a link":       {Query: "q", Model: replay, InputDir: filepath.Join(inputs, "out")},
		"input by dots":         {Query: "q", Model: replay, InputDir: inputs + "/../" + filepath.Base(outside)},
		"input called alike":    {Query: "q", Model: replay, InputDir: inputs + "x"},
		"a run of the daemon":   {Query: "q", Model: replay, InputDir: ended.Dir},
		"a recording":           {Query: "q", Model: api.AgentModel{Replay: filepath.Join(ended.Dir, "trajectory.json")}},
		"nothing that is there": {Query: "q", Model: replay, InputDir: "/no/such"},
	} {
		_, err := c.StartAgentRun(t.Context(), req)
		if !errors.Is(err, &api.Problem{Code: api.CodeInvalid}) || !strings.Contains(err.Error(), "--agent-inputs") {
			t.Errorf("%s: %v", name, err)
		}
	}

	// The next daemon allows nothing. Inputs that the record of a run names are not read either.
	d.Kill9(t)
	d.LaunchWith(t)
	c = apiClient(t, d)
	for name, req := range map[string]api.StartAgentRun{
		"input": {Query: "q", Model: api.AgentModel{Name: "m", BaseURL: "http://127.0.0.1:1"}, InputDir: filepath.Join(inputs, "task")}, "recording": {Query: "q", Model: replay},
	} {
		_, err := c.StartAgentRun(t.Context(), req)
		if !errors.Is(err, &api.Problem{Code: api.CodeInvalid}) || !strings.Contains(err.Error(), "--agent-inputs") {
			t.Errorf("%s of a daemon that allows none: %v", name, err)
		}
	}
	if _, err := c.ResumeAgentRun(t.Context(), run.ID, api.ResumeAgentRun{}); !errors.Is(err, &api.Problem{Code: api.CodeInvalid}) || !strings.Contains(err.Error(), "--agent-inputs") {
		t.Errorf("resumed with its recording: %v", err)
	}
	// As a crash leaves a run that has no sandbox yet: resume makes one, with the input.
	record := filepath.Join(ended.Dir, "record.jsonl")
	text, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(record, int64(strings.IndexByte(string(text), '\n')+1)); err != nil {
		t.Fatal(err)
	}
	_, err = c.ResumeAgentRun(t.Context(), run.ID, api.ResumeAgentRun{Model: api.AgentModel{Name: "m", BaseURL: "http://127.0.0.1:1"}})
	if !errors.Is(err, &api.Problem{Code: api.CodeInvalid}) || !strings.Contains(err.Error(), "--agent-inputs") {
		t.Errorf("resumed with its input: %v", err)
	}
}

// The same at a terminal's command line: Ctrl-C leaves the sandbox, resume goes on in it, show
// writes a report, rm leaves nothing.
func TestInterruptedAgentGoesOnInItsSandbox(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	c := apiClient(t, d)
	g := newGate()
	model := llmtest.Start(t,
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("echo mine > /tmp/mine")}},
		llmtest.Turn{Hang: true, Check: func(llmtest.Request) error {
			close(g.asked)
			return nil
		}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("mkdir -p output; cp /tmp/mine output/answer.txt; sleep 600 & true")}},
		llmtest.Turn{Hang: true},
	)
	output := t.TempDir()
	ctx, interrupt := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, harness.Program(t, "sandboxd"), "--socket", d.Socket, "agent", "run", "--query", "q", "--llm_name", "m", "--llm_base_url", model.URL, "--output_dir", output)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Env = []string{"HOME=" + output, "PATH=/usr/bin:/bin"}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-g.asked
	interrupt()
	_ = cmd.Wait()
	boxes, err := c.ListSandboxes(t.Context(), client.ListOptions{Labels: []string{"sandboxd.agent=run"}})
	if err != nil || len(boxes) != 1 || boxes[0].State != api.StateStopped {
		t.Fatalf("sandboxes %+v, %v", boxes, err)
	}
	runs, err := filepath.Glob(filepath.Join(output, "2*"))
	if err != nil || len(runs) != 1 {
		t.Fatalf("runs %v, %v", runs, err)
	}
	if got := d.CLI(t, "agent", "resume", runs[0], "--llm_base_url", model.URL, "--llm_name", "m", "--timeout", "30s", "--keep_interrupted=false"); !strings.Contains(got.Stderr, "ended: time_limit after 2 turns") || got.Stdout != "mine\n" {
		t.Errorf("resumed: %+v", got)
	}
	report := filepath.Join(output, "report.html")
	if got := d.CLI(t, "agent", "show", runs[0], "--report", report); got.Code != 0 || got.Stdout != "" {
		t.Errorf("%+v", got)
	}
	if page, err := os.ReadFile(report); err != nil || !strings.Contains(string(page), "cp /tmp/mine output/answer.txt") {
		t.Errorf("report of %d bytes, %v", len(page), err)
	}
	if got := d.CLI(t, "agent", "rm", runs[0]); got.Code != 0 || !strings.HasPrefix(got.Stdout, filepath.Base(runs[0])+": 0 snapshots") {
		t.Errorf("%+v", got)
	}
	if _, err := os.Stat(runs[0]); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the run is still there: %v", err)
	}
	if boxes, err := c.ListSandboxes(t.Context(), client.ListOptions{}); err != nil || len(boxes) != 0 {
		t.Errorf("sandboxes %+v, %v", boxes, err)
	}
}
