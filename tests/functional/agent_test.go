package functional

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// trajectory is trajectory.json as its readers know it.
type trajectory struct {
	ProblemStatement *string `json:"problem_statement"`
	Steps            []struct {
		Thought          *string `json:"thought"`
		ReasoningContent *string `json:"reasoning_content"`
		Action           *struct {
			Function   *string        `json:"function"`
			Parameters map[string]any `json:"parameters"`
		} `json:"action"`
		Observation *string `json:"observation"`
		Metadata    *struct {
			Step     int      `json:"step"`
			ExecTime *float64 `json:"exec_time"`
		} `json:"metadata"`
	} `json:"steps"`
	Metadata *struct {
		TotalSteps int `json:"total_steps"`
	} `json:"metadata"`
}

// agentRun runs `sandboxd agent run` and returns the one run directory.
func agentRun(t *testing.T, d *harness.Daemon, args ...string) (harness.Result, string) {
	t.Helper()
	output := t.TempDir()
	got := d.CLI(t, append([]string{"agent", "run", "--output_dir", output}, args...)...)
	runs, err := filepath.Glob(filepath.Join(output, "*"))
	if err != nil || len(runs) != 1 {
		t.Fatalf("run directories: %v (%v); the command ended with %+v", runs, err, got)
	}
	return got, runs[0]
}

func readTrajectory(t *testing.T, dir string) trajectory {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "trajectory.json"))
	if err != nil {
		t.Fatal(err)
	}
	var tr trajectory
	if err := json.Unmarshal(data, &tr); err != nil {
		t.Fatalf("trajectory.json: %v", err)
	}
	return tr
}

