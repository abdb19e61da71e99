package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// Options configure a [Server]. All are needed.
type Options struct {
	Service *service.Service
	Socket  *Socket // has the tenants
	// Shutdown is called for POST /v1/system/shutdown.
	Shutdown func(api.Shutdown)
	// Stopping is closed when the daemon begins to stop: watches end with it.
	Stopping <-chan struct{}
	Log      *slog.Logger
}

// Server is the native face: it serves the API over a Unix socket, for the daemon's own tenant and,
// if there are [Tenants], for each of them.
type Server struct {
	service  *service.Service
	socket   *Socket
	shutdown func(api.Shutdown)
	stopping <-chan struct{}
	log      *slog.Logger
	http     *http.Server
	cancel   context.CancelCauseFunc // of all requests

	requests sync.WaitGroup // handlers, with those of hijacked connections
	piped    sync.WaitGroup // those of programs with pipes
	mu       sync.Mutex
	drained  bool // no request may begin: requests is waited for
	active   int  // number of requests under way
	lastUse  time.Time

	ties map[string]chan struct{} // by the id of a tied sandbox; guarded by mu
}

// New returns a server; ctx bounds no request.
func New(ctx context.Context, opts Options) *Server {
	s := &Server{
		service: opts.Service, socket: opts.Socket, shutdown: opts.Shutdown, stopping: opts.Stopping, log: opts.Log, lastUse: time.Now(),
		ties: make(map[string]chan struct{}),
	}
	requests, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	s.cancel = cancel
	s.http = &http.Server{
		Handler: s.handler(),
		// The header of a request must come soon; the body is bounded where it is read.
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		BaseContext:       func(net.Listener) context.Context { return requests },
		ConnContext:       peerContext,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	return s
}

// Serve accepts connections until [Server.Drain] is called.
func (s *Server) Serve() error {
	if err := s.http.Serve(s.socket); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve: %w", err)
	}
	return nil
}

// Drain accepts no further request and returns when none is under way. Requests may take patience
// to end, are then cancelled, and their connections are closed soon after.
func (s *Server) Drain(ctx context.Context, patience time.Duration) {
	step := func(timeout time.Duration) error {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		return s.http.Shutdown(ctx)
	}
	begun := time.Now()
	err := step(patience)
	if err == nil {
		s.awaitPiped(ctx, patience-time.Since(begun))
	} else {
		s.cancel(class.ErrStopping)
		if step(cutTimeout) != nil {
			s.log.Warn("requests are cut off")
		}
	}
	s.cancel(class.ErrStopping)
	_ = s.http.Close() // of the connections that are left; their requests are waited for next
	// Connections that became WebSockets are not the HTTP server's any more.
	s.mu.Lock()
	s.drained = true
	s.mu.Unlock()
	s.requests.Wait()
}

// awaitPiped waits for programs with pipes to end. Their connections are not the HTTP server's any
// more, and no other begins when its Shutdown has returned.
func (s *Server) awaitPiped(ctx context.Context, patience time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		s.piped.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
	}
}

// untilStopping returns a context for an answer without an end of its own. It ends with
// [class.ErrStopping] when the daemon begins to stop. The caller calls end, which waits for the
// goroutine behind it.
func (s *Server) untilStopping(parent context.Context) (ctx context.Context, end func()) {
	ctx, cancel := context.WithCancelCause(parent)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		select {
		case <-s.stopping:
			cancel(class.ErrStopping)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil); <-stopped }
}

// beginRequest counts a request, which endRequest must end; false once the server is drained.
func (s *Server) beginRequest() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.drained {
		return false
	}
	s.requests.Add(1)
	s.active++
	return true
}

func (s *Server) endRequest() {
	s.mu.Lock()
	s.active--
	s.lastUse = time.Now()
	s.mu.Unlock()
	s.requests.Done()
}

