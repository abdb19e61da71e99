package performance

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

const (
	// agentSteps is how many turns a run here has, submit included.
	agentSteps = 11
	// agentRuns is how many run at the same time.
	agentRuns = 64
	// agentCommand is what each turn but the last runs.
	agentCommand = "true"
)

// instantModel answers at once with the turn that follows the conversation that it is shown, to
// any number of runs.
func instantModel(b *testing.B) (url string) {
	b.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var req struct{ Messages []llmtest.Message }
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		turn := 1
		for _, m := range req.Messages {
			if m.Role == "assistant" {
				turn++
			}
		}
		call := llmtest.Bash(agentCommand)
		if turn == agentSteps {
			call = llmtest.Submit()
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{ // a client that is gone fails its run
			"id": "x", "object": "chat.completion", "model": "instant",
			"choices": []any{map[string]any{"index": 0, "finish_reason": "tool_calls", "message": map[string]any{
				"role": "assistant", "content": nil, "tool_calls": []any{map[string]any{
					"id": fmt.Sprint("call_", turn), "type": "function", "function": map[string]any{"name": call.Name, "arguments": call.Arguments},
				}},
			}}},
		})
	}))
	b.Cleanup(srv.Close)
	return srv.URL + "/v1"
}

// agentRun is one whole run by the built command line. It gives how long each turn took in which a
// command ran.
func agentRun(b *testing.B, d *harness.Daemon, model, output string) (turns []time.Duration, err error) {
	b.Helper()
	result := d.CLI(b, "agent", "run", "--query", "q", "--llm_name", "instant", "--llm_base_url", model, "--llm_retries", "0", "--output_dir", output)
	if result.Code != 0 {
		return nil, fmt.Errorf("exit %d: %s", result.Code, result.Stderr)
	}
	found, err := filepath.Glob(filepath.Join(output, "*", "trajectory.json"))
	if err != nil || len(found) != 1 {
		return nil, fmt.Errorf("trajectories %v, %w", found, err)
	}
	data, err := os.ReadFile(found[0])
	if err != nil {
		return nil, err
	}
	var trajectory struct {
		Steps []struct {
			Metadata struct {
				StartedAt time.Time `json:"started_at"`
			}
		}
	}
	if err := json.Unmarshal(data, &trajectory); err != nil {
		return nil, err
	}
	if len(trajectory.Steps) != agentSteps {
		return nil, fmt.Errorf("%d steps", len(trajectory.Steps))
	}
	for i, s := range trajectory.Steps[1:] {
		turns = append(turns, s.Metadata.StartedAt.Sub(trajectory.Steps[i].Metadata.StartedAt))
	}
	return turns, nil
}

// BenchmarkAgentRun is a whole run of eleven turns with a model that answers at once, from the
// start of the command line to its end, and of it the turns: question, answer, policy, record,
// exec; against the exec alone.
func BenchmarkAgentRun(b *testing.B) {
	testenv.RequireUserNS(b)
	d := harness.Start(b, harness.Options{})
	s := d.Create(b, api.CreateSandbox{})
	model, output := instantModel(b), b.TempDir()
	var turns []time.Duration
	n := 0
	sides := []side{
		{name: "run", run: func() error {
			n++
			took, err := agentRun(b, d, model, filepath.Join(output, fmt.Sprint(n)))
			turns = append(turns, took...)
			return err
		}},
		{name: "exec", run: func() error {
			_, err := s.TryExec(b.Context(), api.ExecRequest{Argv: []string{"bash", "-c", agentCommand}})
			return err
		}},
	}
	compare(b, sides...)
	turns = turns[warmUp*(agentSteps-1):]
	report(b, "turn", turns) // sorts
	b.ReportMetric(float64((turns[len(turns)/2]-sides[1].times[len(sides[1].times)/2]).Microseconds())/1000, "loop-p50-ms")
}

// BenchmarkAgentRunsAtOnce is how long it takes until the first and the last of many runs that
// begin together have ended.
func BenchmarkAgentRunsAtOnce(b *testing.B) {
	testenv.RequireUserNS(b)
	d := harness.Start(b, harness.Options{})
	model, output := instantModel(b), b.TempDir()
	times := make([]time.Duration, agentRuns)
	errs := make([]error, agentRuns)
	var all sync.WaitGroup
	b.ResetTimer()
	for i := range agentRuns {
		all.Go(func() {
			began := time.Now()
			_, errs[i] = agentRun(b, d, model, filepath.Join(output, fmt.Sprint(i)))
			times[i] = time.Since(began)
		})
	}
	all.Wait()
	b.StopTimer()
	for _, err := range errs {
		if err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(slices.Min(times).Seconds(), "first-s")
	b.ReportMetric(slices.Max(times).Seconds(), "last-s")
}
