package faults

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	osexec "os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// benchProblems is how many a benchmark of these tests has; three are worked on at once.
const benchProblems = 6

func countingTask(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "counting")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	var data bytes.Buffer
	for i := range benchProblems {
		fmt.Fprintf(&data, `{"id":"p%d","problem_statement":"count"}`+"\n", i)
	}
	for name, text := range map[string]string{
		"config.yaml": "system_prompt: s\noutput_dir: /testbed/output\nscoring:\n  method: command\n  command: [test, -s, output/log]\n", "data.jsonl": data.String(),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// startBench starts a benchmark, or goes on with the one in resume.
func startBench(t *testing.T, d *harness.Daemon, model *forgetfulModel, task, output, resume string) (cmd *osexec.Cmd, said *bytes.Buffer, ended chan error) {
	t.Helper()
	args := []string{"agent", "--socket", d.Socket, "bench", "--stream=false", "--llm_retries", "0", "--num_workers", "3"}
	if resume != "" {
		args = append(args, "--resume", resume)
	} else {
		args = append(args, "--task", task, "--output_dir", output, "--llm_name", "m", "--llm_base_url", model.url)
	}
	said = &bytes.Buffer{}
	cmd = osexec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + output, "XDG_RUNTIME_DIR=" + d.RuntimeDir}
	harness.StartsNoDaemon(cmd)
	cmd.Stdout, cmd.Stderr = said, said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended = make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	return cmd, said, ended
}

// afterTurns waits until the model was asked so many times, and reports whether the benchmark
// still runs.
func afterTurns(model *forgetfulModel, ended chan error, turns int) bool {
	for range turns {
		select {
		case <-model.asked:
		case err := <-ended:
			ended <- err
			return false
		}
	}
	return true
}

func waitBench(t *testing.T, cmd *osexec.Cmd, said *bytes.Buffer, ended chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(testenv.HungAfter):
		_ = cmd.Process.Kill()
		t.Fatalf("the benchmark did not end (%v); it said:\n%s", <-ended, said)
		return nil
	}
}

func oneDir(t *testing.T, output string) string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(output, "2*"))
	if err != nil || len(dirs) != 1 {
		t.Fatalf("directories %v, %v", dirs, err)
	}
	return dirs[0]
}

// kill -9 of a benchmark, and of the daemon behind it, at any instant, several times: it goes on,
// and at the end every problem has been answered and scored once, no turn that was on record was
// asked again, and no command was run twice.
func TestKilledBenchmarksGoOnWhereTheyWere(t *testing.T) {
	testenv.SameForAll(t)
	testenv.RequireUserNS(t)
	rounds, seed := setting(t, "SANDBOXD_AGENT_FAULT_ROUNDS", uint64(testenv.Rounds(1, 6))), setting(t, "SANDBOXD_FAULT_SEED", rand.Uint64())
	t.Logf("SANDBOXD_FAULT_SEED=%d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	d := harness.Start(t, harness.Options{})
	task := countingTask(t)
	for range rounds {
		model, output := startForgetful(t), t.TempDir()
		resume, kills := "", 0
		for attempt := 0; ; attempt++ {
			cmd, said, ended := startBench(t, d, model, task, output, resume)
			if attempt < 4 && afterTurns(model, ended, 1+r.IntN(10)) {
				select {
				case <-time.After(time.Duration(r.Int64N(int64(90 * time.Millisecond)))):
				case err := <-ended:
					ended <- err
				}
				_ = cmd.Process.Kill() // it may have ended
				if kills++; r.IntN(3) == 0 {
					d.Kill9(t)
					d.Launch(t)
				}
			}
			err := waitBench(t, cmd, said, ended)
			resume = oneDir(t, output)
			if err == nil {
				break
			}
			if attempt >= 4 {
				t.Fatalf("with nothing killed it ended with %v; it said:\n%s", err, said)
			}
		}
		checkBench(t, d, model, resume)
		t.Logf("killed %d times", kills)
	}
}

// checkBench looks at a benchmark that has come to its end.
func checkBench(t *testing.T, d *harness.Daemon, model *forgetfulModel, dir string) {
	t.Helper()
	f, err := os.Open(filepath.Join(dir, "bench.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	answered, scored := map[int]int{}, map[int]int{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var e struct {
			Answered *struct {
				Index    int    `json:"index"`
				Run      string `json:"run"`
				Error    string `json:"error"`
				Attempts int    `json:"attempts"`
				Exit     string `json:"exit_reason"`
			} `json:"answered"`
			Scored *struct {
				Index int     `json:"index"`
				Score float64 `json:"score"`
			} `json:"scored"`
		}
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatalf("%v in %s", err, lines.Bytes())
		}
		if e.Scored != nil {
			scored[e.Scored.Index]++
			if e.Scored.Score != 1 {
				t.Errorf("problem %d has %v", e.Scored.Index, e.Scored.Score)
			}
		}
		if e.Answered == nil {
			continue
		}
		answered[e.Answered.Index]++
		if e.Answered.Error != "" || e.Answered.Exit != "submitted" || e.Answered.Attempts != 1 {
			t.Errorf("%+v", e.Answered)
		}
		run := filepath.Join(dir, e.Answered.Run)
		rec := readRunRecord(t, run)
		if len(rec.turns) != agentTurns {
			t.Errorf("problem %d: turns on record: %v", e.Answered.Index, rec.turns)
		}
		log, err := os.ReadFile(filepath.Join(run, "files", "log"))
		if err != nil {
			t.Error(err)
		}
		for turn := range agentTurns - 1 {
			n := strings.Count("\n"+string(log), fmt.Sprintf("\n%d\n", turn))
			if n > 1 || n == 0 && !rec.unknown[turn+1] || rec.begun[turn+1] != 1 {
				t.Errorf("problem %d: the command of turn %d was run %d times, begun %d times", e.Answered.Index, turn+1, n, rec.begun[turn+1])
			}
		}
	}
	for i := range benchProblems {
		if answered[i] != 1 || scored[i] != 1 {
			t.Errorf("problem %d was answered %d times and scored %d times", i, answered[i], scored[i])
		}
	}
	for _, s := range d.List(t) {
		t.Errorf("the sandbox %s is left: %v", s.ID, s.Labels)
	}
	model.mu.Lock()
	defer model.mu.Unlock()
	for _, err := range model.errs {
		t.Errorf("the model refused a request: %v", err)
	}
}