// Eleven steps, all three tools, an input directory, a symlink and a sub-folder in the output: the
// same files come out, and a trajectory with the keys that its readers expect.
func TestAgentRunOfElevenSteps(t *testing.T) {
	testenv.SameForAll(t)
	inParallel(t)
	input := filepath.Join(t.TempDir(), "input")
	write(t, input, "numbers.txt", "3\n1\n2\n", 0o644)
	write(t, input, "sub/more.txt", "40\n", 0o644)
	const out = "/testbed/output"
	model := llmtest.Start(t,
		llmtest.Turn{Content: "Looking.", Reasoning: "first look around", Calls: []llmtest.Call{llmtest.Bash("find /testbed/input -type f | sort")}},
		llmtest.Turn{Content: "Two at once.", Calls: []llmtest.Call{llmtest.Bash("cat /testbed/input/numbers.txt"), llmtest.Bash("cat /testbed/input/sub/more.txt")}},
		llmtest.Turn{Content: "A script.", Calls: []llmtest.Call{llmtest.Edit(map[string]any{
			"command": "create", "path": "/testbed/sum.py",
			"file_text": "import sys\nprint(sum(int(l) for f in sys.argv[1:] for l in open(f)) + 1)\n",
		})}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Edit(map[string]any{"command": "view", "path": "/testbed/sum.py"})}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Edit(map[string]any{"command": "str_replace", "path": "/testbed/sum.py", "old_str": " + 1)", "new_str": ")"})}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Edit(map[string]any{"command": "insert", "path": "/testbed/sum.py", "insert_line": 0, "new_str": "# adds up"})}},
		llmtest.Turn{Content: "Thinking aloud, without a tool."},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Tool("execute_bash", `{"command": 7}`)}}, // of the wrong type: a tool error
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("mkdir -p " + out + "/sub && python3 /testbed/sum.py /testbed/input/numbers.txt /testbed/input/sub/more.txt >" + out + "/answer.txt && ln -s answer.txt " + out + "/link && cp /testbed/sum.py " + out + "/sub/")}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("cat " + out + "/answer.txt; exit 3")}},
		llmtest.Turn{Content: "Done.", Calls: []llmtest.Call{llmtest.Submit()}},
	)
	d := start(t)
	d.Warm(t)
	before := d.Snapshot(t)
	got, dir := agentRun(t, d, "--query", "add the numbers up", "--llm_name", "scripted", "--llm_base_url", model.URL,
		"--api_key", "planted-key", "--input_dir", input, "--max_steps", "20")
	if got.Code != 0 {
		t.Fatalf("the run ended with %+v", got)
	}
	if !strings.Contains(got.Stdout, "46") {
		t.Errorf("the answer is not on stdout: %q", got.Stdout)
	}
	if model.Left() != 0 {
		t.Errorf("%d turns were not asked for", model.Left())
	}

	for name, want := range map[string]string{"answer.txt": "46\n", "sub/sum.py": "# adds up\nimport sys\nprint(sum(int(l) for f in sys.argv[1:] for l in open(f)))\n"} {
		if data, err := os.ReadFile(filepath.Join(dir, "files", name)); err != nil || string(data) != want {
			t.Errorf("files/%s is %q (%v), want %q", name, data, err, want)
		}
	}
	if target, err := os.Readlink(filepath.Join(dir, "files/link")); err != nil || target != "answer.txt" {
		t.Errorf("files/link points at %q (%v)", target, err)
	}

	tr := readTrajectory(t, dir)
	if tr.ProblemStatement == nil || *tr.ProblemStatement != "add the numbers up" || tr.Metadata == nil || tr.Metadata.TotalSteps != 11 || len(tr.Steps) != 11 {
		t.Fatalf("trajectory: %+v with %d steps", tr.Metadata, len(tr.Steps))
	}
	var functions []string
	for i, s := range tr.Steps {
		if s.Thought == nil || s.ReasoningContent == nil || s.Action == nil || s.Action.Function == nil || s.Action.Parameters == nil ||
			s.Observation == nil || s.Metadata == nil || s.Metadata.ExecTime == nil {
			t.Errorf("step %d lacks a key: %+v", i+1, s)
			continue
		}
		if s.Metadata.Step != i+1 {
			t.Errorf("step %d is numbered %d", i+1, s.Metadata.Step)
		}
		functions = append(functions, *s.Action.Function)
	}
	want := []string{
		"execute_bash", "execute_bash", "str_replace_editor", "str_replace_editor", "str_replace_editor", "str_replace_editor",
		"", "execute_bash", "execute_bash", "execute_bash", "submit",
	}
	if !slices.Equal(functions, want) {
		t.Errorf("actions are %q, want %q", functions, want)
	}
	if *tr.Steps[0].ReasoningContent != "first look around" || !strings.Contains(*tr.Steps[0].Observation, "/testbed/input/sub/more.txt") {
		t.Errorf("first step: %q, %q", *tr.Steps[0].ReasoningContent, *tr.Steps[0].Observation)
	}
	if !strings.Contains(*tr.Steps[9].Observation, "3") || !strings.Contains(*tr.Steps[9].Observation, "46") {
		t.Errorf("exit code and output of step 10: %q", *tr.Steps[9].Observation)
	}
	// All tool calls of a turn are answered: the scripted model refuses anything else. And the key
	// stays a header.
	data, err := os.ReadFile(filepath.Join(dir, "trajectory.json"))
	if err != nil || strings.Contains(string(data), "planted-key") {
		t.Errorf("the model's key is in the trajectory (%v)", err)
	}
	d.NothingLeaked(t, before)
}

