package llm

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/anthropics/anthropic-sdk-go"
	"github.com/anthropics/anthropic-sdk-go/option"
	"github.com/anthropics/anthropic-sdk-go/packages/param"
)

// Anthropic calls a server that speaks Anthropic's Messages. It does not retry: wrap it in [Retry].
//
// It marks the conversation for the provider's cache, because every turn sends the whole beginning
// again. Cached input costs a tenth.
type Anthropic struct {
	endpoint
	service anthropic.MessageService
}

// NewAnthropic returns a model for the server at opts.BaseURL, with or without the /v1 that other
// formats need. It sends nothing yet.
func NewAnthropic(opts ServerOptions) (*Anthropic, error) {
	opts.BaseURL = strings.TrimSuffix(strings.TrimRight(opts.BaseURL, "/"), "/v1") // the SDK adds it
	e, err := newEndpoint(opts)
	if err != nil {
		return nil, err
	}
	// anthropic.NewClient is not used: it also reads keys, profiles and headers from the environment
	// and the home directory, and would send them to any server that the user names.
	return &Anthropic{endpoint: e, service: anthropic.NewMessageService(
		option.WithBaseURL(opts.BaseURL),
		option.WithAPIKey(e.key),
		option.WithMaxRetries(0),
		option.WithRequestTimeout(e.timeout),
		option.WithHTTPClient(e.client),
	)}, nil
}

// Describe names the server.
func (a *Anthropic) Describe() string { return "Anthropic Messages at " + a.baseURL }

// Complete requests one message.
func (a *Anthropic) Complete(ctx context.Context, req Request) (*Response, error) {
	params, err := anthropicParams(req)
	if err != nil {
		return nil, err
	}
	body, err := a.exchange(ctx, func(into **http.Response) error {
		opts := []option.RequestOption{option.WithResponseBodyInto(into)}
		if req.OnDelta != nil {
			opts = append(opts, option.WithJSONSet("stream", true))
		}
		_, err := a.service.New(ctx, params, opts...)
		return err
	}, &anthropicStream{show: req.show})
	if err != nil {
		return a.finish(nil, err)
	}
	return a.finish(parseAnthropic(body))
}

// block is a content block that we write.
type block struct {
	Type         string          `json:"type"`
	Text         string          `json:"text,omitempty"`
	ID           string          `json:"id,omitempty"`
	Name         string          `json:"name,omitempty"`
	Input        json.RawMessage `json:"input,omitempty"`
	ToolUseID    string          `json:"tool_use_id,omitempty"`
	Content      string          `json:"content,omitempty"`
	CacheControl *cacheControl   `json:"cache_control,omitempty"`
}

type cacheControl struct {
	Type string `json:"type"`
}

// turn is one message of a request. The roles user and assistant alternate, so all messages between
// two answers of the model form one turn.
type turn struct {
	role   Role
	blocks []block
	raw    json.RawMessage // an assistant's blocks as received
}

// defaultMaxTokens is the ceiling if the request sets none; this format requires one.
const defaultMaxTokens = MinMaxTokens

// anthropicParams converts a request to the SDK's form.
func anthropicParams(req Request) (anthropic.MessageNewParams, error) {
	params := anthropic.MessageNewParams{Model: req.Model, MaxTokens: defaultMaxTokens}
	if req.MaxTokens > 0 {
		params.MaxTokens = int64(req.MaxTokens)
	}
	messages := req.Messages
	for len(messages) > 0 && messages[0].Role == RoleSystem {
		if messages[0].Content != "" {
			params.System = append(params.System, anthropic.TextBlockParam{Text: messages[0].Content})
		}
		messages = messages[1:]
	}
	if n := len(params.System); n > 0 {
		params.System[n-1].CacheControl = anthropic.NewCacheControlEphemeralParam() // covers the tools too, which precede it
	}
	turns := anthropicTurns(messages)
	markForCache(turns)
	for i, t := range turns {
		content := t.raw
		if content == nil {
			var err error
			if content, err = json.Marshal(t.blocks); err != nil {
				return params, fmt.Errorf("encode message %d: %w", i, err)
			}
		}
		raw, err := json.Marshal(map[string]any{"role": t.role, "content": content})
		if err != nil {
			return params, fmt.Errorf("encode message %d: %w", i, err)
		}
		params.Messages = append(params.Messages, param.Override[anthropic.MessageParam](json.RawMessage(raw)))
	}
	for _, t := range req.Tools {
		tool, err := json.Marshal(map[string]any{"name": t.Name, "description": t.Description, "input_schema": t.Parameters})
		if err != nil {
			return params, fmt.Errorf("schema of tool %s: %w", t.Name, err)
		}
		params.Tools = append(params.Tools, param.Override[anthropic.ToolUnionParam](json.RawMessage(tool)))
	}
	// 1 is the default, and newer models refuse any temperature.
	if req.Temperature != nil && *req.Temperature != 1 {
		params.Temperature = anthropic.Float(*req.Temperature)
	}
	if len(req.ExtraBody) > 0 {
		params.SetExtraFields(req.ExtraBody)
	}
	return params, nil
}

