package llm

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/responses"
)

// Responses calls a server that speaks OpenAI's Responses. The server stores nothing: every request
// holds the whole conversation, and the model's reasoning travels in it encrypted. Responses does
// not retry: wrap it in [Retry].
type Responses struct {
	endpoint
	service responses.ResponseService
}

// NewResponses returns a model for the server at opts.BaseURL; it sends nothing yet.
func NewResponses(opts ServerOptions) (*Responses, error) {
	e, err := newEndpoint(opts)
	if err != nil {
		return nil, err
	}
	return &Responses{endpoint: e, service: responses.NewResponseService(e.openAIOptions(opts.BaseURL)...)}, nil
}

// Describe names the server.
func (r *Responses) Describe() string { return "OpenAI Responses at " + r.baseURL }

// Complete requests one response.
func (r *Responses) Complete(ctx context.Context, req Request) (*Response, error) {
	params, err := responsesParams(req)
	if err != nil {
		return nil, err
	}
	body, err := r.exchange(ctx, func(into **http.Response) error {
		opts := []option.RequestOption{option.WithResponseBodyInto(into)}
		if req.OnDelta != nil {
			opts = append(opts, option.WithJSONSet("stream", true))
		}
		_, err := r.service.New(ctx, params, opts...)
		return err
	}, &responsesStream{show: req.show})
	if err != nil {
		return r.finish(nil, err)
	}
	return r.finish(parseResponses(body))
}

// inputItem is an element of a request's input that we write.
type inputItem struct {
	Type      string  `json:"type"`
	Role      Role    `json:"role,omitempty"`
	Content   *string `json:"content,omitempty"`
	CallID    string  `json:"call_id,omitempty"`
	Name      string  `json:"name,omitempty"`
	Arguments string  `json:"arguments,omitempty"`
	Output    *string `json:"output,omitempty"`
}

// responsesParams converts a request to the SDK's form.
func responsesParams(req Request) (responses.ResponseNewParams, error) {
	params := responses.ResponseNewParams{Model: req.Model, Store: openai.Bool(false)}
	if reasoningModel(req.Model) { // other models refuse the option
		params.Include = []responses.ResponseIncludable{responses.ResponseIncludableReasoningEncryptedContent}
	}
	var items []json.RawMessage
	add := func(item inputItem) error {
		raw, err := json.Marshal(item)
		items = append(items, raw)
		return err
	}
	for i, m := range req.Messages {
		var err error
		switch {
		case m.Role == RoleSystem && i == 0:
			params.Instructions = openai.String(m.Content)
		case m.Role == RoleTool:
			err = add(inputItem{Type: "function_call_output", CallID: m.ToolCallID, Output: &m.Content})
		case m.Role == RoleAssistant && m.Raw != nil && m.RawFormat == FormatResponses:
			var output []json.RawMessage
			err = json.Unmarshal(m.Raw, &output)
			items = append(items, output...)
		default:
			if m.Content != "" || m.Role != RoleAssistant {
				err = add(inputItem{Type: "message", Role: m.Role, Content: &m.Content})
			}
			for _, c := range m.ToolCalls {
				if err == nil {
					err = add(inputItem{Type: "function_call", CallID: c.ID, Name: historyName(c.Name), Arguments: historyArguments(c.Arguments)})
				}
			}
		}
		if err != nil {
			return params, fmt.Errorf("encode message %d: %w", i, err)
		}
	}
	for _, item := range items {
		params.Input.OfInputItemList = append(params.Input.OfInputItemList, param.Override[responses.ResponseInputItemUnionParam](item))
	}
	for _, t := range req.Tools {
		var schema map[string]any
		if err := json.Unmarshal(t.Parameters, &schema); err != nil {
			return params, fmt.Errorf("schema of tool %s: %w", t.Name, err)
		}
		params.Tools = append(params.Tools, responses.ToolUnionParam{OfFunction: &responses.FunctionToolParam{
			Name: t.Name, Description: openai.String(t.Description), Parameters: schema,
			Strict: openai.Bool(false), // strict mode requires every argument
		}})
	}
	if req.Temperature != nil {
		params.Temperature = openai.Float(*req.Temperature)
	}
	if req.MaxTokens > 0 {
		params.MaxOutputTokens = openai.Int(int64(req.MaxTokens))
	}
	if len(req.ExtraBody) > 0 {
		params.SetExtraFields(req.ExtraBody)
	}
	return params, nil
}

