package api

import (
	"encoding/json"
	"time"
)

// StartAgentRun is the body of POST /v1/agent/runs. Absent fields have the defaults of `sandboxd
// agent run`, with the daemon's settings and environment.
type StartAgentRun struct {
	Query string     `json:"query"` // the task
	Model AgentModel `json:"model"`
	Image string     `json:"image,omitempty"`
	// InputDir is an absolute path on the daemon's host, below a directory that serve --agent-inputs
	// allows. Its content is copied into the sandbox.
	InputDir         string         `json:"input_dir,omitempty"`
	PromptConfig     string         `json:"prompt_config,omitempty"` // YAML text
	Limits           Limits         `json:"limits,omitzero"`         // memory, cpus and pids
	Network          Network        `json:"network,omitzero"`        // of the sandbox
	Budget           AgentBudget    `json:"budget,omitzero"`
	MaxTokensPerCall int            `json:"max_tokens_per_call,omitempty"`
	Temperature      *float64       `json:"temperature,omitempty"`
	ExtraBody        map[string]any `json:"extra_body,omitempty"`
	Policy           string         `json:"policy,omitempty"`      // name of a preset, or YAML
	PolicyHook       string         `json:"policy_hook,omitempty"` // service for the policy's "ask"; without one "ask" denies
	SnapshotTurns    bool           `json:"snapshot_turns,omitempty"`
	OutputDeny       []string       `json:"output_deny,omitempty"`
	Collect          []string       `json:"collect,omitempty"`           // paths in the sandbox that are collected beside the output directory
	OutputLinks      bool           `json:"output_links,omitempty"`      // keep links that lead out of the output directory
	OutputLimit      int64          `json:"output_limit,omitempty"`      // bytes
	OutputFileLimit  int64          `json:"output_file_limit,omitempty"` // bytes
}

// AgentModel selects the model. The daemon uses the key but never stores it: no record, list, log
// or process argument holds it.
type AgentModel struct {
	Name    string `json:"name,omitempty"`     // with its provider as prefix, as in --llm_name
	BaseURL string `json:"base_url,omitempty"` // a secret before its host is refused
	Key     string `json:"key,omitempty"`      // default: from the daemon's environment or settings
	Replay  string `json:"replay,omitempty"`   // absolute path of a trajectory.json to replay, on the daemon's host, below the same directories
	Retries *int   `json:"retries,omitempty"`
}

// AgentBudget bounds the resources of a run. A zero field means the default, or no ceiling if there
// is none.
type AgentBudget struct {
	Turns        int     `json:"turns,omitempty"`
	Conversation int     `json:"conversation_tokens,omitempty"`
	Tokens       int     `json:"tokens,omitempty"` // total of all model calls
	Cost         float64 `json:"cost_usd,omitempty"`
	Time         float64 `json:"seconds,omitempty"`
	CPU          float64 `json:"cpu_seconds,omitempty"`
}

// ResumeAgentRun is the body of POST /v1/agent/runs/{run}/resume. Absent fields, except the key,
// come from the record.
type ResumeAgentRun struct {
	Model      AgentModel  `json:"model,omitzero"`
	Budget     AgentBudget `json:"budget,omitzero"`
	Policy     string      `json:"policy,omitempty"`
	PolicyHook string      `json:"policy_hook,omitempty"`
	Message    string      `json:"message,omitempty"` // message to the model before it continues
}

// CancelAgentRun is the optional body of POST /v1/agent/runs/{run}/cancel. The run ends as after an
// interrupt: its programs are ended and its output is collected. The answer does not wait for that.
type CancelAgentRun struct {
	Keep bool `json:"keep,omitempty"` // keep the sandbox, stopped, for a resume
}

// AgentRunState is the phase of a run.
type AgentRunState string

// States of a run.
const (
	AgentRunning AgentRunState = "running" // a process works on it
	AgentStopped AgentRunState = "stopped" // its process was killed before the run's end; it can be resumed
	AgentEnded   AgentRunState = "ended"   // see ExitReason; unless "submitted", it can be resumed if the sandbox or a snapshot exists
)

// AgentRun is one run of the agent that the daemon hosts.
type AgentRun struct {
	ID         string        `json:"id"`
	Dir        string        `json:"dir"` // on the daemon's host: record.jsonl, and at the end trajectory.json and files/
	State      AgentRunState `json:"state"`
	ExitReason string        `json:"exit_reason,omitempty"`
	ExitDetail string        `json:"exit_detail,omitempty"`
	Turns      int           `json:"turns"`
	ToolCalls  int           `json:"tool_calls"`
	Denied     int           `json:"denied"`
	Tokens     int           `json:"tokens"`
	Cost       float64       `json:"cost_usd"`
	// UnpricedCalls counts the model calls that Cost omits because their price is unknown.
	UnpricedCalls int       `json:"unpriced_calls,omitempty"`
	Time          float64   `json:"seconds"`
	CPU           float64   `json:"cpu_seconds"`
	Model         string    `json:"model"`
	Query         string    `json:"query"` // beginning of the task
	SandboxID     string    `json:"sandbox_id,omitempty"`
	StartedAt     time.Time `json:"started_at"`
	UpdatedAt     time.Time `json:"updated_at"`      // time of the last change
	Error         string    `json:"error,omitempty"` // reason why only ID, Dir and State are known
}

// AgentRunList is the answer to GET /v1/agent/runs, oldest first.
type AgentRunList struct {
	Runs []AgentRun `json:"runs"`
}

// AgentRunEvent is one line of GET /v1/agent/runs/{run}/events: a line of the run's record. The
// last line holds the run's state instead, once no process works on it.
type AgentRunEvent struct {
	N       int             `json:"n,omitempty"`       // line number in the record, from 1
	Event   json.RawMessage `json:"event,omitempty"`   // described in docs/reference/agent.md
	Omitted int64           `json:"omitted,omitempty"` // bytes of a line that is too long to send; the record has it
	Run     *AgentRun       `json:"run,omitempty"`
}