// anthropicTurns groups messages as this provider requires. The results of a turn's tool calls
// share one message with the user's text and precede it, and no text is empty.
func anthropicTurns(messages []Message) []turn {
	var turns []turn
	for _, m := range messages {
		if m.Role == RoleAssistant {
			if m.Raw != nil && m.RawFormat == FormatAnthropic {
				turns = append(turns, turn{role: RoleAssistant, raw: m.Raw})
				continue
			}
			var blocks []block
			if strings.TrimSpace(m.Content) != "" {
				blocks = append(blocks, block{Type: "text", Text: m.Content})
			}
			for _, c := range m.ToolCalls {
				blocks = append(blocks, block{Type: "tool_use", ID: identifier(c.ID), Name: historyName(c.Name), Input: json.RawMessage(historyArguments(c.Arguments))})
			}
			if len(blocks) > 0 { // a message without content is refused
				turns = append(turns, turn{role: RoleAssistant, blocks: blocks})
			}
			continue
		}
		if n := len(turns); n == 0 || turns[n-1].role != RoleUser {
			turns = append(turns, turn{role: RoleUser})
		}
		t := &turns[len(turns)-1]
		switch {
		case m.Role == RoleTool:
			t.blocks = append(t.blocks, block{Type: "tool_result", ToolUseID: identifier(m.ToolCallID), Content: m.Content})
		case strings.TrimSpace(m.Content) != "":
			t.blocks = append(t.blocks, block{Type: "text", Text: m.Content})
		}
	}
	return turns
}

// markForCache marks the last two user turns. The provider's cache holds the conversation up to the
// older mark; this call stores it up to the newer one.
func markForCache(turns []turn) {
	left := 2
	for _, t := range slices.Backward(turns) {
		if n := len(t.blocks); t.role == RoleUser && n > 0 && left > 0 {
			t.blocks[n-1].CacheControl = &cacheControl{Type: "ephemeral"}
			left--
		}
	}
}

// anthropicUsage holds the counts of a message or of a stream event. An event may omit counts that
// did not change.
type anthropicUsage struct {
	InputTokens   int `json:"input_tokens"`
	OutputTokens  int `json:"output_tokens"`
	CacheRead     int `json:"cache_read_input_tokens"`
	CacheCreation int `json:"cache_creation_input_tokens"`
	OutputDetails struct {
		ThinkingTokens int `json:"thinking_tokens"`
	} `json:"output_tokens_details"`
}

// contentBlock is the part of a content block that we read.
type contentBlock struct {
	Type     string          `json:"type"`
	Text     string          `json:"text"`
	Thinking string          `json:"thinking"`
	ID       string          `json:"id"`
	Name     string          `json:"name"`
	Input    json.RawMessage `json:"input"` // an object; a string if the streamed text was no object
}

