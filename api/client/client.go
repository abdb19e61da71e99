// Package client is the Go client of the sandboxd API over its Unix socket.
//
// [New] returns a [Client], which is safe for concurrent use and keeps connections open between
// requests. Every method takes a context and returns when that ends. The method's comment states
// the effect of a cancelled request on the daemon.
//
// An error from the daemon is an [*api.Problem]. Use errors.As, or match its code with
//
//	errors.Is(err, &api.Problem{Code: api.CodeNotFound})
//
// If no daemon listens, the error is a [*NotRunning].
package client

import (
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
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/api"
)

// Bounds on data from the daemon, far above its own bounds and far below harmful sizes.
const (
	maxProblem = 256 << 10 // an error document
	maxAnswer  = 32 << 20  // a JSON answer, program output excepted
	maxLine    = 4 << 20   // a message of a stream; the daemon sends pieces of at most 64 KiB
	maxEvent   = 128 << 20 // a line of a stream: the result of a code run has 16 MiB, in JSON up to six times that
)

// Default and maximum of [api.ExecRequest.OutputLimit], as in the daemon.
const (
	defaultOutput = 1 << 20
	maxOutput     = 16 << 20
)

// origin is the prefix of all URLs. The host is never looked up: the transport dials the socket.
const origin = "http://sandboxd"

// Client is a client of the daemon behind one socket.
type Client struct {
	socket  string
	http    *http.Client
	wrapped bool // requests go through a transport that is not ours
}

// New returns a client for the daemon that listens on the Unix socket at path. It does not connect
// yet. Each of wrap returns a transport around the one that it gets, for example to trace requests.
func New(socket string, wrap ...func(http.RoundTripper) http.RoundTripper) *Client {
	var transport http.RoundTripper = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dial(ctx, socket)
		},
		DisableCompression:  true, // a local socket gains nothing from it
		MaxIdleConnsPerHost: 32,
		IdleConnTimeout:     30 * time.Second,
		// A daemon always says whether it wants the body, however busy it is. Another server on the
		// socket may never say it.
		ExpectContinueTimeout: time.Minute,
	}
	for _, w := range wrap {
		transport = w(transport)
	}
	return &Client{
		socket: socket, wrapped: len(wrap) > 0,
		http: &http.Client{
			Transport: transport,
			// A redirect cannot come from sandboxd.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// Socket returns the path that the client dials.
func (c *Client) Socket() string { return c.socket }

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// DefaultSocket returns the path on which the user's own daemon listens by default: the value of
// SANDBOXD_SOCKET, else api.sock in the runtime directory. Package internal/dirs implements the
// same rule for the daemon, and a test compares the two. The copy keeps internal packages out of
// this one.
func DefaultSocket() string {
	if s := os.Getenv("SANDBOXD_SOCKET"); s != "" {
		return s
	}
	uid := os.Getuid()
	if uid == 0 {
		return "/run/sandboxd/api.sock"
	}
	for _, dir := range []string{os.Getenv("XDG_RUNTIME_DIR"), "/run/user/" + strconv.Itoa(uid)} {
		if !filepath.IsAbs(dir) {
			continue
		}
		if fi, err := os.Lstat(dir); err == nil && fi.IsDir() { //nolint:gosec // the environment is the user's own
			if st, ok := fi.Sys().(*syscall.Stat_t); ok && int(st.Uid) == uid {
				return filepath.Join(dir, "sandboxd", "api.sock")
			}
		}
	}
	data := os.Getenv("XDG_DATA_HOME")
	if !filepath.IsAbs(data) {
		data = filepath.Join(os.Getenv("HOME"), ".local", "share")
	}
	return filepath.Join(data, "sandboxd", "run", "api.sock")
}

// NotRunning is the error of a request that found no daemon behind the socket.
type NotRunning struct {
	Socket string
	Err    error // error of connect(2)
}

func (e *NotRunning) Error() string {
	return fmt.Sprintf("no daemon is running at %s; start one with: sandboxd serve (or name another socket with --socket or SANDBOXD_SOCKET)", e.Socket)
}

func (e *NotRunning) Unwrap() error { return e.Err }

// oPath is O_PATH, which package syscall lacks. A user that may connect need not be able to read
// the directory.
const oPath = 0x200000

// dial connects to the socket. A path longer than the 107 bytes of sockaddr_un, such as one below a
// deep home directory, is reached through a descriptor of its directory.
func dial(ctx context.Context, socket string) (net.Conn, error) {
	addr := socket
	if len(addr) > 107 {
		dir, err := os.OpenFile(filepath.Dir(socket), oPath|syscall.O_DIRECTORY, 0)
		if err != nil {
			if errors.Is(err, os.ErrNotExist) {
				return nil, &NotRunning{Socket: socket, Err: err}
			}
			return nil, fmt.Errorf("reach the socket: %w", err)
		}
		defer dir.Close()
		addr = fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(socket))
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", addr)
	switch {
	case err == nil:
		return conn, nil
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOTDIR):
		return nil, &NotRunning{Socket: socket, Err: err}
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("connect to %s: permission denied; the socket belongs to another user's daemon: %w", socket, err)
	}
	return nil, fmt.Errorf("connect to %s: %w", socket, err)
}

// request is one call to the daemon.
type request struct {
	method string
	path   []string // unescaped segments: IDs come from users
	query  url.Values
	json   any       // JSON body
	body   io.Reader // raw body of type typ
	typ    string
	accept string
	span   string // Range header

	secrets string // header [api.HeaderBuildSecrets]
}

// do sends the request and returns a response with a 2xx status; every other one is an error. The
// caller closes the body.
func (c *Client) do(ctx context.Context, r request) (*http.Response, error) {
	u, err := r.url()
	if err != nil {
		return nil, err
	}
	body, typ := r.body, r.typ
	if r.json != nil {
		b, err := json.Marshal(r.json)
		if err != nil {
			return nil, fmt.Errorf("encode the request: %w", err)
		}
		body, typ = bytes.NewReader(b), api.TypeJSON
	}
	req, err := http.NewRequestWithContext(ctx, r.method, u, body)
	if err != nil {
		return nil, fmt.Errorf("build the request: %w", err)
	}
	if typ != "" {
		req.Header.Set("Content-Type", typ)
	}
	if r.body != nil {
		// The daemon can refuse an upload before it is sent. Otherwise its answer would race with a
		// broken pipe here.
		req.Header.Set("Expect", "100-continue")
	}
	if r.accept != "" {
		req.Header.Set("Accept", r.accept)
	}
	if r.span != "" {
		req.Header.Set("Range", r.span)
	}
	if r.secrets != "" {
		req.Header.Set(api.HeaderBuildSecrets, r.secrets)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.transportError(ctx, err)
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		defer resp.Body.Close()
		return nil, problem(resp)
	}
	return resp, nil
}

// readOnly hides all methods of r but Read: http.NewRequest would take a length from r, and close
// it.
func readOnly(r io.Reader) io.Reader { return struct{ io.Reader }{r} }

func (r request) url() (string, error) {
	var b strings.Builder
	b.WriteString(origin)
	for _, s := range r.path {
		// URL cleaning would turn these into another route.
		if s == "" || s == "." || s == ".." {
			return "", &api.Problem{
				Code: api.CodeInvalid, Title: "invalid argument", Status: api.CodeInvalid.Status(),
				Detail: fmt.Sprintf("%q is not the id or name of a sandbox", s),
			}
		}
		b.WriteByte('/')
		b.WriteString(url.PathEscape(s))
	}
	if len(r.query) > 0 {
		b.WriteByte('?')
		b.WriteString(r.query.Encode())
	}
	return b.String(), nil
}

// download sends the request and returns a body of type r.accept, which the caller closes.
func (c *Client) download(ctx context.Context, r request) (io.ReadCloser, error) {
	resp, err := c.do(ctx, r)
	if err != nil {
		return nil, err
	}
	if mediaType(resp) != r.accept {
		defer resp.Body.Close()
		return nil, unexpectedAnswer(resp, read(resp.Body, 200))
	}
	if r.span != "" && resp.StatusCode != http.StatusPartialContent {
		defer resp.Body.Close()
		return nil, errors.New("the daemon sent the whole file instead of a range")
	}
	return resp.Body, nil
}

// call sends the request and decodes its JSON answer, of at most limit bytes, into out. A nil out
// expects no content.
func (c *Client) call(ctx context.Context, r request, limit int64, out any) (err error) {
	r.accept = api.TypeJSON
	resp, err := c.do(ctx, r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		// Drain the body, so that the connection can be reused.
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxProblem)) // only trailing bytes can fail here
		return nil
	}
	if t := mediaType(resp); t != api.TypeJSON {
		return unexpectedAnswer(resp, read(resp.Body, 200))
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return fmt.Errorf("read the answer to %s %s: %w", r.method, resp.Request.URL.Path, err)
	}
	if int64(len(b)) > limit {
		return fmt.Errorf("the answer to %s %s exceeds %d bytes", r.method, resp.Request.URL.Path, limit)
	}
	if err := json.Unmarshal(b, out); err != nil {
		return fmt.Errorf("decode the answer to %s %s: %w", r.method, resp.Request.URL.Path, err)
	}
	return nil
}