// The recorded trajectory that the quickstart plays needs no model.
func TestQuickstartReplay(t *testing.T) {
	testenv.SameForAll(t)
	example := filepath.Join(harness.Root(t), "examples/quickstart")
	d := shared(t)
	got, dir := agentRun(t, d, "--llm", "replay:"+filepath.Join(example, "trajectory.json"), "--input_dir", filepath.Join(example, "input"))
	if got.Code != 0 || got.Stdout == "" {
		t.Errorf("the replay ended with %+v", got)
	}
	want, err := os.ReadFile(filepath.Join(example, "answer.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if answer, err := os.ReadFile(filepath.Join(dir, "files/answer.txt")); err != nil || string(answer) != string(want) {
		t.Errorf("the answer is %q (%v), want %q", answer, err, want)
	}
	if tr := readTrajectory(t, dir); len(tr.Steps) == 0 {
		t.Error("the replay recorded no steps")
	}
}

// A replay of a fresh recording makes the same files.
func TestRecordedRunCanBeReplayed(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	model := llmtest.Start(t,
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("mkdir -p /testbed/output; echo $((6*7)) >/testbed/output/answer.txt")}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}})
	_, first := agentRun(t, d, "--query", "q", "--llm_name", "m", "--llm_base_url", model.URL)
	_, second := agentRun(t, d, "--llm", "replay:"+filepath.Join(first, "trajectory.json"))
	for _, dir := range []string{first, second} {
		if data, err := os.ReadFile(filepath.Join(dir, "files/answer.txt")); err != nil || string(data) != "42\n" {
			t.Errorf("%s: answer %q (%v)", dir, data, err)
		}
	}
}

// A model that fails ends the run with one clear error; finished turns are kept, and the sandbox
// is gone.
func TestAgentWithABadModel(t *testing.T) {
	testenv.SameForAll(t)
	inParallel(t)
	work := llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("mkdir -p /testbed/output; echo kept >/testbed/output/answer.txt")}}
	d := start(t)
	for _, test := range []struct {
		name  string
		turns []llmtest.Turn
		args  []string
		says  string
	}{
		{"answers 500", []llmtest.Turn{work, {Status: http.StatusInternalServerError, Body: `{"error":{"message":"boom"}}`}}, []string{"--llm_retries", "0"}, "500"},
		{"answers garbage", []llmtest.Turn{work, {Status: http.StatusOK, Body: "<html>hello</html>"}}, []string{"--llm_retries", "0"}, ""},
		{"never calls a tool", []llmtest.Turn{work, {Content: "hm"}, {Content: "hm"}, {Content: "hm"}}, []string{"--max_steps", "4"}, ""},
		{"calls what is not there", []llmtest.Turn{work, {Calls: []llmtest.Call{llmtest.Tool("rm_rf", "{}")}}}, []string{"--max_steps", "2"}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			model := llmtest.Start(t, test.turns...)
			got, dir := agentRun(t, d, append([]string{"--query", "q", "--llm_name", "m", "--llm_base_url", model.URL}, test.args...)...)
			if got.Code == 0 || !strings.Contains(got.Stderr, test.says) {
				t.Errorf("the run ended with %+v", got)
			}
			if data, err := os.ReadFile(filepath.Join(dir, "files/answer.txt")); err != nil || string(data) != "kept\n" {
				t.Errorf("what the model had done is %q (%v)", data, err)
			}
			if tr := readTrajectory(t, dir); len(tr.Steps) == 0 {
				t.Error("nothing was recorded")
			}
			if list := d.List(t); len(list) != 0 {
				t.Errorf("%d sandboxes are left", len(list))
			}
		})
	}
	t.Run("is not there", func(t *testing.T) {
		got, _ := agentRun(t, d, "--query", "q", "--llm_name", "m", "--llm_base_url", "http://127.0.0.1:1/v1", "--llm_retries", "0")
		if got.Code == 0 || !strings.Contains(got.Stderr, "127.0.0.1:1") {
			t.Errorf("the run ended with %+v", got)
		}
	})
}

