package docker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"mime"
	"net"
	"net/http"
	"net/url"
	"regexp"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// Versions of Docker's API that are spoken, and the version of Docker that the face says it is.
const (
	maxVersion    = "1.51"
	minVersion    = "1.24"
	engineVersion = "28.5.2"

	maxMinor = 51
	minMinor = 24
)

const (
	maxBody = 8 << 20 // bytes of a JSON body
	// bodyTimeout bounds a JSON body, which clients send at once.
	bodyTimeout = time.Minute
)

// Options configure a face.
type Options struct {
	Client  *client.Client // of the daemon
	Version string         // of sandboxd
	// Network is the network of containers in "bridge" and in networks with other names.
	Network api.Network
	Log     *slog.Logger
}

// Face serves Docker's API.
type Face struct {
	opts  Options
	api   *client.Client
	log   *slog.Logger
	began time.Time

	mu      sync.Mutex
	failed  map[string]map[chan int]struct{} // by sandbox: requests that wait for an exit, told of failed starts
	working map[string]*turn                 // by sandbox: files of stopped containers are worked on in turns
}

type turn struct {
	sync.Mutex
	users int
}

// New returns a face.
func New(opts Options) *Face {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	return &Face{began: time.Now(), opts: opts, api: opts.Client, log: opts.Log, failed: make(map[string]map[chan int]struct{}), working: make(map[string]*turn)}
}

// Serve serves a listener until ctx ends. See package facesock.
func (f *Face) Serve(ctx context.Context, l net.Listener) error {
	server := &http.Server{
		Handler:           f.Handler(),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       5 * time.Minute,
		MaxHeaderBytes:    1 << 20,
		ErrorLog:          slog.NewLogLogger(f.log.Handler(), slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve Docker's API: %w", err)
	}
	return nil
}

// call is one request.
type call struct {
	f     *Face
	w     http.ResponseWriter
	r     *http.Request
	q     url.Values
	minor int // of the version in the path; the highest without one
	args  []string
	began time.Time
}

// route is a row of the table of requests. In a pattern {id} stands for a part of the path, and
// {name} for a part that may have slashes.
type route struct {
	method, pattern string
	handle          func(c *call) error
	match           *regexp.Regexp
}

func compile(table []route) []route {
	for i := range table {
		expr := regexp.QuoteMeta(table[i].pattern)
		expr = strings.ReplaceAll(expr, `\{id\}`, `([^/]+)`)
		expr = strings.ReplaceAll(expr, `\{name\}`, `(.+)`)
		table[i].match = regexp.MustCompile("^" + expr + "$")
	}
	return table
}

// libpod matches the paths of podman's own API, which podman --remote uses.
var libpod = regexp.MustCompile(`^(/v[0-9.]+)?/libpod/`)

var versioned = regexp.MustCompile(`^/v([0-9]{1,4})\.([0-9]{1,4})(/.*)$`)

// Handler returns the handler of all requests.
func (f *Face) Handler() http.Handler {
	table := compile(routes())
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Api-Version", maxVersion)
		h.Set("Docker-Experimental", "false")
		h.Set("Ostype", "linux")
		h.Set("Server", "Docker/"+engineVersion+" (linux)")
		c := &call{f: f, w: w, r: r, minor: maxMinor, began: time.Now()}
		err := c.serve(table)
		switch {
		case err == nil:
		case errors.Is(err, errAnswered):
		default:
			f.answerError(w, r, err)
		}
	})
}

// errAnswered ends a request whose answer has begun.
var errAnswered = errors.New("answered")

func (c *call) serve(table []route) error {
	path := c.r.URL.Path
	if r := c.r.Header; r.Get("Origin") != "" || r.Get("Sec-Fetch-Site") != "" {
		return statusf(http.StatusForbidden, "requests of web pages are refused")
	}
	if libpod.MatchString(path) {
		return statusf(http.StatusNotFound, "podman's own API is not served, only Docker's: use a client of Docker, or podman without --remote")
	}
	if m := versioned.FindStringSubmatch(path); m != nil {
		major, _ := strconv.Atoi(m[1]) // digits
		minor, _ := strconv.Atoi(m[2])
		switch asked := m[1] + "." + m[2]; {
		case major > 1 || minor > maxMinor:
			return statusf(http.StatusBadRequest, "client version %s is too new. Maximum supported API version is %s", asked, maxVersion)
		case major < 1 || minor < minMinor:
			return statusf(http.StatusBadRequest, "client version %s is too old. Minimum supported API version is %s, please upgrade your client to a newer version", asked, minVersion)
		}
		c.minor, path = minor, m[3]
	}
	var err error
	if c.q, err = url.ParseQuery(c.r.URL.RawQuery); err != nil {
		return badf("parse the query: %v", err)
	}
	path = strings.Replace(path, "/containers//", "/containers/", 1) // a name as inspect shows it
	for i := range table {
		m := table[i].match.FindStringSubmatch(path)
		if m == nil {
			continue
		}
		if table[i].method != c.r.Method && (table[i].method != http.MethodGet || c.r.Method != http.MethodHead) {
			continue
		}
		c.args = m[1:]
		return table[i].handle(c)
	}
	return statusf(http.StatusNotFound, "page not found")
}

// statusError is an error with the status that Docker has for it.
type statusError struct {
	status  int
	message string
}

func (e *statusError) Error() string { return e.message }

func statusf(status int, format string, args ...any) error {
	return &statusError{status, fmt.Sprintf(format, args...)}
}

func badf(format string, args ...any) error { return statusf(http.StatusBadRequest, format, args...) }

