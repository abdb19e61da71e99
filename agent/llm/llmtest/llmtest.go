// Package llmtest serves a scripted model for tests in the real wire formats: chat completions,
// Responses and Anthropic's Messages, whole and streamed. No model is involved, and the Server
// header of every answer says so.
//
// The server is as strict as the strictest provider. Like OpenAI, it answers 400 if a tool call is
// not answered exactly once, or if a tool message answers no call. It plays its turns in order,
// whatever the requests hold.
package llmtest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unicode/utf16"

	"github.com/sandboxd/sandboxd/agent/llm"
)

// Call is one tool call of a scripted turn.
type Call struct {
	ID        string // "" for a generated ID; NoID for a call without one
	Name      string
	Arguments string // sent unchanged, valid or not
}

// NoID makes the server send an empty tool call ID, as some local servers do.
const NoID = "\x00none"

// Tool returns a call whose arguments are the JSON of args; a string is taken as JSON.
func Tool(name string, args any) Call {
	if s, ok := args.(string); ok {
		return Call{Name: name, Arguments: s}
	}
	b, err := json.Marshal(args)
	if err != nil {
		panic(fmt.Sprintf("llmtest: arguments of %s: %v", name, err)) // a defect of the test
	}
	return Call{Name: name, Arguments: string(b)}
}

// Bash returns a call of execute_bash.
func Bash(command string) Call { return Tool("execute_bash", map[string]string{"command": command}) }

// Edit returns a call of str_replace_editor.
func Edit(args map[string]any) Call { return Tool("str_replace_editor", args) }

// Submit returns a call of submit.
func Submit() Call { return Tool("submit", "{}") }

// Turn is one answer of the model.
type Turn struct {
	Content      string
	Reasoning    string // sent as reasoning_content
	Calls        []Call
	FinishReason string         // "" means "tool_calls" or "stop"
	Extra        map[string]any // further fields of the message; later requests must repeat them
	Refusal      string         // replaces Content
	PromptTokens int            // reported usage; 0 reports none
	// Rest of the usage. A zero CompletionTokens means 10.
	CompletionTokens, CachedTokens, CacheWriteTokens, ReasoningTokens int

	// Status, if set, answers with this HTTP status, Header and Body instead of a completion.
	Status int
	Header http.Header
	Body   string // with Status 200: garbage instead of a completion
	// Hang withholds the answer until the client disconnects or the server closes. HangAfter does so
	// after the first piece of a streamed answer.
	Hang, HangAfter bool
	// Drop breaks the answer off.
	Drop Drop
	// StreamError is the type of an error after the first piece of a streamed answer. If the answer
	// is not streamed, the error replaces it.
	StreamError, StreamMessage string
	// Pieces selects how the texts of a streamed answer are cut. Chunk is the number of bytes of one
	// write; 0 writes each event at once.
	Pieces Pieces
	Chunk  int
	// Check, if set, inspects the request first. Its error is answered with 400 and kept in Errors.
	Check func(Request) error
}

// Drop is the place at which an answer breaks off.
type Drop string

// Places to break an answer off.
const (
	DropNone   Drop = ""
	DropAtOnce Drop = "at once" // before the first byte
	DropFirst  Drop = "first"   // after the first piece of the turn; half-way if the answer is not streamed
	DropMiddle Drop = "middle"  // in the middle of a line
	DropEnd    Drop = "end"     // before the end mark
	DropClean  Drop = "clean"   // after the first piece, with a clean end of the body
)

// Pieces is a way to cut texts into deltas.
type Pieces string

// Ways to cut a text.
const (
	PiecesWords Pieces = ""      // a few characters each
	PiecesBytes Pieces = "bytes" // single bytes of the UTF-8 form
	PiecesUnits Pieces = "units" // single UTF-16 units, escaped
)

// Message is a message of a request as received.
type Message struct {
	Role       string                     `json:"role"`
	Content    *string                    `json:"content"`
	ToolCallID string                     `json:"tool_call_id"`
	ToolCalls  []MessageCall              `json:"tool_calls"`
	Fields     map[string]json.RawMessage `json:"-"` // all fields that were sent
}

// MessageCall is a tool call in a request.
type MessageCall struct {
	ID       string `json:"id"`
	Type     string `json:"type"`
	Function struct {
		Name      string `json:"name"`
		Arguments string `json:"arguments"`
	} `json:"function"`
}

