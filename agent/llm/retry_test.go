package llm

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

// script is a model that fails with errs, one after the other, and then answers.
type script struct {
	errs []error
	seen []Request
}

func (s *script) Describe() string { return "script" }

func (s *script) Complete(_ context.Context, req Request) (*Response, error) {
	s.seen = append(s.seen, req)
	if n := len(s.seen); n <= len(s.errs) && s.errs[n-1] != nil {
		return nil, s.errs[n-1]
	}
	return &Response{Content: "ok"}, nil
}

func TestRetry(t *testing.T) {
	server, network, bad := &Error{Kind: KindServer, Message: "s"}, &Error{Kind: KindNetwork, Message: "n"}, &Error{Kind: KindBadResponse, Message: "b"}
	overflow := func(text string) error { return &Error{Kind: KindContextLength, Message: text} }
	const known = "maximum context length of 163840 tokens. You requested a total of 179069 tokens: 113533 tokens from the input messages and 65536 tokens for the completion"
	for _, tc := range []struct {
		name   string
		errs   []error
		start  int
		tokens []int // max_tokens of each attempt
		waits  []time.Duration
		fails  string
	}{
		{name: "no error", start: 100, tokens: []int{100}},
		{name: "passes", errs: []error{server, network, bad, server, server}, tokens: []int{0, 0, 0, 0, 0, 0}, waits: []time.Duration{1, 2, 3, 4, 5}},
		{name: "stays", errs: []error{server, server, server, server, server, server}, tokens: []int{0, 0, 0, 0, 0, 0}, waits: []time.Duration{1, 2, 3, 4, 5}, fails: "gave up after 6 attempts: s"},
		{name: "cannot be cured", errs: []error{&Error{Kind: KindAuth, Message: "no key"}}, tokens: []int{0}, fails: "no key"},
		{name: "not an answer of a model", errs: []error{errors.New("disk")}, tokens: []int{0}, fails: "disk"},
		{name: "server says how long", errs: []error{&Error{Kind: KindRateLimit, RetryAfter: 42}}, tokens: []int{0, 0}, waits: []time.Duration{42}},
		{name: "server says for ever", errs: []error{&Error{Kind: KindRateLimit, RetryAfter: 1000 * time.Hour}}, tokens: []int{0, 0}, waits: []time.Duration{maxWait}},
		{name: "figures known", errs: []error{overflow(known)}, start: 65536, tokens: []int{65536, 163840 - 113533 - 100}},
		{name: "figures known and no room", errs: []error{overflow("maximum context length is 9000 tokens, you have 5000 input tokens")}, start: 65536, tokens: []int{65536}, fails: "9000"},
		{name: "figures say that it fits", errs: []error{overflow("context length 200000 tokens, 1000 input tokens, exceeded")}, start: 65536, tokens: []int{65536, 32768}},
		{name: "halves to the floor", errs: []error{overflow("x"), overflow("x"), overflow("x"), overflow("context exceeded")}, start: 65535, tokens: []int{65535, 32767, 16383, 8192}, fails: "context exceeded"},
		{name: "already small", errs: []error{overflow("too long")}, start: 4096, tokens: []int{4096}, fails: "too long"},
		{name: "not sent", errs: []error{overflow("too long")}, tokens: []int{0}, fails: "too long"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := &script{errs: tc.errs}
			var waits []time.Duration
			r := &Retry{
				Model: s, Retries: DefaultRetries,
				Backoff: func(n int, _ Kind) time.Duration { return time.Duration(n) },
				Wait:    func(_ context.Context, d time.Duration) error { waits = append(waits, d); return nil },
			}
			_, err := r.Complete(t.Context(), Request{MaxTokens: tc.start})
			if tc.fails == "" && err != nil || tc.fails != "" && (err == nil || !strings.Contains(err.Error(), tc.fails)) {
				t.Errorf("error %v, want %q", err, tc.fails)
			}
			var tokens []int
			for _, req := range s.seen {
				tokens = append(tokens, req.MaxTokens)
			}
			if !slices.Equal(tokens, tc.tokens) || !slices.Equal(waits, tc.waits) {
				t.Errorf("max_tokens %v, waits %v; want %v, %v", tokens, waits, tc.tokens, tc.waits)
			}
		})
	}
}