// IdleFor returns the time since the last request or sandbox; zero while there is one.
func (s *Server) IdleFor() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active > 0 || s.service.Sandboxes() > 0 {
		s.lastUse = time.Now()
		return 0
	}
	return time.Since(s.lastUse)
}

// as returns the service as the caller of a request sees it. A handler runs only for callers that
// [allowed] has admitted.
func (s *Server) as(r *http.Request) *service.API {
	p := peerOf(r.Context())
	caller := service.Caller{UID: int(p.uid), Tenant: p.tenant()}
	if p.operator() {
		caller.Rights = service.Administer
	}
	return s.service.For(caller)
}

// access limits the callers of a route.
type access int

const (
	owner  access = iota // the uid that runs the daemon, and root, which no file mode keeps out
	tenant               // these, and tenants, of objects that are theirs
	anyone               // every process that can open the socket
)

// route is one line of the API. A handler that returns an error must not have begun to answer.
type route struct {
	method, pattern string
	access          access
	handle          func(*Server, http.ResponseWriter, *http.Request) error
}

// anyMethod is the method of a route whose requests are another server's: OpenAPI cannot describe
// it.
const anyMethod = ""

// routes is the whole API.
var routes = []route{
	{"GET", "/healthz", anyone, (*Server).getHealth}, // reveals only that the daemon lives: for a supervisor under another uid

	{"GET", "/v1/system", owner, (*Server).getSystem},
	{"GET", "/v1/system/checks", owner, (*Server).getChecks},
	{"POST", "/v1/system/shutdown", owner, (*Server).postShutdown},

	{"GET", "/v1/system/df", tenant, (*Server).getDiskUsage}, // of the caller's own objects

	{"GET", "/v1/stats", tenant, (*Server).getAllStats},
	{"GET", "/v1/events", tenant, (*Server).getEvents},

	{"GET", "/v1/profiles", tenant, (*Server).getProfiles},
	{"GET", "/v1/profiles/{profile}", tenant, (*Server).getProfile},

	{"POST", "/v1/sandboxes", tenant, (*Server).postSandbox},
	{"GET", "/v1/sandboxes", tenant, (*Server).getSandboxes},
	{"POST", "/v1/sandboxes/prune", tenant, (*Server).postSandboxesPrune},
	{"GET", "/v1/sandboxes/{id}", tenant, (*Server).getSandbox},
	{"PATCH", "/v1/sandboxes/{id}", tenant, (*Server).patchSandbox},
	{"DELETE", "/v1/sandboxes/{id}", tenant, (*Server).deleteSandbox},
	{"POST", "/v1/sandboxes/{id}/rename", tenant, (*Server).postRename},
	{"POST", "/v1/sandboxes/{id}/start", tenant, (*Server).postStart},
	{"POST", "/v1/sandboxes/{id}/stop", tenant, (*Server).postStop},
	{"POST", "/v1/sandboxes/{id}/pause", tenant, (*Server).postPause},
	{"POST", "/v1/sandboxes/{id}/resume", tenant, (*Server).postResume},
	{"GET", "/v1/sandboxes/{id}/wait", tenant, (*Server).getWait},
	{"GET", "/v1/sandboxes/{id}/logs", tenant, (*Server).getLogs},
	{"GET", "/v1/sandboxes/{id}/stats", tenant, (*Server).getStats},
	{"GET", "/v1/sandboxes/{id}/flows", tenant, (*Server).getFlows},
	{"GET", "/v1/sandboxes/{id}/diff", tenant, (*Server).getDiff},
	{"GET", "/v1/sandboxes/{id}/changes", tenant, (*Server).getChanges},
	{"POST", "/v1/sandboxes/{id}/commit", tenant, (*Server).postCommit},

	{"POST", "/v1/sandboxes/{id}/snapshots", tenant, (*Server).postSnapshot},
	{"GET", "/v1/sandboxes/{id}/snapshots", tenant, (*Server).getSandboxSnapshots},
	{"POST", "/v1/sandboxes/{id}/fork", tenant, (*Server).postFork},
	{"POST", "/v1/sandboxes/{id}/rollback", tenant, (*Server).postRollback},

	{"POST", "/v1/sandboxes/{id}/ports/{port}", tenant, (*Server).postConnect},
	{anyMethod, "/v1/sandboxes/{id}/ports/{port}/{path...}", tenant, (*Server).proxyPort},

	{"GET", "/v1/snapshots", tenant, (*Server).getSnapshots},
	{"POST", "/v1/snapshots/import", tenant, (*Server).postSnapshotImport},
	{"POST", "/v1/snapshots/prune", tenant, (*Server).postSnapshotsPrune},
	{"GET", "/v1/snapshots/{snapshot}", tenant, (*Server).getSnapshot},
	{"GET", "/v1/snapshots/{snapshot}/export", tenant, (*Server).getSnapshotExport},
	{"DELETE", "/v1/snapshots/{snapshot}", tenant, (*Server).deleteSnapshot},

	{"POST", "/v1/sandboxes/{id}/exec", tenant, (*Server).postExec},
	{"GET", "/v1/sandboxes/{id}/exec", tenant, (*Server).getExec},              // WebSocket: its handshake is a GET
	{"POST", "/v1/sandboxes/{id}/exec/pipes", tenant, (*Server).postExecPipes}, // its answer has descriptors
	{"POST", "/v1/sandboxes/{id}/code", tenant, (*Server).postCode},
	{"GET", "/v1/languages", tenant, (*Server).getLanguages},
	{"GET", "/v1/sandboxes/{id}/execs", tenant, (*Server).getExecs},
	{"POST", "/v1/sandboxes/{id}/execs", tenant, (*Server).postExecPrepare},
	{"POST", "/v1/sandboxes/{id}/execs/{exec}/start", tenant, (*Server).postExecStart},
	{"GET", "/v1/sandboxes/{id}/execs/{exec}", tenant, (*Server).getExecRecord},
	{"DELETE", "/v1/sandboxes/{id}/execs/{exec}", tenant, (*Server).deleteExec},
	{"GET", "/v1/sandboxes/{id}/execs/{exec}/attach", tenant, (*Server).getAttach}, // NDJSON, or a WebSocket
	{"POST", "/v1/sandboxes/{id}/execs/{exec}/signal", tenant, (*Server).postSignal},
	{"POST", "/v1/sandboxes/{id}/execs/{exec}/resize", tenant, (*Server).postResize},
	{"POST", "/v1/sandboxes/{id}/execs/{exec}/stdin", tenant, (*Server).postStdin},
	{"POST", "/v1/sandboxes/{id}/contexts", tenant, (*Server).postContext},
	{"GET", "/v1/sandboxes/{id}/contexts", tenant, (*Server).getContexts},
	{"GET", "/v1/sandboxes/{id}/contexts/{context}", tenant, (*Server).getContext},
	{"DELETE", "/v1/sandboxes/{id}/contexts/{context}", tenant, (*Server).deleteContext},
	{"POST", "/v1/sandboxes/{id}/contexts/{context}/interrupt", tenant, (*Server).postContextInterrupt},
	{"POST", "/v1/sandboxes/{id}/contexts/{context}/restart", tenant, (*Server).postContextRestart},
	{"GET", "/v1/sandboxes/{id}/processes", tenant, (*Server).getProcesses},

	{"GET", "/v1/sandboxes/{id}/files", tenant, (*Server).getFile},
	{"PUT", "/v1/sandboxes/{id}/files", tenant, (*Server).putFile},
	{"DELETE", "/v1/sandboxes/{id}/files", tenant, (*Server).deleteFile},
	{"GET", "/v1/sandboxes/{id}/stat", tenant, (*Server).getStat},
	{"GET", "/v1/sandboxes/{id}/list", tenant, (*Server).getList},
	{"POST", "/v1/sandboxes/{id}/mkdir", tenant, (*Server).postMkdir},
	{"POST", "/v1/sandboxes/{id}/move", tenant, (*Server).postMove},
	{"GET", "/v1/sandboxes/{id}/watch", tenant, (*Server).getWatch},
	{"GET", "/v1/sandboxes/{id}/archive", tenant, (*Server).getArchive},
	{"PUT", "/v1/sandboxes/{id}/archive", tenant, (*Server).putArchive},

	{"POST", "/v1/run", tenant, (*Server).postRun},

	{"GET", "/v1/images", tenant, (*Server).getImages},
	{"DELETE", "/v1/images", tenant, (*Server).deleteImage},
	{"POST", "/v1/images/pull", tenant, (*Server).postPull},
	{"POST", "/v1/images/push", tenant, (*Server).postPush},
	{"POST", "/v1/registries/check", tenant, (*Server).postCheckRegistry},
	{"POST", "/v1/images/import", tenant, (*Server).postImport},
	{"GET", "/v1/images/export", tenant, (*Server).getExport},
	{"GET", "/v1/images/inspect", tenant, (*Server).getImage},
	{"GET", "/v1/images/verify", owner, (*Server).getVerify},
	{"POST", "/v1/images/tag", tenant, (*Server).postTag},
	{"POST", "/v1/images/prune", tenant, (*Server).postPrune},

	{"GET", "/v1/networks", tenant, (*Server).getNetworks},
	{"POST", "/v1/networks", tenant, (*Server).postNetwork},
	{"POST", "/v1/networks/prune", tenant, (*Server).postNetworksPrune},
	{"GET", "/v1/networks/{network}", tenant, (*Server).getNetwork},
	{"DELETE", "/v1/networks/{network}", tenant, (*Server).deleteNetwork},
	{"POST", "/v1/networks/{network}/connect", tenant, (*Server).postNetworkConnect},
	{"POST", "/v1/networks/{network}/disconnect", tenant, (*Server).postNetworkDisconnect},

	{"GET", "/v1/volumes", tenant, (*Server).getVolumes},
	{"POST", "/v1/volumes", tenant, (*Server).postVolume},
	{"POST", "/v1/volumes/import", tenant, (*Server).postVolumeImport},
	{"POST", "/v1/volumes/prune", tenant, (*Server).postVolumesPrune},
	{"GET", "/v1/volumes/{volume}", tenant, (*Server).getVolume},
	{"DELETE", "/v1/volumes/{volume}", tenant, (*Server).deleteVolume},
	{"GET", "/v1/volumes/{volume}/export", tenant, (*Server).getVolumeExport},

	{"GET", "/v1/secrets", tenant, (*Server).getSecrets},
	{"PUT", "/v1/secrets/{secret}", tenant, (*Server).putSecret},
	{"DELETE", "/v1/secrets/{secret}", tenant, (*Server).deleteSecret},

	{"POST", "/v1/builds", tenant, (*Server).postBuild},

	{"POST", "/v1/agent/runs", owner, (*Server).postAgentRun},
	{"GET", "/v1/agent/runs", owner, (*Server).getAgentRuns},
	{"GET", "/v1/agent/runs/{run}", owner, (*Server).getAgentRun},
	{"DELETE", "/v1/agent/runs/{run}", owner, (*Server).deleteAgentRun},
	{"GET", "/v1/agent/runs/{run}/events", owner, (*Server).getAgentEvents},
	{"POST", "/v1/agent/runs/{run}/resume", owner, (*Server).postAgentResume},
	{"POST", "/v1/agent/runs/{run}/cancel", owner, (*Server).postAgentCancel},
}