// Text returns the content, or "" if there is none.
func (m Message) Text() string {
	if m.Content == nil {
		return ""
	}
	return *m.Content
}

// Request is one request as received. Its messages have one form, whatever the format; Fields is
// the body as sent.
type Request struct {
	Format   llm.Format
	Model    string
	Stream   bool
	Messages []Message
	Tools    []string                   // names
	Fields   map[string]json.RawMessage // the whole body
	Header   http.Header
}

// Last returns the last message.
func (r Request) Last() Message { return r.Messages[len(r.Messages)-1] }

// Server is a scripted model.
type Server struct {
	URL string // base URL, ending in /v1
	// Key, if set, is the only accepted key.
	Key string

	http *httptest.Server
	stop chan struct{}

	mu       sync.Mutex
	turns    []Turn
	next     int
	requests []Request
	errs     []error
}

// New starts a server on the loopback address that plays the turns. The caller closes it.
func New(turns ...Turn) *Server {
	s := &Server{turns: turns, stop: make(chan struct{})}
	mux := http.NewServeMux()
	for path, format := range map[string]llm.Format{
		"/v1/chat/completions": llm.FormatChat, "/v1/responses": llm.FormatResponses, "/v1/messages": llm.FormatAnthropic,
	} {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Server", "scripted model (a fake, for tests)")
			s.complete(w, r, format)
		})
	}
	s.http = httptest.NewServer(mux)
	s.URL = s.http.URL + "/v1"
	return s
}

// Start starts a server for a test and closes it at its end. The test fails if the server had to
// refuse a malformed request.
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

// Close stops the server and all withheld answers.
func (s *Server) Close() {
	close(s.stop)
	s.http.CloseClientConnections()
	s.http.Close()
}

// Requests returns the requests that were answered from the script, in order.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Request(nil), s.requests...)
}

// Left returns the number of turns that were not played.
func (s *Server) Left() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.turns) - s.next
}

// Errors returns the violations of the wire format and of Check, and the calls after the script's
// end.
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

func (s *Server) complete(w http.ResponseWriter, r *http.Request, format llm.Format) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 64<<20))
	if err != nil { // the client disconnected while it sent
		panic(http.ErrAbortHandler)
	}
	req, err := ParseFormat(format, body)
	if err == nil && s.Key != "" && key(format, r.Header) != s.Key {
		err = fmt.Errorf("the key is %q", key(format, r.Header))
	}
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
		s.hang(r)
	case turn.Drop == DropAtOnce:
		panic(http.ErrAbortHandler)
	case turn.Status != 0:
		maps.Copy(w.Header(), turn.Header)
		if w.Header().Get("Content-Type") == "" {
			w.Header().Set("Content-Type", "application/json")
		}
		w.WriteHeader(turn.Status)
		_, _ = io.WriteString(w, turn.Body)
	case req.Stream:
		s.stream(w, r, encoder(format).events(n, req.Model, turn), turn)
	case turn.StreamError != "":
		status := map[string]int{"overloaded_error": 529, "rate_limit_error": 429, "invalid_request_error": 400}[turn.StreamError]
		if status == 0 {
			status = http.StatusInternalServerError
		}
		writeJSON(w, status, ErrorBody(format, turn.StreamError, turn.StreamMessage))
	default:
		whole := encoder(format).whole(n, req.Model, turn)
		if turn.Drop == DropNone {
			writeJSON(w, http.StatusOK, whole)
			return
		}
		b, _ := json.Marshal(whole)
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(b[:len(b)/2])
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
}

func (s *Server) hang(r *http.Request) {
	select {
	case <-r.Context().Done():
	case <-s.stop:
	}
}

// key returns the key that a request of the format carries.
func key(format llm.Format, h http.Header) string {
	if format == llm.FormatAnthropic {
		return h.Get("X-Api-Key")
	}
	return strings.TrimPrefix(h.Get("Authorization"), "Bearer ")
}

