package llmtest

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/agent/llm"
)

// anthropicBlocks returns the content blocks of a turn. Arguments that are no JSON object can only
// arrive in a stream.
func anthropicBlocks(n int, t Turn) []map[string]any {
	blocks := []map[string]any{}
	if t.Reasoning != "" {
		blocks = append(blocks, map[string]any{"type": "thinking", "thinking": t.Reasoning, "signature": "signed-" + strconv.Itoa(n+1)})
	}
	if text := t.Content + t.Refusal; text != "" {
		blocks = append(blocks, map[string]any{"type": "text", "text": text, "citations": nil})
	}
	for _, c := range t.calls(n) {
		input := any(c.Arguments)
		var object map[string]any
		if c.Arguments == "" {
			input = map[string]any{}
		} else if json.Unmarshal([]byte(c.Arguments), &object) == nil {
			input = json.RawMessage(c.Arguments)
		}
		blocks = append(blocks, map[string]any{"type": "tool_use", "id": c.ID, "name": c.Name, "input": input})
	}
	return blocks
}

func (t Turn) stopReason() string {
	switch {
	case t.Refusal != "" || t.FinishReason == "refusal":
		return "refusal"
	case t.FinishReason == "length":
		return "max_tokens"
	case t.FinishReason != "":
		return t.FinishReason
	case len(t.Calls) > 0:
		return "tool_use"
	}
	return "end_turn"
}

func anthropicWhole(n int, model string, t Turn) map[string]any {
	usage := map[string]any{"input_tokens": 0, "output_tokens": 0}
	if t.PromptTokens > 0 {
		usage = t.inputUsage()
		maps.Copy(usage, t.outputUsage())
	}
	return map[string]any{
		"id": "msg_" + strconv.Itoa(n+1), "type": "message", "role": "assistant", "model": model,
		"content": anthropicBlocks(n, t), "stop_reason": t.stopReason(), "stop_sequence": nil, "usage": usage,
	}
}

// inputUsage returns the counts of the request; input_tokens excludes cached tokens here.
func (t Turn) inputUsage() map[string]any {
	return map[string]any{
		"input_tokens": t.PromptTokens - t.CachedTokens - t.CacheWriteTokens, "output_tokens": 1,
		"cache_read_input_tokens": t.CachedTokens, "cache_creation_input_tokens": t.CacheWriteTokens,
	}
}

func (t Turn) outputUsage() map[string]any {
	return map[string]any{"output_tokens": t.outputTokens(), "output_tokens_details": map[string]any{"thinking_tokens": t.ReasoningTokens}}
}

func anthropicEvents(n int, model string, t Turn) []event {
	var events []event
	emit := func(kind string, piece bool, fields map[string]any) {
		fields["type"] = kind
		events = append(events, event{name: kind, data: mustJSON(fields), piece: piece})
	}
	start := anthropicWhole(n, model, t)
	start["content"], start["stop_reason"] = []any{}, nil
	if t.PromptTokens > 0 {
		start["usage"] = t.inputUsage()
	}
	emit("message_start", false, map[string]any{"message": start})
	emit("ping", false, map[string]any{})
	calls := t.calls(n)
	for i, b := range anthropicBlocks(n, t) {
		open := maps.Clone(b)
		var deltas []map[string]any
		cut := func(kind, field, text string) {
			for _, p := range t.Pieces.cut(text) {
				deltas = append(deltas, map[string]any{"type": kind, field: p})
			}
		}
		switch b["type"] {
		case "thinking":
			open["thinking"], open["signature"] = "", ""
			cut("thinking_delta", "thinking", t.Reasoning)
			deltas = append(deltas, map[string]any{"type": "signature_delta", "signature": b["signature"]})
		case "text":
			open["text"] = ""
			cut("text_delta", "text", t.Content+t.Refusal)
		case "tool_use":
			open["input"] = map[string]any{}
			cut("input_json_delta", "partial_json", calls[0].Arguments)
			calls = calls[1:]
		}
		emit("content_block_start", false, map[string]any{"index": i, "content_block": open})
		for _, d := range deltas {
			emit("content_block_delta", true, map[string]any{"index": i, "delta": d})
		}
		emit("content_block_stop", false, map[string]any{"index": i})
	}
	usage := map[string]any{}
	if t.PromptTokens > 0 {
		usage = t.outputUsage()
	}
	emit("message_delta", false, map[string]any{"delta": map[string]any{"stop_reason": t.stopReason(), "stop_sequence": nil}, "usage": usage})
	emit("message_stop", false, map[string]any{})
	return events
}

var toolUseID = regexp.MustCompile(`^[a-zA-Z0-9_-]+$`)

