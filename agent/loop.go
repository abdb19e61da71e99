package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/policy"
)

// MaxIdleTurns is the number of consecutive turns without a tool call after which the run ends.
const MaxIdleTurns = 3

// maxCallsPerTurn bounds the calls of one turn that run; further ones are answered as not run.
const maxCallsPerTurn = 64

// reminder answers a turn without a tool call.
const reminder = `Your last turn called no tool, so nothing happened. Work goes on through tools only: call execute_bash or str_replace_editor to continue, or submit if the results are in the output directory. Nobody is there to answer questions; decide for yourself.`

// budgetEnd is the cause of a context that ends because a part of the budget is used up.
type budgetEnd struct {
	reason ExitReason
	detail string
}

func (e *budgetEnd) Error() string { return e.detail }

// conversation is the history that the model sees, with an estimate of its size.
type conversation struct {
	messages []llm.Message
	counted  int // tokens up to the last model call, by the provider's count; 0 if it does not count
	since    int // bytes added after that call
}

func (c *conversation) add(m llm.Message) {
	c.messages = append(c.messages, m)
	c.since += messageSize(m)
}

// remind appends text to the last message, for good: providers can cache a history that only grows.
func (c *conversation) remind(text string) {
	last := &c.messages[len(c.messages)-1]
	last.Content += text
	c.since += len(text)
}

// answered adds the turn of a model call.
func (c *conversation) answered(m llm.Message, u llm.Usage) {
	if total := u.PromptTokens + u.CompletionTokens; total > 0 {
		c.counted, c.since = total, 0
		c.messages = append(c.messages, m)
		return
	}
	c.add(m)
}

// tokens returns the provider's count, plus an estimate of four bytes a token for later messages.
func (c *conversation) tokens() int { return c.counted + c.since/4 }

func messageSize(m llm.Message) int {
	if m.Raw != nil {
		return len(m.Raw)
	}
	n := len(m.Content)
	for _, call := range m.ToolCalls {
		n += len(call.Name) + len(call.Arguments)
	}
	return n
}

// loop takes turns until the run ends. It continues from the ledger's state: at the start, between
// two turns or within one. An error is a failure of the agent itself.
func (r *run) loop(ctx context.Context) (ExitReason, string, error) {
	tools := newTools(r.sandbox, r.l.run.Prompt.WorkingDir, r.l.run.ToolTimeout)
	tools.onOutput = r.OnOutput
	tools.ruled = r.policy.HasRules()
	for {
		if r.l.open == nil {
			if reason, detail, err := r.beginTurn(ctx); reason != "" || err != nil {
				return reason, detail, err
			}
		}
		turn := r.l.open.number
		if r.l.open.response == nil {
			if reason, detail, err := r.ask(ctx, turn); reason != "" || err != nil {
				return reason, detail, err
			}
		}
		callErr, err := r.answerCalls(ctx, tools)
		if err != nil {
			return ExitFailed, err.Error(), err
		}
		snapshot := ""
		if r.l.run.Snapshots && callErr == nil {
			if snapshot, callErr = r.snapshot(ctx, turn); callErr != nil {
				r.OnNote("no snapshot of turn " + strconv.Itoa(turn) + ": " + callErr.Error())
			}
		}
		end := TurnEvent{Snapshot: snapshot, Spent: r.spend(ctx)}
		end.Spent.Turns = turn
		if len(r.l.open.response.ToolCalls) == 0 {
			end.Reminder = reminder
		}
		if err := r.emit(Event{Turn: turn, TurnEnd: &end}, true); err != nil {
			return ExitFailed, err.Error(), err
		}
		r.OnStep(r.l.steps[turn-1])
		r.reportStatus(true)
		switch {
		case callErr != nil && ctx.Err() != nil:
			reason, detail := interrupted(ctx)
			return reason, detail, nil //nolint:nilerr // the end of a run is a result
		case callErr != nil && lost(callErr):
			return ExitSandboxLost, callErr.Error(), nil
		case callErr != nil:
			return ExitFailed, callErr.Error(), callErr
		}
	}
}

