package functional

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// benchResults is results.json as its readers know it, and our additions.
type benchResults struct {
	Config map[string]any `json:"config"`
	Task   string         `json:"task"`
	Total  int            `json:"total"`
	Mean   *float64       `json:"mean_score"`
	Errors *int           `json:"num_errors"`
	Took   *float64       `json:"elapsed_time_seconds"`
	Low    float64        `json:"ci95_low"`
	High   float64        `json:"ci95_high"`

	Problems int `json:"problems"`
	Results  []struct {
		ID         string  `json:"id"`
		Score      float64 `json:"score"`
		Error      string  `json:"error"`
		ExitReason string  `json:"exit_reason"`
		Attempts   int     `json:"attempts"`
		Run        string  `json:"run"`
	} `json:"results"`
}

// agentBench runs `sandboxd agent bench` and reads its results.
func agentBench(t *testing.T, d *harness.Daemon, args ...string) (harness.Result, string, benchResults) {
	t.Helper()
	output := t.TempDir()
	got := d.CLI(t, append([]string{"agent", "bench", "--output_dir", output}, args...)...)
	dirs, err := filepath.Glob(filepath.Join(output, "*"))
	if err != nil || len(dirs) != 1 {
		t.Fatalf("directories: %v (%v); the command ended with %+v", dirs, err, got)
	}
	return got, dirs[0], readResults(t, dirs[0])
}

func readResults(t *testing.T, dir string) benchResults {
	t.Helper()
	var r benchResults
	data, err := os.ReadFile(filepath.Join(dir, "results.json"))
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err != nil {
		t.Fatal(err)
	}
	if r.Mean == nil || r.Errors == nil || r.Took == nil {
		t.Fatalf("results.json lacks a key: %s", data)
	}
	return r
}

// Every example can be done, by commands that are really run. Its check accepts that, and refuses
// an unfinished one.
func TestAgentExamples(t *testing.T) {
	testenv.SameForAll(t)
	inParallel(t)
	examples := filepath.Join(harness.Root(t), "examples/agent")
	tasks, err := filepath.Glob(filepath.Join(examples, "*", "config.yaml"))
	if err != nil || len(tasks) != 10 {
		t.Fatalf("%d examples, %v", len(tasks), err)
	}
	d := start(t)
	d.Warm(t)
	before := d.Snapshot(t)
	for _, config := range tasks {
		task := filepath.Dir(config)
		t.Run(filepath.Base(task), func(t *testing.T) {
			got, _, r := agentBench(t, d, "--task", task, "--llm", "replay:")
			if got.Code != 0 || r.Total != 1 || *r.Mean != 1 || *r.Errors != 0 {
				t.Fatalf("ended with %+v: %+v", got, r)
			}
			// The same turns, but that nothing is made.
			idle := filepath.Join(t.TempDir(), r.Results[0].ID+".json")
			if err := os.WriteFile(idle, []byte(`{"steps":[{"action":{"function":"submit","parameters":{}}}]}`), 0o644); err != nil {
				t.Fatal(err)
			}
			got, _, r = agentBench(t, d, "--task", task, "--llm", "replay:"+filepath.Dir(idle))
			if got.Code != 0 || *r.Mean != 0 || *r.Errors != 0 {
				t.Errorf("of nothing: %+v: %+v", got, r)
			}
		})
	}
	d.NothingLeaked(t, before)
}

