package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/policy"
)

// ledger is the state of a run, derived from the events of its record. Only apply changes it, both
// in the process that writes events and in later readers. So a resumed run continues from exactly
// the recorded state.
type ledger struct {
	run     RunEvent
	sandbox SandboxEvent
	talk    conversation
	steps   []Step
	usage   llm.Usage
	spent   Spent // up to the end of the last turn, plus the open turn's model calls
	idle    int   // turns in a row without a tool call
	open    *openTurn
	end     *EndEvent
	outputs *Outputs
	started time.Time
	last    time.Time
	counted time.Time // time up to which spent is accounted
	resumed int

	snapshots map[int]string // by turn
	calls     map[string]int // calls that ran, by tool
	same      map[string]int // calls that ran, by tool and arguments
	denied    int
	failed    int
	total     int
}

// openTurn is a turn that has begun and not ended.
type openTurn struct {
	number   int
	request  RequestEvent
	asked    time.Time
	response *ResponseEvent // nil until the model has answered
	calls    []openCall
}

// openCall is the progress of a call.
type openCall struct {
	verdict *policy.Verdict
	began   *BeganEvent
	ended   *EndedEvent
}

// clearVerdicts drops the verdicts of calls that are still to run: another policy holds now.
func (t *openTurn) clearVerdicts() {
	for i := range t.calls {
		if c := &t.calls[i]; c.ended == nil && (c.began == nil || c.began.Repeatable) {
			c.verdict = nil
		}
	}
}

// unaccounted returns the working time that the record shows beyond spent: the process ended before
// it recorded a total.
func (l *ledger) unaccounted() time.Duration { return max(l.last.Sub(l.counted), 0) }

// readLedger applies the events of a record.
func readLedger(events []Event) (*ledger, error) {
	l := newLedger()
	for _, e := range events {
		if err := l.apply(e); err != nil {
			return nil, fmt.Errorf("record, line %d: %w", e.N, err)
		}
	}
	return l, nil
}

func newLedger() *ledger {
	return &ledger{snapshots: map[int]string{}, calls: map[string]int{}, same: map[string]int{}}
}

// apply adds one event. An event out of order is an error: the state would be wrong.
func (l *ledger) apply(e Event) error {
	l.last = e.At
	if l.run.ID == "" && e.Run == nil {
		return errors.New("nothing may stand before the run's beginning")
	}
	switch {
	case e.Run != nil:
		if l.run.ID != "" {
			return errors.New("a second beginning")
		}
		if e.Run.ID == "" {
			return errors.New("the run has no id")
		}
		l.run, l.started, l.counted = *e.Run, e.At, e.At
		if l.run.System != "" {
			l.talk.add(llm.Message{Role: llm.RoleSystem, Content: l.run.System})
		}
		l.talk.add(llm.Message{Role: llm.RoleUser, Content: l.run.User})
	case e.Sandbox != nil:
		l.sandbox = *e.Sandbox
		if e.Sandbox.Ready && e.Sandbox.Snapshot != "" && l.open != nil {
			// The snapshot precedes this turn, so none of its calls has begun.
			clear(l.open.calls)
		}
	case e.Request != nil:
		if l.open != nil || e.Turn != len(l.steps)+1 {
			return fmt.Errorf("turn %d begins after %d whole ones", e.Turn, len(l.steps))
		}
		l.talk.remind(e.Request.Reminder)
		l.open = &openTurn{number: e.Turn, request: *e.Request, asked: e.At}
	case e.Response != nil:
		if l.open == nil || l.open.response != nil || e.Turn != l.open.number {
			return errors.New("an answer of the model that was not asked for")
		}
		l.open.response = e.Response
		l.open.calls = make([]openCall, len(e.Response.ToolCalls))
		l.talk.answered(e.Response.message(), e.Response.Usage)
		l.usage.Add(e.Response.Usage)
		used := e.Response.Usage.PromptTokens + e.Response.Usage.CompletionTokens
		if used == 0 {
			used = l.talk.tokens()
		}
		l.spent.Tokens += used
		l.spent.Cost += e.Response.Usage.CostUSD
	case e.Verdict != nil, e.Began != nil, e.Ended != nil:
		return l.applyCall(e)
	case e.TurnEnd != nil:
		return l.closeTurn(e)
	case e.Resumed != nil:
		l.resumed++
		if l.open != nil && e.Resumed.Policy != l.run.Policy {
			l.open.clearVerdicts()
		}
		l.run.Budget, l.run.Policy, l.spent, l.counted = e.Resumed.Budget, e.Resumed.Policy, e.Resumed.Spent, e.At
		l.run.LLMName = e.Resumed.LLMName
		l.run.Model, l.run.ModelSource, l.run.BaseURL = e.Resumed.Model, e.Resumed.ModelSource, e.Resumed.BaseURL
		l.end, l.outputs, l.idle = nil, nil, 0
		if e.Resumed.Message != nil {
			if l.open != nil && l.open.response != nil {
				return errors.New("a message in the middle of a turn")
			}
			l.talk.add(llm.Message{Role: llm.RoleUser, Content: *e.Resumed.Message})
		}
	case e.Outputs != nil:
		l.outputs = e.Outputs
	case e.End != nil:
		l.end, l.spent, l.counted = e.End, e.End.Spent, e.At
	}
	return nil
}