// fetch sends the request and returns its decoded JSON answer.
func fetch[T any](ctx context.Context, c *Client, r request) (*T, error) {
	out := new(T)
	if err := c.call(ctx, r, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// transportError describes a failure below HTTP. The message of net/http names a host that does not
// exist (`Get "http://sandboxd/v1/...": EOF`) instead of the socket.
func (c *Client) transportError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if e, ok := errors.AsType[*NotRunning](err); ok {
		return e
	}
	if e, ok := errors.AsType[*url.Error](err); ok {
		err = e.Err
	}
	return fmt.Errorf("talk to the daemon at %s: %w", c.socket, err)
}

func mediaType(resp *http.Response) string {
	t, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil {
		return ""
	}
	return t
}

// problem returns the error of a response without a 2xx status.
func problem(resp *http.Response) error {
	if t := mediaType(resp); t == api.TypeProblem {
		b := read(resp.Body, maxProblem)
		p := new(api.Problem)
		if err := json.Unmarshal(b, p); err == nil && p.Code != "" {
			p.Status = resp.StatusCode
			return p
		}
		return unexpectedAnswer(resp, b)
	}
	return unexpectedAnswer(resp, read(resp.Body, 200))
}

// unexpectedAnswer returns the error for an answer that no sandboxd gives: another server listens
// on the socket.
func unexpectedAnswer(resp *http.Response, start []byte) error {
	if len(start) > 200 {
		start = start[:200]
	}
	path := ""
	if resp.Request != nil && resp.Request.URL != nil {
		path = resp.Request.Method + " " + resp.Request.URL.Path
	}
	return fmt.Errorf("%s: unexpected answer %s of type %q, beginning %q; does another server listen on the socket?",
		path, resp.Status, resp.Header.Get("Content-Type"), strings.ToValidUTF8(string(start), string(utf8.RuneError)))
}

// read returns up to n bytes for an error message, fewer if reading fails.
func read(r io.Reader, n int64) []byte {
	b, _ := io.ReadAll(io.LimitReader(r, n)) // a partial text is good enough
	return b
}
