package simplesandbox

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"
	"golang.org/x/sync/singleflight"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// Labels of a sandbox.
const (
	// labelFace has the sandbox's own id if a face has made it. Forks have the label too, and not the
	// id, so that they are not the face's.
	labelFace = "sandboxd.simple-sandbox"
	// labelContext has the id of the context of code. The Python and TypeScript clients have the same
	// label, so that they find the same variables.
	labelContext = "sandboxd.client.context.python"
)

const (
	defaultLife = 24 * 60 * 60 // seconds of a sandbox, as in the server that this face stands for
	defaultWork = "/sandbox"   // directory of a sandbox that code starts in

	maxBody     = 8 << 20 // bytes of a JSON body
	maxUpload   = 4 << 30 // bytes of a file
	maxOutput   = 4 << 20 // bytes kept of each stream of a run
	bodyTimeout = time.Minute
	stepTimeout = time.Minute // of a step that the request's end does not stop

	installTimeout = 600 // seconds

	maxSandboxes = 64 // of all faces of a daemon
	// maxCalls bounds requests at once; others wait. It leaves room beside a cell in every sandbox.
	maxCalls = 2 * maxSandboxes
	maxConns = 4 * maxSandboxes // connections at once, also of clients without the token; others wait
)

// Options configure a face.
type Options struct {
	Client *client.Client // of the daemon
	// Sandbox is the request for every sandbox. Zero fields have the face's defaults: a day and the
	// directory /sandbox.
	Sandbox api.CreateSandbox
	Timeout time.Duration // of a run of code; 0 means only the sandbox's end
	Token   string        // that clients must have
	Log     *slog.Logger
}

// Face serves the routes. It implements [http.Handler].
type Face struct {
	opts     Options
	api      *client.Client
	log      *slog.Logger
	digest   [sha256.Size]byte  // of the token
	contexts singleflight.Group // contexts being made, by sandbox
	patience time.Duration      // of a JSON body, and of each piece of a file
	calls    chan struct{}      // requests at once
	creating atomic.Int64       // sandboxes being made
}

// New returns a face.
func New(o Options) *Face {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	sb := &o.Sandbox
	sb.Timeout = cmp.Or(sb.Timeout, defaultLife)
	sb.IdleTimeout = cmp.Or(sb.IdleTimeout, defaultLife)
	sb.Cwd = cmp.Or(sb.Cwd, defaultWork)
	sb.AutoRemove = sb.Restart == ""
	return &Face{
		opts: o, api: o.Client, log: o.Log, patience: bodyTimeout, digest: sha256.Sum256([]byte(o.Token)),
		calls: make(chan struct{}, maxCalls),
	}
}

// Serve serves a listener until ctx ends.
func (f *Face) Serve(ctx context.Context, l net.Listener) error {
	server := &http.Server{
		Handler:           f,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       5 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(f.log.Handler(), slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(netutil.LimitListener(l, maxConns)); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve simple_sandbox's routes: %w", err)
	}
	return nil
}

// refusal is an answer that is an error. Detail is text, or what FastAPI says about a wrong body.
type refusal struct {
	status int
	detail any
}

func (r *refusal) Error() string { return fmt.Sprint(r.detail) }

func refuse(status int, format string, args ...any) error {
	return &refusal{status, fmt.Sprintf(format, args...)}
}

// invalid refuses a field of a body in FastAPI's form.
func invalid(kind, field, format string, args ...any) error {
	return &refusal{http.StatusUnprocessableEntity, []map[string]any{
		{"type": kind, "loc": []string{"body", field}, "msg": fmt.Sprintf(format, args...)},
	}}
}

// call is one request about a sandbox, or about none.
type call struct {
	w    http.ResponseWriter
	r    *http.Request
	id   string
	file string // path behind download/
}

type handler func(*Face, *call) error

// route returns method and handler of a path, nil for an unknown one, and fills in the names that
// the path has. http.ServeMux would redirect paths with dots, which are file names here.
func route(path string, c *call) (method string, handle handler) {
	switch path {
	case "/health":
		return http.MethodGet, (*Face).health
	case "/sandboxes":
		return http.MethodGet, (*Face).list
	case "/sandbox/create":
		return http.MethodPost, (*Face).create
	}
	rest, ok := strings.CutPrefix(path, "/sandbox/")
	if !ok {
		return "", nil
	}
	id, verb, _ := strings.Cut(rest, "/")
	c.id = id
	if file, ok := strings.CutPrefix(verb, "download/"); ok {
		c.file = file
		return http.MethodGet, (*Face).download
	}
	switch verb {
	case "execute":
		return http.MethodPost, (*Face).execute
	case "install":
		return http.MethodPost, (*Face).install
	case "upload":
		return http.MethodPost, (*Face).upload
	case "close":
		return http.MethodPost, (*Face).close
	case "files":
		return http.MethodGet, (*Face).files
	}
	return "", nil
}

// ServeHTTP implements [http.Handler].
func (f *Face) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if err := f.serve(&call{w: w, r: r}); err != nil {
		f.fail(w, err)
	}
}