// responsesAnswer is the part of a response that we read.
type responsesAnswer struct {
	Status     string `json:"status"`
	Incomplete struct {
		Reason string `json:"reason"`
	} `json:"incomplete_details"`
	Error  json.RawMessage              `json:"error"`
	Output []map[string]json.RawMessage `json:"output"`
	Usage  struct {
		InputTokens  int `json:"input_tokens"`
		OutputTokens int `json:"output_tokens"`
		TotalTokens  int `json:"total_tokens"`
		InputDetails struct {
			CachedTokens     int `json:"cached_tokens"`
			CacheWriteTokens int `json:"cache_write_tokens"`
		} `json:"input_tokens_details"`
		OutputDetails struct {
			ReasoningTokens int `json:"reasoning_tokens"`
		} `json:"output_tokens_details"`
	} `json:"usage"`
}

// outputItem is the part of an output item that we read.
type outputItem struct {
	Type      string       `json:"type"`
	CallID    string       `json:"call_id"`
	Name      string       `json:"name"`
	Arguments string       `json:"arguments"`
	Content   []outputPart `json:"content"`
	Summary   []outputPart `json:"summary"`
}

type outputPart struct {
	Type    string `json:"type"`
	Text    string `json:"text"`
	Refusal string `json:"refusal"`
}

// parseResponses decodes a response. Its content is untrusted.
func parseResponses(raw []byte) (*Response, error) {
	var a responsesAnswer
	if err := json.Unmarshal(raw, &a); err != nil {
		return nil, badResponse("the answer is not a response: %v: %s", err, clip(string(raw), 200))
	}
	switch {
	case present(a.Error):
		return nil, streamError(a.Error)
	case a.Status == "failed" || a.Status == "cancelled":
		return nil, &Error{Kind: KindServer, Message: "the response has " + a.Status + " without a reason"}
	case a.Output == nil:
		return nil, badResponse("the answer has no output: %s", clip(string(raw), 200))
	}
	resp := &Response{FinishReason: FinishStop, Raw: raw, Usage: Usage{
		PromptTokens: max(0, a.Usage.InputTokens), CompletionTokens: max(0, a.Usage.OutputTokens), TotalTokens: max(0, a.Usage.TotalTokens),
		CachedTokens:     max(0, a.Usage.InputDetails.CachedTokens),
		CacheWriteTokens: max(0, a.Usage.InputDetails.CacheWriteTokens),
		ReasoningTokens:  max(0, a.Usage.OutputDetails.ReasoningTokens),
	}}
	var content, refusal, reasoning []string
	var calls []int // indices of the tool calls in the output
	last := -1      // index of the last item other than reasoning
	for i, fields := range a.Output {
		item, err := decodeFields[outputItem](fields)
		if err != nil {
			return nil, badResponse("item %d of the answer cannot be read: %v", i, err)
		}
		if item.Type != "reasoning" {
			last = i
		}
		switch item.Type {
		case "message":
			for _, p := range item.Content {
				content, refusal = appendText(content, p.Text), appendText(refusal, p.Refusal)
			}
		case "reasoning":
			for _, p := range append(item.Summary, item.Content...) {
				reasoning = appendText(reasoning, p.Text)
			}
		case "function_call":
			calls = append(calls, i)
			resp.ToolCalls = append(resp.ToolCalls, ToolCall{ID: item.CallID, Name: item.Name, Arguments: item.Arguments})
		}
	}
	MakeUnique(resp.ToolCalls)
	resp.Content, resp.Reasoning = strings.Join(content, "\n"), strings.Join(reasoning, "\n")
	switch {
	case a.Incomplete.Reason == "max_output_tokens":
		resp.FinishReason = FinishLength
	case a.Incomplete.Reason != "":
		resp.FinishReason = a.Incomplete.Reason
	case len(calls) > 0:
		resp.FinishReason = FinishToolCalls
	case resp.Content == "" && len(refusal) > 0:
		resp.Content, resp.FinishReason = strings.Join(refusal, "\n"), FinishRefusal
	}

	// Trailing reasoning is not sent back: without the item that follows it, it is refused.
	for n, i := range calls {
		c, fields := resp.ToolCalls[n], a.Output[i]
		fields["call_id"], fields["name"], fields["arguments"] = quoted(c.ID), quoted(historyName(c.Name)), quoted(historyArguments(c.Arguments))
	}
	history := a.Output[:last+1]
	for _, fields := range history {
		dropNulls(fields)
	}
	resp.Message = Message{Role: RoleAssistant, Content: resp.Content, ToolCalls: resp.ToolCalls, RawFormat: FormatResponses}
	var err error
	if resp.Message.Raw, err = json.Marshal(history); err != nil {
		return nil, badResponse("the answer's output cannot be kept: %v", err)
	}
	return resp, nil
}

