package llm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
)

// maxRecording is the maximum size of a trajectory in bytes.
const maxRecording = 256 << 20

// Recording holds the model turns of a trajectory.json.
type Recording struct {
	ProblemStatement string
	Turns            []Response
}

// trajectory is the part of a trajectory.json that describes the model's turns. Other tools record
// one action a step; ours also records every tool call.
type trajectory struct {
	ProblemStatement string `json:"problem_statement"`
	Steps            *[]struct {
		Thought          string `json:"thought"`
		ReasoningContent string `json:"reasoning_content"`
		Action           struct {
			Function   string          `json:"function"`
			Parameters json.RawMessage `json:"parameters"`
		} `json:"action"`
		ToolCalls *[]struct {
			ID        string `json:"id"`
			Function  string `json:"function"`
			Arguments string `json:"arguments"`
		} `json:"tool_calls"`
	} `json:"steps"`
}

// ReadRecording reads a trajectory.json. It ignores unknown keys, because trajectories may be
// extended.
func ReadRecording(r io.Reader) (*Recording, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxRecording+1))
	if err != nil {
		return nil, fmt.Errorf("read recording: %w", err)
	}
	if len(data) > maxRecording {
		return nil, fmt.Errorf("recording exceeds %d MiB", maxRecording>>20)
	}
	var t trajectory
	if err := json.Unmarshal(data, &t); err != nil {
		return nil, fmt.Errorf("parse recording: %w", err)
	}
	if t.Steps == nil {
		return nil, errors.New(`parse recording: it has no "steps"; want a trajectory.json`)
	}
	rec := &Recording{ProblemStatement: t.ProblemStatement}
	for i, s := range *t.Steps {
		turn := Response{Content: s.Thought, Reasoning: s.ReasoningContent, FinishReason: FinishStop}
		switch {
		case s.ToolCalls != nil:
			for _, c := range *s.ToolCalls {
				turn.ToolCalls = append(turn.ToolCalls, ToolCall{ID: c.ID, Name: c.Function, Arguments: c.Arguments})
			}
		case s.Action.Function != "":
			args := "{}"
			if len(s.Action.Parameters) > 0 && string(s.Action.Parameters) != "null" {
				args = string(s.Action.Parameters)
			}
			turn.ToolCalls = []ToolCall{{ID: "call_" + strconv.Itoa(i+1), Name: s.Action.Function, Arguments: args}}
		}
		MakeUnique(turn.ToolCalls)
		if len(turn.ToolCalls) > 0 {
			turn.FinishReason = FinishToolCalls
		}
		turn.Message = Message{Role: RoleAssistant, Content: turn.Content, ToolCalls: turn.ToolCalls}
		rec.Turns = append(rec.Turns, turn)
	}
	return rec, nil
}

// Replay is a model that returns the turns of a recording, one for each call, whatever the request
// holds. The tool results of this run do not influence the next turn; the tools really run.
type Replay struct {
	name string
	rec  *Recording

	mu   sync.Mutex
	next int
}

// OpenReplay reads the recording at path.
func OpenReplay(path string) (*Replay, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open recording: %w", err)
	}
	defer f.Close()
	return NewReplay(path, f)
}

// NewReplay reads a recording; name appears in messages.
func NewReplay(name string, r io.Reader) (*Replay, error) {
	rec, err := ReadRecording(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(rec.Turns) == 0 {
		return nil, fmt.Errorf("%s: the recording holds no turn", name)
	}
	return &Replay{name: name, rec: rec}, nil
}

// Recording returns the recording that is replayed.
func (r *Replay) Recording() *Recording { return r.rec }

// Describe returns a line that marks the model as a replay.
func (r *Replay) Describe() string {
	return fmt.Sprintf("REPLAY of %s: the %d model turns are recorded, every command is really executed", r.name, len(r.rec.Turns))
}

// Complete returns the next recorded turn, or an error of [KindReplayEnd] after the last.
func (r *Replay) Complete(ctx context.Context, _ Request) (*Response, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("replay: %w", context.Cause(ctx))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.next >= len(r.rec.Turns) {
		return nil, &Error{Kind: KindReplayEnd, Message: fmt.Sprintf("replay of %s: the recording ends after %d turns, and none of them submitted", r.name, len(r.rec.Turns))}
	}
	turn := r.rec.Turns[r.next]
	r.next++
	return &turn, nil
}