// beginTurn checks the end conditions, then opens the turn.
func (r *run) beginTurn(ctx context.Context) (ExitReason, string, error) {
	b, spent := r.l.run.Budget, r.spend(ctx)
	switch {
	case r.l.submitted():
		return ExitSubmitted, "", nil
	case r.l.idle >= MaxIdleTurns:
		return ExitNoToolCall, fmt.Sprintf("%d turns in a row called no tool", r.l.idle), nil
	case ctx.Err() != nil:
		reason, detail := interrupted(ctx)
		return reason, detail, nil //nolint:nilerr // the end of a run is a result
	}
	if reason, detail := b.over(spent); reason != "" {
		return reason, detail, nil
	}
	turn := len(r.l.steps) + 1
	req := RequestEvent{Reminder: fmt.Sprintf("\nSteps Remaining: %d", b.Turns-turn+1), Messages: len(r.l.talk.messages)}
	req.Tokens = r.l.talk.tokens() + len(req.Reminder)/4
	var reason ExitReason
	var detail string
	if req.MaxTokens, reason, detail = b.answerTokens(spent, req.Tokens, r.l.run.PerCall, r.Price); reason != "" {
		return reason, detail, nil
	}
	r.budgetChecked = true
	return "", "", r.emit(Event{Turn: turn, Request: &req}, false)
}

// checkOpenRequest reports whether the open turn's request, which another process has recorded,
// still fits the budget. It returns the ceiling of the answer.
func (r *run) checkOpenRequest(ctx context.Context) (most int, reason ExitReason, detail string) {
	most = r.l.open.request.MaxTokens
	if r.budgetChecked {
		return most, "", ""
	}
	b, spent := r.l.run.Budget, r.spend(ctx)
	if reason, detail = b.over(spent); reason != "" {
		return 0, reason, detail
	}
	left, reason, detail := b.answerTokens(spent, r.l.talk.tokens(), r.l.run.PerCall, r.Price)
	return min(most, left), reason, detail
}

// ask makes one model call, and saves its request and answer if the run's options say so.
func (r *run) ask(ctx context.Context, turn int) (ExitReason, string, error) {
	most, reason, detail := r.checkOpenRequest(ctx)
	if reason != "" {
		return reason, detail, nil
	}
	req := llm.Request{
		Model: r.l.run.Model, Messages: r.l.talk.messages, Tools: Tools(), Temperature: r.l.run.Temperature,
		MaxTokens: most, ExtraBody: r.l.run.ExtraBody, OnDelta: r.OnDelta,
	}
	if r.l.run.SaveCalls {
		if err := SaveRequest(r.dir, turn, req, r.l.run.BaseURL, r.Secrets); err != nil {
			return ExitFailed, err.Error(), err
		}
	}
	begun := r.Now()
	resp, err := r.Model.Complete(ctx, req)
	if err != nil {
		reason, detail := endOfModel(ctx, err)
		return reason, detail, nil
	}
	took := r.Now().Sub(begun)
	if r.l.run.SaveCalls {
		if err := SaveResponse(r.dir, turn, resp, r.Secrets); err != nil {
			return ExitFailed, err.Error(), err
		}
	}
	if r.Price == nil {
		resp.Usage.UnpricedCalls = 1
	} else {
		used := resp.Usage
		if used.PromptTokens+used.CompletionTokens == 0 { // not counted by the provider: estimate
			used = llm.Usage{PromptTokens: r.l.open.request.Tokens, CompletionTokens: messageSize(resp.Message) / 4}
		}
		resp.Usage.CostUSD = r.Price.Cost(used)
	}
	return "", "", r.emit(Event{Turn: turn, Response: newResponse(resp, took)}, false)
}

// SaveRequest writes a request to dir/request_NNN.json, in the form of LLM-in-Sandbox. The file has
// no API key.
func SaveRequest(dir string, step int, req llm.Request, baseURL string, secrets []string) error {
	extra := map[string]any{}
	if len(req.ExtraBody) > 0 {
		extra["extra_body"] = req.ExtraBody
	}
	kwargs := map[string]any{"max_tokens": req.MaxTokens}
	if req.Temperature != nil {
		kwargs["temperature"] = *req.Temperature
	}
	return saveCall(dir, fmt.Sprintf("request_%03d.json", step), secrets, map[string]any{
		"call_id": step, "model": req.Model, "api_base": baseURL, "messages": req.Messages, "extra_params": extra, "kwargs": kwargs,
	})
}

