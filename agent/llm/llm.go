package llm

import (
	"context"
	"encoding/json"
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
	// Raw is an assistant message as its provider wants it back. When set, it is sent in place of the other fields.
	Raw json.RawMessage
}

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
}

// Usage is what the provider counted for one call. Zero fields were not reported.
type Usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
	CachedTokens     int `json:"cached_tokens,omitempty"`
	ReasoningTokens  int `json:"reasoning_tokens,omitempty"`
}

// Response is one model turn.
type Response struct {
	Content      string
	Reasoning    string // what the provider shows of the model's thinking, where it does
	ToolCalls    []ToolCall
	FinishReason string // "stop", "tool_calls", "length", ... as the provider says it
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

// MarshalJSON writes the chat-completions form, or Raw where it is set.
func (m Message) MarshalJSON() ([]byte, error) {
	if m.Raw != nil {
		return m.Raw, nil
	}
	w := wireMessage{Role: m.Role, Content: &m.Content, ToolCallID: m.ToolCallID}
	for _, c := range m.ToolCalls {
		w.ToolCalls = append(w.ToolCalls, wireToolCall{ID: c.ID, Type: "function", Function: wireFunction{Name: c.Name, Arguments: historyArguments(c.Arguments)}})
	}
	return json.Marshal(w)
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
