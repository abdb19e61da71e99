package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/policy"
	"github.com/sandboxd/sandboxd/api"
)

// Trajectory is trajectory.json: the record of a run. It holds the keys that LLM-in-Sandbox writes, with the same meaning, and
// more beside them.
type Trajectory struct {
	ProblemStatement string      `json:"problem_statement"`
	Steps            []Step      `json:"steps"`
	Metadata         RunMetadata `json:"metadata"`
}

// Step is one turn of the model and what came of it.
type Step struct {
	Thought          string `json:"thought"`
	ReasoningContent string `json:"reasoning_content"`
	// Action is the first tool call; its function is empty in a turn without one, and its parameters are empty where
	// they could not be parsed. ToolCalls has every call.
	Action      Action       `json:"action"`
	Observation string       `json:"observation"` // what the model was answered; of several calls one after the other
	ToolCalls   []ToolRecord `json:"tool_calls"`
	Metadata    StepMetadata `json:"metadata"`
}

// Action is a tool call with its arguments parsed.
type Action struct {
	Function   string                     `json:"function"`
	Parameters map[string]json.RawMessage `json:"parameters"`
}

// ToolRecord is one tool call as the model wrote it, and its answer.
type ToolRecord struct {
	ID          string  `json:"id"`
	Function    string  `json:"function"`
	Arguments   string  `json:"arguments"` // the model's own text, valid JSON or not
	Observation string  `json:"observation"`
	Failed      bool    `json:"failed,omitempty"` // answered as a tool error; a command that exits 1 is not one
	ToolTime    float64 `json:"tool_time"`        // seconds
	// CPUTime, MemoryPeak and Exit are of a command, as its sandbox says.
	CPUTime    float64         `json:"cpu_time,omitempty"`    // seconds
	MemoryPeak int64           `json:"memory_peak,omitempty"` // bytes
	Exit       *api.Exit       `json:"exit,omitempty"`
	Verdict    *policy.Verdict `json:"verdict,omitempty"` // what was decided before it ran
	NotRun     bool            `json:"not_run,omitempty"` // denied, malformed, or too late
	Unknown    bool            `json:"unknown,omitempty"` // begun before a crash: nobody knows whether it was done
}

// StepMetadata is what is known about a step beside its content.
type StepMetadata struct {
	Step         int       `json:"step"`
	ExecTime     float64   `json:"exec_time"` // seconds of the model call, retries included
	ToolTime     float64   `json:"tool_time"` // seconds of all its tool calls, added up
	StartedAt    time.Time `json:"started_at"`
	FinishReason string    `json:"finish_reason,omitempty"`
	Usage        llm.Usage `json:"usage"`                 // as the provider counted, zeros where it did not; and its cost
	CPUTime      float64   `json:"cpu_time,omitempty"`    // seconds, of all its commands
	MemoryPeak   int64     `json:"memory_peak,omitempty"` // bytes, of the largest process
	Snapshot     string    `json:"snapshot,omitempty"`    // id of the one taken after it
}

// RunMetadata is what is known about the run.
type RunMetadata struct {
	TotalSteps  int        `json:"total_steps"`
	ExitReason  ExitReason `json:"exit_reason"` // empty while the run goes on
	ExitDetail  string     `json:"exit_detail,omitempty"`
	Model       string     `json:"model"`
	ModelSource string     `json:"model_source"` // where the turns came from; says so when they are a replay
	Image       string     `json:"image"`
	SandboxID   string     `json:"sandbox_id,omitempty"`
	StartedAt   time.Time  `json:"started_at"`
	FinishedAt  *time.Time `json:"finished_at,omitempty"`
	Usage       llm.Usage  `json:"usage"` // sum over all steps
	Output      *Collected `json:"output,omitempty"`

	RunID     string      `json:"run_id"`
	Budget    Budget      `json:"budget"`
	Spent     Spent       `json:"spent"`
	ToolCalls int         `json:"tool_calls"` // that ran
	Denied    int         `json:"denied"`
	Resumed   int         `json:"resumed,omitempty"` // how often another process went on with it
	Outputs   *Outputs    `json:"outputs,omitempty"` // what was to be collected, listed before
	Fork      *ForkOrigin `json:"fork,omitempty"`
}

// ExitReason is why a run ended.
type ExitReason string

// The reasons. All but the first make `sandboxd agent run` exit with 1.
const (
	ExitSubmitted   ExitReason = "submitted"    // the model called submit
	ExitMaxSteps    ExitReason = "max_steps"    // as many turns as allowed, and no submit
	ExitTokenLimit  ExitReason = "token_limit"  // the conversation exceeds its ceiling, or the model's context
	ExitTimeLimit   ExitReason = "time_limit"   // the run took as long as allowed
	ExitCostLimit   ExitReason = "cost_limit"   // the model cost as much as allowed
	ExitCPULimit    ExitReason = "cpu_limit"    // the sandbox used as much processor time as allowed
	ExitNoToolCall  ExitReason = "no_tool_call" // several turns in a row without a tool call, in spite of reminders
	ExitModelError  ExitReason = "model_error"  // the model could not be reached, or answered nonsense, retries included
	ExitSandboxLost ExitReason = "sandbox_lost" // the sandbox or the daemon went away
	ExitInterrupted ExitReason = "interrupted"  // Ctrl-C, SIGTERM
	ExitFailed      ExitReason = "failed"       // a failure on our side, such as a full disk
)

// newAction parses a call's arguments for the record.
func newAction(function, arguments string) Action {
	a := Action{Function: function}
	if err := json.Unmarshal([]byte(arguments), &a.Parameters); err != nil || a.Parameters == nil {
		a.Parameters = map[string]json.RawMessage{}
	}
	return a
}

// save writes the trajectory to dir/trajectory.json: beside it first, then renamed, so that there always is a whole one. It is
// derived from the record; what it must outlast a crash of the machine is in there.
func (t *Trajectory) save(dir string, durable bool) error {
	if err := writeJSON(filepath.Join(dir, "trajectory.json"), t, durable); err != nil {
		return fmt.Errorf("save the trajectory: %w", err)
	}
	return nil
}

// writeJSON writes v whole or not at all to the file at path.
func writeJSON(path string, v any, durable bool) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // people read these files
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return err
	}
	return writeFile(path, b.Bytes(), durable)
}

// writeFile writes a file whole or not at all.
func writeFile(path string, data []byte, durable bool) error {
	temporary := path + ".new"
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644) //nolint:gosec // results are meant to be read by others, as the umask allows
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil && durable {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	if err := os.Rename(temporary, path); err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	if !durable {
		return nil
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
