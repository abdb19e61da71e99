package llm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/shared"
)

// HTTPTimeout is how long one call may take, queueing and generation included. Local servers under load need it.
const HTTPTimeout = 1200 * time.Second

// maxResponseBytes bounds what a server may send: a turn is text, and this is a thousand times the longest one.
const maxResponseBytes = 64 << 20

// OpenAIOptions configures [NewOpenAI].
type OpenAIOptions struct {
	BaseURL string // ending in /v1 as a rule
	APIKey  string // empty: "dummy", which local servers accept
	Timeout time.Duration
	Now     func() time.Time // for Retry-After dates; nil: time.Now
}

// OpenAI calls a server that speaks OpenAI's chat completions. It does not retry: wrap it in [Retry].
type OpenAI struct {
	service openai.ChatCompletionService
	baseURL string
	now     func() time.Time
}

// NewOpenAI prepares calls to the server at opts.BaseURL; nothing is sent yet.
func NewOpenAI(opts OpenAIOptions) (*OpenAI, error) {
	u, err := url.Parse(opts.BaseURL)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, fmt.Errorf("model base URL %q: want http://HOST[:PORT]/v1 or https://", opts.BaseURL)
	}
	if opts.APIKey == "" {
		opts.APIKey = "dummy"
	}
	if opts.Timeout == 0 {
		opts.Timeout = HTTPTimeout
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	transport, ok := http.DefaultTransport.(*http.Transport)
	if !ok {
		return nil, fmt.Errorf("default HTTP transport is a %T", http.DefaultTransport)
	}
	return &OpenAI{
		// Not openai.NewClient: that one also reads OPENAI_ORG_ID and friends from the environment, and would send
		// them to whichever server the user named.
		service: openai.NewChatCompletionService(
			option.WithBaseURL(opts.BaseURL),
			option.WithAPIKey(opts.APIKey),
			option.WithMaxRetries(0),
			option.WithRequestTimeout(opts.Timeout),
			option.WithHTTPClient(&http.Client{Transport: boundedTransport{transport.Clone()}}),
		),
		baseURL: u.Redacted(),
		now:     opts.Now,
	}, nil
}

// Describe names the server.
func (o *OpenAI) Describe() string { return "OpenAI-compatible server at " + o.baseURL }

// BaseURL is where the calls go, without a password that may stand in it.
func (o *OpenAI) BaseURL() string { return o.baseURL }

// Complete sends one chat completion.
func (o *OpenAI) Complete(ctx context.Context, req Request) (*Response, error) {
	params, err := chatParams(req)
	if err != nil {
		return nil, err
	}
	// The body is taken as it came. The SDK's decoder loses the fields that OpenAI does not have, gives a nil completion
	// for "null", and drops the status of an error whose body has another shape than OpenAI's.
	var body []byte
	var httpResp *http.Response
	_, err = o.service.New(ctx, params, option.WithResponseBodyInto(&body), option.WithResponseInto(&httpResp))
	if err != nil {
		return nil, o.classify(ctx, err, httpResp)
	}
	resp, err := parseCompletion(body)
	if err != nil {
		if e, ok := errors.AsType[*Error](err); ok {
			e.Endpoint = o.baseURL
		}
		return nil, err
	}
	return resp, nil
}

// chatParams is the pure part: from our request to the SDK's.
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
			// Deprecated by OpenAI, but the one name that every other server knows.
			params.MaxTokens = openai.Int(int64(req.MaxTokens))
		}
	}
	if len(req.ExtraBody) > 0 {
		params.SetExtraFields(req.ExtraBody)
	}
	return params, nil
}

// reasoningModel reports whether a name is one of OpenAI's models that refuse max_tokens and a temperature.
func reasoningModel(name string) bool {
	base := strings.ToLower(path.Base(name))
	for _, prefix := range []string{"o1", "o3", "o4", "gpt-5"} {
		if base == prefix || strings.HasPrefix(base, prefix+"-") || strings.HasPrefix(base, prefix+".") {
			return true
		}
	}
	return false
}

// AcceptsTemperature reports whether a temperature may be sent to the model of this name.
func AcceptsTemperature(name string) bool { return !reasoningModel(name) }

