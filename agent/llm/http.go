package llm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/openai/openai-go/v3/packages/ssestream"
)

// HTTPTimeout is the default time limit of one call, queueing and generation included. Local
// servers under load need that long.
const HTTPTimeout = 1200 * time.Second

const (
	// maxResponseBytes bounds the body of an answer. A streamed answer takes some 300 bytes a token.
	maxResponseBytes = 64 << 20
	// maxHeaderBytes bounds the header of an answer.
	maxHeaderBytes = 1 << 20
	// minScrubbed is the shortest key that is removed from a server's text. Shorter ones ("dummy",
	// "none") are ordinary words and no secrets.
	minScrubbed = 8
)

// ServerOptions holds the address of a model's server and the parameters of calls to it.
type ServerOptions struct {
	BaseURL string // usually ends in /v1
	APIKey  string // "" means "dummy", which local servers accept
	Timeout time.Duration
	Now     func() time.Time // clock for Retry-After dates; nil means time.Now
}

// endpoint is the part that all wire formats share: one server, the reading of its answers and the
// classification of its errors.
type endpoint struct {
	baseURL string // without parts that may be secret
	key     string
	timeout time.Duration
	now     func() time.Time
	client  *http.Client
}

func newEndpoint(opts ServerOptions) (endpoint, error) {
	u, err := url.Parse(opts.BaseURL)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return endpoint{}, fmt.Errorf("model base URL %q: want http://HOST[:PORT]/v1 or https://", shownURL(u))
	}
	if u.User != nil {
		// The address is recorded and appears in errors, and resuming a run calls the recorded
		// address. A secret must not be part of it.
		return endpoint{}, fmt.Errorf("model base URL %q: a user name, token or password stands before its host; give the key with --api_key (in a request, as \"key\") or in LLM_API_KEY", shownURL(u))
	}
	transport, ok := http.DefaultTransport.(*http.Transport)
	if !ok {
		return endpoint{}, fmt.Errorf("default HTTP transport is a %T", http.DefaultTransport)
	}
	transport = transport.Clone()
	transport.MaxResponseHeaderBytes = maxHeaderBytes
	e := endpoint{baseURL: shownURL(u), key: opts.APIKey, timeout: opts.Timeout, now: opts.Now}
	if e.key == "" {
		e.key = "dummy"
	}
	if e.timeout == 0 {
		e.timeout = HTTPTimeout
	}
	if e.now == nil {
		e.now = time.Now
	}
	e.client = &http.Client{
		Transport: boundedTransport{transport, maxResponseBytes},
		// The key and the conversation go only to the server that the user named. On a redirect to
		// another host Go drops the Authorization header, but not Anthropic's x-api-key, and resends
		// the body.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return e, nil
}

// shownURL returns a URL without parts that may be secret. Without a host, any part but the scheme
// could be one.
func shownURL(u *url.URL) string {
	switch {
	case u == nil:
		return ""
	case u.Host == "":
		if text := u.String(); !strings.Contains(text, "@") && u.RawQuery == "" && u.Fragment == "" {
			return text
		}
		return "…"
	}
	shown := *u
	shown.User, shown.RawQuery, shown.Fragment = nil, "", ""
	return shown.String()
}

// BaseURL returns the address of the server, without parts that may be secret.
func (e *endpoint) BaseURL() string { return e.baseURL }

// accumulator assembles one streamed answer.
type accumulator interface {
	// event adds one server-sent event, and reports whether it was the last.
	event(data []byte) (done bool, err error)
	// complete reports whether a stream that ends here holds a whole answer.
	complete() bool
	// answer returns the answer as the server would have sent it without streaming.
	answer() ([]byte, error)
}

// exchange makes one call with send and returns the JSON of the answer, assembled by acc if the
// server streams it.
func (e *endpoint) exchange(ctx context.Context, send func(**http.Response) error, acc accumulator) ([]byte, error) {
	var resp *http.Response
	if err := send(&resp); err != nil {
		return nil, e.classify(ctx, err, resp)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, &Error{Kind: KindRequest, Status: resp.StatusCode, Message: e.redirectMessage(resp)}
	}
	// The body is read as received. The SDKs' decoders lose fields that their provider does not use,
	// and return a nil answer for "null".
	var body []byte
	var err error
	if kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); kind == "text/event-stream" {
		body, err = e.readEvents(ctx, resp, acc)
	} else if body, err = io.ReadAll(resp.Body); err != nil {
		err = e.connectionError(ctx, err)
	}
	if err != nil {
		return nil, err
	}
	body = bytes.ToValidUTF8(body, []byte("\uFFFD"))
	if len(e.key) >= minScrubbed {
		body = bytes.ReplaceAll(body, []byte(e.key), []byte("[API key]")) // some gateways echo the request
	}
	return body, nil
}

func (e *endpoint) readEvents(ctx context.Context, resp *http.Response, acc accumulator) ([]byte, error) {
	dec := ssestream.NewDecoder(resp)
	for dec.Next() {
		done, err := acc.event(bytes.TrimSpace(dec.Event().Data))
		if err != nil {
			return nil, err
		}
		if done {
			return acc.answer()
		}
	}
	switch err := dec.Err(); {
	case errors.Is(err, errResponseTooLarge) || errors.Is(err, bufio.ErrTooLong):
		return nil, e.connectionError(ctx, err)
	case acc.complete(): // only the end mark or the usage is missing
		return acc.answer()
	case err != nil:
		return nil, e.connectionError(ctx, err)
	}
	return nil, &Error{Kind: KindNetwork, Message: "the stream ended before the answer was complete"}
}