// parseAnthropic decodes a message. Its content is untrusted.
func parseAnthropic(raw []byte) (*Response, error) {
	var a struct {
		Type       string                       `json:"type"`
		Error      json.RawMessage              `json:"error"`
		Content    []map[string]json.RawMessage `json:"content"`
		StopReason string                       `json:"stop_reason"`
		Usage      anthropicUsage               `json:"usage"`
	}
	if err := json.Unmarshal(raw, &a); err != nil {
		return nil, badResponse("the answer is not a message: %v: %s", err, clip(string(raw), 200))
	}
	switch {
	case present(a.Error):
		return nil, streamError(a.Error)
	case a.Content == nil:
		return nil, badResponse("the answer has no content: %s", clip(string(raw), 200))
	}
	u := a.Usage
	resp := &Response{FinishReason: finishOf(a.StopReason), Raw: raw, Usage: Usage{
		// The provider's input_tokens exclude tokens read from the cache or written to it.
		PromptTokens:     max(0, u.InputTokens) + max(0, u.CacheRead) + max(0, u.CacheCreation),
		CompletionTokens: max(0, u.OutputTokens),
		CachedTokens:     max(0, u.CacheRead), CacheWriteTokens: max(0, u.CacheCreation),
		ReasoningTokens: max(0, u.OutputDetails.ThinkingTokens),
	}}
	resp.Usage.TotalTokens = resp.Usage.PromptTokens + resp.Usage.CompletionTokens

	var content, reasoning []string
	var history, calls []map[string]json.RawMessage
	said := false // whether a block other than reasoning was seen
	for i, fields := range a.Content {
		b, err := decodeFields[contentBlock](fields)
		if err != nil {
			return nil, badResponse("block %d of the answer cannot be read: %v", i, err)
		}
		dropNulls(fields)
		switch b.Type {
		case "text":
			if strings.TrimSpace(b.Text) == "" {
				continue // empty text is refused in a request
			}
			content = append(content, b.Text)
		case "thinking":
			reasoning = appendText(reasoning, b.Thinking)
		case "tool_use":
			args := string(bytes.TrimSpace(b.Input))
			if strings.HasPrefix(args, `"`) {
				_ = json.Unmarshal(b.Input, &args) // valid: it was decoded before, as part of the block
			}
			resp.ToolCalls = append(resp.ToolCalls, ToolCall{ID: identifier(b.ID), Name: b.Name, Arguments: args})
			calls = append(calls, fields)
		}
		said = said || b.Type != "thinking" && b.Type != "redacted_thinking"
		history = append(history, fields)
	}
	MakeUnique(resp.ToolCalls)
	for i, c := range resp.ToolCalls {
		calls[i]["id"], calls[i]["name"], calls[i]["input"] = quoted(c.ID), quoted(historyName(c.Name)), json.RawMessage(historyArguments(c.Arguments))
	}
	resp.Content, resp.Reasoning = strings.Join(content, ""), strings.Join(reasoning, "\n")
	resp.Message = Message{Role: RoleAssistant, Content: resp.Content, ToolCalls: resp.ToolCalls, RawFormat: FormatAnthropic}
	if said { // a message of reasoning alone is refused; without Raw and content it is omitted
		var err error
		if resp.Message.Raw, err = json.Marshal(history); err != nil {
			return nil, badResponse("the answer's content cannot be kept: %v", err)
		}
	}
	return resp, nil
}

// finishOf translates a stop reason to our constants.
func finishOf(reason string) string {
	switch reason {
	case "end_turn", "stop_sequence", "":
		return FinishStop
	case "tool_use":
		return FinishToolCalls
	case "max_tokens", "model_context_window_exceeded":
		return FinishLength
	case "refusal":
		return FinishRefusal
	}
	return reason
}

// anthropicStream assembles a streamed message.
type anthropicStream struct {
	show    func(DeltaKind, string)
	message map[string]json.RawMessage
	usage   map[string]json.RawMessage
	blocks  []*streamedBlock
	stopped bool
}

// streamedBlock is an unfinished content block.
type streamedBlock struct {
	index  int
	fields map[string]json.RawMessage
	texts  map[string]*jsonText // by field; partial_json becomes the input
}

