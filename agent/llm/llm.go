package llm

import (
	"context"
	"encoding/json"
	"strings"
)

// Model is a source of model turns.
type Model interface {
	// Complete requests the next turn. Failures on the model's side are of type [*Error]; if ctx
	// ends, the error is the context's.
	Complete(ctx context.Context, req Request) (*Response, error)
	// Describe names the source of the turns in one line, for the user and the record.
	Describe() string
}

// Role names the author of a [Message].
type Role string

// Roles of a conversation.
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
	ToolCallID string     // of a tool message: ID of the call that it answers
	// Raw is an assistant message as its provider expects it back, in the wire format RawFormat. A
	// model of that format sends Raw in place of the other fields; other models send the fields.
	Raw       json.RawMessage
	RawFormat Format
}

// Format is a wire format of requests and answers.
type Format string

// Wire formats.
const (
	FormatChat      Format = ""          // OpenAI's chat completions
	FormatResponses Format = "responses" // OpenAI's Responses
	FormatAnthropic Format = "anthropic" // Anthropic's Messages
)

// ToolCall is one action that the model requests.
type ToolCall struct {
	ID   string // unique within its message, never empty
	Name string
	// Arguments is the text that the model wrote. It should be a JSON object but often is not;
	// validate it.
	Arguments string
}

// Tool describes one tool to the model.
type Tool struct {
	Name        string
	Description string
	Parameters  json.RawMessage // JSON schema of the arguments
}

// Request is one call of a model. A model keeps no part of it after the call.
type Request struct {
	Model       string
	Messages    []Message
	Tools       []Tool
	Temperature *float64       // nil means the provider's default: none is sent
	MaxTokens   int            // answer ceiling in tokens; 0 sends none
	ExtraBody   map[string]any // further fields of the request's body; they override the others
	// OnDelta, if set, requests a streamed answer and receives its pieces, from one goroutine and
	// before Complete returns.
	OnDelta func(Delta)
}

// show passes a piece of the answer to OnDelta.
func (r *Request) show(kind DeltaKind, text string) {
	if r.OnDelta != nil && (text != "" || kind == DeltaRestart) {
		r.OnDelta(Delta{Kind: kind, Text: text})
	}
}

// Delta is a piece of an unfinished answer, for display only: the [Response] is authoritative.
type Delta struct {
	Kind DeltaKind
	Text string // complete characters, not sanitised for a terminal
}

// DeltaKind is the part of the answer that a [Delta] belongs to.
type DeltaKind string

// Kinds of deltas.
const (
	DeltaContent   DeltaKind = "content"
	DeltaReasoning DeltaKind = "reasoning"
	DeltaCall      DeltaKind = "call"      // name of a tool; its arguments follow
	DeltaArguments DeltaKind = "arguments" // of the last named tool
	// DeltaRestart voids all earlier deltas of the answer: it broke off and is requested again.
	DeltaRestart DeltaKind = "restart"
)

// Usage holds a provider's token counts for one call, or a sum of them. Zero fields were not
// reported.
type Usage struct {
	PromptTokens     int `json:"prompt_tokens"` // whole input, cached or not
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
	CachedTokens     int `json:"cached_tokens,omitempty"`      // of PromptTokens: read from the provider's cache
	CacheWriteTokens int `json:"cache_write_tokens,omitempty"` // of PromptTokens: written to that cache, for which some providers charge
	ReasoningTokens  int `json:"reasoning_tokens,omitempty"`   // of CompletionTokens
	// CostUSD is the cost of the calls by [Prices]. UnpricedCalls counts the calls that it omits
	// because their model has no known price. The models of this package set neither.
	CostUSD       float64 `json:"cost_usd,omitempty"`
	UnpricedCalls int     `json:"unpriced_calls,omitempty"`
}

// Add adds the usage of another call.
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

// Values of [Response.FinishReason], independent of the provider's words. Unknown reasons are
// passed on unchanged.
const (
	FinishStop      = "stop"
	FinishToolCalls = "tool_calls"
	FinishLength    = "length"         // cut off at the answer ceiling or the end of the context
	FinishRefusal   = "refusal"        // the model refused
	FinishFilter    = "content_filter" // the provider refused
)

// Response is one model turn.
type Response struct {
	Content      string
	Reasoning    string // the model's reasoning, if the provider shows it
	ToolCalls    []ToolCall
	FinishReason string // FinishStop, FinishToolCalls, ...
	Usage        Usage
	Raw          json.RawMessage // whole answer as received, for the record
	Message      Message         // this turn in the form for the next request
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

// MarshalJSON writes the chat-completions form, which is Raw if Raw has that format.
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

// historyName returns the name of a past call as it is sent back. A model can invent a name that
// providers refuse in a request, which would break every later call of the conversation.
func historyName(name string) string {
	name = identifier(name)
	if name == "" {
		return "unnamed"
	}
	return name[:min(len(name), 64)]
}

// identifier replaces every character but ASCII letters, digits, underscores and dashes by an
// underscore.
func identifier(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '-':
			return r
		}
		return '_'
	}, text)
}

// historyArguments returns the arguments of a past call as they are sent back. Several servers,
// vLLM's chat templates among them, parse these and answer 400 or 500 from then on if one is not a
// JSON object. Text that does not parse is therefore quoted inside an object. The tool error that
// the model received holds its own text.
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
