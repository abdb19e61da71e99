package llmtest

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/sandboxd/sandboxd/agent/llm"
)

// responsesItems returns the output items of a turn.
func responsesItems(n int, t Turn) []map[string]any {
	items := []map[string]any{}
	id := func(kind string) string { return kind + "_" + strconv.Itoa(n+1) + "_" + strconv.Itoa(len(items)) }
	if t.Reasoning != "" {
		items = append(items, map[string]any{
			"id": id("rs"), "type": "reasoning", "summary": []any{map[string]any{"type": "summary_text", "text": t.Reasoning}},
			"encrypted_content": "sealed-" + strconv.Itoa(n+1), "content": nil,
		})
	}
	if text, kind := t.Content, "output_text"; text != "" || t.Refusal != "" {
		part := map[string]any{"type": kind, "text": text, "annotations": []any{}}
		if t.Refusal != "" {
			part = map[string]any{"type": "refusal", "refusal": t.Refusal}
		}
		items = append(items, map[string]any{"id": id("msg"), "type": "message", "status": "completed", "role": "assistant", "content": []any{part}})
	}
	for _, c := range t.calls(n) {
		items = append(items, map[string]any{"id": id("fc"), "type": "function_call", "status": "completed", "call_id": c.ID, "name": c.Name, "arguments": c.Arguments})
	}
	return items
}

func responsesWhole(n int, model string, t Turn) map[string]any {
	answer := map[string]any{
		"id": "resp_" + strconv.Itoa(n+1), "object": "response", "created_at": 1750000000, "model": model,
		"status": "completed", "error": nil, "incomplete_details": nil, "output": responsesItems(n, t),
	}
	switch t.FinishReason {
	case "length":
		answer["status"], answer["incomplete_details"] = "incomplete", map[string]any{"reason": "max_output_tokens"}
	case "content_filter":
		answer["status"], answer["incomplete_details"] = "incomplete", map[string]any{"reason": "content_filter"}
	}
	if t.PromptTokens > 0 {
		answer["usage"] = map[string]any{
			"input_tokens": t.PromptTokens, "output_tokens": t.outputTokens(), "total_tokens": t.PromptTokens + t.outputTokens(),
			"input_tokens_details":  map[string]any{"cached_tokens": t.CachedTokens, "cache_write_tokens": t.CacheWriteTokens},
			"output_tokens_details": map[string]any{"reasoning_tokens": t.ReasoningTokens},
		}
	}
	return answer
}

func responsesEvents(n int, model string, t Turn) []event {
	var events []event
	emit := func(kind string, piece bool, fields map[string]any) {
		fields["type"], fields["sequence_number"] = kind, len(events)
		events = append(events, event{name: kind, data: mustJSON(fields), piece: piece})
	}
	whole := responsesWhole(n, model, t)
	emit("response.created", false, map[string]any{"response": map[string]any{"id": whole["id"], "status": "in_progress", "output": []any{}}})
	for i, item := range responsesItems(n, t) {
		emit("response.output_item.added", false, map[string]any{"output_index": i, "item": item})
		kind, text := "", ""
		switch item["type"] {
		case "reasoning":
			kind, text = "response.reasoning_summary_text.delta", t.Reasoning
		case "message":
			kind, text = "response.output_text.delta", t.Content
			if t.Refusal != "" {
				kind, text = "response.refusal.delta", t.Refusal
			}
		case "function_call":
			kind, text = "response.function_call_arguments.delta", fmt.Sprint(item["arguments"])
		}
		for _, p := range t.Pieces.cut(text) {
			emit(kind, true, map[string]any{"output_index": i, "item_id": item["id"], "delta": p})
		}
		emit("response.output_item.done", false, map[string]any{"output_index": i, "item": item})
	}
	last := "response.completed"
	if whole["status"] == "incomplete" {
		last = "response.incomplete"
	}
	emit(last, false, map[string]any{"response": whole})
	return events
}

