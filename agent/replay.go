package agent

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/api"
)

// Replayed is the result of running a record's tool calls again.
type Replayed struct {
	Turns       int          `json:"turns"`
	Calls       int          `json:"calls"`   // calls that ran again
	Unknown     int          `json:"unknown"` // calls that did not, because their first outcome is unknown
	Differences []Difference `json:"differences"`
	// Times holds the observations that differ only in times: those that mean the moment of the call,
	// times of day, and durations.
	Times []Difference `json:"times,omitempty"`
}

// ReplayRun runs the tool calls of the run in dir again, in a new sandbox with the same image,
// limits and input, and returns the observations that differ. It calls no model. Calls that did not
// run the first time are skipped. Of opts it uses Create, InputDir (if the input has moved), OnNote
// and Now.
func ReplayRun(ctx context.Context, dir string, opts Options) (out *Replayed, err error) {
	events, _, err := ReadRecord(dir)
	if err != nil {
		return nil, err
	}
	opts.Budget, opts.Policy = Budget{}, nil
	r, err := newWork(opts)
	if err != nil {
		return nil, err
	}
	if r.l, err = readLedger(events); err != nil {
		return nil, err
	}
	r.dir = filepath.Clean(dir) // hidden, if the repository has it
	if opts.InputDir != "" {
		r.l.run.InputDir = opts.InputDir
	}
	req := api.CreateSandbox{
		Image: r.l.run.Image, Limits: r.l.run.Limits, Network: r.l.run.Network, Labels: map[string]string{"sandboxd.agent": "replay"},
		Timeout: r.l.run.Budget.Time.Seconds(), IdleTimeout: idleTime.Seconds(),
	}
	if err := r.withRepo(ctx, &req); err != nil {
		return nil, err
	}
	if r.sandbox, err = r.Create(ctx, req); err != nil {
		return nil, fmt.Errorf("create the sandbox: %w", err)
	}
	defer func() { err = errors.Join(err, r.discard(ctx)) }()
	if err := r.setUp(ctx); err != nil {
		return nil, err
	}
	return r.rerun(ctx, r.l.steps)
}

// rerun runs the calls of steps in the run's sandbox, in order.
func (r *run) rerun(ctx context.Context, steps []Step) (*Replayed, error) {
	tools := newTools(r.sandbox, r.l.run.Prompt.WorkingDir, r.l.run.ToolTimeout)
	out := &Replayed{Turns: len(steps), Differences: []Difference{}}
	for _, s := range steps {
		for i, c := range s.ToolCalls {
			switch {
			case c.Unknown:
				out.Unknown++
				continue
			case c.NotRun, c.Function == ToolSubmit:
				continue
			}
			a, err := parse(llm.ToolCall{ID: c.ID, Name: c.Function, Arguments: c.Arguments})
			if err != nil {
				return out, fmt.Errorf("turn %d, call %d: %w", s.Metadata.Step, i+1, err)
			}
			if v := c.Verdict; v != nil && v.Command != "" {
				a = a.replaced(v.Command)
			}
			obs, err := tools.run(ctx, a)
			if err != nil {
				return out, fmt.Errorf("turn %d, call %d: %w", s.Metadata.Step, i+1, err)
			}
			out.Calls++
			if obs.text == c.Observation {
				continue
			}
			diff := Difference{Turn: s.Metadata.Step, Call: i + 1, Function: c.Function, Recorded: c.Observation, Observed: obs.text}
			if diff.Lines = compareLines(diff.Recorded, diff.Observed, s.Metadata.StartedAt, r.Now()); len(diff.Lines) == 0 {
				out.Times = append(out.Times, diff)
			} else {
				out.Differences = append(out.Differences, diff)
			}
		}
	}
	return out, nil
}
