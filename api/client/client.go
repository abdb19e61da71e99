// Package client drives a sandboxd daemon over its Unix socket.
//
// A [Client] is made with [New] and may be used by several goroutines at once; it keeps connections open between
// requests. Every method takes a context and stops waiting when that is done; what a stopped request leaves behind in
// the daemon is said at the method.
//
// An error that the daemon answered is an [*api.Problem] and is found with errors.As, or by its code with
//
//	errors.Is(err, &api.Problem{Code: api.CodeNotFound})
//
// A daemon that is not there at all is a [*NotRunning].
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

// Bounds on what is read from the daemon. They are far above what it sends, and far below what would hurt.
const (
	maxProblem = 256 << 10 // one error document
	maxAnswer  = 32 << 20  // one JSON answer other than the output of a program
	maxLine    = 4 << 20   // one line of a stream; the daemon sends pieces of at most 64 KiB
)

// The daemon's own default and ceiling of [api.ExecRequest.OutputLimit].
const (
	defaultOutput = 1 << 20
	maxOutput     = 16 << 20
)

// origin is what the requests' URLs start with. The host in it is never looked up: the transport dials the socket.
const origin = "http://sandboxd"

// Client talks to the daemon behind one socket.
type Client struct {
	socket string
	http   *http.Client
}

// New returns a client for the daemon that listens on the Unix socket at path. It does not connect yet. Each of wrap returns a
// transport around the one that it gets, for example to trace requests.
func New(socket string, wrap ...func(http.RoundTripper) http.RoundTripper) *Client {
	var transport http.RoundTripper = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dial(ctx, socket)
		},
		DisableCompression:  true, // a local socket gains nothing from it
		MaxIdleConnsPerHost: 32,
		IdleConnTimeout:     30 * time.Second,
		// A daemon says whether it wants the body, however busy it is; only something else on the socket may never say it.
		ExpectContinueTimeout: time.Minute,
	}
	for _, w := range wrap {
		transport = w(transport)
	}
	return &Client{
		socket: socket,
		http: &http.Client{
			Transport: transport,
			// A redirect would not come from a sandboxd.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// Socket is the path that the client dials.
func (c *Client) Socket() string { return c.socket }

// Close closes the connections that no request uses.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// DefaultSocket is where the caller's own daemon listens unless told otherwise: the file that SANDBOXD_SOCKET names,
// else api.sock in the runtime directory. (Package internal/dirs holds the same rule for the daemon's side, with its
// data directory; a test there keeps the two in step. This package stays free of our internal ones.)
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
	Err    error // what connect said
}

func (e *NotRunning) Error() string {
	return fmt.Sprintf("no daemon is running at %s; start one with: sandboxd serve (or name another socket with --socket or SANDBOXD_SOCKET)", e.Socket)
}

func (e *NotRunning) Unwrap() error { return e.Err }

// oPath is O_PATH, which package syscall does not have: who may connect need not be able to read the directory.
const oPath = 0x200000

// dial connects to the socket. A path that exceeds the 107 bytes of sockaddr_un is reached through a descriptor of its
// directory: data directories below a deep home are real.
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
	path   []string // segments, unescaped: ids come from users
	query  url.Values
	json   any       // sent as a JSON body
	body   io.Reader // or sent as it is, with its type
	typ    string
	accept string
	span   string // the header Range
}

// do sends the request. The response has a 2xx status, and its body is the caller's to close; every other answer is an
// error already.
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
		// Let the daemon refuse an upload before it is sent; otherwise its answer races with our broken pipe.
		req.Header.Set("Expect", "100-continue")
	}
	if r.accept != "" {
		req.Header.Set("Accept", r.accept)
	}
	if r.span != "" {
		req.Header.Set("Range", r.span)
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

func (r request) url() (string, error) {
	var b strings.Builder
	b.WriteString(origin)
	for _, s := range r.path {
		// These would turn one route into another on the way through URL cleaning.
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

// call sends the request and decodes its JSON answer, of at most limit bytes, into out. A nil out expects no content.
func (c *Client) call(ctx context.Context, r request, limit int64, out any) (err error) {
	r.accept = api.TypeJSON
	resp, err := c.do(ctx, r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		// Drained so that the connection can be used again.
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxProblem)) // the answer counts, what trails it does not
		return nil
	}
	if t := mediaType(resp); t != api.TypeJSON {
		return notOurs(resp, read(resp.Body, 200))
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

// transportError says what went wrong below HTTP. net/http's own `Get "http://sandboxd/v1/...": EOF` names a host that
// does not exist and not the socket that does.
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

// problem makes an error of an answer that is not a success.
func problem(resp *http.Response) error {
	if t := mediaType(resp); t == api.TypeProblem {
		b := read(resp.Body, maxProblem)
		p := new(api.Problem)
		if err := json.Unmarshal(b, p); err == nil && p.Code != "" {
			p.Status = resp.StatusCode
			return p
		}
		return notOurs(resp, b)
	}
	return notOurs(resp, read(resp.Body, 200))
}

// notOurs is the error for an answer no sandboxd gives: something else listens on the socket.
func notOurs(resp *http.Response, start []byte) error {
	if len(start) > 200 {
		start = start[:200]
	}
	path := ""
	if resp.Request != nil && resp.Request.URL != nil {
		path = resp.Request.Method + " " + resp.Request.URL.Path
	}
	return fmt.Errorf("%s: unexpected answer %s of type %q, beginning %q; is it a sandboxd that listens there?",
		path, resp.Status, resp.Header.Get("Content-Type"), strings.ToValidUTF8(string(start), string(utf8.RuneError)))
}

// read returns up to n bytes, fewer when reading ends early: it serves error messages only.
func read(r io.Reader, n int64) []byte {
	b, _ := io.ReadAll(io.LimitReader(r, n)) // what came is all there is to say
	return b
}