func (f *Face) serve(c *call) error {
	if c.r.ContentLength != 0 {
		c.deadline(f.patience) // also of a body that is refused, and then read to its end
	}
	method, handle := route(c.r.URL.Path, c)
	public := c.r.URL.Path == "/health"
	if err := f.admit(c.r, public); err != nil {
		return err
	}
	if !public { // its answer comes also while all others wait
		select {
		case f.calls <- struct{}{}:
			defer func() { <-f.calls }()
		case <-c.r.Context().Done():
			return c.r.Context().Err()
		}
		if c.r.ContentLength != 0 {
			c.deadline(f.patience) // from now on: the client could not know that it waits
		}
	}
	switch {
	case handle == nil:
		return refuse(http.StatusNotFound, "Not Found")
	case c.r.Method != method:
		c.w.Header().Set("Allow", method)
		return refuse(http.StatusMethodNotAllowed, "Method Not Allowed")
	}
	return handle(f, c)
}

// admit refuses requests of web pages, of names that another site's DNS points here, and of clients
// without the token.
func (f *Face) admit(r *http.Request, public bool) error {
	if site := r.Header.Get("Sec-Fetch-Site"); r.Header.Get("Origin") != "" || site != "" && site != "none" {
		return refuse(http.StatusForbidden, "requests of web pages are refused")
	}
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	if host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return refuse(http.StatusForbidden, "Host: only localhost and loopback addresses are served")
	}
	if public {
		return nil
	}
	// Clients that cannot set a header have the token in their URL: http://token:TOKEN@HOST.
	given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if _, password, basic := r.BasicAuth(); basic {
		given, ok = password, true
	}
	digest := sha256.Sum256([]byte(given)) // so that a comparison takes the same time whatever differs
	if !ok || subtle.ConstantTimeCompare(digest[:], f.digest[:]) != 1 {
		return refuse(http.StatusUnauthorized, "the token is missing or wrong")
	}
	return nil
}

// fail answers with an error.
func (f *Face) fail(w http.ResponseWriter, err error) {
	status, detail := http.StatusInternalServerError, any("the daemon gave no whole answer")
	if no, ok := errors.AsType[*refusal](err); ok {
		status, detail = no.status, no.detail
	} else if p, ok := errors.AsType[*api.Problem](err); ok {
		detail = p.Detail
		switch p.Code {
		case api.CodeGone:
			status, detail = http.StatusNotFound, noSandbox
		case api.CodeNotFound, api.CodeTooLarge, api.CodeConflict:
			status = p.Code.Status()
		case api.CodeUnavailable, api.CodeInternal:
			f.log.Warn("the daemon has refused a request", "error", err)
			status, detail = p.Code.Status(), "the daemon could not do it: "+p.Title
		case api.CodeInvalid, api.CodeForbidden, api.CodeExists, api.CodeProgramMissing, api.CodeProgramDenied, api.CodeUnenforceable,
			api.CodeRegistry, api.CodeImage, api.CodeBuild, api.CodeNoLanguage, api.CodeLibraries, api.CodeRefused:
		}
	} else if _, ok := errors.AsType[*client.NotRunning](err); ok {
		status, detail = http.StatusServiceUnavailable, "no daemon is running"
	} else {
		f.log.Warn("a request to the daemon had no whole answer", "error", err) // it names paths of the host
	}
	if status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	f.reply(w, status, map[string]any{"detail": detail})
}

// reply writes a JSON answer.
func (f *Face) reply(w http.ResponseWriter, status int, v any) {
	text, err := json.Marshal(v)
	if err != nil { // of a result that holds a number JSON has no form for
		f.log.Warn("encode an answer", "error", err)
		status, text = http.StatusInternalServerError, []byte(`{"detail":"the result has no JSON form"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(text) // the client may have gone
}

// deadline bounds the reads of the body from now on; zero lifts the bound. The body is then read: a
// deadline that passes later would end the request.
func (c *call) deadline(d time.Duration) {
	var at time.Time
	if d > 0 {
		at = time.Now().Add(d)
	}
	_ = http.NewResponseController(c.w).SetReadDeadline(at) // every connection of a server has deadlines
}

// body reads a JSON body whole.
func (c *call) body(v any) error {
	text, err := io.ReadAll(http.MaxBytesReader(c.w, c.r.Body, maxBody))
	if err != nil {
		return bodyError(err)
	}
	c.deadline(0)
	if err := json.Unmarshal(text, v); err != nil {
		return invalid("json_invalid", "", "decode the body: %v", err)
	}
	return nil
}

// bodyError explains an error of reading a body.
func bodyError(err error) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return refuse(http.StatusRequestTimeout, "the body did not come in time")
	case tooLarge(err):
		return refuse(http.StatusRequestEntityTooLarge, "the body is too large")
	}
	return refuse(http.StatusBadRequest, "read the body: %v", err)
}

func tooLarge(err error) bool {
	_, ok := errors.AsType[*http.MaxBytesError](err)
	return ok
}