const (
	maxBody     = 1 << 20
	maxExecBody = 24 << 20 // stdin of 16 MiB in base64, and what stands around it

	// bodyTimeout bounds a pause within a body, and answerTimeout the time in which a client reads
	// nothing of an answer: a half-open connection keeps a sandbox from idling no longer.
	bodyTimeout   = time.Minute
	answerTimeout = 5 * time.Minute

	// cutTimeout is the time in which a cancelled request may answer, before its connection is closed.
	cutTimeout = 2 * time.Second
	// stepTimeout bounds each step that must be tried although no client waits for it any more.
	stepTimeout = 10 * time.Second
)

// handler routes requests. Whatever happens, the answer is the route's own or a problem.
func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	for _, r := range routes {
		mux.HandleFunc(strings.TrimSpace(r.method+" "+r.pattern), func(w http.ResponseWriter, req *http.Request) {
			if err := s.allowed(req.Context(), r.access); err != nil {
				writeProblem(w, err)
				return
			}
			err := r.handle(s, w, req)
			switch a := w.(*answer); {
			case err == nil:
			case a.began:
				s.log.Info("answer broke off", "method", req.Method, "path", req.URL.Path, "error", err)
				panic(http.ErrAbortHandler) // half an answer must not look like a whole one
			default:
				if p := ProblemOf(err); p.Code == api.CodeInternal {
					s.log.Error("request failed", "method", req.Method, "path", req.URL.Path, "error", err)
				}
				writeProblem(w, err)
			}
		})
	}
	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		w := &answer{ResponseWriter: rw}
		if !s.beginRequest() {
			writeProblem(w, class.ErrStopping)
			return
		}
		defer s.endRequest()
		// Deadlines that the last request on this connection set do not hold for this one.
		_ = http.NewResponseController(rw).SetWriteDeadline(time.Time{}) // every connection of ours has deadlines
		defer s.recover(w, req)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		if err := checkOrigin(req); err != nil {
			writeProblem(w, err)
			return
		}
		// The mux would clean such a path and redirect; no well-meaning client sends one.
		if p := req.URL.Path; p != path.Clean(p) && (p != path.Clean(p)+"/" || !portPath.MatchString(p)) {
			writeProblem(w, class.Mark(errNoRoute, fmt.Errorf("path %q: not in its shortest form", class.Clip(p))))
			return
		}
		if _, pattern := mux.Handler(req); pattern == "" {
			writeProblem(w, noRoute(mux, w, req))
			return
		}
		mux.ServeHTTP(w, req)
	})
}