// A server that never answered is not waited for: its address is wrong, or it was not started. One
// that has answered may be restarting.
func TestUnreachableServerFailsAtOnce(t *testing.T) {
	gone := &Error{Kind: KindUnreachable, Message: "connection refused"}
	for _, tc := range []struct {
		name  string
		first error // of an earlier call; nil means an answer
		calls bool  // there is an earlier call
		fails bool
		tried int
	}{
		{"never answered", nil, false, true, 1},
		{"was never reached", &Error{Kind: KindNetwork, Message: "reset"}, true, true, 2},
		{"has answered", nil, true, false, 3},
		{"has refused", &Error{Kind: KindRateLimit, Status: 429}, true, false, 3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := &script{}
			r := &Retry{Model: s, Wait: func(context.Context, time.Duration) error { return nil }}
			if tc.calls {
				s.errs = append(s.errs, tc.first)
				if _, err := r.Complete(t.Context(), Request{}); (err != nil) != (tc.first != nil) {
					t.Fatal(err)
				}
			}
			s.errs, r.Retries = append(s.errs, gone), 3
			_, err := r.Complete(t.Context(), Request{})
			if (err != nil) != tc.fails || len(s.seen) != tc.tried || tc.fails && !errors.Is(err, error(gone)) {
				t.Errorf("%d calls, error %v", len(s.seen), err)
			}
		})
	}
}

func TestRequiresKey(t *testing.T) {
	for address, want := range map[string]bool{
		"https://api.anthropic.com": true, "https://API.OpenAI.com/v1": true, "https://mine.openai.azure.com/openai": true, "https://api.openai.com:443/v1": true,
		"http://localhost:8000/v1": false, "https://api.openai.com.example/v1": false, "https://openai.azure.com/": false, "": false, "::": false,
	} {
		if got := RequiresKey(address); got != want {
			t.Errorf("%q: %v", address, got)
		}
	}
}

func TestWaitEndsWithTheContext(t *testing.T) {
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	r := &Retry{Model: &script{errs: []error{&Error{Kind: KindServer}}}, Retries: 1, Backoff: func(int, Kind) time.Duration { return time.Hour }}
	if _, err := r.Complete(ctx, Request{}); !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
}

func TestBackoffGrowsAndIsBounded(t *testing.T) {
	for n := 1; n < 100; n++ {
		if d := Backoff(n, KindServer); d <= 0 || d > 30*time.Second || n == 1 && d > 500*time.Millisecond || n > 8 && d < 20*time.Second {
			t.Errorf("Backoff(%d) = %v", n, d)
		}
		if d := Backoff(n, KindRateLimit); d < 3*time.Second || d > time.Minute {
			t.Errorf("Backoff(%d, rate limit) = %v", n, d)
		}
	}
}

// The texts are taken from the servers' sources.
func TestContextOverflowWordings(t *testing.T) {
	for _, tc := range []struct {
		server, text   string
		context, input int
	}{
		{"OpenAI", "This model's maximum context length is 8192 tokens. However, you requested 10000 tokens (2000 in the messages, 8000 in the completion). Please reduce the length of the messages or completion.", 8192, 0},
		{"OpenAI, input alone", "This model's maximum context length is 128000 tokens. However, your messages resulted in 130011 tokens.", 128000, 0},
		{"vLLM", "'max_tokens' or 'max_completion_tokens' is too large: 65536. This model's maximum context length is 32768 tokens and your request has 1234 input tokens (65536 > 32768 - 1234).", 32768, 1234},
		{"SGLang", "Requested token count exceeds the model's maximum context length of 163840 tokens. You requested a total of 179069 tokens: 113533 tokens from the input messages and 65536 tokens for the completion.", 163840, 113533},
		{"llama.cpp", `the request exceeds the available context size, try increasing it {"n_prompt_tokens":9001,"n_ctx":8192}`, 8192, 9001},
		{"OpenAI, output", "max_tokens is too large: 65536. This model supports at most 16384 completion tokens, whereas you provided 65536.", 0, 0},
	} {
		t.Run(tc.server, func(t *testing.T) {
			overflow, context, input := contextOverflow(tc.text)
			if !overflow || context != tc.context || input != tc.input {
				t.Errorf("got %v, context %d, input %d; want %d, %d", overflow, context, input, tc.context, tc.input)
			}
		})
	}
	for _, text := range []string{"model not found", "invalid api key", "messages[3]: unknown role"} {
		if overflow, _, _ := contextOverflow(text); overflow {
			t.Errorf("%q was taken for a context overflow", text)
		}
	}
}

func FuzzParseCompletion(f *testing.F) {
	f.Add(`{"choices":[{"message":{"role":"assistant","content":"x","tool_calls":[{"id":"1","function":{"name":"t","arguments":"{}"}}]}}],"usage":{"prompt_tokens":1}}`)
	f.Add(`{"choices":[{"message":{"content":null,"tool_calls":[{},{"id":"call_1"}],"reasoning":{"a":1}}}]}`)
	f.Add(`{"error":"x"}`)
	f.Add(`null`)
	f.Fuzz(func(t *testing.T, raw string) { fuzzAnswer(t, []byte(raw), parseCompletion) })
}