// An interrupt ends a benchmark's own sandboxes and no other of the same image, and nothing that
// was scored is lost.
func TestInterruptedBenchmarkLeavesOthersAlone(t *testing.T) {
	testenv.SameForAll(t)
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	other := d.Create(t, api.CreateSandbox{Labels: map[string]string{"sandboxd.agent": "run"}})
	model, output := startForgetful(t), t.TempDir()
	const interrupted = 3*agentTurns + 2
	model.hold(interrupted + 1) // or it might end before the signal comes
	cmd, said, ended := startBench(t, d, model, countingTask(t), output, "")
	if !afterTurns(model, ended, interrupted) {
		t.Fatalf("it ended by itself:\n%s", said)
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := waitBench(t, cmd, said, ended); cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("it ended with %v; it said:\n%s", err, said)
	}
	model.hold(0) // not before: nor may it end before it has seen the signal
	if list := d.List(t); len(list) != 1 || list[0].ID != other.ID || list[0].State != api.StateRunning {
		t.Errorf("sandboxes after the interrupt: %+v", list)
	}
	other.Sh(t, "true")
	dir := oneDir(t, output)
	cmd, said, ended = startBench(t, d, model, "", output, dir)
	if err := waitBench(t, cmd, said, ended); err != nil {
		t.Fatalf("resumed, it ended with %v; it said:\n%s", err, said)
	}
	data, err := os.ReadFile(filepath.Join(dir, "results.json"))
	if err != nil || !strings.Contains(string(data), `"mean_score": 1`) || !strings.Contains(string(data), fmt.Sprintf(`"total": %d`, benchProblems)) {
		t.Errorf("%v: %s\nit said:\n%s", err, data, said)
	}
	if list := d.List(t); len(list) != 1 {
		t.Errorf("sandboxes at the end: %+v", list)
	}
}

// crowd is how many runs there are at the same time in the test of fairness, and crowdTurns what
// each has, submit included.
const (
	crowd      = 64
	crowdTurns = 11
)

// crowdModel counts the turns of each run. It answers no first request before all runs have sent
// theirs, and in step no further one either.
type crowdModel struct {
	step    bool
	mu      sync.Mutex
	turns   map[string]int                // asked for, by problem
	at      [crowdTurns + 1]int           // runs that have asked for a turn
	all     [crowdTurns + 1]chan struct{} // closed when all have asked for a turn
	began   time.Time
	ended   map[string]time.Duration // since then, by problem
	slowest int                      // the least of turns when the first had asked for its last,
	done    int                      // and all of them together
}