// A model's text in a command or a path is data: it never reaches a shell of the host.
func TestModelsShellTricksStayInside(t *testing.T) {
	testenv.SameForAll(t)
	planted := filepath.Join(os.TempDir(), fmt.Sprintf("planted-by-a-model-%d", os.Getpid()))
	trick := "/testbed/x'; touch " + planted + "; echo '.txt"
	model := llmtest.Start(t,
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Edit(map[string]any{"command": "create", "path": trick, "file_text": "x"})}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Edit(map[string]any{"command": "view", "path": "$(touch " + planted + ")"})}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("touch " + planted + " /planted-in-the-sandbox")}},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}})
	d := shared(t)
	if got, _ := agentRun(t, d, "--query", "q", "--llm_name", "m", "--llm_base_url", model.URL); got.Code != 0 {
		t.Errorf("the run ended with %+v", got)
	}
	if _, err := os.Lstat(planted); err == nil {
		t.Error("a file was planted on the host")
	}
}

// A budget of processor time ends a run in the midst of a command, where the kernel counts it by
// sandbox; elsewhere it is refused.
func TestAgentBudgetOfProcessorTime(t *testing.T) {
	testenv.SameForAll(t)
	model := llmtest.Start(t, llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("echo kept > /testbed/output/f; while :; do :; done")}})
	d := shared(t)
	got, dir := tryAgentRun(t, d, "--query", "q", "--llm_name", "m", "--llm_base_url", model.URL, "--max_cpu", "1s")
	if got.Code == 125 && strings.Contains(got.Stderr, "cannot be held here") {
		if model.Left() != 1 {
			t.Error("it was refused, and began all the same")
		}
		return
	}
	if got.Code != 1 || !strings.Contains(got.Stderr, "ended: cpu_limit") {
		t.Fatalf("the run ended with %+v", got)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "files/f")); err != nil || string(data) != "kept\n" {
		t.Errorf("output %q, %v", data, err)
	}
}

// tryAgentRun is agentRun for a run that may not even have begun.
func tryAgentRun(t *testing.T, d *harness.Daemon, args ...string) (harness.Result, string) {
	t.Helper()
	output := t.TempDir()
	got := d.CLI(t, append([]string{"agent", "run", "--output_dir", output}, args...)...)
	runs, err := filepath.Glob(filepath.Join(output, "*"))
	if err != nil || len(runs) > 1 {
		t.Fatalf("run directories: %v (%v)", runs, err)
	}
	return got, strings.Join(runs, "")
}

// A run with snapshots that its budget ended goes on in a sandbox made of the last one. A branch
// has the files of its turn and no others, and a replay gives the recorded answers. A denied
// command is not run.
func TestAgentRunsGoOnBranchAndReplay(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	add := func(what string) llmtest.Turn {
		return llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("echo " + what + " >> /testbed/log; cat /testbed/log")}}
	}
	hand := llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("cp /testbed/log /testbed/output/answer.txt")}}
	submit := llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}}
	model := llmtest.Start(t,
		add("one"), llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("curl http://192.0.2.1/ > /testbed/log")}}, // the run, which ends there
		add("three"), hand, submit, // resumed
		add("branch"), hand, submit) // branched from turn 1
	got, dir := agentRun(t, d, "--query", "q", "--llm_name", "m", "--llm_base_url", model.URL, "--max_steps", "2", "--snapshot_turns", "--policy", "strict")
	if got.Code != 1 || !strings.Contains(got.Stderr, "ended: max_steps") || !strings.Contains(got.Stderr, "deny by policy: strict/hosts") {
		t.Fatalf("the run ended with %+v", got)
	}
	for _, tc := range []struct {
		args   []string
		answer string
	}{
		{[]string{"agent", "resume", dir, "--max_steps", "20"}, "one\nthree\n"},
		{[]string{"agent", "fork", "--at", "1", dir, "--max_steps", "20", "--output_dir", filepath.Dir(dir)}, "one\nbranch\n"},
	} {
		if got := d.CLI(t, tc.args...); got.Code != 0 || got.Stdout != tc.answer {
			t.Errorf("%v ended with %+v", tc.args, got)
		}
	}
	if model.Left() != 0 {
		t.Errorf("%d turns were not asked for", model.Left())
	}
	if got := d.CLI(t, "agent", "resume", dir); got.Code != 125 || !strings.Contains(got.Stderr, "it was submitted") {
		t.Errorf("to resume what is done: %+v", got)
	}
	if got := d.CLI(t, "agent", "replay", dir); got.Code != 0 || !strings.Contains(got.Stdout, "3 calls of 5 turns were run again; 0 observations differ") {
		t.Errorf("replay: %+v", got)
	}
	if got := d.CLI(t, "agent", "list", "--output_dir", filepath.Dir(dir)); got.Code != 0 || strings.Count(got.Stdout, "submitted") != 2 {
		t.Errorf("list: %+v", got)
	}
	if got := d.CLI(t, "agent", "show", dir); got.Code != 0 || !strings.Contains(got.Stdout, "turn 5") {
		t.Errorf("show: %+v", got)
	}
	if got := d.CLI(t, "ps", "--json"); strings.Contains(got.Stdout, "agent-") {
		t.Errorf("a sandbox is left: %s", got.Stdout)
	}
}

