// Package llmtest is a scripted model behind the real chat-completions wire format, for tests.
//
// The server is as strict as the strictest providers: a conversation in which a tool call is not answered exactly once, or
// a tool message answers nothing, is refused with 400, as OpenAI does. It plays its turns in order, whatever the tools said.
package llmtest

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
)

// Call is one tool call of a scripted turn.
type Call struct {
	ID        string // "": made up; NoID for a call without one
	Name      string
	Arguments string // sent as it is, valid or not
}

// NoID makes the server send an empty tool call id, as some local servers do.
const NoID = "\x00none"

// Tool builds a call whose arguments are the JSON of args; a string is taken as the JSON itself.
func Tool(name string, args any) Call {
	if s, ok := args.(string); ok {
		return Call{Name: name, Arguments: s}
	}
	b, err := json.Marshal(args)
	if err != nil {
		panic(fmt.Sprintf("llmtest: arguments of %s: %v", name, err)) // a mistake in the test itself
	}
	return Call{Name: name, Arguments: string(b)}
}

// Bash is a call of execute_bash.
func Bash(command string) Call { return Tool("execute_bash", map[string]string{"command": command}) }

// Edit is a call of str_replace_editor.
func Edit(args map[string]any) Call { return Tool("str_replace_editor", args) }

// Submit is a call of submit.
func Submit() Call { return Tool("submit", "{}") }

// Turn is one answer of the model.
type Turn struct {
	Content      string
	Reasoning    string // sent as reasoning_content
	Calls        []Call
	FinishReason string         // "": "tool_calls" or "stop"
	Extra        map[string]any // further fields of the message; they must come back in later requests
	PromptTokens int            // reported usage; 0: none is reported

	// Status, when set, answers with this HTTP status, Header and Body in place of a completion.
	Status int
	Header http.Header
	Body   string // with Status 200: garbage in place of a completion
	// Hang holds the answer back until the client goes away or the server closes.
	Hang bool
	// Check, if set, looks at the request first; its error is answered with 400 and kept in Errors.
	Check func(Request) error
}

// Message is a message of a request as the server got it.
type Message struct {
	Role       string  `json:"role"`
	Content    *string `json:"content"`
	ToolCallID string  `json:"tool_call_id"`
	ToolCalls  []struct {
		ID       string `json:"id"`
		Type     string `json:"type"`
		Function struct {
			Name      string `json:"name"`
			Arguments string `json:"arguments"`
		} `json:"function"`
	} `json:"tool_calls"`
	Fields map[string]json.RawMessage `json:"-"` // everything that was sent
}

// Text is the content, or "" for none.
func (m Message) Text() string {
	if m.Content == nil {
		return ""
	}
	return *m.Content
}

// Request is one request as the server got it.
type Request struct {
	Model    string
	Messages []Message
	Tools    []string                   // names
	Fields   map[string]json.RawMessage // the whole body
	Header   http.Header
}

// Last is the last message.
func (r Request) Last() Message { return r.Messages[len(r.Messages)-1] }

// Server is a scripted model.
type Server struct {
	URL string // base URL, ending in /v1

	http *httptest.Server
	stop chan struct{}

	mu       sync.Mutex
	turns    []Turn
	next     int
	requests []Request
	errs     []error
}

// New starts a server on the loopback address that plays the turns. Close it.
func New(turns ...Turn) *Server {
	s := &Server{turns: turns, stop: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", s.complete)
	s.http = httptest.NewServer(mux)
	s.URL = s.http.URL + "/v1"
	return s
}

// Start is New for a test: closed at its end, which fails if the server had to refuse a request as malformed.
func Start(tb testing.TB, turns ...Turn) *Server {
	tb.Helper()
	s := New(turns...)
	tb.Cleanup(func() {
		s.Close()
		for _, err := range s.Errors() {
			tb.Errorf("scripted model refused a request: %v", err)
		}
	})
	return s
}

// Close ends the server and every answer that hangs.
func (s *Server) Close() {
	close(s.stop)
	s.http.CloseClientConnections()
	s.http.Close()
}

// Requests are those that were answered from the script, in order.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Request(nil), s.requests...)
}

