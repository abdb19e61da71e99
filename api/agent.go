package api

import (
	"encoding/json"
	"time"
)

// StartAgentRun is the body of POST /v1/agent/runs. What is left out is as in `sandboxd agent run` without the flag, the settings and the
// environment being the daemon's.
type StartAgentRun struct {
	Query string     `json:"query"` // the task
	Model AgentModel `json:"model"`
	Image string     `json:"image,omitempty"`
	// InputDir is an absolute path on the daemon's host, below a directory that the daemon was told to allow (serve --agent-inputs); what is
	// in it is copied into the sandbox.
	InputDir         string         `json:"input_dir,omitempty"`
	PromptConfig     string         `json:"prompt_config,omitempty"` // its text, YAML
	Limits           Limits         `json:"limits,omitzero"`         // memory, cpus and pids
	Budget           AgentBudget    `json:"budget,omitzero"`
	MaxTokensPerCall int            `json:"max_tokens_per_call,omitempty"`
	Temperature      *float64       `json:"temperature,omitempty"`
	ExtraBody        map[string]any `json:"extra_body,omitempty"`
	Policy           string         `json:"policy,omitempty"`      // the name of a preset, or YAML
	PolicyHook       string         `json:"policy_hook,omitempty"` // asked where the policy says to ask; otherwise nobody is, and the answer is no
	SnapshotTurns    bool           `json:"snapshot_turns,omitempty"`
	OutputDeny       []string       `json:"output_deny,omitempty"`
	OutputLimit      int64          `json:"output_limit,omitempty"`      // bytes
	OutputFileLimit  int64          `json:"output_file_limit,omitempty"` // bytes
}

// AgentModel says which model is asked. The key is used and kept nowhere: it is in no record, no list, no log and no process's arguments.
type AgentModel struct {
	Name    string `json:"name,omitempty"`     // with its provider before it, as --llm_name
	BaseURL string `json:"base_url,omitempty"` // without a secret before its host, which is refused
	Key     string `json:"key,omitempty"`      // default: what the daemon's environment or settings have
	Replay  string `json:"replay,omitempty"`   // absolute path of a recorded trajectory.json on the daemon's host, below the same directories, instead of a model
	Retries *int   `json:"retries,omitempty"`
}

// AgentBudget is what a run may spend. A zero part is the default, or no ceiling where there is none.
type AgentBudget struct {
	Turns        int     `json:"turns,omitempty"`
	Conversation int     `json:"conversation_tokens,omitempty"`
	Tokens       int     `json:"tokens,omitempty"` // of all model calls
	Cost         float64 `json:"cost_usd,omitempty"`
	Time         float64 `json:"seconds,omitempty"`
	CPU          float64 `json:"cpu_seconds,omitempty"`
}

// ResumeAgentRun is the body of POST /v1/agent/runs/{run}/resume. What is left out is as the record says, but for the key.
type ResumeAgentRun struct {
	Model      AgentModel  `json:"model,omitzero"`
	Budget     AgentBudget `json:"budget,omitzero"`
	Policy     string      `json:"policy,omitempty"`
	PolicyHook string      `json:"policy_hook,omitempty"`
	Message    string      `json:"message,omitempty"` // said to the model before it goes on
}

// CancelAgentRun is the body of POST /v1/agent/runs/{run}/cancel, which may be left out. The run ends as after an interrupt: what runs is ended
// and the output collected. The answer does not wait for that.
type CancelAgentRun struct {
	Keep bool `json:"keep,omitempty"` // leave the sandbox, stopped, for resume
}

// AgentRunState says where a run stands.
type AgentRunState string

// The states of a run.
const (
	AgentRunning AgentRunState = "running" // a process works on it
	AgentStopped AgentRunState = "stopped" // nobody does, and it has no end: its process was killed. Resume goes on
	AgentEnded   AgentRunState = "ended"   // ExitReason says how; resume goes on where it was not "submitted" and the sandbox, or a snapshot, is there
)

// AgentRun is one run of the agent that the daemon hosts.
type AgentRun struct {
	ID         string        `json:"id"`
	Dir        string        `json:"dir"` // on the daemon's host: record.jsonl, trajectory.json, and at the end files/
	State      AgentRunState `json:"state"`
	ExitReason string        `json:"exit_reason,omitempty"`
	ExitDetail string        `json:"exit_detail,omitempty"`
	Turns      int           `json:"turns"`
	ToolCalls  int           `json:"tool_calls"`
	Denied     int           `json:"denied"`
	Tokens     int           `json:"tokens"`
	Cost       float64       `json:"cost_usd"`
	Time       float64       `json:"seconds"`
	CPU        float64       `json:"cpu_seconds"`
	Model      string        `json:"model"`
	Query      string        `json:"query"` // its beginning
	SandboxID  string        `json:"sandbox_id,omitempty"`
	StartedAt  time.Time     `json:"started_at"`
	UpdatedAt  time.Time     `json:"updated_at"`      // when this was last so
	Error      string        `json:"error,omitempty"` // why nothing is known but ID, Dir and State
}

// AgentRunList is the answer to GET /v1/agent/runs, oldest first.
type AgentRunList struct {
	Runs []AgentRun `json:"runs"`
}

// AgentRunEvent is one line of GET /v1/agent/runs/{run}/events: a line of the run's record, or, as the last, how the run stands
// when nobody works on it any more.
type AgentRunEvent struct {
	N       int             `json:"n,omitempty"`       // counts the lines of the record, from 1
	Event   json.RawMessage `json:"event,omitempty"`   // as docs/reference/agent.md describes it
	Omitted int64           `json:"omitted,omitempty"` // bytes of a line that is too long to be sent; it is in the record
	Run     *AgentRun       `json:"run,omitempty"`
}