// redirectMessage describes an answer that is neither 200 nor an error.
func (e *endpoint) redirectMessage(resp *http.Response) string {
	if at, err := resp.Location(); err == nil {
		return clip("redirect to "+shownURL(at)+" refused: the key goes to the named server only", 600)
	}
	return "no turn in an answer of this status"
}

// finish adds the endpoint to an error and removes the key from it.
func (e *endpoint) finish(resp *Response, err error) (*Response, error) {
	if m, ok := errors.AsType[*Error](err); ok {
		m.Endpoint = e.baseURL
		if len(e.key) >= minScrubbed {
			m.Message = strings.ReplaceAll(m.Message, e.key, "[API key]")
		}
	}
	return resp, err
}

// classify converts an SDK's error to an [*Error], or to the context's error if that ended the
// call.
func (e *endpoint) classify(ctx context.Context, err error, resp *http.Response) error {
	if resp != nil && resp.StatusCode >= 400 && ctx.Err() == nil {
		// Not wrapped: the SDKs' errors hold the request, and with it the key.
		return refused(resp, e.now())
	}
	return e.connectionError(ctx, err)
}

// connectionError returns the error of a call whose answer did not arrive or broke off.
func (e *endpoint) connectionError(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("model call: %w", context.Cause(ctx))
	case errors.Is(err, errResponseTooLarge) || errors.Is(err, bufio.ErrTooLong):
		return &Error{Kind: KindRequest, Message: clip(err.Error(), 600), Err: err} // repeating it would cost as much again
	case errors.Is(err, context.DeadlineExceeded):
		return &Error{Kind: KindNetwork, Message: "no answer within the time limit of one call", Err: err}
	}
	kind := KindNetwork
	if isUnreachable(err) {
		kind = KindUnreachable
	}
	return &Error{Kind: kind, Message: clip(err.Error(), 600), Err: err}
}

// isUnreachable reports whether an error says that no server is at the address.
func isUnreachable(err error) bool {
	dns, ok := errors.AsType[*net.DNSError](err)
	return errors.Is(err, syscall.ECONNREFUSED) || ok && dns.IsNotFound
}

// refused returns the error of an answer with an error status. The SDK has read the body and
// restored it.
func refused(resp *http.Response, now time.Time) *Error {
	e := &Error{Status: resp.StatusCode, RetryAfter: retryAfter(resp.Header, now)}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	e.Message = clip(serverMessage(body), 1000)
	if err != nil || e.Message == "" {
		e.Message = http.StatusText(resp.StatusCode)
	}
	e.Kind = kindOf(e.Status, e.Message)
	return e
}

// kindOf classifies an error by its status and the server's message.
func kindOf(status int, message string) Kind {
	lower := strings.ToLower(message)
	var kind Kind
	switch {
	case strings.Contains(lower, "insufficient_quota"):
		return KindRequest // OpenAI answers 429, but waiting does not restore a quota
	case status == http.StatusTooManyRequests || status == 529: // 529 is Anthropic's "overloaded", which lasts as long as a rate limit
		return KindRateLimit
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return KindAuth
	case status >= 500 || status == http.StatusRequestTimeout || status == http.StatusConflict:
		kind = KindServer
	default:
		kind = KindRequest
	}
	// llama.cpp and older vLLM answer 500. There the message must say "context", since quotas have
	// tokens too.
	if kind == KindRequest || strings.Contains(lower, "context") {
		if overflow, _, _ := contextOverflow(message); overflow {
			return KindContextLength
		}
	}
	return kind
}

// streamError returns an error that arrived in the middle of an answer instead of a status. It is
// an object with a type or a code, or a text. Without a class it counts as temporary.
func streamError(raw json.RawMessage) *Error {
	wrapped, err := json.Marshal(map[string]json.RawMessage{"error": raw})
	if err != nil {
		wrapped = raw
	}
	e := &Error{Message: clip(serverMessage(wrapped), 1000)}
	var object struct {
		Code any    `json:"code"`
		Type string `json:"type"`
	}
	_ = json.Unmarshal(raw, &object) // a text has neither
	status := http.StatusInternalServerError
	code := object.Type
	switch v := object.Code.(type) {
	case float64:
		status = int(min(max(v, 0), 999))
	case string:
		if n, err := strconv.Atoi(v); err == nil {
			status = n
		} else {
			code += " " + v
		}
	}
	for _, known := range []struct {
		word   string
		status int
	}{{"rate_limit", 429}, {"overloaded", 529}, {"invalid", 400}, {"not_found", 404}, {"authentication", 401}, {"permission", 403}} {
		if strings.Contains(code, known.word) {
			status = known.status
		}
	}
	e.Kind = kindOf(status, e.Message)
	return e
}

// serverMessage returns the readable part of an error body: {"error":{"message":...}},
// {"error":"..."}, {"message":...}, {"detail":...}, or the text itself. llama.cpp puts its figures
// beside the message, so an object with n_ctx is kept whole.
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

// retryAfter returns the wait that a server asks for, in any of the three forms in use.
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

var errResponseTooLarge = errors.New("the answer is too large")

// boundedTransport fails the read of a response body that exceeds limit: bodies are read whole, and
// the SDKs read error bodies.
type boundedTransport struct {
	next  http.RoundTripper
	limit int64
}

func (t boundedTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	resp.Body = &boundedBody{ReadCloser: resp.Body, left: t.limit, limit: t.limit}
	return resp, nil
}

type boundedBody struct {
	io.ReadCloser
	left, limit int64
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("%w: more than %d MiB", errResponseTooLarge, b.limit>>20)
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.ReadCloser.Read(p)
	b.left -= int64(n)
	return n, err
}
