package faults

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// agentTurns is how many turns a run of this test has, submit included.
const agentTurns = 7

// forgetfulModel gives the turn that follows the conversation that it is shown, however often it
// is asked: as a real one, it has no memory of a client that was killed.
type forgetfulModel struct {
	url   string
	asked chan int // the turn that was asked for, when it was

	mu    sync.Mutex
	seen  [agentTurns]int
	errs  []error
	count int           // of all that was asked
	held  int           // answers from this one on wait; 0: none
	freed chan struct{} // closed when they do not any more
}

// hold makes answers wait, from the n-th request on; with 0 none waits any more.
func (m *forgetfulModel) hold(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.held = n
	if n > 0 {
		m.freed = make(chan struct{})
	} else {
		close(m.freed)
	}
}

// wait holds a request back if it must wait. Its question has been counted.
func (m *forgetfulModel) wait(r *http.Request) {
	m.mu.Lock()
	m.count++
	held, freed := m.held > 0 && m.count >= m.held, m.freed
	m.mu.Unlock()
	if !held {
		return
	}
	select {
	case <-freed:
	case <-r.Context().Done():
	}
}

func startForgetful(t *testing.T) *forgetfulModel {
	t.Helper()
	m := &forgetfulModel{asked: make(chan int, 1000)}
	srv := httptest.NewServer(http.HandlerFunc(m.answer))
	t.Cleanup(srv.Close)
	m.url = srv.URL + "/v1"
	return m
}

// forget drops the questions of earlier attempts: the next attempt is struck when it has asked one
// itself, and so has found the daemon. The last question of a killed attempt may still come; then
// the daemon may be killed before it is found, which is another instant.
func (m *forgetfulModel) forget() {
	for len(m.asked) > 0 {
		<-m.asked
	}
}