// noRoute distinguishes an unknown path from a method that a path lacks.
func noRoute(mux *http.ServeMux, w http.ResponseWriter, req *http.Request) error {
	var methods []string
	for _, r := range routes {
		if slices.Contains(methods, r.method) {
			continue
		}
		other := req.Clone(req.Context())
		other.Method = r.method
		if _, pattern := mux.Handler(other); pattern != "" {
			methods = append(methods, r.method)
		}
	}
	if methods == nil {
		return class.Mark(errNoRoute, fmt.Errorf("no route %s %q", class.Clip(req.Method), class.Clip(req.URL.Path)))
	}
	allow := strings.Join(methods, ", ")
	w.Header().Set("Allow", allow)
	return class.Mark(errNoMethod, fmt.Errorf("%q cannot be asked with %s, only with %s", class.Clip(req.URL.Path), class.Clip(req.Method), allow))
}

func (s *Server) allowed(ctx context.Context, a access) error {
	p := peerOf(ctx)
	known := s.socket.tenants.has(p)
	switch {
	case a == anyone, p.operator(), a == tenant && known:
		return nil
	case p.uid == unknownUID:
		return class.Mark(class.ErrForbidden, errors.New("the kernel does not say who calls"))
	case known:
		return class.Mark(class.ErrForbidden, fmt.Errorf("uid %d is a tenant: this is for the daemon's user, uid %d", p.uid, os.Geteuid()))
	}
	return class.Mark(class.ErrForbidden, fmt.Errorf("uid %d may not use the daemon of uid %d", p.uid, os.Geteuid()))
}

