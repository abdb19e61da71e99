package llm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	goruntime "runtime"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// endless serves head and then block without end.
func endless(t *testing.T, contentType, head, block string) string {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		_, _ = io.WriteString(w, head)
		for {
			if _, err := io.WriteString(w, block); err != nil {
				return
			}
		}
	}))
	t.Cleanup(srv.Close)
	return srv.URL + "/v1"
}

// An endless answer must exhaust neither memory nor time, whatever its content.
func TestEndlessStreamsAreEnded(t *testing.T) {
	const limit = 4 << 20 // TestHugeAnswerIsRefused tests the real limit
	pad := strings.Repeat("x", 1<<20)
	for name, tc := range map[string]struct{ head, block string }{
		"one line":     {"data: ", pad},
		"one event":    {"", "data: " + pad + "\n"},
		"comments":     {"", ": " + pad + "\n\n"},
		"text":         {"", `data: {"choices":[{"index":0,"delta":{"content":"` + pad + `"}}]}` + "\n\n"},
		"small pieces": {"", strings.Repeat(`data: {"choices":[{"index":0,"delta":{"content":"x"}}]}`+"\n\n", 5000)},
		"arguments":    {"", `data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"` + pad + `"}}]}}]}` + "\n\n"},
		"calls":        {"", strings.Repeat(`data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":7,"id":"","function":{"name":"a"}}]}}]}`+"\n\n", 5000)},
		"fields":       {"", `data: {"choices":[{"index":0,"delta":{"f":"` + pad + `"}}]}` + "\n\n"},
		"not streamed": {"", pad},
	} {
		t.Run(name, func(t *testing.T) {
			contentType := "text/event-stream"
			if name == "not streamed" {
				contentType = "application/json"
			}
			m, err := NewOpenAI(ServerOptions{BaseURL: endless(t, contentType, tc.head, tc.block)})
			if err != nil {
				t.Fatal(err)
			}
			transport, ok := m.client.Transport.(boundedTransport)
			if !ok || transport.limit != maxResponseBytes {
				t.Fatalf("the transport is %+v", m.client.Transport)
			}
			transport.limit = limit
			m.client.Transport = transport
			var before, after goruntime.MemStats
			goruntime.ReadMemStats(&before)
			_, err = m.Complete(t.Context(), Request{Model: "m", Messages: []Message{{Role: RoleUser, Content: "x"}}, OnDelta: func(Delta) {}})
			goruntime.ReadMemStats(&after)
			var e *Error
			if !errors.As(err, &e) || len(err.Error()) > 2000 {
				t.Fatalf("got %T %.300v", err, err)
			}
			// TotalAlloc counts freed memory too.
			if got := after.TotalAlloc - before.TotalAlloc; got > 200*limit {
				t.Errorf("%d MiB were allocated", got>>20)
			}
			if e.Temporary() {
				t.Errorf("it would be asked for again: %v", e)
			}
		})
	}
}

// The SDK's reader bounds a line on its own.
func TestEndlessLineIsRefusedForGood(t *testing.T) {
	e, err := newEndpoint(ServerOptions{BaseURL: "http://x/v1"})
	if err != nil {
		t.Fatal(err)
	}
	got := e.connectionError(t.Context(), fmt.Errorf("read: %w", bufio.ErrTooLong))
	var m *Error
	if !errors.As(got, &m) || m.Temporary() {
		t.Errorf("got %v", got)
	}
}

