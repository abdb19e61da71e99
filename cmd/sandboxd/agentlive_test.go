package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/llm"
)

// What a model writes must not reach the terminal as more than text, and be shown once.
func TestAgentShowsATurnWhileItIsWritten(t *testing.T) {
	var out strings.Builder
	l := &live{w: &out}
	for _, d := range []llm.Delta{
		{Kind: llm.DeltaReasoning, Text: "hm\x1b[2J"},
		{Kind: llm.DeltaReasoning, Text: " so"},
		{Kind: llm.DeltaContent, Text: "I wi"},
		{Kind: llm.DeltaRestart},
		{Kind: llm.DeltaContent, Text: "I \u009b"},
		{Kind: llm.DeltaContent, Text: "look.\nended: submitted"},
		{Kind: llm.DeltaCall, Text: "execute_bash\x07"},
		{Kind: llm.DeltaArguments, Text: `{"command":`},
		{Kind: llm.DeltaArguments, Text: `"ls"}`},
	} {
		l.delta(d)
	}
	l.step(agent.Step{Thought: "I look.", ToolCalls: []agent.ToolRecord{{Function: "execute_bash", Arguments: `{"command":"ls"}`, Observation: "a"}}})
	l.step(agent.Step{Thought: "Not streamed."})
	want := `
(thinking) hm\x1b[2J so
  I wi
(the answer broke off and is asked for again)
  I \u009blook.
  ended: submitted
(calling execute_bash\a)

--- turn 0 · model 0.0 s · tools 0.00 s
> execute_bash ls
    a

--- turn 0 · model 0.0 s · tools 0.00 s
  Not streamed.
  (no tool call)
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("shown (-want +got):\n%s", diff)
	}
}

func TestAgentSaysWhatWasUsed(t *testing.T) {
	for want, u := range map[string]llm.Usage{
		"0 tokens in, 0 out":                                          {},
		"3000 tokens in (1400 cached), 150 out, $0.0035":              {PromptTokens: 3000, CachedTokens: 1400, CompletionTokens: 150, CostUSD: 0.003465},
		"10 tokens in, 5 out; 2 calls without a known price":          {PromptTokens: 10, CompletionTokens: 5, UnpricedCalls: 2},
		"10 tokens in, 5 out, $1.0000; 1 calls without a known price": {PromptTokens: 10, CompletionTokens: 5, CostUSD: 1, UnpricedCalls: 1},
	} {
		if got := used(u); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
