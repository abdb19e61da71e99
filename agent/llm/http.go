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
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/openai/openai-go/v3/packages/ssestream"
)

// HTTPTimeout is how long one call may take, queueing and generation included. Local servers under load need it.
const HTTPTimeout = 1200 * time.Second

const (
	// maxResponseBytes bounds what a server may send: a turn is text, and streamed it takes some 300 bytes for each token.
	maxResponseBytes = 64 << 20
	// maxHeaderBytes bounds the header of an answer.
	maxHeaderBytes = 1 << 20
	// minScrubbed is the length from which a key is looked for in what a server says. Shorter ones ("dummy", "none") are no
	// secrets, and are words.
	minScrubbed = 8
)

// ServerOptions says where a model is served and how it is called.
type ServerOptions struct {
	BaseURL string // ending in /v1 as a rule
	APIKey  string // empty: "dummy", which local servers accept
	Timeout time.Duration
	Now     func() time.Time // for Retry-After dates; nil: time.Now
}

// endpoint is what the wire formats share: one server, and how its answers are read and its errors understood.
type endpoint struct {
	baseURL string // as it may be shown
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
		// Where calls go is on record, and told of in errors, and who resumes a run calls what stands there: no place for a secret.
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
		// The key and the conversation go to the server that the user named and to no other. Go would drop the
		// Authorization header at another host, but not Anthropic's x-api-key, and would send the body again.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return e, nil
}

// shownURL is a URL without what may be secret in it. Of one without a host, nothing can be told from a secret but its scheme.
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

// BaseURL is where the calls go, without what may be secret in it.
func (e *endpoint) BaseURL() string { return e.baseURL }

// accumulator puts one streamed answer together.
type accumulator interface {
	// event takes one server-sent event, and reports whether it was the last.
	event(data []byte) (done bool, err error)
	// complete reports whether a stream that ends here has given a whole answer.
	complete() bool
	// answer is what the server would have sent, had it not been asked to stream.
	answer() ([]byte, error)
}

// exchange makes one call with send and gives the JSON of the answer, put together by acc if the server streams it.
func (e *endpoint) exchange(ctx context.Context, send func(**http.Response) error, acc accumulator) ([]byte, error) {
	var resp *http.Response
	if err := send(&resp); err != nil {
		return nil, e.classify(ctx, err, resp)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, &Error{Kind: KindRequest, Status: resp.StatusCode, Message: e.elsewhere(resp)}
	}
	// The body is taken as it came. The SDKs' decoders lose the fields that their maker does not have, and give a nil answer
	// for "null".
	var body []byte
	var err error
	if kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); kind == "text/event-stream" {
		body, err = e.readEvents(ctx, resp, acc)
	} else if body, err = io.ReadAll(resp.Body); err != nil {
		err = e.brokenOff(ctx, err)
	}
	if err != nil {
		return nil, err
	}
	body = bytes.ToValidUTF8(body, []byte("\uFFFD"))
	if len(e.key) >= minScrubbed {
		body = bytes.ReplaceAll(body, []byte(e.key), []byte("[API key]")) // a gateway that echoes what it was sent
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
		return nil, e.brokenOff(ctx, err)
	case acc.complete(): // all but the end mark, or the usage
		return acc.answer()
	case err != nil:
		return nil, e.brokenOff(ctx, err)
	}
	return nil, &Error{Kind: KindNetwork, Message: "the answer broke off: the stream ended before the answer did"}
}

// elsewhere says what is wrong with an answer that is neither 200 nor an error.
func (e *endpoint) elsewhere(resp *http.Response) string {
	if at, err := resp.Location(); err == nil {
		return clip("the server is elsewhere: "+shownURL(at)+"; redirects are not followed, so that the key goes to no other server", 600)
	}
	return "an answer of this status holds no turn"
}

// done gives an error its endpoint and takes the key out of it.
func (e *endpoint) done(resp *Response, err error) (*Response, error) {
	if m, ok := errors.AsType[*Error](err); ok {
		m.Endpoint = e.baseURL
		if len(e.key) >= minScrubbed {
			m.Message = strings.ReplaceAll(m.Message, e.key, "[API key]")
		}
	}
	return resp, err
}

// classify turns what an SDK returned into an [*Error], or the context's error if that is what ended the call.
func (e *endpoint) classify(ctx context.Context, err error, resp *http.Response) error {
	if resp != nil && resp.StatusCode >= 400 && ctx.Err() == nil {
		// Not wrapped: the SDKs' errors hold the request, and with it the key.
		return refused(resp, e.now())
	}
	return e.brokenOff(ctx, err)
}

// brokenOff is the error of a call that was sent, or should have been, and whose answer did not come or did not end.
func (e *endpoint) brokenOff(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("model call: %w", context.Cause(ctx))
	case errors.Is(err, errResponseTooLarge) || errors.Is(err, bufio.ErrTooLong):
		return &Error{Kind: KindRequest, Message: clip(err.Error(), 600), Err: err} // repeating it would only cost as much again
	case errors.Is(err, context.DeadlineExceeded):
		return &Error{Kind: KindNetwork, Message: "no answer within the time limit of one call", Err: err}
	}
	return &Error{Kind: KindNetwork, Message: clip(err.Error(), 600), Err: err}
}

// refused is the error of an answer with an error status. The SDK has read its body and put it back.
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

// kindOf is the class of an error by its status and what the server said.
func kindOf(status int, message string) Kind {
	lower := strings.ToLower(message)
	var kind Kind
	switch {
	case strings.Contains(lower, "insufficient_quota"):
		return KindRequest // OpenAI says 429, and no waiting brings money
	case status == http.StatusTooManyRequests || status == 529: // Anthropic's "overloaded" passes as slowly as a rate limit
		return KindRateLimit
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return KindAuth
	case status >= 500 || status == http.StatusRequestTimeout || status == http.StatusConflict:
		kind = KindServer
	default:
		kind = KindRequest
	}
	// llama.cpp and older vLLM say it with 500; there the word must be "context", since quotas have tokens too.
	if kind == KindRequest || strings.Contains(lower, "context") {
		if overflow, _, _ := contextOverflow(message); overflow {
			return KindContextLength
		}
	}
	return kind
}

// streamError is an error that came in the middle of an answer, in place of a status: an object with a type or a code, or a
// text. Where it does not say what class it is, it may go away.
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

// serverMessage finds the readable part of an error body: {"error":{"message":...}}, {"error":"..."}, {"message":...},
// {"detail":...}, or the text itself. llama.cpp puts its figures beside the message, so an error object is kept
// whole when it has more than OpenAI's fields.
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

// retryAfter reads the wait that a server asked for, in any of the three forms in use.
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

// boundedTransport ends a response body that exceeds limit with an error: bodies are read whole, and error bodies by the SDKs.
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
		return 0, fmt.Errorf("%w: it exceeds %d MiB", errResponseTooLarge, b.limit>>20)
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.ReadCloser.Read(p)
	b.left -= int64(n)
	return n, err
}