func (l *ledger) applyCall(e Event) error {
	if l.open == nil || l.open.response == nil || e.Turn != l.open.number || e.Call < 1 || e.Call > len(l.open.calls) {
		return fmt.Errorf("call %d of turn %d, which the model did not make", e.Call, e.Turn)
	}
	call, c := &l.open.calls[e.Call-1], l.open.response.ToolCalls[e.Call-1]
	switch {
	case call.ended != nil:
		return fmt.Errorf("call %d of turn %d has ended already", e.Call, e.Turn)
	case e.Verdict != nil:
		call.verdict = e.Verdict
		if e.Verdict.Action != policy.Allow {
			l.denied++
		}
	case e.Began != nil:
		if call.verdict == nil || call.verdict.Action != policy.Allow {
			return fmt.Errorf("call %d of turn %d has begun without leave", e.Call, e.Turn)
		}
		if call.began == nil { // a repeatable call begins again after a crash
			l.total++
			l.calls[c.Name]++
			l.same[callKey(c)]++
		}
		call.began = e.Began
	default:
		call.ended = e.Ended
		if e.Ended.ToolUse != nil {
			l.spent.CPU += time.Duration(e.Ended.ToolUse.CPU * float64(time.Second))
		}
		if e.Ended.Failed {
			l.failed++
		}
	}
	return nil
}

// callKey returns a key that is equal for calls of the same tool with equal arguments.
func callKey(c RecordedCall) string {
	var v any
	if json.Unmarshal([]byte(c.Arguments), &v) == nil {
		if b, err := json.Marshal(v); err == nil {
			return c.Name + " " + string(b)
		}
	}
	return c.Name + " " + c.Arguments
}

// closeTurn adds the answers of all calls to the conversation, in the model's order, and the turn
// to the steps.
func (l *ledger) closeTurn(e Event) error {
	t := l.open
	if t == nil || t.response == nil || e.Turn != t.number {
		return fmt.Errorf("turn %d ends and has not begun", e.Turn)
	}
	r := t.response
	s := Step{
		Thought: r.Content, ReasoningContent: r.Reasoning, Action: newAction("", ""), ToolCalls: []ToolRecord{},
		Metadata: StepMetadata{
			Step: t.number, ExecTime: r.Time, StartedAt: t.asked.UTC(), FinishReason: r.FinishReason,
			Usage: r.Usage, Snapshot: e.TurnEnd.Snapshot,
		},
	}
	var texts []string
	for i, c := range r.ToolCalls {
		call := t.calls[i]
		if call.ended == nil {
			return fmt.Errorf("turn %d ends, and its call %d has not", t.number, i+1)
		}
		if i == 0 {
			s.Action = newAction(c.Name, c.Arguments)
		}
		rec := ToolRecord{
			ID: c.ID, Function: c.Name, Arguments: c.Arguments, Observation: call.ended.Observation, Failed: call.ended.Failed,
			ToolTime: call.ended.Time, Verdict: call.verdict, Unknown: call.ended.Unknown, NotRun: call.ended.NotRun,
		}
		if use := call.ended.ToolUse; use != nil {
			rec.CPUTime, rec.MemoryPeak, rec.Exit = use.CPU, use.Memory, &use.Exit
			s.Metadata.CPUTime += use.CPU
			s.Metadata.MemoryPeak = max(s.Metadata.MemoryPeak, use.Memory)
		}
		s.Metadata.ToolTime += rec.ToolTime
		s.ToolCalls = append(s.ToolCalls, rec)
		texts = append(texts, rec.Observation)
		l.talk.add(llm.Message{Role: llm.RoleTool, ToolCallID: c.ID, Content: rec.Observation})
	}
	s.Observation = strings.Join(texts, "\n\n")
	if e.TurnEnd.Reminder == "" {
		l.idle = 0
	} else {
		l.idle++
		s.Observation = e.TurnEnd.Reminder
		l.talk.add(llm.Message{Role: llm.RoleUser, Content: e.TurnEnd.Reminder})
	}
	if e.TurnEnd.Snapshot != "" {
		l.snapshots[t.number] = e.TurnEnd.Snapshot
	}
	l.spent, l.counted = e.TurnEnd.Spent, e.At
	l.steps = append(l.steps, s)
	l.open = nil
	return nil
}

// submitted reports whether the last complete turn submitted.
func (l *ledger) submitted() bool {
	if len(l.steps) == 0 {
		return false
	}
	for _, c := range l.steps[len(l.steps)-1].ToolCalls {
		if c.Function == ToolSubmit && !c.Failed {
			return true
		}
	}
	return false
}

// trajectory returns the trajectory of the run so far.
func (l *ledger) trajectory() *Trajectory {
	t := &Trajectory{ProblemStatement: l.run.Query, Steps: l.steps, Metadata: RunMetadata{
		TotalSteps: len(l.steps), Model: l.run.Model, ModelSource: l.run.ModelSource, Image: l.run.Image, SandboxID: l.sandbox.ID,
		StartedAt: l.started.UTC(), Usage: l.usage, RunID: l.run.ID, Budget: l.run.Budget, Spent: l.spent, Resumed: l.resumed,
		ToolCalls: l.total, Denied: l.denied, Outputs: l.outputs, Fork: l.run.Fork,
	}}
	if t.Steps == nil {
		t.Steps = []Step{}
	}
	if l.end != nil {
		finished := l.last.UTC()
		t.Metadata.ExitReason, t.Metadata.ExitDetail, t.Metadata.FinishedAt, t.Metadata.Output = l.end.Reason, l.end.Detail, &finished, l.end.Output
	}
	return t
}