// WireName is the name that is sent for a model that the user called name, which may carry the provider prefix that
// other tools ask for: "openai/" and "hosted_vllm/" are taken off once, so "openai/openai/gpt-oss-20b" reaches a server
// as "openai/gpt-oss-20b". Providers that do not speak chat completions are refused.
func WireName(name string) (string, error) {
	provider, rest, found := strings.Cut(name, "/")
	if !found {
		return name, nil
	}
	switch provider {
	case "openai", "hosted_vllm":
		if rest == "" {
			return "", &Error{Kind: KindUnsupported, Message: fmt.Sprintf("model name %q: nothing after the provider", name)}
		}
		return rest, nil
	case "anthropic", "azure":
		return "", &Error{Kind: KindUnsupported, Message: fmt.Sprintf("model name %q: provider %q is not supported yet; use an OpenAI-compatible endpoint of it with --llm_base_url and the name without %q", name, provider, provider+"/")}
	}
	return name, nil
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
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
		CompletionTokensDetails struct {
			ReasoningTokens int `json:"reasoning_tokens"`
		} `json:"completion_tokens_details"`
	} `json:"usage"`
	Error json.RawMessage `json:"error"` // some gateways answer 200 with an error
}

type answerMessage struct {
	Content          *string `json:"content"`
	Refusal          string  `json:"refusal"`
	ReasoningContent *string `json:"reasoning_content"` // DeepSeek, vLLM, SGLang
	Reasoning        any     `json:"reasoning"`         // OpenRouter, newer vLLM; a string there
	Provider         struct {
		Thinking string `json:"thinking"`
	} `json:"provider_specific_fields"`
	ToolCalls []struct {
		ID       string `json:"id"`
		Function struct {
			Name      string          `json:"name"`
			Arguments json.RawMessage `json:"arguments"` // a string; an object from a few servers
		} `json:"function"`
	} `json:"tool_calls"`
}

func badResponse(format string, args ...any) error {
	return &Error{Kind: KindBadResponse, Message: clip(fmt.Sprintf(format, args...), 600)}
}

