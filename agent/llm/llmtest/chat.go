package llmtest

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"strconv"

	"github.com/sandboxd/sandboxd/agent/llm"
)

// completion returns the answer as vLLM writes it: with fields that OpenAI does not have, and with
// nulls and empty lists that must not be sent back.
func completion(n int, model string, t Turn) map[string]any {
	calls := []map[string]any{}
	for _, c := range t.calls(n) {
		calls = append(calls, map[string]any{"id": c.ID, "type": "function", "function": map[string]any{"name": c.Name, "arguments": c.Arguments}})
	}
	message := map[string]any{"role": "assistant", "refusal": nil, "annotations": nil, "tool_calls": calls}
	message["content"] = t.Content
	if t.Content == "" {
		message["content"] = nil
	}
	if t.Reasoning != "" {
		message["reasoning_content"] = t.Reasoning
	}
	if t.Refusal != "" {
		message["refusal"] = t.Refusal
	}
	maps.Copy(message, t.Extra)
	answer := map[string]any{
		"id": "chatcmpl-" + strconv.Itoa(n+1), "object": "chat.completion", "created": 1750000000, "model": model,
		"choices": []any{map[string]any{"index": 0, "message": message, "finish_reason": t.finish(), "logprobs": nil}},
	}
	if t.PromptTokens > 0 {
		answer["usage"] = t.chatUsage()
	}
	return answer
}

func (t Turn) finish() string {
	switch {
	case t.FinishReason != "":
		return t.FinishReason
	case len(t.Calls) > 0:
		return "tool_calls"
	}
	return "stop"
}

func (t Turn) chatUsage() map[string]any {
	return map[string]any{
		"prompt_tokens": t.PromptTokens, "completion_tokens": t.outputTokens(), "total_tokens": t.PromptTokens + t.outputTokens(),
		"prompt_tokens_details":     map[string]any{"cached_tokens": t.CachedTokens, "cache_write_tokens": t.CacheWriteTokens},
		"completion_tokens_details": map[string]any{"reasoning_tokens": t.ReasoningTokens},
	}
}

// chatEvents streams as OpenAI does: the role first, a call's ID and name before its arguments, and
// the usage last, without a choice.
func chatEvents(n int, model string, t Turn) []event {
	var events []event
	chunk := func(choices []any, more map[string]any, piece bool) {
		c := map[string]any{"id": "chatcmpl-" + strconv.Itoa(n+1), "object": "chat.completion.chunk", "model": model, "choices": choices}
		maps.Copy(c, more)
		events = append(events, event{data: mustJSON(c), piece: piece})
	}
	delta := func(fields map[string]any, finish any, piece bool) {
		chunk([]any{map[string]any{"index": 0, "delta": fields, "finish_reason": finish, "logprobs": nil}}, map[string]any{"usage": nil}, piece)
	}
	delta(map[string]any{"role": "assistant", "content": nil, "refusal": nil}, nil, false)
	for _, f := range []struct{ field, text string }{{"reasoning_content", t.Reasoning}, {"content", t.Content}, {"refusal", t.Refusal}} {
		for _, p := range t.Pieces.cut(f.text) {
			delta(map[string]any{f.field: p}, nil, true)
		}
	}
	for field, value := range t.Extra {
		if text, ok := value.(string); ok && (field == "reasoning" || field == "reasoning_content") {
			for _, p := range t.Pieces.cut(text) {
				delta(map[string]any{field: p}, nil, true)
			}
			continue
		}
		delta(map[string]any{field: value}, nil, true)
	}
	for i, c := range t.calls(n) {
		call := func(fields map[string]any) {
			fields["index"] = i
			delta(map[string]any{"tool_calls": []any{fields}}, nil, true)
		}
		call(map[string]any{"id": c.ID, "type": "function", "function": map[string]any{"name": c.Name, "arguments": ""}})
		for _, p := range t.Pieces.cut(c.Arguments) {
			call(map[string]any{"function": map[string]any{"arguments": p}})
		}
	}
	delta(map[string]any{}, t.finish(), false)
	if t.PromptTokens > 0 {
		chunk([]any{}, map[string]any{"usage": t.chatUsage()}, false)
	}
	return append(events, event{data: []byte("[DONE]")})
}

// ParseFormat decodes and checks a request body as a strict provider of the format does.
func ParseFormat(format llm.Format, body []byte) (Request, error) {
	switch format {
	case llm.FormatResponses:
		return parseResponses(body)
	case llm.FormatAnthropic:
		return parseAnthropic(body)
	case llm.FormatChat:
	}
	return Parse(body)
}