func newCrowdModel(step bool) *crowdModel {
	m := &crowdModel{step: step, turns: map[string]int{}, ended: map[string]time.Duration{}}
	for turn := range m.all {
		m.all[turn] = make(chan struct{})
	}
	return m
}

func (m *crowdModel) answer(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 16<<20))
	if err != nil {
		return
	}
	req, err := llmtest.Parse(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	turn, problem := 1, ""
	for _, message := range req.Messages {
		switch message.Role {
		case "assistant":
			turn++
		case "user":
			problem, _, _ = strings.Cut(message.Text(), "\n")
		}
	}
	m.mu.Lock()
	m.turns[problem] = turn
	if m.at[turn]++; m.at[turn] == crowd {
		if turn == 1 {
			m.began = time.Now()
		}
		close(m.all[turn])
	}
	if turn == crowdTurns {
		if len(m.ended) == 0 {
			m.slowest = slices.Min(slices.Collect(maps.Values(m.turns)))
			for turns := range maps.Values(m.turns) {
				m.done += turns
			}
		}
		m.ended[problem] = time.Since(m.began)
	}
	m.mu.Unlock()
	if turn == 1 || m.step {
		select {
		case <-m.all[turn]:
		case <-r.Context().Done():
			return
		}
	}
	call := map[string]any{"name": "execute_bash", "arguments": `{"command":"echo x >> answer.txt"}`}
	if turn == crowdTurns {
		call = map[string]any{"name": "submit", "arguments": "{}"}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{ // a client that is gone fails its run
		"id": "x", "object": "chat.completion", "model": req.Model,
		"choices": []any{map[string]any{"index": 0, "finish_reason": "tool_calls", "message": map[string]any{
			"role": "assistant", "content": nil,
			"tool_calls": []any{map[string]any{"id": fmt.Sprint("call_", turn), "type": "function", "function": call}},
		}}},
	})
}

// Sixty-four runs work at the same time: no model answer is given before all of them have asked
// for their turn, so that runs which waited for others to end would never end.
func TestManyAgentRunsWorkTogether(t *testing.T) {
	testenv.SameForAll(t)
	crowdRuns(t, newCrowdModel(true))
}

// Sixty-four runs that go on at the same time finish, all of them, and none at the cost of the
// others. When the first is at its last turn, the slowest has had a third of its turns at least,
// and all together a third of theirs. One after the other, the last would take 64 times as long.
func TestManyAgentRunsAreFair(t *testing.T) {
	testenv.Soak(t, "judges the order in which a machine runs 64 processes")
	model := newCrowdModel(false)
	crowdRuns(t, model)
	took := slices.Sorted(maps.Values(model.ended))
	t.Logf("when the first had %d turns the slowest had %d, and all together %d; the first took %v, the median %v, the last %v",
		crowdTurns, model.slowest, model.done, took[0], took[crowd/2], took[crowd-1])
	if model.slowest*3 < crowdTurns {
		t.Errorf("when the first had %d turns the slowest had %d", crowdTurns, model.slowest)
	}
	if model.done*3 < crowd*crowdTurns {
		t.Errorf("when the first had %d turns all together had %d of %d", crowdTurns, model.done, crowd*crowdTurns)
	}
}

// crowdRuns has the agent solve as many problems as there are in a crowd, all at once, and
// requires that each run used all of its turns and scored.
func crowdRuns(t *testing.T, model *crowdModel) {
	t.Helper()
	testenv.SameForAll(t)
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	srv := httptest.NewServer(http.HandlerFunc(model.answer))
	defer srv.Close()
	dir := t.TempDir()
	var data bytes.Buffer
	for i := range crowd {
		fmt.Fprintf(&data, `{"id":"p%d","problem_statement":"problem %d","ground_truth":"^(x\\n?){%d}$"}`+"\n", i, i, crowdTurns-1)
	}
	for name, text := range map[string]string{"config.yaml": "system_prompt: s\nscoring: regex\n", "data.jsonl": data.String()} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	output := t.TempDir()
	got := d.CLI(t, "agent", "bench", "--stream=false", "--llm_retries", "0", "--num_workers", fmt.Sprint(crowd), "--task", dir, "--output_dir", output,
		"--llm_name", "m", "--llm_base_url", srv.URL+"/v1")
	if got.Code != 0 || strings.Count(got.Stderr, "  1.00  submitted") != crowd {
		t.Fatalf("the runs ended with %+v", got)
	}
	if len(model.ended) != crowd {
		t.Fatalf("%d of %d runs asked for their last turn", len(model.ended), crowd)
	}
}