// recover answers for a handler that panicked.
func (s *Server) recover(w *answer, req *http.Request) {
	v := recover()
	if v == nil {
		return
	}
	if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(v) // the way to break a connection off
	}
	s.log.Error("panic in a request", "method", req.Method, "path", req.URL.Path, "panic", v, "stack", string(debug.Stack()))
	if w.began {
		panic(http.ErrAbortHandler) // the client must not take the rest for a whole answer
	}
	writeProblem(w, errPanic)
}

// answer records whether an answer has begun.
type answer struct {
	http.ResponseWriter
	began bool
}

// Unwrap lets http.ResponseController and the WebSocket's handshake see the connection.
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

func (a *answer) WriteHeader(status int) {
	a.began = true
	a.ResponseWriter.WriteHeader(status)
}

func (a *answer) Write(p []byte) (int, error) {
	a.began = true
	return a.ResponseWriter.Write(p)
}

// ReadFrom keeps the way to sendfile open.
func (a *answer) ReadFrom(r io.Reader) (int64, error) {
	a.began = true
	return io.Copy(a.ResponseWriter, r)
}

func writeProblem(w http.ResponseWriter, err error) {
	p := ProblemOf(err)
	h := w.Header()
	for _, name := range []string{"Content-Length", "Content-Encoding", "Last-Modified", "Accept-Ranges"} {
		h.Del(name)
	}
	h.Set("Content-Type", api.TypeProblem)
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(p) // a client that is gone does not need it
}