// stream writes the events. The first one with a piece of the turn is at index first.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, events []event, turn Turn) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	first := max(0, slices.IndexFunc(events, func(e event) bool { return e.piece }))
	out := &chunkWriter{w: w, flush: http.NewResponseController(w).Flush, size: turn.Chunk}
	for i, e := range events {
		text := e.encode()
		switch {
		case turn.Drop == DropMiddle && i == first+1:
			out.write(text[:len(text)/2])
			out.end()
			panic(http.ErrAbortHandler)
		case turn.Drop == DropEnd && i == len(events)-1:
			out.end()
			panic(http.ErrAbortHandler)
		}
		out.write(text)
		if i != first {
			continue
		}
		switch {
		case turn.HangAfter:
			out.end()
			s.hang(r)
			return
		case turn.Drop == DropFirst:
			out.end()
			panic(http.ErrAbortHandler)
		case turn.Drop == DropClean:
			out.end()
			return
		case turn.StreamError != "":
			out.write(event{name: "error", data: mustJSON(ErrorBody(requestFormat(r), turn.StreamError, turn.StreamMessage))}.encode())
			out.end()
			return
		}
	}
	out.end()
}

func requestFormat(r *http.Request) llm.Format {
	switch path.Base(r.URL.Path) {
	case "responses":
		return llm.FormatResponses
	case "messages":
		return llm.FormatAnthropic
	}
	return llm.FormatChat
}

// chunkWriter flushes after every size bytes, so that the client reads them apart. With size 0 it
// flushes after every write.
type chunkWriter struct {
	w     io.Writer
	flush func() error
	size  int
}

func (c *chunkWriter) write(text []byte) {
	size := c.size
	if size == 0 {
		size = len(text)
	}
	for part := range slices.Chunk(text, size) {
		_, _ = c.w.Write(part)
		_ = c.flush()
	}
}

func (c *chunkWriter) end() { _ = c.flush() }

// event is one server-sent event.
type event struct {
	name  string
	data  []byte
	piece bool // a piece of the turn
}

func (e event) encode() []byte {
	var b bytes.Buffer
	if e.name != "" {
		fmt.Fprintf(&b, "event: %s\n", e.name)
	}
	fmt.Fprintf(&b, "data: %s\n\n", e.data)
	return b.Bytes()
}

// wire encodes answers in one wire format.
type wire struct {
	whole  func(n int, model string, t Turn) map[string]any
	events func(n int, model string, t Turn) []event
}

func encoder(format llm.Format) wire {
	switch format {
	case llm.FormatResponses:
		return wire{responsesWhole, responsesEvents}
	case llm.FormatAnthropic:
		return wire{anthropicWhole, anthropicEvents}
	case llm.FormatChat:
	}
	return wire{completion, chatEvents}
}

// ErrorBody returns an error in the form of the format's provider.
func ErrorBody(format llm.Format, kind, message string) map[string]any {
	if format == llm.FormatAnthropic {
		return map[string]any{"type": "error", "error": map[string]any{"type": kind, "message": message}, "request_id": "req_scripted"}
	}
	return map[string]any{"error": map[string]any{"message": message, "type": kind, "param": nil, "code": kind}}
}

// calls returns the calls of a turn with their IDs.
func (t Turn) calls(n int) []Call {
	calls := slices.Clone(t.Calls)
	for i := range calls {
		switch calls[i].ID {
		case "":
			calls[i].ID = "call_" + strconv.Itoa(n+1) + "_" + strconv.Itoa(i+1)
		case NoID:
			calls[i].ID = ""
		}
	}
	return calls
}

func (t Turn) outputTokens() int {
	if t.CompletionTokens == 0 {
		return 10
	}
	return t.CompletionTokens
}

func mustJSON(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("llmtest: %v", err)) // a defect of the test
	}
	return b
}

// cut returns the JSON strings of the pieces of a text.
func (p Pieces) cut(text string) []json.RawMessage {
	var pieces []json.RawMessage
	switch p {
	case PiecesBytes:
		for i := range len(text) {
			switch c := text[i]; {
			case c == '"' || c == '\\':
				pieces = append(pieces, json.RawMessage{'"', '\\', c, '"'})
			case c < ' ':
				pieces = append(pieces, fmt.Appendf(nil, `"\u%04x"`, c))
			default:
				pieces = append(pieces, json.RawMessage{'"', c, '"'})
			}
		}
	case PiecesUnits:
		for _, unit := range utf16.Encode([]rune(text)) {
			pieces = append(pieces, fmt.Appendf(nil, `"\u%04x"`, unit))
		}
	case PiecesWords:
		for part := range slices.Chunk([]rune(text), 7) {
			pieces = append(pieces, mustJSON(string(part)))
		}
	}
	return pieces
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}
