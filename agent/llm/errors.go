package llm

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Kind is the class of an [Error]; it decides whether another attempt can help.
type Kind string

// Kinds of errors.
const (
	KindRateLimit     Kind = "rate limit"       // 429: wait and try again
	KindServer        Kind = "server error"     // 5xx, 408, 409: may be temporary
	KindNetwork       Kind = "network"          // no answer at all: reset, timed out
	KindUnreachable   Kind = "unreachable"      // no server at the address: connection refused, or no such host
	KindBadResponse   Kind = "bad response"     // an answer that is not a chat completion
	KindContextLength Kind = "context length"   // the request does not fit into the model's context
	KindAuth          Kind = "not authorised"   // 401, 403
	KindRequest       Kind = "request refused"  // any other 4xx: repeating it cannot help
	KindReplayEnd     Kind = "recording's end"  // the replay has no turn left
	KindUnsupported   Kind = "unsupported name" // no adapter for this model name
)

// Error is a model call that failed on the model's side.
type Error struct {
	Kind       Kind
	Endpoint   string        // address of the model's server
	Status     int           // HTTP status, 0 if there was none
	Message    string        // server's message, or the defect of its answer; bounded
	RetryAfter time.Duration // wait that the server asked for; 0 if none
	Err        error         // cause below HTTP; nil if none
}

// Error returns the address, the failure and, for some kinds, the remedy.
func (e *Error) Error() string {
	var b strings.Builder
	if e.Endpoint != "" {
		fmt.Fprintf(&b, "model at %s: ", e.Endpoint)
	}
	if e.Status != 0 {
		fmt.Fprintf(&b, "HTTP %d: ", e.Status)
	}
	b.WriteString(e.Message)
	switch e.Kind {
	case KindAuth:
		b.WriteString(" (give the key with --api_key, or in LLM_API_KEY)")
	case KindNetwork:
		b.WriteString(" (is the server running? --llm_base_url says where)")
	case KindUnreachable:
		b.WriteString(" (no server is there: start it, or name another with --llm_base_url)")
	case KindRateLimit, KindServer, KindBadResponse, KindContextLength, KindRequest, KindReplayEnd, KindUnsupported:
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Temporary reports whether the same request may succeed later. [Retry] repeats an unreachable
// server only if it has answered before.
func (e *Error) Temporary() bool {
	switch e.Kind {
	case KindRateLimit, KindServer, KindNetwork, KindUnreachable, KindBadResponse:
		return true
	case KindContextLength, KindAuth, KindRequest, KindReplayEnd, KindUnsupported:
	}
	return false
}

// contextPatterns match the messages with which OpenAI, Anthropic, vLLM, SGLang and llama.cpp
// refuse a request that exceeds the context. They are compiled on first use: most commands of the
// binary that carries this package never need them.
var contextPatterns = sync.OnceValue(func() (p struct{ context, input, output, overflow, temperature *regexp.Regexp }) {
	p.context = regexp.MustCompile(`(?i)(?:context (?:length|size|window)|maximum)[^0-9]{0,40}([0-9]{1,12}) ?tokens?|n_ctx\W{1,4}([0-9]{1,12})|[0-9] \+ [0-9]{1,12} > ([0-9]{1,12})|tokens > ([0-9]{1,12}) maximum`)
	p.input = regexp.MustCompile(`(?i)([0-9]{1,12}) (?:input tokens?|tokens? (?:from|in) (?:the |your )?(?:input|prompt|messages?))|n_prompt_tokens\W{1,4}([0-9]{1,12})|([0-9]{1,12}) \+ [0-9]{1,12} > [0-9]|prompt is too long: ([0-9]{1,12}) tokens`)
	p.output = regexp.MustCompile(`(?i)at most ([0-9]{1,12}) (?:completion|output) tokens|max_tokens: [0-9]{1,12} > ([0-9]{1,12}),`)
	p.temperature = regexp.MustCompile(`(?i)temperature.{0,100}(?:deprecated|not support|unsupported|only the default)|(?:unsupported|not support).{0,100}temperature`)
	p.overflow = regexp.MustCompile(`(?i)context_length_exceeded|exceed_context_size|(?:context|token).{0,200}(?:exceed|limit|maximum|too (?:large|long)|longer than)|(?:exceed|limit|maximum|too (?:large|long)|longer than).{0,200}(?:context|token)`)
	return p
})

// contextOverflow reports whether the message of a refused request says that the request exceeds
// the model's context. It returns the two figures that such messages usually hold, or 0.
func contextOverflow(text string) (overflow bool, context, input int) {
	p := contextPatterns()
	if !p.overflow.MatchString(text) {
		return false, 0, 0
	}
	return true, firstNumber(p.context, text), firstNumber(p.input, text)
}

// outputLimit returns the answer ceiling that a refusal of a higher one names, or 0.
func outputLimit(text string) int { return firstNumber(contextPatterns().output, text) }

// refusesTemperature reports whether a message refuses the request's temperature.
func refusesTemperature(text string) bool { return contextPatterns().temperature.MatchString(text) }

func firstNumber(re *regexp.Regexp, text string) int {
	m := re.FindStringSubmatch(text)
	if m == nil {
		return 0
	}
	for _, s := range m[1:] {
		if n, err := strconv.Atoi(s); err == nil {
			return n
		}
	}
	return 0
}

// clip bounds the text of an untrusted server in an error message.
func clip(s string, limit int) string {
	s = strings.TrimSpace(strings.ToValidUTF8(s, "\uFFFD"))
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "..."
}
