package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm"
)

// MaxIdleTurns is how many turns in a row may go without a tool call before the run ends.
const MaxIdleTurns = 3

// maxCallsPerTurn bounds how many calls of one turn are run; the rest are answered that they were not.
const maxCallsPerTurn = 64

// reminder answers a turn without a tool call.
const reminder = `Your last turn called no tool, so nothing happened. Work goes on through tools only: call execute_bash or str_replace_editor to continue, or submit if the results are in the output directory. Nobody is there to answer questions; decide for yourself.`

var errTimeLimit = errors.New("the run's time limit was reached")

// conversation is the history that the model sees, with an estimate of its size.
type conversation struct {
	messages []llm.Message
	counted  int // tokens up to the last model call, as the provider counted; 0 if it does not
	since    int // bytes added after that
}

func (c *conversation) add(m llm.Message) {
	c.messages = append(c.messages, m)
	c.since += messageSize(m)
}

// remind appends text to the last message. It stays there: a history that only grows can be cached by the provider.
func (c *conversation) remind(text string) {
	last := &c.messages[len(c.messages)-1]
	last.Content += text
	c.since += len(text)
}

// answered records a model call and adds its turn.
func (c *conversation) answered(resp *llm.Response) {
	if total := resp.Usage.PromptTokens + resp.Usage.CompletionTokens; total > 0 {
		c.counted, c.since = total, 0
		c.messages = append(c.messages, resp.Message)
		return
	}
	c.add(resp.Message)
}

// tokens is the provider's count where there is one, and four bytes to a token for what came since.
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

// loop takes turns until one of the reasons to end. Its error is a failure on our side.
func (r *run) loop(ctx context.Context, system, user string) (ExitReason, string, error) {
	var talk conversation
	if system != "" {
		talk.add(llm.Message{Role: llm.RoleSystem, Content: system})
	}
	talk.add(llm.Message{Role: llm.RoleUser, Content: user})
	tools := &toolbox{sandbox: r.sandbox, workingDir: r.Prompt.WorkingDir, timeout: r.ToolTimeout, outputLimit: defaultOutputLimit, shell: "bash", scriptDir: "/tmp"}

	idle := 0
	for step := 1; step <= r.MaxSteps; step++ {
		talk.remind(fmt.Sprintf("\nSteps Remaining: %d", r.MaxSteps-step+1))
		if n := talk.tokens(); n > r.MaxTokenLimit {
			return ExitTokenLimit, fmt.Sprintf("the conversation has about %d tokens, more than the limit of %d", n, r.MaxTokenLimit), nil
		}
		begun := r.Now()
		resp, err := r.ask(ctx, step, &talk)
		if err != nil {
			reason, detail := endOfModel(ctx, err)
			return reason, detail, nil
		}
		asked := r.Now()
		talk.answered(resp)

		rec := Step{
			Thought: resp.Content, ReasoningContent: resp.Reasoning, Action: newAction("", ""), ToolCalls: []ToolRecord{},
			Metadata: StepMetadata{Step: step, ExecTime: seconds(asked.Sub(begun)), StartedAt: begun.UTC(), FinishReason: resp.FinishReason, Usage: resp.Usage},
		}
		submitted, callErr := r.answerCalls(ctx, tools, resp, &rec, &talk)
		if len(resp.ToolCalls) == 0 {
			idle++
			rec.Observation = reminder
			talk.add(llm.Message{Role: llm.RoleUser, Content: reminder})
		} else {
			idle = 0
		}
		rec.Metadata.ToolTime = seconds(r.Now().Sub(asked))
		r.record(rec)
		if err := r.trajectory.save(r.dir); err != nil {
			return ExitFailed, err.Error(), err
		}
		r.OnStep(rec)
		switch {
		case callErr != nil && ctx.Err() != nil:
			return interrupted(ctx), context.Cause(ctx).Error(), nil //nolint:nilerr // how a run ends is a result
		case callErr != nil:
			return ExitSandboxLost, callErr.Error(), nil //nolint:nilerr // how a run ends is a result
		case submitted:
			return ExitSubmitted, "", nil
		case idle >= MaxIdleTurns:
			return ExitNoToolCall, fmt.Sprintf("%d turns in a row called no tool", idle), nil
		}
	}
	return ExitMaxSteps, fmt.Sprintf("no submit within %d steps", r.MaxSteps), nil
}

