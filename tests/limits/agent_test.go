package limits

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

// A run of the agent that the daemon hosts ends when its sandbox has used its processor time. That
// it gets that far says that its process, which is confined, reaches the daemon: whether it may
// the kernel decides from Linux 7.1 on, and these tests run there too.
func TestHostedAgentRunIsHeldToItsProcessorTime(t *testing.T) {
	d := shared(t)
	recording := filepath.Join(common.inputs, "recorded.json")
	text, err := json.Marshal(map[string]any{"problem_statement": "q", "steps": []any{map[string]any{
		"action": map[string]any{"function": "execute_bash", "parameters": map[string]string{"command": "while :; do :; done"}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(recording, text, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Logf("the daemon is held by version %d of Landlock", d.System(t).Confined)
	var run api.AgentRun
	if err := d.Call(t.Context(), http.MethodPost, "/v1/agent/runs", api.StartAgentRun{
		Query: "q", Model: api.AgentModel{Replay: recording}, Limits: api.Limits{Memory: 256 << 20}, Budget: api.AgentBudget{CPU: 1},
	}, &run); err != nil {
		t.Fatal(err)
	}
	resp, err := d.Do(t.Context(), http.MethodGet, "/v1/agent/runs/"+run.ID+"/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var last api.AgentRunEvent
	for lines := json.NewDecoder(resp.Body); last.Run == nil; {
		if err := lines.Decode(&last); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Call(t.Context(), http.MethodDelete, "/v1/agent/runs/"+run.ID, nil, nil); err != nil {
		t.Error(err)
	}
	if last.Run.ExitReason != "cpu_limit" || last.Run.CPU < 1 {
		t.Errorf("it has ended with %+v", last.Run)
	}
}