// The snapshots of a run's turns stay for resume and fork until the run is removed, or they are.
// No other snapshots go with them, and a branch from a turn whose snapshot is gone does the turns
// again.
func TestAgentRunsAreRemovedWithTheirSnapshots(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	step := func(what string) llmtest.Turn {
		return llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("echo " + what + " >> /testbed/log; cp /testbed/log /testbed/output/answer.txt")}}
	}
	submit := llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}}
	model := llmtest.Start(t, step("one"), step("two"), submit, step("branch"), submit, step("another"), submit, step("other"), submit)
	with := func(args ...string) []string {
		return append(args, "--llm_name", "m", "--llm_base_url", model.URL, "--snapshot_turns")
	}
	_, dir := agentRun(t, d, with("--query", "q")...)
	output := filepath.Dir(dir)
	mine := d.Create(t, api.CreateSandbox{Labels: map[string]string{"sandboxd.agent": "turn"}})
	if got := d.CLI(t, "snapshot", mine.ID); got.Code != 0 {
		t.Fatalf("%+v", got)
	}
	count := func(want int) {
		t.Helper()
		var list api.SnapshotList
		if err := d.Call(t.Context(), http.MethodGet, "/v1/snapshots", nil, &list); err != nil || len(list.Snapshots) != want {
			t.Errorf("%d snapshots, %v; want %d", len(list.Snapshots), err, want)
		}
	}
	count(4) // of three turns, and one of no run
	if got := d.CLI(t, "agent", "fork", "--at", "1", dir, "--output_dir", output); got.Code != 0 || got.Stdout != "one\nbranch\n" {
		t.Errorf("fork: %+v", got)
	}
	count(6)
	if got := d.CLI(t, "agent", "rm", "--snapshots", dir); got.Code != 0 || !strings.Contains(got.Stdout, "3 snapshots") {
		t.Errorf("rm --snapshots: %+v", got)
	}
	count(3)
	if got := d.CLI(t, "agent", "fork", "--at", "1", dir, "--output_dir", output); got.Code != 0 || got.Stdout != "one\nanother\n" || !strings.Contains(got.Stderr, "is gone: the turns are done again") {
		t.Errorf("fork without the snapshot: %+v", got)
	}
	count(5)
	runs, err := filepath.Glob(filepath.Join(output, "*"))
	if err != nil || len(runs) != 3 {
		t.Fatalf("%v, %v", runs, err)
	}
	if got := d.CLI(t, append([]string{"agent", "rm"}, runs...)...); got.Code != 0 {
		t.Errorf("rm: %+v", got)
	}
	count(1)
	if runs, err := filepath.Glob(filepath.Join(output, "*")); err != nil || len(runs) != 0 {
		t.Errorf("%v, %v", runs, err)
	}
	if got := d.CLI(t, "agent", "rm", dir); got.Code != 1 || !strings.Contains(got.Stderr, "there is no run") {
		t.Errorf("rm of nothing: %+v", got)
	}
}