// The search for a call's pieces is linear, so the number of calls must be bounded.
func TestEndlessCallsAreRefused(t *testing.T) {
	var s chatStream
	s.show = func(DeltaKind, string) {}
	for i := range 10 * maxCalls {
		data, err := json.Marshal(map[string]any{"choices": []any{map[string]any{"delta": map[string]any{"tool_calls": []any{map[string]any{"id": string(rune('a'+i%26)) + strings.Repeat("x", i)}}}}}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.event(data); err != nil {
			if i < maxCalls {
				t.Errorf("refused after %d calls: %v", i, err)
			}
			return
		}
	}
	t.Error("every call was taken")
}

// The key goes to the named server only, and no error holds it.
func TestRedirectsAreNotFollowed(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("the other server got %s %v", r.URL, r.Header)
	}))
	t.Cleanup(elsewhere.Close)
	for _, status := range []int{301, 302, 303, 307, 308} {
		named := httptest.NewServer(http.RedirectHandler(elsewhere.URL+"/v1/x?key=secret-of-a-redirect", status))
		for _, format := range []Format{FormatChat, FormatResponses, FormatAnthropic} {
			m, err := Open(format, ServerOptions{BaseURL: named.URL + "/v1", APIKey: "sk-0123456789"})
			if err != nil {
				t.Fatal(err)
			}
			_, err = m.Complete(t.Context(), Request{Model: "m", Messages: []Message{{Role: RoleUser, Content: "x"}}})
			var e *Error
			if !errors.As(err, &e) || e.Temporary() || !strings.Contains(err.Error(), elsewhere.URL) || strings.Contains(err.Error(), "secret-of") {
				t.Errorf("%d, %q: %v", status, format, err)
			}
		}
		named.Close()
	}
}

// The options alone decide the content of a call: variables of other programs must not reach a
// server that the user named.
func TestEnvironmentIsNotSent(t *testing.T) {
	for _, name := range []string{
		"OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN",
		"OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS",
	} {
		t.Setenv(name, "X-Leak: from-the-environment")
	}
	t.Setenv("OPENAI_BASE_URL", "http://127.0.0.1:1")
	t.Setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:1")
	for _, format := range []Format{FormatChat, FormatResponses, FormatAnthropic} {
		asked := false
		srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			asked = true
			for name, values := range r.Header {
				if strings.Contains(strings.Join(values, " "), "environment") {
					t.Errorf("%q: %s: %v", format, name, values)
				}
			}
		}))
		m, err := Open(format, ServerOptions{BaseURL: srv.URL + "/v1", APIKey: "sk-0123456789"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Complete(t.Context(), Request{Model: "m", Messages: []Message{{Role: RoleUser, Content: "x"}}}); err == nil || !asked {
			t.Errorf("%q: asked %v, %v", format, asked, err)
		}
		srv.Close()
	}
}

func TestErrorsDoNotHoldTheKey(t *testing.T) {
	const key = "sk-0123456789"
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, "no: "+r.Header.Get("Authorization")+r.Header.Get("X-Api-Key"))
	}))
	t.Cleanup(srv.Close)
	for _, format := range []Format{FormatChat, FormatResponses, FormatAnthropic} {
		m, err := Open(format, ServerOptions{BaseURL: srv.URL + "/v1?k=" + key, APIKey: key})
		if err != nil {
			t.Fatal(err)
		}
		_, err = m.Complete(t.Context(), Request{Model: "m", Messages: []Message{{Role: RoleUser, Content: "x"}}})
		for ; err != nil; err = errors.Unwrap(err) {
			if text := err.Error() + m.Describe() + m.BaseURL(); strings.Contains(text, key) {
				t.Errorf("%q: %T %s", format, err, text)
			}
		}
	}
	if _, err := Open(FormatChat, ServerOptions{BaseURL: "ftp://me:pass-word@host/?k=" + key}); err == nil || strings.Contains(err.Error(), "pass-word") || strings.Contains(err.Error(), key) {
		t.Errorf("got %v", err)
	}
}