func parseResponses(body []byte) (Request, error) {
	req := Request{Format: llm.FormatResponses}
	if err := json.Unmarshal(body, &req.Fields); err != nil {
		return req, fmt.Errorf("body is not a JSON object: %w", err)
	}
	var w struct {
		Model        string                       `json:"model"`
		Instructions string                       `json:"instructions"`
		Input        []map[string]json.RawMessage `json:"input"`
		Stream       bool                         `json:"stream"`
		Store        *bool                        `json:"store"`
		Tools        []struct {
			Type       string         `json:"type"`
			Name       string         `json:"name"`
			Strict     *bool          `json:"strict"`
			Parameters map[string]any `json:"parameters"`
		} `json:"tools"`
	}
	if err := json.Unmarshal(body, &w); err != nil {
		return req, fmt.Errorf("body: %w", err)
	}
	switch {
	case w.Model == "":
		return req, fmt.Errorf("you must provide a model parameter")
	case len(w.Input) == 0:
		return req, fmt.Errorf("input: [] is too short")
	case w.Store == nil || *w.Store:
		return req, fmt.Errorf("store: the conversation would be kept")
	}
	req.Model, req.Stream = w.Model, w.Stream
	for _, t := range w.Tools {
		if t.Type != "function" || t.Name == "" || t.Parameters["type"] != "object" || t.Strict == nil || *t.Strict {
			return req, fmt.Errorf("tools: malformed tool %q", t.Name)
		}
		req.Tools = append(req.Tools, t.Name)
	}
	if w.Instructions != "" {
		req.Messages = append(req.Messages, Message{Role: "system", Content: &w.Instructions})
	}
	open := false // the last message is an assistant's, and further items of its turn join it
	assistant := func() *Message {
		if !open {
			req.Messages = append(req.Messages, Message{Role: "assistant", Fields: map[string]json.RawMessage{}})
			open = true
		}
		return &req.Messages[len(req.Messages)-1]
	}
	for i, fields := range w.Input {
		for name, value := range fields {
			if string(value) == "null" {
				return req, fmt.Errorf("input[%d].%s: null is not allowed", i, name)
			}
		}
		var item struct {
			Type      string          `json:"type"`
			Role      string          `json:"role"`
			Content   json.RawMessage `json:"content"`
			CallID    string          `json:"call_id"`
			Name      string          `json:"name"`
			Arguments string          `json:"arguments"`
			Output    *string         `json:"output"`
			Encrypted string          `json:"encrypted_content"`
			Summary   []any           `json:"summary"`
		}
		if err := json.Unmarshal(mustJSON(fields), &item); err != nil {
			return req, fmt.Errorf("input[%d]: %w", i, err)
		}
		switch item.Type {
		case "reasoning":
			if item.Encrypted == "" || item.Summary == nil {
				return req, fmt.Errorf("input[%d]: reasoning that is not stored and not sealed", i)
			}
			if i+1 == len(w.Input) || string(w.Input[i+1]["type"]) != `"message"` && string(w.Input[i+1]["type"]) != `"function_call"` {
				return req, fmt.Errorf("input[%d]: reasoning was provided without its required following item", i)
			}
			assistant().Fields["reasoning"] = mustJSON(fields)
		case "function_call":
			m := assistant()
			call := MessageCall{ID: item.CallID, Type: "function"}
			call.Function.Name, call.Function.Arguments = item.Name, item.Arguments
			m.ToolCalls = append(m.ToolCalls, call)
		case "function_call_output":
			open = false
			req.Messages = append(req.Messages, Message{Role: "tool", ToolCallID: item.CallID, Content: item.Output})
		case "message":
			text, err := responsesText(item.Content)
			if err != nil {
				return req, fmt.Errorf("input[%d]: %w", i, err)
			}
			if item.Role == "assistant" {
				assistant().Content = &text
				continue
			}
			open = false
			req.Messages = append(req.Messages, Message{Role: item.Role, Content: &text})
		default:
			return req, fmt.Errorf("input[%d]: unknown type %q", i, item.Type)
		}
	}
	return req, checkMessages(req.Messages)
}

// responsesText decodes a message's content: a text, or the parts that the model wrote.
func responsesText(raw json.RawMessage) (string, error) {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text, nil
	}
	var parts []struct {
		Type    string `json:"type"`
		Text    string `json:"text"`
		Refusal string `json:"refusal"`
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return "", fmt.Errorf("content: %w", err)
	}
	for _, p := range parts {
		if p.Type != "output_text" && p.Type != "refusal" {
			return "", fmt.Errorf("content: unknown part %q", p.Type)
		}
		text += p.Text + p.Refusal
	}
	return text, nil
}