// SaveResponse writes a response to dir/response_NNN.json.
func SaveResponse(dir string, step int, resp *llm.Response, secrets []string) error {
	raw := resp.Raw
	if raw == nil { // a replay has none
		var err error
		if raw, err = json.Marshal(resp.Message); err != nil {
			return fmt.Errorf("keep the response: %w", err)
		}
	}
	return saveCall(dir, fmt.Sprintf("response_%03d.json", step), secrets, map[string]any{"call_id": step, "response": raw})
}

// saveCall writes one of these files without secrets, which a server may have echoed.
func saveCall(dir, name string, secrets []string, v any) error {
	line, err := marshalLine(v)
	if err == nil {
		err = writeJSON(filepath.Join(dir, name), json.RawMessage(redact(line, secretForms(secrets))), false)
	}
	if err != nil {
		return fmt.Errorf("keep %s: %w", name, err)
	}
	return nil
}

// maxParallelCalls bounds the read-only calls that run concurrently.
const maxParallelCalls = 8

// answerCalls runs the open turn's remaining calls and answers each of them. callErr means that the
// run cannot continue; the remaining calls are then answered as not run. err is a failure of the
// agent itself.
func (r *run) answerCalls(ctx context.Context, tools *toolbox) (callErr, err error) {
	t := r.l.open
	for i := 0; i < len(t.calls); {
		var group []pending
		for ; i < len(t.calls) && len(group) < maxParallelCalls; i++ {
			if t.calls[i].ended != nil {
				continue
			}
			p, ready, err := r.prepare(ctx, i, &callErr)
			if err != nil {
				return callErr, err
			}
			if !ready {
				continue
			}
			if !p.action.readOnly() {
				if len(group) == 0 {
					group, i = append(group, p), i+1
				}
				break // it waits for earlier calls; its verdict is recorded already
			}
			group = append(group, p)
		}
		if len(group) == 0 {
			continue
		}
		ended, err := r.runGroup(ctx, tools, group)
		if err != nil {
			return callErr, err
		}
		if callErr == nil {
			callErr = ended
		}
	}
	return callErr, nil
}

// pending is a call that may run.
type pending struct {
	index  int
	action action
}

// prepare returns a call that is ready to run, or answers it without running it.
func (r *run) prepare(ctx context.Context, i int, callErr *error) (p pending, ready bool, err error) {
	t := r.l.open
	call := llm.ToolCall(t.response.ToolCalls[i])
	answer := func(e EndedEvent) (pending, bool, error) {
		e.Failed = true
		return pending{}, false, r.emit(Event{Turn: t.number, Call: i + 1, Ended: &e}, false)
	}
	if began := t.calls[i].began; began != nil && !began.Repeatable {
		return answer(EndedEvent{Unknown: true, Observation: unknownDone})
	}
	if *callErr != nil {
		return answer(EndedEvent{NotRun: true, Observation: "Error: not run, because the run ended before."})
	}
	if i >= maxCallsPerTurn {
		return answer(EndedEvent{NotRun: true, Observation: fmt.Sprintf("Error: not run, because a turn may have %d tool calls at most.", maxCallsPerTurn)})
	}
	a, err := parse(call)
	if err != nil {
		obs, err := refusal(call.Name, err)
		if err != nil {
			return p, false, err
		}
		if t.response.FinishReason == llm.FinishLength && i == len(t.calls)-1 {
			obs.text += "\nYour turn was cut off at the limit of tokens: write less in one call."
		}
		return answer(EndedEvent{NotRun: true, Observation: obs.text})
	}
	if t.calls[i].verdict == nil {
		v, err := r.decide(ctx, i, call, a)
		if err != nil { // the run ended during the question, so there is no verdict
			*callErr = err
			return answer(EndedEvent{NotRun: true, Observation: "Error: not run, because the run ended before."})
		}
		if err := r.emit(Event{Turn: t.number, Call: i + 1, Verdict: &v}, false); err != nil {
			return p, false, err
		}
	}
	v := t.calls[i].verdict
	if v.Action != policy.Allow {
		return answer(EndedEvent{NotRun: true, Observation: denial(*v)})
	}
	if v.Command != "" {
		a = a.replaced(v.Command)
	}
	return pending{i, a}, true, nil
}