func appendText(list []string, text string) []string {
	if text == "" {
		return list
	}
	return append(list, text)
}

// decodeFields decodes an object whose fields are also kept one by one.
func decodeFields[T any](fields map[string]json.RawMessage) (v T, err error) {
	raw, err := json.Marshal(fields)
	if err != nil {
		return v, err
	}
	return v, json.Unmarshal(raw, &v)
}

// dropNulls removes null fields, which several servers send and refuse to receive.
func dropNulls(fields map[string]json.RawMessage) {
	for name, value := range fields {
		if !present(value) {
			delete(fields, name)
		}
	}
}

// responsesStream assembles a streamed response, whose last event holds the whole.
type responsesStream struct {
	show  func(DeltaKind, string)
	texts map[string]*jsonText // shown text, by kind and item
	items []json.RawMessage    // finished items, for servers that omit them from the last event
	final map[string]json.RawMessage
}

func (s *responsesStream) event(data []byte) (bool, error) {
	if len(data) == 0 || string(data) == "[DONE]" {
		return s.final != nil, nil
	}
	var event struct {
		Type     string                     `json:"type"`
		Delta    json.RawMessage            `json:"delta"`
		ItemID   string                     `json:"item_id"`
		Item     json.RawMessage            `json:"item"`
		Response map[string]json.RawMessage `json:"response"`
		Error    json.RawMessage            `json:"error"`
	}
	if err := json.Unmarshal(data, &event); err != nil {
		return false, badResponse("a piece of the answer cannot be read: %v: %s", err, clip(string(data), 200))
	}
	switch event.Type {
	case "response.output_text.delta", "response.refusal.delta":
		s.delta(DeltaContent, event.ItemID, event.Delta)
	case "response.reasoning_summary_text.delta", "response.reasoning_text.delta":
		s.delta(DeltaReasoning, event.ItemID, event.Delta)
	case "response.function_call_arguments.delta":
		s.delta(DeltaArguments, event.ItemID, event.Delta)
	case "response.output_item.added":
		var item outputItem
		if json.Unmarshal(event.Item, &item) == nil && item.Type == "function_call" {
			s.show(DeltaCall, item.Name)
		}
	case "response.output_item.done":
		s.items = append(s.items, event.Item)
	case "response.completed", "response.incomplete", "response.failed":
		if event.Response == nil {
			return false, badResponse("the answer's last event is empty: %s", clip(string(data), 200))
		}
		s.final = event.Response
		return true, nil
	case "error":
		if present(event.Error) {
			return false, streamError(event.Error)
		}
		return false, streamError(data) // here the event itself holds the error's fields
	case "":
		if present(event.Error) {
			return false, streamError(event.Error)
		}
	}
	return false, nil
}

func (s *responsesStream) delta(kind DeltaKind, item string, piece json.RawMessage) {
	if s.texts == nil {
		s.texts = map[string]*jsonText{}
	}
	key := string(kind) + " " + item
	if s.texts[key] == nil {
		s.texts[key] = &jsonText{}
	}
	s.show(kind, s.texts[key].add(piece))
}

func (s *responsesStream) complete() bool { return s.final != nil }

func (s *responsesStream) answer() ([]byte, error) {
	if output := bytes.TrimSpace(s.final["output"]); len(s.items) > 0 && (!present(output) || string(output) == "[]") {
		list, err := json.Marshal(s.items)
		if err != nil {
			return nil, badResponse("the answer's items cannot be kept: %v", err)
		}
		s.final["output"] = list
	}
	body, err := json.Marshal(s.final)
	if err != nil {
		return nil, badResponse("the answer cannot be kept: %v", err)
	}
	return body, nil
}