// The task that ships runs without a model, and leaves what readers of LLM-in-Sandbox's benchmarks
// know.
func TestAgentBenchOfTheDemo(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	got, dir, r := agentBench(t, d, "--task", filepath.Join(harness.Root(t), "examples/bench/demo"), "--llm", "replay:", "--num_workers", "2")
	if got.Code != 0 || r.Task != "demo" || r.Total != 4 || *r.Mean != 1 || r.Low < 0.5 || r.High != 1 {
		t.Fatalf("ended with %+v: %+v", got, r)
	}
	for _, key := range []string{"mode", "docker_image", "llm_name", "max_steps", "temperature", "max_token_limit", "max_tokens_per_call", "max_response_len", "extra_body", "save_litellm_response"} {
		if _, ok := r.Config[key]; !ok {
			t.Errorf("the configuration in results.json lacks %s", key)
		}
	}
	var all map[string]struct {
		ProblemStatement string           `json:"problem_statement"`
		Trajectory       []map[string]any `json:"trajectory"`
		Reward           *float64         `json:"reward"`
		AgentAnswer      string           `json:"agent_answer"`
		GroundTruth      string           `json:"ground_truth"`
	}
	data, err := os.ReadFile(filepath.Join(dir, "trajectory.json"))
	if err == nil {
		err = json.Unmarshal(data, &all)
	}
	if err != nil || len(all) != 4 {
		t.Fatalf("trajectory.json: %v: %s", err, data)
	}
	// The answer's case does not matter, and the task's own directories are where things are.
	if p := all["longest-word"]; p.AgentAnswer != "thunderstorm" || p.GroundTruth != "Thunderstorm" || p.Reward == nil || *p.Reward != 1 || len(p.Trajectory) != 3 || p.ProblemStatement == "" {
		t.Errorf("trajectory.json: %+v", p)
	}
	for _, r := range r.Results {
		if log, err := os.ReadFile(filepath.Join(dir, "logs", r.ID+".txt")); err != nil || len(log) == 0 {
			t.Errorf("log of %s: %q, %v", r.ID, log, err)
		}
	}
}

// task writes a task of files by name.
func task(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "quiz")
	for name, text := range files {
		write(t, dir, name, text, 0o644)
	}
	return dir
}

