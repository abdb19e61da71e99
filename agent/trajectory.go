package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/policy"
	"github.com/sandboxd/sandboxd/api"
)

// Trajectory is the content of trajectory.json, which a run writes once, at its end. It holds the
// keys of LLM-in-Sandbox with the same meaning, and further ones.
type Trajectory struct {
	ProblemStatement string      `json:"problem_statement"`
	Steps            []Step      `json:"steps"`
	Metadata         RunMetadata `json:"metadata"`
}

// Step is one turn of the model with its outcome.
type Step struct {
	Thought          string `json:"thought"`
	ReasoningContent string `json:"reasoning_content"`
	// Action is the first tool call. Its function is empty in a turn without a call, and its
	// parameters are empty if they could not be parsed. ToolCalls holds every call.
	Action      Action       `json:"action"`
	Observation string       `json:"observation"` // answers to the model, joined
	ToolCalls   []ToolRecord `json:"tool_calls"`
	Metadata    StepMetadata `json:"metadata"`
}

// Action is a tool call with parsed arguments.
type Action struct {
	Function   string                     `json:"function"`
	Parameters map[string]json.RawMessage `json:"parameters"`
}

// ToolRecord is one tool call as the model wrote it, with its answer.
type ToolRecord struct {
	ID          string  `json:"id"`
	Function    string  `json:"function"`
	Arguments   string  `json:"arguments"` // the model's own text, valid JSON or not
	Observation string  `json:"observation"`
	Failed      bool    `json:"failed,omitempty"` // answered with a tool error; a command's non-zero exit is none
	ToolTime    float64 `json:"tool_time"`        // seconds
	// CPUTime, MemoryPeak and Exit are the sandbox's figures for a command.
	CPUTime    float64         `json:"cpu_time,omitempty"`    // seconds
	MemoryPeak int64           `json:"memory_peak,omitempty"` // bytes
	Exit       *api.Exit       `json:"exit,omitempty"`
	Verdict    *policy.Verdict `json:"verdict,omitempty"` // decision before the call ran
	NotRun     bool            `json:"not_run,omitempty"` // denied, malformed or too late
	Unknown    bool            `json:"unknown,omitempty"` // begun before a crash; its outcome is unknown
}

// StepMetadata describes a step beside its content.
type StepMetadata struct {
	Step         int       `json:"step"`
	ExecTime     float64   `json:"exec_time"` // duration of the model call in seconds, retries included
	ToolTime     float64   `json:"tool_time"` // sum over its tool calls, in seconds
	StartedAt    time.Time `json:"started_at"`
	FinishReason string    `json:"finish_reason,omitempty"`
	Usage        llm.Usage `json:"usage"`                 // as counted by the provider, with its cost; zeros if not counted
	CPUTime      float64   `json:"cpu_time,omitempty"`    // seconds, of all its commands
	MemoryPeak   int64     `json:"memory_peak,omitempty"` // bytes, of the largest process
	Snapshot     string    `json:"snapshot,omitempty"`    // ID of the snapshot taken after it
}

// RunMetadata describes a run.
type RunMetadata struct {
	TotalSteps  int        `json:"total_steps"`
	ExitReason  ExitReason `json:"exit_reason"` // empty while the run is not over
	ExitDetail  string     `json:"exit_detail,omitempty"`
	Model       string     `json:"model"`
	ModelSource string     `json:"model_source"` // source of the turns; names a replay as such
	Image       string     `json:"image"`
	SandboxID   string     `json:"sandbox_id,omitempty"`
	StartedAt   time.Time  `json:"started_at"`
	FinishedAt  *time.Time `json:"finished_at,omitempty"`
	Usage       llm.Usage  `json:"usage"` // sum over all steps
	Output      *Collected `json:"output,omitempty"`

	RunID     string      `json:"run_id"`
	Budget    Budget      `json:"budget"`
	Spent     Spent       `json:"spent"`
	ToolCalls int         `json:"tool_calls"` // calls that ran
	Denied    int         `json:"denied"`
	Resumed   int         `json:"resumed,omitempty"` // number of times that a process resumed it
	Outputs   *Outputs    `json:"outputs,omitempty"` // output directory as listed before the collection
	Fork      *ForkOrigin `json:"fork,omitempty"`
}

// ExitReason is the reason why a run ended.
type ExitReason string

// Reasons. For all but the first `sandboxd agent run` exits with 1.
const (
	ExitSubmitted   ExitReason = "submitted"    // the model called submit
	ExitMaxSteps    ExitReason = "max_steps"    // the turns are used up, without a submit
	ExitTokenLimit  ExitReason = "token_limit"  // the conversation exceeds its ceiling, or the model's context
	ExitTimeLimit   ExitReason = "time_limit"   // the time is used up
	ExitCostLimit   ExitReason = "cost_limit"   // the money is used up
	ExitCPULimit    ExitReason = "cpu_limit"    // the sandbox's processor time is used up
	ExitNoToolCall  ExitReason = "no_tool_call" // several turns in a row without a tool call, in spite of reminders
	ExitModelError  ExitReason = "model_error"  // the model is unreachable, or its answers are unusable, after all retries
	ExitSandboxLost ExitReason = "sandbox_lost" // the sandbox or the daemon is gone
	ExitInterrupted ExitReason = "interrupted"  // Ctrl-C, SIGTERM
	ExitFailed      ExitReason = "failed"       // a failure of the agent, such as a full disk
)

// newAction parses a call's arguments for the trajectory.
func newAction(function, arguments string) Action {
	a := Action{Function: function}
	if err := json.Unmarshal([]byte(arguments), &a.Parameters); err != nil || a.Parameters == nil {
		a.Parameters = map[string]json.RawMessage{}
	}
	return a
}

// trajectoryName is the name of the trajectory in a run's directory.
const trajectoryName = "trajectory.json"

// save writes dir/trajectory.json durably.
func (t *Trajectory) save(dir string) error {
	if err := writeJSON(filepath.Join(dir, trajectoryName), t, true); err != nil {
		return fmt.Errorf("save the trajectory: %w", err)
	}
	return nil
}

// discardTrajectory removes the trajectory of an earlier end of the run in dir: it would not match
// the record.
func discardTrajectory(dir string) error {
	if err := os.Remove(filepath.Join(dir, trajectoryName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the earlier trajectory: %w", err)
	}
	return nil
}

// writeJSON writes v to the file at path, as a whole or not at all.
func writeJSON(path string, v any, durable bool) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // these files are for people
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return err
	}
	return writeFile(path, b.Bytes(), durable)
}

// writeFile writes a file as a whole or not at all: beside it first, then renamed.
func writeFile(path string, data []byte, durable bool) error {
	temporary := path + ".new"
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644) //nolint:gosec // results are readable by others, as the umask allows
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