// ask makes one model call and keeps its request and answer if that was asked for.
func (r *run) ask(ctx context.Context, step int, talk *conversation) (*llm.Response, error) {
	req := llm.Request{
		Model: r.ModelName, Messages: talk.messages, Tools: Tools(), Temperature: r.Temperature,
		MaxTokens: r.MaxTokensPerCall, ExtraBody: r.ExtraBody, OnDelta: r.OnDelta,
	}
	if r.SaveRequests {
		if err := r.saveRequest(step, req); err != nil {
			return nil, err
		}
	}
	resp, err := r.Model.Complete(ctx, req)
	if err != nil {
		return nil, err
	}
	if r.SaveRequests {
		raw := resp.Raw
		if raw == nil { // a replay has none
			if raw, err = json.Marshal(resp.Message); err != nil {
				return nil, fmt.Errorf("keep the response: %w", err)
			}
		}
		name := filepath.Join(r.dir, fmt.Sprintf("response_%03d.json", step))
		if err := writeJSON(name, map[string]any{"call_id": step, "response": raw}); err != nil {
			return nil, fmt.Errorf("keep the response: %w", err)
		}
	}
	return resp, nil
}

// saveRequest writes what is sent, in the shape that LLM-in-Sandbox gives it. The API key is not part of it.
func (r *run) saveRequest(step int, req llm.Request) error {
	extra := map[string]any{}
	if len(req.ExtraBody) > 0 {
		extra["extra_body"] = req.ExtraBody
	}
	kwargs := map[string]any{"max_tokens": req.MaxTokens}
	if req.Temperature != nil {
		kwargs["temperature"] = *req.Temperature
	}
	name := filepath.Join(r.dir, fmt.Sprintf("request_%03d.json", step))
	err := writeJSON(name, map[string]any{
		"call_id": step, "model": req.Model, "api_base": r.BaseURL, "messages": req.Messages, "extra_params": extra, "kwargs": kwargs,
	})
	if err != nil {
		return fmt.Errorf("keep the request: %w", err)
	}
	return nil
}

// answerCalls runs the tool calls of a turn in order and answers every one. After an error the rest are recorded as not run;
// the history need not be answered then, since no turn follows.
func (r *run) answerCalls(ctx context.Context, tools *toolbox, resp *llm.Response, rec *Step, talk *conversation) (submitted bool, err error) {
	var texts []string
	for i, call := range resp.ToolCalls {
		if i == 0 {
			rec.Action = newAction(call.Name, call.Arguments)
		}
		begun := r.Now()
		var obs observation
		switch {
		case err != nil:
			obs = observation{text: "Error: not run, because the run ended before.", failed: true}
		case i >= maxCallsPerTurn:
			obs = observation{text: fmt.Sprintf("Error: not run, because a turn may have %d tool calls at most.", maxCallsPerTurn), failed: true}
		default:
			if obs, err = tools.run(ctx, call); err != nil {
				obs = observation{text: "Error: not finished: " + err.Error(), failed: true}
			} else if obs.failed && resp.FinishReason == llm.FinishLength && i == len(resp.ToolCalls)-1 {
				obs.text += "\nYour turn was cut off at the limit of tokens: write less in one call."
			}
		}
		submitted = submitted || obs.submit
		texts = append(texts, obs.text)
		rec.ToolCalls = append(rec.ToolCalls, ToolRecord{
			ID: call.ID, Function: call.Name, Arguments: call.Arguments, Observation: obs.text, Failed: obs.failed, ToolTime: seconds(r.Now().Sub(begun)),
		})
		talk.add(llm.Message{Role: llm.RoleTool, ToolCallID: call.ID, Content: obs.text})
	}
	rec.Observation = strings.Join(texts, "\n\n")
	return submitted, err
}

// record appends a step to the trajectory.
func (r *run) record(s Step) {
	t := &r.trajectory
	t.Steps = append(t.Steps, s)
	t.Metadata.TotalSteps = len(t.Steps)
	t.Metadata.Usage.Add(s.Metadata.Usage)
}

// endOfModel is why a failed model call ends the run.
func endOfModel(ctx context.Context, err error) (ExitReason, string) {
	var e *llm.Error
	switch {
	case ctx.Err() != nil:
		return interrupted(ctx), context.Cause(ctx).Error()
	case errors.As(err, &e) && e.Kind == llm.KindContextLength:
		return ExitTokenLimit, err.Error()
	case errors.As(err, &e):
		return ExitModelError, err.Error()
	}
	return ExitFailed, err.Error()
}

func interrupted(ctx context.Context) ExitReason {
	if errors.Is(context.Cause(ctx), errTimeLimit) {
		return ExitTimeLimit
	}
	return ExitInterrupted
}

// seconds is a duration for the record: to the microsecond, so that it reads well.
func seconds(d time.Duration) float64 { return math.Round(d.Seconds()*1e6) / 1e6 }