// statusOf returns the status that Docker's clients expect for an error of the daemon.
func statusOf(err error) int {
	if s, ok := errors.AsType[*statusError](err); ok {
		return s.status
	}
	if _, ok := errors.AsType[*client.NotRunning](err); ok {
		return http.StatusServiceUnavailable
	}
	p, ok := errors.AsType[*api.Problem](err)
	if !ok {
		return http.StatusInternalServerError
	}
	switch p.Code {
	case api.CodeInvalid, api.CodeTooLarge, api.CodeUnenforceable, api.CodeProgramMissing, api.CodeProgramDenied, api.CodeImage,
		api.CodeNoLanguage, api.CodeLibraries, api.CodeRefused:
		return http.StatusBadRequest
	case api.CodeForbidden:
		return http.StatusForbidden
	case api.CodeNotFound, api.CodeGone:
		return http.StatusNotFound
	case api.CodeExists, api.CodeConflict:
		return http.StatusConflict
	case api.CodeUnavailable:
		return http.StatusServiceUnavailable
	case api.CodeRegistry, api.CodeBuild, api.CodeInternal:
	}
	return http.StatusInternalServerError
}

func (f *Face) answerError(w http.ResponseWriter, r *http.Request, err error) {
	status := statusOf(err)
	if status == http.StatusNotModified {
		w.WriteHeader(status)
		return
	}
	if status >= http.StatusInternalServerError && r.Context().Err() == nil {
		f.log.Info("request failed", "method", r.Method, "path", r.URL.Path, "error", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"message": err.Error()}) // a client that is gone needs no answer
}

// json answers with a document.
func (c *call) json(status int, v any) error {
	c.w.Header().Set("Content-Type", "application/json")
	c.w.WriteHeader(status)
	_ = json.NewEncoder(c.w).Encode(v) // a client that is gone needs no answer
	return nil
}

func (c *call) none(status int) error {
	c.w.WriteHeader(status)
	return nil
}

// read decodes the JSON body. An empty one is as good as none where it is optional.
func (c *call) read(v any, optional bool) error {
	typ := c.r.Header.Get("Content-Type")
	if c.r.ContentLength == 0 && optional {
		return nil
	}
	if typ != "" || !optional && c.r.ContentLength != 0 {
		if t, _, err := mime.ParseMediaType(typ); err != nil || t != "application/json" {
			if !optional || typ != "text/plain" {
				return badf("Content-Type specified (%s) must be 'application/json'", typ)
			}
		}
	}
	data, err := c.body()
	if err != nil {
		return err
	}
	if len(data) == 0 {
		if optional {
			return nil
		}
		return badf("invalid JSON: got EOF while reading request body")
	}
	in := json.NewDecoder(bytes.NewReader(data))
	if err := in.Decode(v); err != nil {
		return badf("invalid JSON: %v", err)
	}
	if in.More() {
		return badf("unexpected content after JSON")
	}
	return nil
}

// body reads the body whole.
func (c *call) body() ([]byte, error) {
	rc := http.NewResponseController(c.w)
	_ = rc.SetReadDeadline(time.Now().Add(bodyTimeout)) // every connection of ours has deadlines
	defer func() { _ = rc.SetReadDeadline(time.Time{}) }()
	data, err := io.ReadAll(http.MaxBytesReader(c.w, c.r.Body, maxBody))
	if err != nil {
		return nil, badf("read the body: %v", err)
	}
	return data, nil
}

// skipBody reads the body of a request that becomes a stream, in which dockerode repeats the
// query: the program's input begins behind it. A body without a length is the input.
func (c *call) skipBody() error {
	if c.r.ContentLength <= 0 {
		return nil
	}
	_, err := c.body()
	return err
}

// truth reads a parameter that is true or false as Docker does.
func truth(s string) bool {
	switch strings.ToLower(strings.TrimSpace(s)) {
	case "", "0", "no", "false", "none":
		return false
	}
	return true
}

func (c *call) bool(name string) bool { return truth(c.q.Get(name)) }

func (c *call) ctx() context.Context { return c.r.Context() }

// flush sends what has been written so far.
func (c *call) flush() { _ = http.NewResponseController(c.w).Flush() }

// filters restrict a list: for each key one of the values must fit.
type filters map[string][]string

// filters reads the parameter in both forms that clients use: lists, and maps of true.
func (c *call) filters(known ...string) (filters, error) {
	text := c.q.Get("filters")
	out := filters{}
	if text == "" {
		return out, nil
	}
	var lists map[string][]string
	if json.Unmarshal([]byte(text), &lists) == nil {
		maps.Copy(out, lists)
	} else {
		var sets map[string]map[string]bool
		if err := json.Unmarshal([]byte(text), &sets); err != nil {
			return nil, badf("invalid filter: %v", err)
		}
		for k, m := range sets {
			for v, on := range m {
				if on {
					out[k] = append(out[k], v)
				}
			}
		}
	}
	for k := range out {
		if !slices.Contains(known, k) {
			return nil, badf("invalid filter '%s'", clip(k))
		}
	}
	return out, nil
}

// has reports whether there is no filter of this key, or one of its values fits.
func (f filters) has(key string, fits func(want string) bool) bool {
	wants, ok := f[key]
	if !ok {
		return true
	}
	return slices.ContainsFunc(wants, fits)
}

// labels reports whether labels have all that the filters label and label! ask for.
func (f filters) labels(have map[string]string) bool {
	fits := func(want string) bool {
		k, v, exact := strings.Cut(want, "=")
		got, ok := have[k]
		return ok && (!exact || got == v)
	}
	for _, want := range f["label"] {
		if !fits(want) {
			return false
		}
	}
	return !slices.ContainsFunc(f["label!"], fits)
}

func clip(s string) string {
	if len(s) > 100 {
		return strings.ToValidUTF8(s[:100], "") + "..."
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

func architecture() string { return goruntime.GOARCH }