// A task with the files of LLM-in-Sandbox, reward.py and vanilla_llm_prompt.py among them, is used
// as it is: Python runs in sandboxes, with the same inputs as there.
func TestAgentBenchOfTheOriginalsFiles(t *testing.T) {
	testenv.SameForAll(t)
	inParallel(t)
	dir := task(t, map[string]string{
		"config.yaml": `dataset: "json"
data_files: "quiz/data.json"
split: "test"
system_prompt: |-
  You work in {working_dir}. Write {{literally}} to {output_dir}/answer.txt.
instance_prompt: |-
  <problem>
  {problem_statement}
  </problem>
working_dir: "/elsewhere"
input_dir: "/elsewhere/documents"
output_dir: "/elsewhere"
`,
		"data.json": `[
 {"id": "q1", "domain": "sums", "problem_statement": "add them", "ground_truth": "7", "input_files": {"n.txt": "3 4", "other": null}, "bonus": 0.25},
 {"id": "q2", "domain": "sums", "problem_statement": "say yes", "ground_truth": "yes", "input_files": "", "bonus": 0.5}]`,
		"reward.py": `def compute_score(agent_answer, ground_truth, **kwargs):
    print("scoring", kwargs["id"], sorted(kwargs))
    assert "ground_truth" not in kwargs and kwargs["problem_statement"]
    return 1.0 if agent_answer.strip().lower() == ground_truth.lower() else kwargs["bonus"]
`,
		"vanilla_llm_prompt.py": `def create_prompt(problem):
    return "PLAIN " + problem["problem_statement"] + " of " + problem["id"]
`,
	})
	d := start(t)
	d.Warm(t)
	before := d.Snapshot(t)
	submit := llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}}
	model := llmtest.Start(t,
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("pwd; awk '{print $1 + $2}' documents/n.txt > answer.txt; ls documents")}, Check: func(r llmtest.Request) error {
			return llmtest.HoldsInOrder(r.Messages[0].Text()+r.Messages[1].Text(), []string{"You work in /elsewhere. Write {literally} to /elsewhere/answer.txt.", "<problem>\nadd them\n</problem>"})
		}}, submit,
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("echo no > answer.txt")}}, submit)
	got, out, r := agentBench(t, d, "--task", dir, "--llm_name", "m", "--llm_base_url", model.URL, "--save_litellm_response")
	if got.Code != 0 || r.Total != 2 || r.Results[0].Score != 1 || r.Results[1].Score != 0.5 || *r.Mean != 0.75 || *r.Errors != 0 {
		t.Errorf("in sandboxes: %+v: %+v", got, r)
	}
	if _, err := os.Stat(filepath.Join(out, r.Results[0].Run, "request_001.json")); err != nil {
		t.Error(err)
	}

	if log, err := os.ReadFile(filepath.Join(out, "logs", "q1.txt")); err != nil || len(log) == 0 {
		t.Errorf("log: %q, %v", log, err)
	}

	plain := llmtest.Start(t,
		llmtest.Turn{Content: " 7 ", PromptTokens: 9, Check: func(r llmtest.Request) error {
			if len(r.Tools) != 0 || len(r.Messages) != 1 {
				return fmt.Errorf("%d tools, %d messages", len(r.Tools), len(r.Messages))
			}
			return llmtest.HoldsInOrder(r.Last().Text(), []string{"PLAIN add them of q1"})
		}},
		llmtest.Turn{Content: "YES"})
	got, out, r = agentBench(t, d, "--task", dir, "--llm_name", "m", "--llm_base_url", plain.URL, "--mode", "llm", "--save_litellm_response")
	for _, name := range []string{"request_001.json", "response_001.json"} {
		if text, err := os.ReadFile(filepath.Join(out, "runs", "00001-q2", name)); err != nil || !json.Valid(text) {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
	if got.Code != 0 || *r.Mean != 1 || plain.Left() != 0 {
		t.Errorf("without: %+v: %+v", got, r)
	}

	// The same answers, by another rule and of one problem only.
	again := llmtest.Start(t, llmtest.Turn{Content: "so it is YES"})
	got, _, r = agentBench(t, d, "--task", dir, "--llm_name", "m", "--llm_base_url", again.URL, "--mode", "llm", "--scoring", "exact", "--start_id", "1", "--end_id", "9")
	if got.Code != 0 || r.Total != 1 || r.Results[0].ID != "q2" || *r.Mean != 0 {
		t.Errorf("by another rule: %+v: %+v", got, r)
	}

	// A missing need of the task's rule is found before the model is asked.
	write(t, dir, "reward.py", "import no_such_module\ndef compute_score(a, g, **k): return 1\n", 0o644)
	result := d.CLI(t, "agent", "bench", "--output_dir", t.TempDir(), "--task", dir, "--llm_name", "m", "--llm_base_url", "http://127.0.0.1:1/v1")
	if result.Code != 125 || !strings.Contains(result.Stderr, "no_such_module") || !strings.Contains(result.Stderr, "--score_image") {
		t.Errorf("a module that is missing: %+v", result)
	}
	d.NothingLeaked(t, before)
}

// A judge is asked several times, and its last word counts. A refused key loses the key, not the
// scores.
func TestAgentBenchByAJudge(t *testing.T) {
	testenv.SameForAll(t)
	dir := task(t, map[string]string{
		"config.yaml": "system_prompt: s\nscoring: {method: judge, repeats: 2}\n",
		"data.json":   `[{"id":"q","problem_statement":"why {answer}?","ground_truth":"because"}]`,
	})
	d := shared(t)
	model := llmtest.Start(t, llmtest.Turn{Content: "<think>CORRECT</think>it is so"})
	judge := llmtest.Start(t,
		llmtest.Turn{Content: "INCORRECT? No: correct.", Check: func(r llmtest.Request) error {
			if got := r.Header.Get("Authorization"); got != "Bearer dummy" {
				return fmt.Errorf("a server that is not the model's is given the key %q", got)
			}
			if strings.Contains(r.Last().Text(), "think") {
				return fmt.Errorf("it is shown %q", r.Last().Text())
			}
			return llmtest.HoldsInOrder(r.Last().Text(), []string{"why {answer}?", "because", "it is so"})
		}},
		llmtest.Turn{Content: "INCORRECT"})
	got, _, r := agentBench(t, d, "--task", dir, "--mode", "llm", "--api_key", "planted-secret", "--llm_name", "m", "--llm_base_url", model.URL, "--judge_model", "j", "--judge_base_url", judge.URL)
	if got.Code != 0 || *r.Mean != 0.5 || judge.Left() != 0 {
		t.Errorf("judged: %+v: %+v", got, r)
	}
	// Where the server is the same, so is the key; and nine times out of nine are all.
	both := llmtest.Start(t, append([]llmtest.Turn{{Content: "it is so"}}, slices.Repeat([]llmtest.Turn{{Content: "CORRECT"}}, 9)...)...)
	both.Key = "planted-secret"
	write(t, dir, "config.yaml", "system_prompt: s\nscoring: {method: judge, repeats: 9}\n", 0o644)
	got, _, r = agentBench(t, d, "--task", dir, "--mode", "llm", "--api_key", "planted-secret", "--llm_name", "m", "--llm_base_url", both.URL, "--judge_model", "j", "--judge_base_url", both.URL)
	if got.Code != 0 || *r.Mean != 1 || both.Left() != 0 {
		t.Errorf("judged by the same server: %+v: %+v", got, r)
	}
	refusing := llmtest.Start(t, llmtest.Turn{Status: http.StatusUnauthorized, Body: `{"error":{"message":"who are you? planted-secret"}}`})
	got, out, r := agentBench(t, d, "--task", dir, "--mode", "llm", "--api_key", "planted-secret", "--llm_name", "m", "--llm_base_url", refusing.URL, "--judge_model", "j", "--judge_base_url", judge.URL)
	if got.Code != 1 || r.Total != 0 || r.Problems != 1 || !strings.Contains(got.Stderr, "who are you?") || !strings.Contains(got.Stderr, "--resume") {
		t.Errorf("with a key that is refused: %+v: %+v", got, r)
	}
	echo := llmtest.Start(t, llmtest.Turn{Content: "your key is planted-secret"})
	said, other, r := agentBench(t, d, "--task", dir, "--mode", "llm", "--scoring", "exact", "--save_litellm_response", "--judge_base_url", "http://me:planted-secret@localhost/v1", "--api_key", "planted-secret", "--llm_name", "m", "--llm_base_url", echo.URL)
	if said.Code != 0 || r.Total != 1 {
		t.Errorf("a model that knows the key: %+v: %+v", said, r)
	}
	if strings.Contains(got.Stderr+said.Stderr, "planted-secret") {
		t.Errorf("the key is shown: %s%s", got.Stderr, said.Stderr)
	}
	for _, dir := range []string{out, other} {
		err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			text, err := os.ReadFile(path)
			if strings.Contains(string(text), "planted-secret") {
				t.Errorf("the key is in %s", path)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// A scoring program is held to its range, and a hostile one to its sandbox.
func TestAgentBenchByACommand(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	d.Warm(t)
	before := d.Snapshot(t)
	for _, tc := range []struct {
		script string
		score  float64
		says   string
	}{
		{"test $(cat answer.txt) = 7 && test $(cat output/sub/f) = left && test $(cat input/n) = in && grep -q extra problem.json", 1, ""},
		{"exit 1", 0, ""},
		{"echo score: 0.25", 0.25, ""},
		{"echo score: 1; echo done", 1, ""}, // not the last line: the exit status counts
		{"echo score: 0.25; exit 1", 0.25, ""},
		{"echo score: 0.25; echo a warning at the end >&2", 0.25, ""}, // not the output's last line
		{"echo score: 1 >&2; exit 1", 0, ""},
		{"echo why it is so >&2; exit 3", 0, "why it is so"},
		{"test $(cat input/n) = in && test $(cat input/of-the-task) = all", 1, ""}, // a problem's own file before the task's
		{"echo score: 1.5", 0, "1.5 is no score"},
		{"echo score: NaN", 0, "NaN is no score"},
		{"echo score: much", 0, "much"},
		{"echo what is this; exit 2", 0, "what is this"},
		{"kill -9 $$", 0, "137"},
		{"sleep 6000", 0, "longer than 1s"},
		{"yes | head -c 300000; echo; echo score: 0.5", 0.5, ""},
	} {
		t.Run(tc.script, func(t *testing.T) {
			timeout := "5m"
			if strings.Contains(tc.says, "longer than") {
				timeout = "1s"
			}
			dir := task(t, map[string]string{
				"config.yaml": "system_prompt: s\ninputs: given\nscoring:\n  method: command\n  command: [sh, check.sh]\n  files: [check.sh]\n  timeout: " + timeout + "\n",
				"data.json":   `[{"id":"q","problem_statement":"p","extra":1,"input_files":{"n":"in"}}]`, "check.sh": tc.script,
				"given/n": "of the task", "given/of-the-task": "all",
			})
			write(t, dir, "replay/q.json", `{"steps":[{"action":{"function":"execute_bash","parameters":{"command":"echo 7 > answer.txt; mkdir sub; echo left > sub/f"}}},{"action":{"function":"submit","parameters":{}}}]}`, 0o644)
			got, _, r := agentBench(t, d, "--task", dir, "--llm", "replay:")
			if got.Code != 0 || *r.Mean != tc.score || (*r.Errors == 1) != (tc.says != "") || !strings.Contains(r.Results[0].Error, tc.says) {
				t.Errorf("%+v: %+v", got, r)
			}
		})
	}
	d.NothingLeaked(t, before)
}
