package functional

import (
	"errors"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A secret before the host of a model's address is refused, wherever the address comes from, and
// is in no record, answer or log.
func TestAgentRunRefusesSecretsInAddresses(t *testing.T) {
	testenv.SameForAll(t)
	t.Parallel()
	testenv.RequireUserNS(t)
	const planted = "tk-planted-in-an-address" // not the key that others look for in all processes
	const address = "http://" + planted + "@127.0.0.1:1/v1"
	d := harness.Start(t, harness.Options{Env: []string{"LLM_BASE_URL=" + address}})
	c := apiClient(t, d)
	refused := func(how string, err error) {
		t.Helper()
		if !errors.Is(err, &api.Problem{Code: api.CodeInvalid}) || !strings.Contains(err.Error(), "http://127.0.0.1:1/v1") || strings.Contains(err.Error(), planted) {
			t.Errorf("%s: %v", how, err)
		}
	}
	for _, url := range []string{"", address, "http://me:" + planted + "@127.0.0.1:1/v1"} {
		_, err := c.StartAgentRun(t.Context(), api.StartAgentRun{Query: "q", Model: api.AgentModel{Name: "m", BaseURL: url}})
		refused("begun with "+url, err)
	}
	if runs, err := c.AgentRuns(t.Context()); err != nil || len(runs) != 0 {
		t.Errorf("left are %+v, %v", runs, err)
	}
	model := llmtest.Start(t, llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}})
	run := mustStart(t, c, api.StartAgentRun{Query: "q", Model: api.AgentModel{Name: "m", BaseURL: model.URL}})
	follow(t, c, run.ID, 1)
	_, err := c.ResumeAgentRun(t.Context(), run.ID, api.ResumeAgentRun{Model: api.AgentModel{Name: "m", BaseURL: address}})
	refused("resumed", err)
	said := d.CLI(t, "agent", "run", "--query", "q", "--output_dir", t.TempDir(), "--llm_name", "m", "--llm_base_url", address)
	if said.Code == 0 || strings.Contains(said.Stdout+said.Stderr, planted) || !strings.Contains(said.Stderr, "http://127.0.0.1:1/v1") {
		t.Errorf("at a terminal: %+v", said)
	}
	if strings.Contains(d.Log(), planted) {
		t.Error("it is in the daemon's log")
	}
	secretInFiles(t, d.DataDir, planted)
}
