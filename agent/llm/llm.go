package llm

import (
	"context"
	"encoding/json"
	"strings"
)

// Model is one source of model turns.
type Model interface {
	// Complete asks for the next turn. Errors that came from the model's side are of type [*Error]; a context that
	// ended gives the context's error.
	Complete(ctx context.Context, req Request) (*Response, error)
	// Describe says in one line where the turns come from, for the person who watches and for the record.
	Describe() string
}

// Role says who speaks in a [Message].
type Role string

// The roles of a conversation.
const (
	RoleSystem    Role = "system"
	RoleUser      Role = "user"
	RoleAssistant Role = "assistant"
	RoleTool      Role = "tool"
)

// Message is one entry of the conversation. Its JSON form is that of chat completions.
type Message struct {
	Role       Role
	Content    string
	ToolCalls  []ToolCall // of an assistant message
	ToolCallID string     // of a tool message: the call that it answers
	// Raw is an assistant message as its provider wants it back, in the wire format RawFormat. A provider of that format
	// sends it in place of the other fields; the others send those.
	Raw       json.RawMessage
	RawFormat Format
}

// Format is a wire format: the shape of requests and answers.
type Format string

// The formats.
const (
	FormatChat      Format = ""          // OpenAI's chat completions
	FormatResponses Format = "responses" // OpenAI's Responses
	FormatAnthropic Format = "anthropic" // Anthropic's Messages
)

// ToolCall is one action that the model asks for.
type ToolCall struct {
	ID   string // unique within its message, never empty
	Name string
	// Arguments is the text that the model wrote. It should be a JSON object and often is not: parse it with suspicion.
	Arguments string
}

// Tool is what the model is told about one tool.
type Tool struct {
	Name        string
	Description string
	Parameters  json.RawMessage // JSON schema of the arguments
}

// Request is one call of a model. Nothing in it is kept by the model after the call.
type Request struct {
	Model       string
	Messages    []Message
	Tools       []Tool
	Temperature *float64       // nil: not sent, the provider's default holds
	MaxTokens   int            // ceiling of the answer; 0: not sent
	ExtraBody   map[string]any // added to the request's body, overriding what stands there
	// OnDelta, if set, asks for a streamed answer and is given its pieces as they come, from one goroutine and before
	// Complete returns.
	OnDelta func(Delta)
}

// show hands a piece to who watches.
func (r *Request) show(kind DeltaKind, text string) {
	if r.OnDelta != nil && (text != "" || kind == DeltaRestart) {
		r.OnDelta(Delta{Kind: kind, Text: text})
	}
}

// Delta is a piece of an answer that is still being written. It is for who watches: what counts is the [Response].
type Delta struct {
	Kind DeltaKind
	Text string // whole characters, but not made safe for a terminal
}

// DeltaKind says what a [Delta] is a piece of.
type DeltaKind string

// The kinds of deltas.
const (
	DeltaContent   DeltaKind = "content"
	DeltaReasoning DeltaKind = "reasoning"
	DeltaCall      DeltaKind = "call"      // the name of a tool; its arguments follow
	DeltaArguments DeltaKind = "arguments" // of the last tool that was named
	// DeltaRestart says that what was shown of this answer is void: it broke off, and is asked for again.
	DeltaRestart DeltaKind = "restart"
)

// Usage is what the provider counted for one call, or a sum of such. Zero fields were not reported.
type Usage struct {
	PromptTokens     int `json:"prompt_tokens"` // all of the input, cached or not
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
	CachedTokens     int `json:"cached_tokens,omitempty"`      // of PromptTokens: read from the provider's cache
	CacheWriteTokens int `json:"cache_write_tokens,omitempty"` // of PromptTokens: written to it, which some charge for
	ReasoningTokens  int `json:"reasoning_tokens,omitempty"`   // of CompletionTokens
	// CostUSD is what the calls cost by [Prices], and UnpricedCalls how many it leaves out because the price of their model is not
	// known. No model of this package fills them in.
	CostUSD       float64 `json:"cost_usd,omitempty"`
	UnpricedCalls int     `json:"unpriced_calls,omitempty"`
}

// Add adds what another call used.
func (u *Usage) Add(v Usage) {
	u.PromptTokens += v.PromptTokens
	u.CompletionTokens += v.CompletionTokens
	u.TotalTokens += v.TotalTokens
	u.CachedTokens += v.CachedTokens
	u.CacheWriteTokens += v.CacheWriteTokens
	u.ReasoningTokens += v.ReasoningTokens
	u.CostUSD += v.CostUSD
	u.UnpricedCalls += v.UnpricedCalls
}

// What [Response.FinishReason] is, whatever the provider calls it. Others are given as they come.
const (
	FinishStop      = "stop"
	FinishToolCalls = "tool_calls"
	FinishLength    = "length"         // cut off at the ceiling of tokens, or at the end of the context
	FinishRefusal   = "refusal"        // the model would not
	FinishFilter    = "content_filter" // the provider would not
)

// Response is one model turn.
type Response struct {
	Content      string
	Reasoning    string // what the provider shows of the model's thinking, where it does
	ToolCalls    []ToolCall
	FinishReason string // FinishStop, FinishToolCalls, ...
	Usage        Usage
	Raw          json.RawMessage // the whole answer as received, for the record
	Message      Message         // this turn as it must stand in the next request
}

// wireMessage is the chat-completions form of a message.
type wireMessage struct {
	Role       Role           `json:"role"`
	Content    *string        `json:"content"`
	ToolCalls  []wireToolCall `json:"tool_calls,omitempty"`
	ToolCallID string         `json:"tool_call_id,omitempty"`
}

type wireToolCall struct {
	ID       string       `json:"id"`
	Type     string       `json:"type"`
	Function wireFunction `json:"function"`
}

type wireFunction struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

// MarshalJSON writes the chat-completions form, which is Raw where that has this form.
func (m Message) MarshalJSON() ([]byte, error) {
	if m.Raw != nil && m.RawFormat == FormatChat {
		return m.Raw, nil
	}
	w := wireMessage{Role: m.Role, Content: &m.Content, ToolCallID: m.ToolCallID}
	for _, c := range m.ToolCalls {
		w.ToolCalls = append(w.ToolCalls, wireToolCall{ID: c.ID, Type: "function", Function: wireFunction{Name: historyName(c.Name), Arguments: historyArguments(c.Arguments)}})
	}
	return json.Marshal(w)
}

// historyName is how the name of a past call is shown to the provider again: what a model made up may be no name that
// providers take in a request, and would spoil the conversation for ever after.
func historyName(name string) string {
	name = identifier(name)
	if name == "" {
		return "unnamed"
	}
	return name[:min(len(name), 64)]
}

// identifier is text with an underscore for each character but ASCII letters, digits, underscores and dashes.
func identifier(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '-':
			return r
		}
		return '_'
	}, text)
}

// historyArguments is how a call's arguments are shown to the provider again. Several servers (vLLM's chat templates
// among them) parse the arguments of past calls and answer 400 or 500 for ever after when one is not a JSON object, so
// what cannot be parsed is quoted inside an object. The model's own text stands in the tool error that it gets.
func historyArguments(args string) string {
	var object map[string]json.RawMessage
	if json.Unmarshal([]byte(args), &object) == nil && object != nil {
		return args
	}
	if args == "" {
		return "{}"
	}
	quoted, err := json.Marshal(map[string]string{"invalid_json": args})
	if err != nil { // a map of strings always marshals
		return "{}"
	}
	return string(quoted)
}