// Parse decodes and checks the request of a chat completion.
func Parse(body []byte) (Request, error) {
	req := Request{Format: llm.FormatChat}
	if err := json.Unmarshal(body, &req.Fields); err != nil {
		return req, fmt.Errorf("body is not a JSON object: %w", err)
	}
	var wire struct {
		Model    string            `json:"model"`
		Messages []json.RawMessage `json:"messages"`
		Stream   bool              `json:"stream"`
		Tools    []struct {
			Type     string `json:"type"`
			Function struct {
				Name       string         `json:"name"`
				Parameters map[string]any `json:"parameters"`
			} `json:"function"`
		} `json:"tools"`
	}
	if err := json.Unmarshal(body, &wire); err != nil {
		return req, fmt.Errorf("body: %w", err)
	}
	switch {
	case wire.Model == "":
		return req, fmt.Errorf("you must provide a model parameter")
	case len(wire.Messages) == 0:
		return req, fmt.Errorf("messages: [] is too short")
	case wire.Stream && string(req.Fields["stream_options"]) != `{"include_usage":true}`:
		return req, fmt.Errorf("stream_options: %s: the usage is not asked for", req.Fields["stream_options"])
	}
	req.Model, req.Stream = wire.Model, wire.Stream
	for _, t := range wire.Tools {
		if t.Type != "function" || t.Function.Name == "" || t.Function.Parameters["type"] != "object" {
			return req, fmt.Errorf("tools: malformed tool %q", t.Function.Name)
		}
		req.Tools = append(req.Tools, t.Function.Name)
	}
	for i, raw := range wire.Messages {
		var m Message
		if err := json.Unmarshal(raw, &m); err != nil {
			return req, fmt.Errorf("messages[%d]: %w", i, err)
		}
		if err := json.Unmarshal(raw, &m.Fields); err != nil {
			return req, fmt.Errorf("messages[%d]: %w", i, err)
		}
		req.Messages = append(req.Messages, m)
	}
	return req, checkMessages(req.Messages)
}

var functionName = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

// checkMessages enforces the rule that agents break most often. The tool messages that follow an
// assistant message answer each of its calls exactly once, and no other call.
func checkMessages(messages []Message) error {
	open := map[string]bool{} // IDs of the last assistant message; true if answered
	unanswered := func() error {
		for id, answered := range open {
			if !answered {
				return fmt.Errorf("an assistant message with tool_calls must be followed by tool messages responding to each tool_call_id; no response for %q", id)
			}
		}
		return nil
	}
	for i, m := range messages {
		if m.Role != "tool" {
			if err := unanswered(); err != nil {
				return fmt.Errorf("messages[%d]: %w", i, err)
			}
			clear(open)
		}
		for name, value := range m.Fields {
			if string(value) == "null" && name != "content" {
				return fmt.Errorf("messages[%d].%s: null is not allowed", i, name)
			}
		}
		switch m.Role {
		case "system", "user":
			if m.Content == nil {
				return fmt.Errorf("messages[%d]: %s message without content", i, m.Role)
			}
		case "assistant":
			if m.Content == nil && len(m.ToolCalls) == 0 {
				return fmt.Errorf("messages[%d]: assistant message with neither content nor tool calls", i)
			}
			if raw, ok := m.Fields["tool_calls"]; ok && len(m.ToolCalls) == 0 {
				return fmt.Errorf("messages[%d].tool_calls: %s is too short", i, raw)
			}
			for _, c := range m.ToolCalls {
				if _, dup := open[c.ID]; dup || c.ID == "" || c.Type != "function" || !functionName.MatchString(c.Function.Name) {
					return fmt.Errorf("messages[%d]: malformed or repeated tool call %q", i, c.ID)
				}
				if !json.Valid([]byte(c.Function.Arguments)) {
					return fmt.Errorf("messages[%d]: arguments of tool call %q are not JSON", i, c.ID) // vLLM, SGLang
				}
				open[c.ID] = false
			}
		case "tool":
			answered, known := open[m.ToolCallID]
			if !known || answered || m.Content == nil {
				return fmt.Errorf("messages[%d]: tool message for %q answers no open tool call", i, m.ToolCallID)
			}
			open[m.ToolCallID] = true
		default:
			return fmt.Errorf("messages[%d]: unknown role %q", i, m.Role)
		}
	}
	return unanswered()
}