func (m *forgetfulModel) answer(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 16<<20))
	if err != nil {
		return // it was killed while it asked
	}
	m.wait(r)
	req, err := llmtest.Parse(body)
	turn := 0
	for _, message := range req.Messages {
		if message.Role == "assistant" {
			turn++
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil && turn >= agentTurns {
		err = fmt.Errorf("a turn %d was asked for", turn)
	}
	if err != nil {
		m.errs = append(m.errs, err)
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	m.seen[turn]++
	m.asked <- turn
	call := map[string]any{"name": "submit", "arguments": "{}"}
	if turn < agentTurns-1 {
		// Half of the instants at which a kill strikes shall be within a command.
		call = map[string]any{"name": "execute_bash", "arguments": fmt.Sprintf(`{"command":"echo %d >> /testbed/output/log; sleep 0.05"}`, turn)}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{ // the client may be dead
		"id": "x", "object": "chat.completion", "created": 1, "model": req.Model,
		"choices": []any{map[string]any{"index": 0, "finish_reason": "tool_calls", "message": map[string]any{
			"role": "assistant", "content": nil,
			"tool_calls": []any{map[string]any{"id": fmt.Sprint("call_", turn), "type": "function", "function": call}},
		}}},
	})
}

// runRecord is what of a run's record this test is about.
type runRecord struct {
	turns   []int
	begun   map[int]int
	unknown map[int]bool
	end     string
}

func readRunRecord(t *testing.T, dir string) runRecord {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "record.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	r := runRecord{begun: map[int]int{}, unknown: map[int]bool{}}
	n := 0
	for line := range strings.Lines(string(data)) {
		if !strings.HasSuffix(line, "\n") {
			break // it was killed while it wrote that
		}
		n++
		var e struct {
			N       int  `json:"n"`
			Turn    int  `json:"turn"`
			Began   *any `json:"began"`
			TurnEnd *any `json:"turn_end"`
			Ended   *struct {
				Unknown bool `json:"unknown"`
			} `json:"ended"`
			End *struct {
				Reason      string `json:"reason"`
				OutputError string `json:"output_error"`
			} `json:"end"`
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil || e.N != n {
			t.Fatalf("line %d of the record is number %d: %v", n, e.N, err)
		}
		switch {
		case e.Began != nil:
			r.begun[e.Turn]++
		case e.Ended != nil && e.Ended.Unknown:
			r.unknown[e.Turn] = true
		case e.TurnEnd != nil:
			r.turns = append(r.turns, e.Turn)
		case e.End != nil:
			if r.end = e.End.Reason; e.End.OutputError != "" {
				r.end += ", without its output"
			}
		}
	}
	return r
}

// kill -9 of the agent, of the daemon, or of both, at any instant of a run, several times: resume
// finishes it, no turn is lost or asked for after it was recorded, and no command is run twice;
// where it is not known whether one was run, the record says so. SANDBOXD_AGENT_FAULT_ROUNDS says
// how many runs there are.
func TestKilledAgentsGoOnWhereTheyWere(t *testing.T) {
	testenv.SameForAll(t)
	testenv.RequireUserNS(t)
	rounds, seed := setting(t, "SANDBOXD_AGENT_FAULT_ROUNDS", uint64(testenv.Rounds(4, 24))), setting(t, "SANDBOXD_FAULT_SEED", rand.Uint64())
	t.Logf("SANDBOXD_FAULT_SEED=%d SANDBOXD_AGENT_FAULT_ROUNDS=%d", seed, rounds)
	r := rand.New(rand.NewPCG(seed, 0))
	d := harness.Start(t, harness.Options{})
	struck := map[string]int{}
	unknown := 0
	for round := range rounds {
		unknown += killedRun(t, d, r, struck)
		if t.Failed() {
			t.Fatalf("SANDBOXD_FAULT_SEED=%d: failed in round %d", seed, round)
		}
	}
	t.Logf("killed: %v; %d calls were told to be unknown", struck, unknown)
}

func killedRun(t *testing.T, d *harness.Daemon, r *rand.Rand, struck map[string]int) (unknown int) {
	t.Helper()
	model := startForgetful(t)
	output := t.TempDir()
	args := []string{"run", "--query", "count", "--llm_name", "m", "--stream=false", "--llm_retries", "0", "--llm_base_url", model.url, "--output_dir", output}
	kills := 1 + r.IntN(3)
	var dir string
	for attempt := 0; ; attempt++ {
		if attempt > 0 {
			args = []string{"resume", "--stream=false", "--llm_retries", "0", dir}
		}
		var said bytes.Buffer
		cmd := osexec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), append([]string{"agent", "--socket", d.Socket}, args...)...)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + output, "XDG_RUNTIME_DIR=" + d.RuntimeDir}
		harness.StartsNoDaemon(cmd)
		cmd.Stdout, cmd.Stderr = &said, &said
		model.forget()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		if attempt < kills {
			what := strike(t, d, cmd, model, ended, r)
			struck[what]++
		}
		var err error
		select {
		case err = <-ended:
		case <-time.After(testenv.HungAfter):
			_ = cmd.Process.Kill()
			t.Fatalf("attempt %d of the agent did not end (%v); it said:\n%s", attempt, <-ended, &said)
		}
		runs, globErr := filepath.Glob(filepath.Join(output, "2*"))
		if globErr != nil || len(runs) != 1 {
			t.Fatalf("run directories %v, %v; it said:\n%s", runs, err, &said)
		}
		dir = runs[0]
		if readRunRecord(t, dir).end == "submitted" {
			if err != nil && attempt >= kills {
				t.Errorf("%v, though it was submitted; it said:\n%s", err, &said)
			}
			break
		}
		if attempt >= kills+1 {
			t.Fatalf("attempt %d with nothing killed ended with %v; it said:\n%s", attempt, err, &said)
		}
	}
	// A crash between the end on record and the end of the sandbox leaves one, which the next resume
	// deletes.
	d.CLI(t, "agent", "resume", "--stream=false", dir)

	rec := readRunRecord(t, dir)
	if len(rec.turns) != agentTurns {
		t.Errorf("turns on record: %v", rec.turns)
	}
	for i, turn := range rec.turns {
		if turn != i+1 {
			t.Errorf("turns on record: %v", rec.turns)
		}
	}
	data, err := os.ReadFile(filepath.Join(dir, "files", "log"))
	if err != nil {
		t.Errorf("what the commands wrote: %v", err)
	}
	times := map[string]int{}
	for line := range strings.Lines(string(data)) {
		times[strings.TrimSpace(line)]++
	}
	for turn := range agentTurns - 1 {
		switch n := times[fmt.Sprint(turn)]; {
		case n > 1:
			t.Errorf("the command of turn %d was run %d times", turn+1, n)
		case n == 0 && !rec.unknown[turn+1]:
			t.Errorf("the command of turn %d was not run, and the record does not say that this is unknown", turn+1)
		}
		if rec.begun[turn+1] != 1 {
			t.Errorf("the command of turn %d was begun %d times", turn+1, rec.begun[turn+1])
		}
	}
	model.mu.Lock()
	defer model.mu.Unlock()
	for _, err := range model.errs {
		t.Errorf("the model refused a request: %v", err)
	}
	return len(rec.unknown)
}

// strike kills something at an instant after the model was asked for a turn, unless the run ends
// before.
func strike(t *testing.T, d *harness.Daemon, cmd *osexec.Cmd, model *forgetfulModel, ended chan error, r *rand.Rand) string {
	t.Helper()
	turns, after, what := 1+r.IntN(3), time.Duration(r.Int64N(int64(90*time.Millisecond))), r.IntN(3)
	for range turns {
		select {
		case <-model.asked:
		case err := <-ended:
			ended <- err
			return "nothing"
		}
	}
	select {
	case <-time.After(after):
	case err := <-ended:
		ended <- err
		return "nothing"
	}
	if what != 0 {
		d.Kill9(t)
	}
	if what != 1 {
		_ = cmd.Process.Kill() // it may have ended
	}
	if what == 0 {
		return "the agent"
	}
	if what == 1 {
		// It ends by itself, without the daemon: going on with the next one would be another test.
		select {
		case err := <-ended:
			ended <- err
		case <-time.After(testenv.HungAfter):
			t.Error("the agent goes on without a daemon")
		}
	}
	d.Launch(t)
	return [...]string{1: "the daemon", 2: "both"}[what]
}