func parseAnthropic(body []byte) (Request, error) {
	req := Request{Format: llm.FormatAnthropic}
	if err := json.Unmarshal(body, &req.Fields); err != nil {
		return req, fmt.Errorf("body is not a JSON object: %w", err)
	}
	type contentBlock struct {
		Type      string          `json:"type"`
		Text      string          `json:"text"`
		Thinking  string          `json:"thinking"`
		Signature string          `json:"signature"`
		ID        string          `json:"id"`
		Name      string          `json:"name"`
		Input     json.RawMessage `json:"input"`
		ToolUseID string          `json:"tool_use_id"`
		Content   string          `json:"content"`
	}
	var w struct {
		Model     string         `json:"model"`
		MaxTokens int            `json:"max_tokens"`
		System    []contentBlock `json:"system"`
		Messages  []struct {
			Role    string                       `json:"role"`
			Content []map[string]json.RawMessage `json:"content"`
		} `json:"messages"`
		Stream bool `json:"stream"`
		Tools  []struct {
			Name   string         `json:"name"`
			Schema map[string]any `json:"input_schema"`
		} `json:"tools"`
	}
	if err := json.Unmarshal(body, &w); err != nil {
		return req, fmt.Errorf("body: %w", err)
	}
	switch {
	case w.Model == "":
		return req, fmt.Errorf("model: Field required")
	case w.MaxTokens < 1:
		return req, fmt.Errorf("max_tokens: Field required")
	case len(w.Messages) == 0:
		return req, fmt.Errorf("messages: at least one message is required")
	case strings.Count(string(body), `"cache_control"`) > 4:
		return req, fmt.Errorf("a maximum of 4 blocks with cache_control may be provided")
	}
	req.Model, req.Stream = w.Model, w.Stream
	for _, t := range w.Tools {
		if t.Name == "" || t.Schema["type"] != "object" {
			return req, fmt.Errorf("tools: malformed tool %q", t.Name)
		}
		req.Tools = append(req.Tools, t.Name)
	}
	for _, b := range w.System {
		req.Messages = append(req.Messages, Message{Role: "system", Content: &b.Text})
	}
	for i, m := range w.Messages {
		if i > 0 && w.Messages[i-1].Role == m.Role {
			return req, fmt.Errorf("messages.%d: roles must take turns", i)
		}
		if len(m.Content) == 0 {
			return req, fmt.Errorf("messages.%d: all messages must have non-empty content", i)
		}
		assistant := Message{Role: "assistant", Fields: map[string]json.RawMessage{}}
		said := false
		for j, fields := range m.Content {
			var b contentBlock
			if err := json.Unmarshal(mustJSON(fields), &b); err != nil {
				return req, fmt.Errorf("messages.%d.content.%d: %w", i, j, err)
			}
			for name, value := range fields {
				if string(value) == "null" {
					return req, fmt.Errorf("messages.%d.content.%d.%s: null is not allowed", i, j, name)
				}
			}
			switch m.Role + " " + b.Type {
			case "user text", "assistant text":
				if strings.TrimSpace(b.Text) == "" {
					return req, fmt.Errorf("messages.%d.content.%d: text content blocks must contain non-whitespace text", i, j)
				}
				if m.Role == "user" {
					req.Messages = append(req.Messages, Message{Role: "user", Content: &b.Text})
					continue
				}
				assistant.Content, said = &b.Text, true
			case "user tool_result":
				req.Messages = append(req.Messages, Message{Role: "tool", ToolCallID: b.ToolUseID, Content: &b.Content})
			case "assistant thinking":
				if b.Signature == "" || said {
					return req, fmt.Errorf("messages.%d.content.%d: thinking that is not signed, or not first", i, j)
				}
				assistant.Fields["thinking"] = mustJSON(fields)
			case "assistant tool_use":
				if !toolUseID.MatchString(b.ID) {
					return req, fmt.Errorf("messages.%d.content.%d.tool_use.id: %q should match %s", i, j, b.ID, toolUseID)
				}
				if len(b.Input) == 0 || b.Input[0] != '{' {
					return req, fmt.Errorf("messages.%d.content.%d.tool_use.input: Input should be a valid dictionary", i, j)
				}
				call := MessageCall{ID: b.ID, Type: "function"}
				call.Function.Name, call.Function.Arguments = b.Name, string(b.Input)
				assistant.ToolCalls, said = append(assistant.ToolCalls, call), true
			default:
				return req, fmt.Errorf("messages.%d.content.%d: unexpected %s in a message of %s", i, j, b.Type, m.Role)
			}
		}
		if m.Role == "assistant" {
			if !said {
				return req, fmt.Errorf("messages.%d: nothing but thinking", i)
			}
			req.Messages = append(req.Messages, assistant)
		}
	}
	return req, checkMessages(req.Messages)
}