// Every way to cut a text restores the text.
func FuzzTextInPieces(f *testing.F) {
	f.Add("Grüße, 世界 👩‍🚀 \\ \" \x00", uint64(0x5555))
	f.Add("\ufffd\\ud83d", uint64(1))
	f.Fuzz(func(t *testing.T, text string, cuts uint64) {
		text = strings.ToValidUTF8(text, "")
		whole, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		// Servers cut literals anywhere but inside an escape: each piece is JSON.
		var pieces []json.RawMessage
		piece := []byte{'"'}
		for i, n := 1, 0; i < len(whole)-1; n++ {
			step := 1
			if whole[i] == '\\' {
				if step = 2; whole[i+1] == 'u' {
					step = 6
				}
			}
			piece = append(piece, whole[i:i+step]...)
			i += step
			if cuts>>(n%64)&1 == 1 {
				pieces, piece = append(pieces, append(piece, '"')), []byte{'"'}
			}
		}
		pieces = append(pieces, append(piece, '"'))
		var got jsonText
		shown := ""
		for _, p := range pieces {
			part := got.add(p)
			if !utf8.ValidString(part) {
				t.Errorf("showed half a character: %q", part)
			}
			shown += part
		}
		if got.String() != text || shown != text {
			t.Errorf("%q came as %q and was shown as %q", text, got.String(), shown)
		}
	})
}

// fuzzStream feeds events to an accumulator and checks the result.
func fuzzStream(t *testing.T, acc accumulator, events string, parse func([]byte) (*Response, error)) {
	t.Helper()
	for line := range strings.Lines(events) {
		done, err := acc.event([]byte(strings.TrimSpace(line)))
		if err != nil {
			if len(err.Error()) > 2000 {
				t.Errorf("error of %d bytes", len(err.Error()))
			}
			return
		}
		if done {
			break
		}
	}
	if !acc.complete() {
		return
	}
	body, err := acc.answer()
	if err != nil {
		return
	}
	fuzzAnswer(t, body, parse)
}

// fuzzAnswer parses an answer and checks that the turn can be sent back to every provider.
func fuzzAnswer(t *testing.T, body []byte, parse func([]byte) (*Response, error)) {
	t.Helper()
	resp, err := parse(body)
	if err != nil {
		if len(err.Error()) > 2000 {
			t.Errorf("error of %d bytes", len(err.Error()))
		}
		return
	}
	ids := map[string]bool{}
	for _, c := range resp.ToolCalls {
		if c.ID == "" || ids[c.ID] {
			t.Errorf("call id %q is empty or repeated", c.ID)
		}
		ids[c.ID] = true
	}
	u := resp.Usage
	if u.PromptTokens < 0 || u.CompletionTokens < 0 || u.CachedTokens < 0 || u.ReasoningTokens < 0 {
		t.Errorf("usage %+v", u)
	}
	req := Request{Model: "m", Messages: []Message{{Role: RoleUser, Content: "x"}, resp.Message}}
	for _, c := range resp.ToolCalls {
		req.Messages = append(req.Messages, Message{Role: RoleTool, ToolCallID: c.ID, Content: "y"})
	}
	chat, err := chatParams(req)
	if _, jsonErr := json.Marshal(chat); err != nil || jsonErr != nil {
		t.Errorf("chat completions: %v, %v", err, jsonErr)
	}
	resps, err := responsesParams(req)
	if _, jsonErr := json.Marshal(resps); err != nil || jsonErr != nil {
		t.Errorf("Responses: %v, %v", err, jsonErr)
	}
	messages, err := anthropicParams(req)
	if _, jsonErr := json.Marshal(messages); err != nil || jsonErr != nil {
		t.Errorf("Messages: %v, %v", err, jsonErr)
	}
}

func silent(DeltaKind, string) {}

func FuzzChatStream(f *testing.F) {
	f.Add(`{"choices":[{"index":0,"delta":{"role":"assistant","content":"a","tool_calls":[{"index":0,"id":"1","function":{"name":"t","arguments":"{"}}]}}]}` + "\n" +
		`{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"}"}}],"reasoning_details":[{"type":"x","text":"y"}]},"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}` + "\n[DONE]")
	f.Add(`{"choices":[{"delta":{"content":["\ud83d"],"tool_calls":[{},null,{"function":{"arguments":{}}}],"reasoning_details":7},"finish_reason":"x"}]}`)
	f.Fuzz(func(t *testing.T, events string) { fuzzStream(t, &chatStream{show: silent}, events, parseCompletion) })
}