// unknownDone answers a call that was running when the agent ended.
const unknownDone = "Error: it is unknown whether this was done. The run was interrupted after the call had begun; it may have been done, in part, or not at all. It has not been repeated. Look at the state of things before you go on."

// denial returns the answer to a call that the policy did not allow.
func denial(v policy.Verdict) string {
	text := "Error: not run. The policy of this run does not allow it"
	if v.Rule != "" {
		text += " (" + v.Rule + ")"
	}
	if v.Asked {
		text += "; " + v.By + " was asked"
	}
	if v.Reason != "" {
		text += ": " + v.Reason
	}
	return text + ". Do not try to get round it; find another way or do without."
}

// decide asks the policy, and if the policy says so, a person or a service.
func (r *run) decide(ctx context.Context, i int, call llm.ToolCall, a action) (policy.Verdict, error) {
	facts := r.facts(i, call, a)
	if ctx.Err() != nil {
		return policy.Verdict{}, context.Cause(ctx)
	}
	v := r.policy.Decide(ctx, facts)
	if ctx.Err() != nil {
		return policy.Verdict{}, context.Cause(ctx)
	}
	if v.Action != policy.Ask {
		return v, nil
	}
	v.Asked, v.Action = true, policy.Deny
	if r.Asker == nil {
		v.By, v.Reason = "none", "no person or service is set up to be asked"
		return v, nil
	}
	v.By = r.Asker.By()
	answer, err := r.Asker.Ask(ctx, policy.Question{
		Run: r.l.run.ID, Turn: facts.Turn, Call: i + 1, Tool: facts.Tool, Arguments: facts.Arguments, Rule: v.Rule, Reason: v.Reason,
		Programs: facts.Programs, Paths: facts.Paths, Writes: facts.Writes, Hosts: facts.Hosts, Opaque: facts.Opaque, Spent: facts.Spent,
	})
	switch {
	case ctx.Err() != nil:
		return policy.Verdict{}, context.Cause(ctx)
	case err != nil:
		v.Reason = err.Error()
	case answer.Allow && answer.Command != "":
		return r.decideReplaced(ctx, i, v, call, answer)
	case answer.Allow:
		v.Action, v.Reason = policy.Allow, clipMiddle(answer.Reason, maxReason)
	default:
		v.Reason = clipMiddle(answer.Reason, maxReason)
	}
	return v, nil
}

// decideReplaced completes the verdict v on a call whose command was replaced in the answer. What
// the policy denies stays denied; what it would ask about has been answered.
func (r *run) decideReplaced(ctx context.Context, i int, v policy.Verdict, call llm.ToolCall, answer policy.Answer) (policy.Verdict, error) {
	arguments, err := json.Marshal(map[string]string{"command": answer.Command})
	if err != nil { // a map of strings always marshals
		arguments = nil
	}
	call.Arguments = string(arguments)
	a, err := parse(call)
	if err != nil || a.tool != ToolBash {
		v.Reason = "the call was replaced by one that cannot run"
		return v, nil //nolint:nilerr // the verdict denies it
	}
	again := r.policy.Decide(ctx, r.facts(i, call, a))
	if ctx.Err() != nil {
		return policy.Verdict{}, context.Cause(ctx)
	}
	if again.Action == policy.Deny {
		v.Rule, v.Reason = again.Rule, again.Reason
		return v, nil
	}
	v.Action, v.Reason, v.Command = policy.Allow, clipMiddle(answer.Reason, maxReason), answer.Command
	return v, nil
}

// maxReason bounds the reason of a person or a service in bytes, since the model receives it.
const maxReason = 2000