func (s *anthropicStream) event(data []byte) (bool, error) {
	if len(data) == 0 {
		return false, nil
	}
	var event struct {
		Type    string                     `json:"type"`
		Index   int                        `json:"index"`
		Message map[string]json.RawMessage `json:"message"`
		Block   map[string]json.RawMessage `json:"content_block"`
		Delta   map[string]json.RawMessage `json:"delta"`
		Usage   map[string]json.RawMessage `json:"usage"`
		Error   json.RawMessage            `json:"error"`
	}
	if err := json.Unmarshal(data, &event); err != nil {
		return false, badResponse("a piece of the answer cannot be read: %v: %s", err, clip(string(data), 200))
	}
	switch {
	case present(event.Error):
		return false, streamError(event.Error)
	case event.Type == "message_start":
		s.message, s.usage = event.Message, map[string]json.RawMessage{}
		var usage map[string]json.RawMessage
		if json.Unmarshal(event.Message["usage"], &usage) == nil {
			s.count(usage)
		}
	case event.Type == "message_stop":
		s.stopped = true
		return true, nil
	case s.message == nil: // a ping, or an event before the message starts
	case event.Type == "message_delta":
		for name, value := range event.Delta {
			if present(value) {
				s.message[name] = value
			}
		}
		s.count(event.Usage)
	case event.Type == "content_block_start" && event.Block != nil:
		if len(s.blocks) > maxCalls {
			return false, badResponse("the answer has more than %d content blocks", maxCalls)
		}
		s.blocks = append(s.blocks, &streamedBlock{index: event.Index, fields: event.Block, texts: map[string]*jsonText{}})
		var start contentBlock
		if raw, err := json.Marshal(event.Block); err == nil && json.Unmarshal(raw, &start) == nil && start.Type == "tool_use" {
			s.show(DeltaCall, start.Name)
		}
		s.delta(event.Index, event.Block) // initial text of the block, usually none
	case event.Type == "content_block_delta":
		s.delta(event.Index, event.Delta)
	}
	return false, nil
}

// count merges the counts of an event; each is a running total.
func (s *anthropicStream) count(usage map[string]json.RawMessage) {
	for name, value := range usage {
		if present(value) {
			s.usage[name] = value
		}
	}
}

func (s *anthropicStream) delta(index int, delta map[string]json.RawMessage) {
	for _, b := range slices.Backward(s.blocks) {
		if b.index != index {
			continue
		}
		for _, field := range []struct {
			name string
			kind DeltaKind
		}{{"text", DeltaContent}, {"thinking", DeltaReasoning}, {"partial_json", DeltaArguments}, {"signature", ""}} {
			piece := delta[field.name]
			if !present(piece) {
				continue
			}
			if b.texts[field.name] == nil {
				b.texts[field.name] = &jsonText{}
			}
			if text := b.texts[field.name].add(piece); field.kind != "" {
				s.show(field.kind, text)
			}
		}
		return
	}
}

// complete accepts a stream without its end mark: the stop reason arrives with the final counts.
func (s *anthropicStream) complete() bool {
	return s.stopped || s.message != nil && present(s.message["stop_reason"])
}

func (s *anthropicStream) answer() ([]byte, error) {
	if s.message == nil {
		return nil, badResponse("the stream held no answer")
	}
	content := []map[string]json.RawMessage{}
	for _, b := range s.blocks {
		fields := maps.Clone(b.fields)
		for name, text := range b.texts {
			if name != "partial_json" {
				fields[name] = quoted(text.String())
				continue
			}
			// Keep text that is no JSON object as a string.
			input := strings.TrimSpace(text.String())
			switch {
			case input == "": // no arguments: the block began with {}
			case input[0] == '{' && json.Valid([]byte(input)):
				fields["input"] = json.RawMessage(input)
			default:
				fields["input"] = quoted(input)
			}
		}
		content = append(content, fields)
	}
	var err error
	if s.message["content"], err = json.Marshal(content); err == nil {
		s.message["usage"], err = json.Marshal(s.usage)
	}
	if err != nil {
		return nil, badResponse("the answer cannot be kept: %v", err)
	}
	body, err := json.Marshal(s.message)
	if err != nil {
		return nil, badResponse("the answer cannot be kept: %v", err)
	}
	return body, nil
}