// Left is how many turns of the script have not been played.
func (s *Server) Left() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.turns) - s.next
}

// Errors are the breaches of the wire format, of a turn's Check, and calls after the script's end.
func (s *Server) Errors() []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]error(nil), s.errs...)
}

func (s *Server) refuse(w http.ResponseWriter, err error) {
	s.mu.Lock()
	s.errs = append(s.errs, err)
	s.mu.Unlock()
	writeJSON(w, http.StatusBadRequest, map[string]any{"error": map[string]any{"message": err.Error(), "type": "invalid_request_error", "param": nil, "code": nil}})
}

func (s *Server) complete(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 64<<20))
	if err != nil {
		s.refuse(w, fmt.Errorf("read body: %w", err))
		return
	}
	req, err := Parse(body)
	if err != nil {
		s.refuse(w, err)
		return
	}
	req.Header = r.Header.Clone()

	s.mu.Lock()
	if s.next >= len(s.turns) {
		s.mu.Unlock()
		s.refuse(w, fmt.Errorf("the script has %d turns and all are played", len(s.turns)))
		return
	}
	n, turn := s.next, s.turns[s.next]
	s.next++
	s.requests = append(s.requests, req)
	s.mu.Unlock()

	if turn.Check != nil {
		if err := turn.Check(req); err != nil {
			s.refuse(w, fmt.Errorf("turn %d: %w", n+1, err))
			return
		}
	}
	switch {
	case turn.Hang:
		select {
		case <-r.Context().Done():
		case <-s.stop:
		}
	case turn.Status != 0:
		maps.Copy(w.Header(), turn.Header)
		if w.Header().Get("Content-Type") == "" {
			w.Header().Set("Content-Type", "application/json")
		}
		w.WriteHeader(turn.Status)
		_, _ = io.WriteString(w, turn.Body)
	default:
		writeJSON(w, http.StatusOK, completion(n, req.Model, turn))
	}
}

// completion is the answer as vLLM writes it: with fields that OpenAI does not have, and nulls and empty lists that
// must not be sent back.
func completion(n int, model string, t Turn) map[string]any {
	calls := []map[string]any{}
	for i, c := range t.Calls {
		id := c.ID
		switch id {
		case "":
			id = "call_" + strconv.Itoa(n+1) + "_" + strconv.Itoa(i+1)
		case NoID:
			id = ""
		}
		calls = append(calls, map[string]any{"id": id, "type": "function", "function": map[string]any{"name": c.Name, "arguments": c.Arguments}})
	}
	message := map[string]any{"role": "assistant", "refusal": nil, "annotations": nil, "tool_calls": calls}
	message["content"] = t.Content
	if t.Content == "" {
		message["content"] = nil
	}
	if t.Reasoning != "" {
		message["reasoning_content"] = t.Reasoning
	}
	maps.Copy(message, t.Extra)
	finish := t.FinishReason
	if finish == "" {
		finish = "stop"
		if len(calls) > 0 {
			finish = "tool_calls"
		}
	}
	answer := map[string]any{
		"id": "chatcmpl-" + strconv.Itoa(n+1), "object": "chat.completion", "created": 1750000000, "model": model,
		"choices": []any{map[string]any{"index": 0, "message": message, "finish_reason": finish, "logprobs": nil}},
	}
	if t.PromptTokens > 0 {
		answer["usage"] = map[string]any{"prompt_tokens": t.PromptTokens, "completion_tokens": 10, "total_tokens": t.PromptTokens + 10}
	}
	return answer
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

// Parse reads and checks a request body as a strict provider does.
func Parse(body []byte) (Request, error) {
	var req Request
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
	case wire.Stream:
		return req, fmt.Errorf("stream: the scripted model does not stream")
	}
	req.Model = wire.Model
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

// checkMessages holds the rule that most agents break: every tool call of an assistant message is answered by exactly
// one of the tool messages that follow it at once, and by nothing else.
func checkMessages(messages []Message) error {
	open := map[string]bool{} // ids of the last assistant message; true: answered
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
				if _, dup := open[c.ID]; dup || c.ID == "" || c.Type != "function" || c.Function.Name == "" {
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
