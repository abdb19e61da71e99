package llm_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
)

func newOpenAI(t *testing.T, url string) *llm.OpenAI {
	t.Helper()
	m, err := llm.NewOpenAI(llm.ServerOptions{BaseURL: url})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func userMessage(text string) []llm.Message {
	return []llm.Message{{Role: llm.RoleUser, Content: text}}
}

var tools = []llm.Tool{{Name: "t", Description: "d", Parameters: json.RawMessage(`{"type":"object"}`)}}

func TestRequestCarriesWhatWasAskedFor(t *testing.T) {
	srv := llmtest.Start(t, llmtest.Turn{Content: "hello"}, llmtest.Turn{Content: "hello"})
	temperature := 0.25
	req := llm.Request{
		Model: "m", Messages: userMessage("hi"), Tools: tools, Temperature: &temperature, MaxTokens: 77,
		ExtraBody: map[string]any{"top_k": 20, "chat_template_kwargs": map[string]any{"enable_thinking": false}, "a.b": 1},
	}
	if _, err := newOpenAI(t, srv.URL).Complete(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	req.Model, req.Temperature = "o3-mini", nil
	if _, err := newOpenAI(t, srv.URL+"/").Complete(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	got := srv.Requests()
	for key, want := range map[string]string{
		"model": `"m"`, "temperature": "0.25", "max_tokens": "77", "top_k": "20", "chat_template_kwargs": `{"enable_thinking":false}`, "a.b": "1",
		"tools": `[{"function":{"name":"t","description":"d","parameters":{"type":"object"}},"type":"function"}]`,
	} {
		if g := string(got[0].Fields[key]); g != want {
			t.Errorf("%s = %s, want %s", key, g, want)
		}
	}
	if got[0].Header.Get("Authorization") != "Bearer dummy" {
		t.Errorf("Authorization = %q", got[0].Header.Get("Authorization"))
	}
	if got[1].Fields["max_completion_tokens"] == nil || got[1].Fields["max_tokens"] != nil || got[1].Fields["temperature"] != nil {
		t.Errorf("a reasoning model got %s", got[1].Fields)
	}
}

// Fields that only the provider understands must return to it; fields that strict providers refuse
// must not.
func TestAssistantMessageComesBackAsItWas(t *testing.T) {
	srv := llmtest.Start(t,
		llmtest.Turn{
			Content: "thinking aloud", Reasoning: "because",
			Calls: []llmtest.Call{
				{ID: "a", Name: "t", Arguments: `{"x":1}`},
				{ID: "a", Name: "t", Arguments: `{"x":`}, // repeated ID, invalid JSON
				{ID: llmtest.NoID, Name: "t", Arguments: ""},
			},
			Extra: map[string]any{"reasoning_details": []any{map[string]any{"signature": "abc"}}},
		},
		llmtest.Turn{}, // neither content nor calls
		llmtest.Turn{Content: "done", PromptTokens: 5})
	m := newOpenAI(t, srv.URL)
	messages := userMessage("hi")
	resp, err := m.Complete(t.Context(), llm.Request{Model: "m", Messages: messages, Tools: tools})
	if err != nil {
		t.Fatal(err)
	}
	want := []llm.ToolCall{{ID: "a", Name: "t", Arguments: `{"x":1}`}, {ID: "call_1", Name: "t", Arguments: `{"x":`}, {ID: "call_2", Name: "t"}}
	if diff := cmp.Diff(want, resp.ToolCalls); diff != "" {
		t.Errorf("tool calls (-want +got):\n%s", diff)
	}
	if resp.Reasoning != "because" || resp.Content != "thinking aloud" || resp.FinishReason != "tool_calls" {
		t.Errorf("response %+v", resp)
	}
	messages = append(messages, resp.Message)
	for _, c := range resp.ToolCalls {
		messages = append(messages, llm.Message{Role: llm.RoleTool, ToolCallID: c.ID, Content: "answer"})
	}
	if resp, err = m.Complete(t.Context(), llm.Request{Model: "m", Messages: messages, Tools: tools}); err != nil {
		t.Fatal(err)
	}
	messages = append(messages, resp.Message, llm.Message{Role: llm.RoleUser, Content: "go on"})
	if resp, err = m.Complete(t.Context(), llm.Request{Model: "m", Messages: messages, Tools: tools}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(llm.Usage{PromptTokens: 5, CompletionTokens: 10, TotalTokens: 15}, resp.Usage); diff != "" {
		t.Errorf("usage (-want +got):\n%s", diff)
	}
	back := srv.Requests()[1].Messages[1]
	if got := string(back.Fields["reasoning_details"]); got != `[{"signature":"abc"}]` {
		t.Errorf("reasoning_details came back as %s", got)
	}
	if got := string(back.Fields["reasoning_content"]); got != `"because"` {
		t.Errorf("reasoning_content came back as %s", got)
	}
	if got := back.ToolCalls[1].Function.Arguments; got != `{"invalid_json":"{\"x\":"}` {
		t.Errorf("broken arguments came back as %s", got)
	}
}

func TestReasoningFields(t *testing.T) {
	for name, extra := range map[string]map[string]any{
		"reasoning":              {"reasoning": "r"},
		"reasoning_content":      {"reasoning_content": "r", "reasoning": nil},
		"provider thinking":      {"provider_specific_fields": map[string]any{"thinking": "r"}},
		"both":                   {"reasoning": "r", "reasoning_content": "r"},
		"object beside a string": {"reasoning": map[string]any{"x": 1}, "reasoning_content": "r"},
	} {
		t.Run(name, func(t *testing.T) {
			srv := llmtest.Start(t, llmtest.Turn{Content: "c", Extra: extra})
			resp, err := newOpenAI(t, srv.URL).Complete(t.Context(), llm.Request{Model: "m", Messages: userMessage("x")})
			if err != nil {
				t.Fatal(err)
			}
			if resp.Reasoning != "r" {
				t.Errorf("reasoning %q", resp.Reasoning)
			}
		})
	}
}

func TestArgumentsAsObject(t *testing.T) {
	srv := llmtest.Start(t, llmtest.Turn{Status: 200, Body: `{"choices":[{"message":{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"t","arguments":{"a":1}}}]}}]}`},
		llmtest.Turn{Content: "ok"})
	m := newOpenAI(t, srv.URL)
	resp, err := m.Complete(t.Context(), llm.Request{Model: "m", Messages: userMessage("x")})
	if err != nil {
		t.Fatal(err)
	}
	if resp.ToolCalls[0].Arguments != `{"a":1}` {
		t.Errorf("arguments %q", resp.ToolCalls[0].Arguments)
	}
	messages := append(userMessage("x"), resp.Message, llm.Message{Role: llm.RoleTool, ToolCallID: "1", Content: "y"})
	if _, err := m.Complete(t.Context(), llm.Request{Model: "m", Messages: messages}); err != nil {
		t.Error(err)
	}
}

func TestErrorsAreClearAndClassified(t *testing.T) {
	for _, tc := range []struct {
		name string
		turn llmtest.Turn
		kind llm.Kind
		want string
		wait time.Duration
	}{
		{"500", llmtest.Turn{Status: 500, Body: `{"error":{"message":"boom"}}`}, llm.KindServer, "HTTP 500: boom", 0},
		{"500 without body", llmtest.Turn{Status: 500}, llm.KindServer, "HTTP 500: Internal Server Error", 0},
		{"502 html", llmtest.Turn{Status: 502, Body: "<html>bad gateway</html>", Header: http.Header{"Content-Type": {"text/html"}}}, llm.KindServer, "bad gateway", 0},
		{"429", llmtest.Turn{Status: 429, Body: `{"error":{"message":"slow down","code":"rate_limit"}}`, Header: http.Header{"Retry-After": {"7"}}}, llm.KindRateLimit, "slow down", 7 * time.Second},
		{"429 date", llmtest.Turn{Status: 429, Header: http.Header{"Retry-After": {"Thu, 01 Jan 1970 00:00:30 GMT"}}}, llm.KindRateLimit, "429", 30 * time.Second},
		{"429 ms", llmtest.Turn{Status: 429, Header: http.Header{"Retry-After-Ms": {"1500"}}}, llm.KindRateLimit, "429", 1500 * time.Millisecond},
		{"429 nonsense", llmtest.Turn{Status: 429, Header: http.Header{"Retry-After": {"-3"}}}, llm.KindRateLimit, "429", 0},
		{"401", llmtest.Turn{Status: 401, Body: `{"error":"bad key"}`}, llm.KindAuth, "bad key (give the key with --api_key", 0},
		{"404", llmtest.Turn{Status: 404, Body: `{"detail":"no such model"}`}, llm.KindRequest, "no such model", 0},
		{"context", llmtest.Turn{Status: 400, Body: `{"error":{"message":"This model's maximum context length is 8192 tokens. However, you requested 9000 tokens (1000 in the messages, 8000 in the completion)."}}`}, llm.KindContextLength, "8192", 0},
		{"context by code", llmtest.Turn{Status: 400, Body: `{"error":{"message":"no","code":"context_length_exceeded"}}`}, llm.KindContextLength, "context_length_exceeded", 0},
		{"garbage", llmtest.Turn{Status: 200, Body: "hello"}, llm.KindBadResponse, "not a chat completion", 0},
		{"html with 200", llmtest.Turn{Status: 200, Body: "<html>", Header: http.Header{"Content-Type": {"text/html"}}}, llm.KindBadResponse, "not a chat completion", 0},
		{"empty body", llmtest.Turn{Status: 200}, llm.KindBadResponse, "", 0},
		{"null", llmtest.Turn{Status: 200, Body: "null"}, llm.KindBadResponse, "no choices", 0},
		{"no choices", llmtest.Turn{Status: 200, Body: `{"choices":[]}`}, llm.KindBadResponse, "no choices", 0},
		{"error with 200", llmtest.Turn{Status: 200, Body: `{"error":{"message":"upstream fell over"}}`}, llm.KindBadResponse, "upstream fell over", 0},
		{"message null", llmtest.Turn{Status: 200, Body: `{"choices":[{"message":null}]}`}, llm.KindBadResponse, "message", 0},
		{"tool calls not a list", llmtest.Turn{Status: 200, Body: `{"choices":[{"message":{"tool_calls":7}}]}`}, llm.KindBadResponse, "message", 0},
		{"cut short", llmtest.Turn{Status: 200, Body: `{"choices":[`}, llm.KindBadResponse, "", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			srv := llmtest.Start(t, tc.turn)
			m, err := llm.NewOpenAI(llm.ServerOptions{BaseURL: srv.URL, Now: func() time.Time { return time.Unix(0, 0) }})
			if err != nil {
				t.Fatal(err)
			}
			_, err = m.Complete(t.Context(), llm.Request{Model: "m", Messages: userMessage("x")})
			var e *llm.Error
			if !errors.As(err, &e) {
				t.Fatalf("error %T %v, want *llm.Error", err, err)
			}
			if e.Kind != tc.kind || !strings.Contains(err.Error(), tc.want) || e.RetryAfter != tc.wait {
				t.Errorf("got kind %q, wait %v, text %q; want %q, %v, ...%q", e.Kind, e.RetryAfter, err, tc.kind, tc.wait, tc.want)
			}
			if len(err.Error()) > 2000 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
		})
	}
}

func TestHugeAnswerIsRefused(t *testing.T) {
	if testing.Short() {
		t.Skip("moves 64 MiB")
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		block := []byte(strings.Repeat(" ", 1<<20))
		for {
			if _, err := w.Write(block); err != nil {
				return
			}
		}
	}))
	t.Cleanup(srv.Close)
	_, err := newOpenAI(t, srv.URL).Complete(t.Context(), llm.Request{Model: "m", Messages: userMessage("x")})
	if err == nil || !strings.Contains(err.Error(), "more than 64 MiB") {
		t.Errorf("got %v", err)
	}
}

func TestUnreachableServer(t *testing.T) {
	// A bound port refuses connections while no socket listens on it.
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	url := fmt.Sprintf("http://127.0.0.1:%d/v1", name.(*unix.SockaddrInet4).Port)
	_, err = newOpenAI(t, url).Complete(t.Context(), llm.Request{Model: "m", Messages: userMessage("x")})
	var e *llm.Error
	if !errors.As(err, &e) || e.Kind != llm.KindUnreachable || !strings.Contains(err.Error(), url) || !strings.Contains(err.Error(), "--llm_base_url") {
		t.Errorf("got %v", err)
	}
}

func TestCallTimeLimit(t *testing.T) {
	srv := llmtest.Start(t, llmtest.Turn{Hang: true})
	m, err := llm.NewOpenAI(llm.ServerOptions{BaseURL: srv.URL, Timeout: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	_, err = m.Complete(t.Context(), llm.Request{Model: "m", Messages: userMessage("x")})
	var e *llm.Error
	if !errors.As(err, &e) || e.Kind != llm.KindNetwork || !strings.Contains(err.Error(), "time limit") {
		t.Errorf("got %v", err)
	}
}

func TestCancelledCall(t *testing.T) {
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	srv := llmtest.Start(t, llmtest.Turn{Hang: true, Check: func(llmtest.Request) error { cancel(why); return nil }})
	_, err := newOpenAI(t, srv.URL).Complete(ctx, llm.Request{Model: "m", Messages: userMessage("x")})
	if !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
}

func TestBaseURLIsChecked(t *testing.T) {
	for _, url := range []string{"", "localhost:8000/v1", "ftp://x/v1", "http://", "http://a b/"} {
		if _, err := llm.NewOpenAI(llm.ServerOptions{BaseURL: url}); err == nil {
			t.Errorf("%q was accepted", url)
		}
	}
	// Text before the host may be a secret, and is neither used nor shown.
	for _, url := range []string{
		"http://me:secret@host/v1", "http://secret@host/v1", "https://secret:@host/v1", "http://:secret@host/v1", "http://se%63ret@host/v1",
		"secret@host/v1", "me:secret@host/v1", "http:secret@host/v1", "ftp://secret@host/v1", "http:/secret@host/v1", "/v1?key=secret", "http://a b/?key=secret",
	} {
		m, err := llm.NewOpenAI(llm.ServerOptions{BaseURL: url})
		if err == nil || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "se%63ret") {
			t.Errorf("%q: %v, %v", url, m, err)
		}
		if strings.HasPrefix(url, "http://secret@") && !strings.Contains(err.Error(), `"http://host/v1"`) {
			t.Errorf("%q: %v does not say which", url, err)
		}
	}
}

func TestParseName(t *testing.T) {
	chat, local := llm.FormatChat, "http://localhost:8000/v1"
	for in, want := range map[string]struct {
		name   string
		format llm.Format
		url    string
		key    string
	}{
		"gpt-4o":                  {"gpt-4o", chat, local, "OPENAI_API_KEY"},
		"openai/gpt-4o":           {"gpt-4o", chat, local, "OPENAI_API_KEY"},
		"hosted_vllm/Qwen/Qwen3":  {"Qwen/Qwen3", chat, local, "OPENAI_API_KEY"},
		"openai/openai/gpt-oss":   {"openai/gpt-oss", chat, local, "OPENAI_API_KEY"},
		"Qwen/Qwen3-Coder":        {"Qwen/Qwen3-Coder", chat, local, "OPENAI_API_KEY"},
		"azure/mine":              {"mine", chat, "", "AZURE_API_KEY"},
		"openai/responses/gpt-5":  {"gpt-5", llm.FormatResponses, local, "OPENAI_API_KEY"},
		"anthropic/claude-opus-5": {"claude-opus-5", llm.FormatAnthropic, "https://api.anthropic.com", "ANTHROPIC_API_KEY"},
	} {
		p, name, err := llm.ParseName(in)
		if err != nil || name != want.name || p != (llm.Provider{Format: want.format, BaseURL: want.url, KeyName: want.key}) {
			t.Errorf("ParseName(%q) = %+v, %q, %v", in, p, name, err)
		}
	}
	for _, in := range []string{"anthropic/", "azure/", "openai/", "openai/responses/"} {
		if _, _, err := llm.ParseName(in); err == nil {
			t.Errorf("ParseName(%q) succeeded", in)
		}
	}
	for name, want := range map[string]bool{"o3": false, "o4-mini": false, "gpt-5": false, "gpt-5.1": false, "gpt-6-sol": false, "o1-preview": false, "gpt-4o": true, "proto3": true, "Qwen/foo3b": true} {
		if got := llm.AcceptsTemperature(name); got != want {
			t.Errorf("AcceptsTemperature(%q) = %v", name, got)
		}
	}
}

// The scripted model must refuse requests that strict providers refuse: the tests rely on it.
func TestScriptedModelIsStrict(t *testing.T) {
	assistant := `{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"t","arguments":"{}"}},{"id":"2","type":"function","function":{"name":"t","arguments":"{}"}}]}`
	tool := func(id string) string { return fmt.Sprintf(`{"role":"tool","tool_call_id":%q,"content":"x"}`, id) }
	user := `{"role":"user","content":"u"}`
	for _, tc := range []struct {
		name     string
		messages []string
		ok       bool
	}{
		{"answered", []string{user, assistant, tool("1"), tool("2"), user}, true},
		{"any order", []string{user, assistant, tool("2"), tool("1")}, true},
		{"one missing at the end", []string{user, assistant, tool("1")}, false},
		{"one missing before a user message", []string{user, assistant, tool("1"), user, tool("2")}, false},
		{"answered twice", []string{user, assistant, tool("1"), tool("1"), tool("2")}, false},
		{"unknown id", []string{user, assistant, tool("1"), tool("2"), tool("3")}, false},
		{"tool message out of nowhere", []string{user, tool("1")}, false},
		{"null content without calls", []string{user, `{"role":"assistant","content":null}`}, false},
		{"empty tool calls", []string{user, `{"role":"assistant","content":"x","tool_calls":[]}`}, false},
		{"null field", []string{user, `{"role":"assistant","content":"x","refusal":null}`}, false},
		{"bad arguments", []string{user, strings.Replace(assistant, `"{}"`, `"{"`, 1), tool("1"), tool("2")}, false},
		{"unknown role", []string{`{"role":"wizard","content":"x"}`}, false},
		{"none", nil, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := llmtest.Parse([]byte(`{"model":"m","messages":[` + strings.Join(tc.messages, ",") + `]}`))
			if (err == nil) != tc.ok {
				t.Errorf("got %v", err)
			}
		})
	}
}

// A call that is cancelled in the middle of its answer returns the cause, not a connection error.
func TestCancelledStream(t *testing.T) {
	for _, format := range []llm.Format{llm.FormatChat, llm.FormatResponses, llm.FormatAnthropic} {
		why := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		srv := llmtest.Start(t, llmtest.Turn{Content: "never finished", HangAfter: true})
		m, err := llm.Open(format, llm.ServerOptions{BaseURL: srv.URL})
		if err != nil {
			t.Fatal(err)
		}
		retry := &llm.Retry{Model: m, Retries: 5}
		shown := ""
		_, err = retry.Complete(ctx, llm.Request{Model: "m", Messages: userMessage("x"), OnDelta: func(d llm.Delta) {
			shown += d.Text
			cancel(why)
		}})
		if !errors.Is(err, why) || shown != "never f" {
			t.Errorf("%q: got %v after %q", format, err, shown)
		}
	}
}