func FuzzResponsesStream(f *testing.F) {
	f.Add(`{"type":"response.output_text.delta","item_id":"m","delta":"\ud83d"}` + "\n" + `{"type":"response.output_item.done","item":{"type":"function_call","call_id":"c","name":"n","arguments":"{"}}` + "\n" +
		`{"type":"response.completed","response":{"status":"completed","output":[]}}`)
	f.Add(`{"type":"response.incomplete","response":{"incomplete_details":{"reason":"x"},"output":[{"type":"reasoning","summary":null},null]}}`)
	f.Fuzz(func(t *testing.T, events string) {
		fuzzStream(t, &responsesStream{show: silent}, events, parseResponses)
	})
}

func FuzzAnthropicStream(f *testing.F) {
	f.Add(`{"type":"message_start","message":{"usage":{"input_tokens":1}}}` + "\n" + `{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"t","name":"n","input":{}}}` + "\n" +
		`{"type":"content_block_delta","index":0,"delta":{"partial_json":"{"}}` + "\n" + `{"type":"message_delta","delta":{"stop_reason":"tool_use"},"usage":{"output_tokens":2}}` + "\n" + `{"type":"message_stop"}`)
	f.Add(`{"type":"message_start","message":{}}` + "\n" + `{"type":"content_block_start","content_block":{"type":"thinking"}}` + "\n" + `{"type":"content_block_delta","delta":{"thinking":"x","signature":"s","text":null}}` + "\n" + `{"type":"message_stop"}`)
	f.Fuzz(func(t *testing.T, events string) {
		fuzzStream(t, &anthropicStream{show: silent}, events, parseAnthropic)
	})
}

func FuzzParseResponses(f *testing.F) {
	f.Add(`{"status":"completed","output":[{"type":"message","content":[{"type":"output_text","text":"x"}]},{"type":"function_call","call_id":"","name":"n","arguments":""},{"type":"reasoning"}],"usage":{"input_tokens":-1}}`)
	f.Add(`{"error":{"code":"rate_limit_exceeded","message":"x"}}`)
	f.Fuzz(func(t *testing.T, raw string) { fuzzAnswer(t, []byte(raw), parseResponses) })
}

func FuzzParseAnthropic(f *testing.F) {
	f.Add(`{"content":[{"type":"thinking","thinking":"x","signature":"s"},{"type":"text","text":" "},{"type":"tool_use","id":"!","name":"","input":"{"}],"stop_reason":"tool_use","usage":{"input_tokens":-1}}`)
	f.Add(`{"content":[null,{"type":7}]}`)
	f.Fuzz(func(t *testing.T, raw string) { fuzzAnswer(t, []byte(raw), parseAnthropic) })
}

func TestRetryLearnsOnce(t *testing.T) {
	half := 0.5
	m := &script{errs: []error{
		&Error{Kind: KindContextLength, Message: "max_tokens: 65536 > 64000, which is the maximum allowed number of output tokens"},
		&Error{Kind: KindRequest, Message: "Unsupported value: 'temperature' does not support 0.5 with this model. Only the default (1) value is supported."},
	}}
	r := &Retry{Model: m, Wait: func(context.Context, time.Duration) error { return nil }}
	for range 2 {
		if _, err := r.Complete(t.Context(), Request{Model: "m", MaxTokens: 65536, Temperature: &half}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Complete(t.Context(), Request{Model: "other", MaxTokens: 65536, Temperature: &half}); err != nil {
		t.Fatal(err)
	}
	if len(m.seen) != 5 {
		t.Fatalf("%d requests", len(m.seen))
	}
	if last := m.seen[3]; last.MaxTokens != 64000 || last.Temperature != nil {
		t.Errorf("the second call: %+v", last)
	}
	if other := m.seen[4]; other.MaxTokens != 65536 || other.Temperature == nil {
		t.Errorf("another model: %+v", other)
	}
}
