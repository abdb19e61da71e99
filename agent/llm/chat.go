package llm

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/shared"
)

// OpenAI calls a server that speaks OpenAI's chat completions, as most do. It does not retry: wrap
// it in [Retry].
type OpenAI struct {
	endpoint
	service openai.ChatCompletionService
}

// NewOpenAI returns a model for the server at opts.BaseURL; it sends nothing yet.
func NewOpenAI(opts ServerOptions) (*OpenAI, error) {
	e, err := newEndpoint(opts)
	if err != nil {
		return nil, err
	}
	return &OpenAI{endpoint: e, service: openai.NewChatCompletionService(e.openAIOptions(opts.BaseURL)...)}, nil
}

// openAIOptions returns the options of an OpenAI service. openai.NewClient is not used: it also
// reads OPENAI_ORG_ID and other variables, and would send them to any server that the user names.
func (e *endpoint) openAIOptions(baseURL string) []option.RequestOption {
	return []option.RequestOption{
		option.WithBaseURL(baseURL),
		option.WithAPIKey(e.key),
		option.WithMaxRetries(0),
		option.WithRequestTimeout(e.timeout),
		option.WithHTTPClient(e.client),
	}
}

// Describe names the server.
func (o *OpenAI) Describe() string { return "OpenAI-compatible server at " + o.baseURL }

// Complete requests one chat completion.
func (o *OpenAI) Complete(ctx context.Context, req Request) (*Response, error) {
	params, err := chatParams(req)
	if err != nil {
		return nil, err
	}
	body, err := o.exchange(ctx, func(into **http.Response) error {
		opts := []option.RequestOption{option.WithResponseBodyInto(into)}
		if req.OnDelta != nil {
			opts = append(opts, option.WithJSONSet("stream", true), option.WithJSONSet("stream_options.include_usage", true))
		}
		_, err := o.service.New(ctx, params, opts...)
		return err
	}, &chatStream{show: req.show})
	if err != nil {
		return o.finish(nil, err)
	}
	return o.finish(parseCompletion(body))
}

// chatParams converts a request to the SDK's form.
func chatParams(req Request) (openai.ChatCompletionNewParams, error) {
	params := openai.ChatCompletionNewParams{Model: req.Model}
	for i, m := range req.Messages {
		raw, err := json.Marshal(m)
		if err != nil {
			return params, fmt.Errorf("encode message %d: %w", i, err)
		}
		params.Messages = append(params.Messages, param.Override[openai.ChatCompletionMessageParamUnion](json.RawMessage(raw)))
	}
	for _, t := range req.Tools {
		var schema shared.FunctionParameters
		if err := json.Unmarshal(t.Parameters, &schema); err != nil {
			return params, fmt.Errorf("schema of tool %s: %w", t.Name, err)
		}
		params.Tools = append(params.Tools, openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
			Name: t.Name, Description: openai.String(t.Description), Parameters: schema,
		}))
	}
	if req.Temperature != nil {
		params.Temperature = openai.Float(*req.Temperature)
	}
	if req.MaxTokens > 0 {
		if reasoningModel(req.Model) {
			params.MaxCompletionTokens = openai.Int(int64(req.MaxTokens))
		} else {
			// Deprecated by OpenAI, but the only name that all other servers know.
			params.MaxTokens = openai.Int(int64(req.MaxTokens))
		}
	}
	if len(req.ExtraBody) > 0 {
		params.SetExtraFields(req.ExtraBody)
	}
	return params, nil
}

// answer is the part of a chat completion that we read.
type answer struct {
	Choices []struct {
		FinishReason string          `json:"finish_reason"`
		Message      json.RawMessage `json:"message"`
	} `json:"choices"`
	Usage struct {
		PromptTokens        int `json:"prompt_tokens"`
		CompletionTokens    int `json:"completion_tokens"`
		TotalTokens         int `json:"total_tokens"`
		PromptTokensDetails struct {
			CachedTokens     int `json:"cached_tokens"`
			CacheWriteTokens int `json:"cache_write_tokens"`
		} `json:"prompt_tokens_details"`
		CompletionTokensDetails struct {
			ReasoningTokens int `json:"reasoning_tokens"`
		} `json:"completion_tokens_details"`
	} `json:"usage"`
	Error json.RawMessage `json:"error"` // some gateways answer 200 with an error
}

type answerMessage struct {
	Content          any     `json:"content"` // a string, or a list of parts from a few servers
	Refusal          string  `json:"refusal"`
	ReasoningContent *string `json:"reasoning_content"` // DeepSeek, vLLM, SGLang, llama.cpp
	Reasoning        any     `json:"reasoning"`         // OpenRouter, newer vLLM: a string
	Provider         struct {
		Thinking string `json:"thinking"`
	} `json:"provider_specific_fields"`
	ToolCalls []struct {
		ID       string `json:"id"`
		Function struct {
			Name      string          `json:"name"`
			Arguments json.RawMessage `json:"arguments"` // a string, or an object from a few servers
		} `json:"function"`
	} `json:"tool_calls"`
}

func badResponse(format string, args ...any) error {
	return &Error{Kind: KindBadResponse, Message: clip(fmt.Sprintf(format, args...), 600)}
}