// facts returns a call as a policy sees it.
func (r *run) facts(i int, call llm.ToolCall, a action) policy.Facts {
	l := r.l
	f := policy.Facts{
		Tool: a.tool, WorkingDir: l.run.Prompt.WorkingDir, InputDir: l.run.Prompt.InputDir, OutputDir: l.run.Prompt.OutputDir,
		Turn: l.open.number, Repeats: l.same[callKey(l.open.response.ToolCalls[i])], Spent: l.spent.facts(), Budget: l.run.Budget.facts(),
		Count: map[string]int{"calls": l.total, "denied": l.denied, "failed": l.failed, ToolBash: 0, ToolEditor: 0, ToolSubmit: 0},
	}
	f.Spent["seconds"] = r.elapsed().Seconds()
	maps.Copy(f.Count, l.calls)
	// The strict parser has accepted the text, so this cannot differ from its result.
	if err := json.Unmarshal([]byte(call.Arguments), &f.Arguments); err != nil {
		f.Arguments = nil
	}
	switch a.tool {
	case ToolBash:
		f.Shell(a.command)
	case ToolEditor:
		f.File(*a.edit.Path, !a.readOnly())
	}
	return f
}

// runGroup runs a group of calls concurrently, or a single one, and records their ends.
func (r *run) runGroup(ctx context.Context, tools *toolbox, group []pending) (callErr, err error) {
	turn := r.l.open.number
	for _, p := range group {
		repeatable := p.action.readOnly() || p.action.tool == ToolSubmit
		if err := r.emit(Event{Turn: turn, Call: p.index + 1, Began: &BeganEvent{Repeatable: repeatable}}, !repeatable); err != nil {
			return nil, err
		}
	}
	type outcome struct {
		obs  observation
		err  error
		took time.Duration
	}
	outcomes := make([]outcome, len(group))
	runOne := func(i int) {
		begun := r.Now()
		obs, err := tools.run(ctx, group[i].action)
		outcomes[i] = outcome{obs, err, r.Now().Sub(begun)}
	}
	if len(group) == 1 {
		runOne(0)
	} else {
		var all sync.WaitGroup
		for i := range group {
			all.Go(func() { runOne(i) })
		}
		all.Wait()
	}
	for i, o := range outcomes {
		e := EndedEvent{Observation: o.obs.text, Failed: o.obs.failed, ToolUse: o.obs.use, Time: seconds(o.took)}
		if o.err != nil {
			callErr = o.err
			e.Failed, e.Unknown = true, !group[i].action.readOnly()
			e.Observation = "Error: not finished: " + o.err.Error()
		}
		if err := r.emit(Event{Turn: turn, Call: group[i].index + 1, Ended: &e}, false); err != nil {
			return callErr, err
		}
	}
	return callErr, nil
}

// snapshot keeps the sandbox's files after a turn.
func (r *run) snapshot(ctx context.Context, turn int) (string, error) {
	id, err := r.sandbox.Snapshot(ctx, fmt.Sprintf("agent run %s, turn %d", clipMiddle(r.l.run.ID, 200), turn))
	switch {
	case err == nil:
		return id, nil
	case ctx.Err() != nil:
		return "", context.Cause(ctx)
	}
	return "", fmt.Errorf("take a snapshot after turn %d: %w", turn, err)
}

// endOfModel returns the exit reason for a failed model call.
func endOfModel(ctx context.Context, err error) (ExitReason, string) {
	var e *llm.Error
	switch {
	case ctx.Err() != nil:
		return interrupted(ctx)
	case errors.As(err, &e) && e.Kind == llm.KindContextLength:
		return ExitTokenLimit, err.Error()
	case errors.As(err, &e):
		return ExitModelError, err.Error()
	}
	return ExitFailed, err.Error()
}

func interrupted(ctx context.Context) (ExitReason, string) {
	cause := context.Cause(ctx)
	if b, ok := errors.AsType[*budgetEnd](cause); ok {
		return b.reason, b.detail
	}
	return ExitInterrupted, cause.Error()
}

// seconds returns a duration in seconds, rounded to microseconds for readability.
func seconds(d time.Duration) float64 { return math.Round(d.Seconds()*1e6) / 1e6 }