func writeJSON(w http.ResponseWriter, status int, v any) error {
	// To memory first: a value that cannot be encoded still becomes a problem.
	var data bytes.Buffer
	if err := encoder(&data).Encode(v); err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	w.Header().Set("Content-Type", api.TypeJSON)
	w.Header().Set("Cache-Control", "no-store")
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTimeout)) // every connection of ours has deadlines
	w.WriteHeader(status)
	_, _ = w.Write(data.Bytes()) // a client that is gone does not need it
	return nil
}

// encoder writes JSON values, one a line. Characters of HTML stay: escaped, a page or a figure is
// up to six times as long. No browser takes an answer for HTML: its content type has nosniff.
func encoder(w io.Writer) *json.Encoder {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc
}

// readJSON reads a body that is one JSON value of v's fields and nothing else.
func readJSON(w http.ResponseWriter, r *http.Request, limit int64, v any) error {
	inner := w
	if a, ok := w.(*answer); ok {
		inner = a.ResponseWriter // which MaxBytesReader tells to close the connection, rather than read the rest
	}
	data, err := io.ReadAll(http.MaxBytesReader(inner, &patientBody{r.Body, http.NewResponseController(w)}, limit))
	if err != nil {
		return bodyError(err)
	}
	return decodeJSON(data, v)
}

func decodeJSON(data []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		if errors.Is(err, io.EOF) {
			return class.Invalidf("body: empty, a JSON object is needed")
		}
		if te, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return class.Invalidf("body: field %q cannot be a %s", te.Field, te.Value)
		}
		return class.Invalidf("body: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return class.Invalidf("body: something follows the JSON object")
	}
	return nil
}

// bodyError classifies the errors of reading a body.
func bodyError(err error) error {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.Is(err, class.ErrInvalid):
		return err
	case errors.As(err, &tooLarge):
		return class.Mark(class.ErrTooLarge, fmt.Errorf("body: larger than %d bytes", tooLarge.Limit))
	case errors.Is(err, io.ErrUnexpectedEOF):
		return class.Invalidf("body: it broke off")
	}
	return fmt.Errorf("read body: %w", err)
}

// patientBody limits the pause between parts of a body.
type patientBody struct {
	io.ReadCloser
	rc *http.ResponseController
}

func (b *patientBody) Read(p []byte) (int, error) {
	_ = b.rc.SetReadDeadline(time.Now().Add(bodyTimeout)) // every connection of ours has deadlines
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		_ = b.rc.SetReadDeadline(time.Time{}) // or the server would take a long handler for a dead client
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = class.Invalidf("body: nothing came for %s", bodyTimeout)
		}
	}
	return n, err
}