// parseCompletion decodes a chat completion. Its content is untrusted.
func parseCompletion(raw []byte) (*Response, error) {
	var a answer
	if err := json.Unmarshal(raw, &a); err != nil {
		return nil, badResponse("the answer is not a chat completion: %v: %s", err, clip(string(raw), 200))
	}
	if len(a.Choices) == 0 {
		if present(a.Error) {
			return nil, badResponse("the answer holds an error and no choices: %s", clip(string(a.Error), 400))
		}
		return nil, badResponse("the answer has no choices: %s", clip(string(raw), 200))
	}
	var m answerMessage
	if err := json.Unmarshal(a.Choices[0].Message, &m); err != nil {
		return nil, badResponse("the answer's message cannot be read: %v: %s", err, clip(string(a.Choices[0].Message), 200))
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(a.Choices[0].Message, &fields); err != nil || fields == nil {
		return nil, badResponse("the answer's message is not an object: %s", clip(string(a.Choices[0].Message), 200))
	}

	resp := &Response{
		FinishReason: a.Choices[0].FinishReason,
		Usage: Usage{
			PromptTokens: max(0, a.Usage.PromptTokens), CompletionTokens: max(0, a.Usage.CompletionTokens), TotalTokens: max(0, a.Usage.TotalTokens),
			CachedTokens:     max(0, a.Usage.PromptTokensDetails.CachedTokens),
			CacheWriteTokens: max(0, a.Usage.PromptTokensDetails.CacheWriteTokens),
			ReasoningTokens:  max(0, a.Usage.CompletionTokensDetails.ReasoningTokens),
		},
		Raw: raw,
	}
	resp.Content = contentText(m.Content)
	if resp.Content == "" && m.Refusal != "" {
		resp.Content, resp.FinishReason = m.Refusal, FinishRefusal
	}
	reasoning, _ := m.Reasoning.(string)
	switch {
	case m.Provider.Thinking != "":
		resp.Reasoning = m.Provider.Thinking
	case m.ReasoningContent != nil && *m.ReasoningContent != "":
		resp.Reasoning = *m.ReasoningContent
	default:
		resp.Reasoning = reasoning
	}
	for _, c := range m.ToolCalls {
		args := string(bytes.TrimSpace(c.Function.Arguments))
		var text string
		if err := json.Unmarshal(c.Function.Arguments, &text); err == nil {
			args = text // the usual case; null gives ""
		}
		resp.ToolCalls = append(resp.ToolCalls, ToolCall{ID: c.ID, Name: c.Function.Name, Arguments: args})
	}
	MakeUnique(resp.ToolCalls)

	history, err := historyMessage(fields, resp.ToolCalls)
	if err != nil {
		return nil, badResponse("the answer's message cannot be kept: %v", err)
	}
	resp.Message = Message{Role: RoleAssistant, Content: resp.Content, ToolCalls: resp.ToolCalls, Raw: history}
	return resp, nil
}

// contentText returns the text of a message's content: a string, or the texts of a list of parts.
func contentText(content any) string {
	parts, ok := content.([]any)
	if !ok {
		text, _ := content.(string)
		return text
	}
	var b strings.Builder
	for _, p := range parts {
		if part, ok := p.(map[string]any); ok {
			text, _ := part["text"].(string)
			b.WriteString(text)
		}
	}
	return b.String()
}

// MakeUnique gives an ID to each call that has none or repeats an earlier one, because results
// refer to calls by ID.
func MakeUnique(calls []ToolCall) {
	seen := make(map[string]bool, len(calls))
	for i := range calls {
		for n := i; calls[i].ID == "" || seen[calls[i].ID]; n++ {
			calls[i].ID = "call_" + strconv.Itoa(n)
		}
		seen[calls[i].ID] = true
	}
}

// historyMessage returns the assistant message as it is sent back. It keeps all fields, known or
// not, except those that some servers send in answers and strict ones refuse in requests.
func historyMessage(fields map[string]json.RawMessage, calls []ToolCall) (json.RawMessage, error) {
	for name, value := range fields {
		if string(value) == "null" {
			delete(fields, name)
		}
	}
	fields["role"] = json.RawMessage(`"assistant"`)
	if _, ok := fields["content"]; !ok {
		// Beside tool calls null is correct; without calls a string is required.
		fields["content"] = json.RawMessage("null")
		if len(calls) == 0 {
			fields["content"] = json.RawMessage(`""`)
		}
	}
	if len(calls) == 0 {
		delete(fields, "tool_calls") // vLLM sends [], OpenAI refuses []
		return json.Marshal(fields)
	}
	var wire []map[string]json.RawMessage
	if err := json.Unmarshal(fields["tool_calls"], &wire); err != nil {
		return nil, err
	}
	for i, c := range calls {
		var function map[string]json.RawMessage
		if err := json.Unmarshal(wire[i]["function"], &function); err != nil || function == nil {
			function = map[string]json.RawMessage{}
		}
		var err error
		if function["name"], err = json.Marshal(historyName(c.Name)); err != nil {
			return nil, err
		}
		if function["arguments"], err = json.Marshal(historyArguments(c.Arguments)); err != nil {
			return nil, err
		}
		if wire[i]["function"], err = json.Marshal(function); err != nil {
			return nil, err
		}
		if wire[i]["id"], err = json.Marshal(c.ID); err != nil {
			return nil, err
		}
		wire[i]["type"] = json.RawMessage(`"function"`)
	}
	list, err := json.Marshal(wire)
	if err != nil {
		return nil, err
	}
	fields["tool_calls"] = list
	return json.Marshal(fields)
}