// parseCompletion reads a chat completion. Everything in it comes from outside.
func parseCompletion(raw []byte) (*Response, error) {
	var a answer
	if err := json.Unmarshal(raw, &a); err != nil {
		return nil, badResponse("the answer is not a chat completion: %v: %s", err, clip(string(raw), 200))
	}
	if len(a.Choices) == 0 {
		if len(a.Error) > 0 && string(a.Error) != "null" {
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
			CachedTokens:    max(0, a.Usage.PromptTokensDetails.CachedTokens),
			ReasoningTokens: max(0, a.Usage.CompletionTokensDetails.ReasoningTokens),
		},
		Raw: raw,
	}
	if m.Content != nil {
		resp.Content = *m.Content
	}
	if resp.Content == "" {
		resp.Content = m.Refusal
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

// MakeUnique gives an id to each call that has none or repeats an earlier one: every call is answered by its id.
func MakeUnique(calls []ToolCall) {
	seen := make(map[string]bool, len(calls))
	for i := range calls {
		for n := i; calls[i].ID == "" || seen[calls[i].ID]; n++ {
			calls[i].ID = "call_" + strconv.Itoa(n)
		}
		seen[calls[i].ID] = true
	}
}

// historyMessage is the assistant message as it is sent back: the fields that came, known or not, except what strict
// servers refuse in a request although they or others send it in an answer.
func historyMessage(fields map[string]json.RawMessage, calls []ToolCall) (json.RawMessage, error) {
	for name, value := range fields {
		if string(value) == "null" {
			delete(fields, name)
		}
	}
	fields["role"] = json.RawMessage(`"assistant"`)
	if _, ok := fields["content"]; !ok {
		// null is right beside tool calls; without any, the content is required.
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
		if function["name"], err = json.Marshal(c.Name); err != nil {
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

// classify turns what the SDK returned into an [*Error], or the context's error if that is what ended the call.
func (o *OpenAI) classify(ctx context.Context, err error, resp *http.Response) error {
	if ctx.Err() != nil {
		return fmt.Errorf("model call: %w", context.Cause(ctx))
	}
	e := &Error{Kind: KindBadResponse, Endpoint: o.baseURL, Err: err}
	var netErr net.Error
	switch {
	case errors.Is(err, errResponseTooLarge):
		e.Kind, e.Message = KindRequest, errResponseTooLarge.Error() // repeating it would only cost as much again
	case errors.Is(err, context.DeadlineExceeded):
		e.Kind, e.Message = KindNetwork, "no answer within the time limit of one call"
	case resp != nil && resp.StatusCode >= 400:
		e.refused(resp, o.now())
	case errors.As(err, &netErr) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		e.Kind, e.Message = KindNetwork, clip(err.Error(), 600)
	default:
		e.Message = clip("the answer is not a chat completion: "+err.Error(), 600)
	}
	return e
}

// refused fills e in from an answer with an error status. The SDK has read its body and put it back.
func (e *Error) refused(resp *http.Response, now time.Time) {
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	e.Message = clip(serverMessage(body), 1000)
	if err != nil || e.Message == "" {
		e.Message = http.StatusText(resp.StatusCode)
	}
	e.Status = resp.StatusCode
	e.RetryAfter = retryAfter(resp.Header, now)
	switch {
	case e.Status == http.StatusTooManyRequests:
		e.Kind = KindRateLimit
	case e.Status == http.StatusUnauthorized || e.Status == http.StatusForbidden:
		e.Kind = KindAuth
	case e.Status >= 500 || e.Status == http.StatusRequestTimeout || e.Status == http.StatusConflict:
		e.Kind = KindServer
	default:
		e.Kind = KindRequest
	}
	// llama.cpp and older vLLM say it with 500; there the word must be "context", since quotas have tokens too.
	if e.Kind == KindRequest || e.Kind == KindServer && strings.Contains(strings.ToLower(e.Message), "context") {
		if overflow, _, _ := contextOverflow(e.Message); overflow {
			e.Kind = KindContextLength
		}
	}
}

// serverMessage finds the readable part of an error body: {"error":{"message":...}}, {"error":"..."}, {"message":...},
// {"detail":...}, or the text itself. llama.cpp puts its figures beside the message, so an error object is kept
// whole when it has more than OpenAI's fields.
func serverMessage(body []byte) string {
	var shape struct {
		Error   any `json:"error"`
		Message any `json:"message"`
		Detail  any `json:"detail"`
	}
	if json.Unmarshal(body, &shape) != nil {
		return string(body)
	}
	if object, ok := shape.Error.(map[string]any); ok {
		text, isText := object["message"].(string)
		if isText && text != "" && object["n_ctx"] == nil {
			if code, ok := object["code"].(string); ok && code != "" && !strings.Contains(text, code) {
				text += " [" + code + "]"
			}
			return text
		}
	}
	for _, v := range []any{shape.Error, shape.Message, shape.Detail} {
		if s, ok := v.(string); ok && s != "" {
			return s
		}
	}
	return string(body)
}

// retryAfter reads the wait that a server asked for, in any of the three forms in use.
func retryAfter(header http.Header, now time.Time) time.Duration {
	if ms, err := strconv.ParseFloat(header.Get("Retry-After-Ms"), 64); err == nil && ms > 0 && ms < 1e9 {
		return time.Duration(ms * float64(time.Millisecond))
	}
	value := header.Get("Retry-After")
	if s, err := strconv.ParseFloat(value, 64); err == nil {
		if s > 0 && s < 1e6 {
			return time.Duration(s * float64(time.Second))
		}
		return 0
	}
	if at, err := http.ParseTime(value); err == nil {
		return max(0, at.Sub(now))
	}
	return 0
}

var errResponseTooLarge = fmt.Errorf("the answer exceeds %d MiB", maxResponseBytes>>20)

// boundedTransport ends a response body that exceeds maxResponseBytes with an error: the SDK reads bodies whole.
type boundedTransport struct{ next http.RoundTripper }

func (t boundedTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	resp.Body = &boundedBody{ReadCloser: resp.Body, left: maxResponseBytes}
	return resp, nil
}

type boundedBody struct {
	io.ReadCloser
	left int64
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errResponseTooLarge
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.ReadCloser.Read(p)
	b.left -= int64(n)
	return n, err
}
