package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// access says who may call a route.
type access int

const (
	owner  access = iota // the uid that runs the daemon, and root, whom nothing can be kept from anyway
	anyone               // who can open the socket
)

// route is one line of the API. A handler that returns an error must not have begun to answer.
type route struct {
	method, pattern string
	access          access
	handle          func(*Daemon, http.ResponseWriter, *http.Request) error
}

// routes is the whole API.
var routes = []route{
	{"GET", "/healthz", anyone, (*Daemon).getHealth}, // says nothing but that we live: for a supervisor under another uid

	{"GET", "/v1/system", owner, (*Daemon).getSystem},
	{"GET", "/v1/system/checks", owner, (*Daemon).getChecks},
	{"POST", "/v1/system/shutdown", owner, (*Daemon).postShutdown},

	{"GET", "/v1/profiles", owner, (*Daemon).getProfiles},
	{"GET", "/v1/profiles/{profile}", owner, (*Daemon).getProfile},

	{"POST", "/v1/sandboxes", owner, (*Daemon).postSandbox},
	{"GET", "/v1/sandboxes", owner, (*Daemon).getSandboxes},
	{"POST", "/v1/sandboxes/prune", owner, (*Daemon).postSandboxesPrune},
	{"GET", "/v1/sandboxes/{id}", owner, (*Daemon).getSandbox},
	{"PATCH", "/v1/sandboxes/{id}", owner, (*Daemon).patchSandbox},
	{"DELETE", "/v1/sandboxes/{id}", owner, (*Daemon).deleteSandbox},
	{"POST", "/v1/sandboxes/{id}/start", owner, (*Daemon).postStart},
	{"POST", "/v1/sandboxes/{id}/stop", owner, (*Daemon).postStop},
	{"POST", "/v1/sandboxes/{id}/pause", owner, (*Daemon).postPause},
	{"POST", "/v1/sandboxes/{id}/resume", owner, (*Daemon).postResume},
	{"GET", "/v1/sandboxes/{id}/wait", owner, (*Daemon).getWait},
	{"GET", "/v1/sandboxes/{id}/logs", owner, (*Daemon).getLogs},
	{"GET", "/v1/sandboxes/{id}/stats", owner, (*Daemon).getStats},
	{"GET", "/v1/sandboxes/{id}/diff", owner, (*Daemon).getDiff},
	{"POST", "/v1/sandboxes/{id}/commit", owner, (*Daemon).postCommit},

	{"POST", "/v1/sandboxes/{id}/snapshots", owner, (*Daemon).postSnapshot},
	{"GET", "/v1/sandboxes/{id}/snapshots", owner, (*Daemon).getSandboxSnapshots},
	{"POST", "/v1/sandboxes/{id}/fork", owner, (*Daemon).postFork},
	{"POST", "/v1/sandboxes/{id}/rollback", owner, (*Daemon).postRollback},

	{"GET", "/v1/snapshots", owner, (*Daemon).getSnapshots},
	{"POST", "/v1/snapshots/import", owner, (*Daemon).postSnapshotImport},
	{"POST", "/v1/snapshots/prune", owner, (*Daemon).postSnapshotsPrune},
	{"GET", "/v1/snapshots/{snapshot}", owner, (*Daemon).getSnapshot},
	{"GET", "/v1/snapshots/{snapshot}/export", owner, (*Daemon).getSnapshotExport},
	{"DELETE", "/v1/snapshots/{snapshot}", owner, (*Daemon).deleteSnapshot},

	{"POST", "/v1/sandboxes/{id}/exec", owner, (*Daemon).postExec},
	{"GET", "/v1/sandboxes/{id}/exec", owner, (*Daemon).getExec}, // WebSocket: its handshake is a GET
	{"GET", "/v1/sandboxes/{id}/execs", owner, (*Daemon).getExecs},
	{"GET", "/v1/sandboxes/{id}/execs/{exec}", owner, (*Daemon).getExecRecord},
	{"DELETE", "/v1/sandboxes/{id}/execs/{exec}", owner, (*Daemon).deleteExec},
	{"GET", "/v1/sandboxes/{id}/execs/{exec}/attach", owner, (*Daemon).getAttach}, // NDJSON, or a WebSocket
	{"POST", "/v1/sandboxes/{id}/execs/{exec}/signal", owner, (*Daemon).postSignal},
	{"POST", "/v1/sandboxes/{id}/execs/{exec}/resize", owner, (*Daemon).postResize},
	{"POST", "/v1/sandboxes/{id}/execs/{exec}/stdin", owner, (*Daemon).postStdin},
	{"GET", "/v1/sandboxes/{id}/processes", owner, (*Daemon).getProcesses},

	{"GET", "/v1/sandboxes/{id}/files", owner, (*Daemon).getFile},
	{"PUT", "/v1/sandboxes/{id}/files", owner, (*Daemon).putFile},
	{"DELETE", "/v1/sandboxes/{id}/files", owner, (*Daemon).deleteFile},
	{"GET", "/v1/sandboxes/{id}/stat", owner, (*Daemon).getStat},
	{"GET", "/v1/sandboxes/{id}/list", owner, (*Daemon).getList},
	{"POST", "/v1/sandboxes/{id}/mkdir", owner, (*Daemon).postMkdir},
	{"POST", "/v1/sandboxes/{id}/move", owner, (*Daemon).postMove},
	{"GET", "/v1/sandboxes/{id}/watch", owner, (*Daemon).getWatch},
	{"GET", "/v1/sandboxes/{id}/archive", owner, (*Daemon).getArchive},
	{"PUT", "/v1/sandboxes/{id}/archive", owner, (*Daemon).putArchive},

	{"POST", "/v1/run", owner, (*Daemon).postRun},

	{"GET", "/v1/images", owner, (*Daemon).getImages},
	{"DELETE", "/v1/images", owner, (*Daemon).deleteImage},
	{"POST", "/v1/images/pull", owner, (*Daemon).postPull},
	{"POST", "/v1/images/push", owner, (*Daemon).postPush},
	{"POST", "/v1/images/import", owner, (*Daemon).postImport},
	{"GET", "/v1/images/export", owner, (*Daemon).getExport},
	{"GET", "/v1/images/inspect", owner, (*Daemon).getImage},
	{"GET", "/v1/images/verify", owner, (*Daemon).getVerify},
	{"POST", "/v1/images/tag", owner, (*Daemon).postTag},
	{"POST", "/v1/images/prune", owner, (*Daemon).postPrune},

	{"POST", "/v1/builds", owner, (*Daemon).postBuild},

	{"POST", "/v1/agent/runs", owner, (*Daemon).postAgentRun},
	{"GET", "/v1/agent/runs", owner, (*Daemon).getAgentRuns},
	{"GET", "/v1/agent/runs/{run}", owner, (*Daemon).getAgentRun},
	{"DELETE", "/v1/agent/runs/{run}", owner, (*Daemon).deleteAgentRun},
	{"GET", "/v1/agent/runs/{run}/events", owner, (*Daemon).getAgentEvents},
	{"POST", "/v1/agent/runs/{run}/resume", owner, (*Daemon).postAgentResume},
	{"POST", "/v1/agent/runs/{run}/cancel", owner, (*Daemon).postAgentCancel},
}

const (
	maxBody     = 1 << 20
	maxExecBody = 24 << 20 // stdin of 16 MiB in base64, and what stands around it

	// bodyTimeout is how long a client may pause within a body, and answerTimeout how long it may take nothing of an
	// answer: a half-open connection holds a sandbox from idling no longer than that.
	bodyTimeout   = time.Minute
	answerTimeout = 5 * time.Minute
)

// handler routes requests. Whatever happens, the answer is the route's own or a problem.
func (d *Daemon) handler() http.Handler {
	mux := http.NewServeMux()
	for _, r := range routes {
		mux.HandleFunc(r.method+" "+r.pattern, func(w http.ResponseWriter, req *http.Request) {
			if err := allowed(req.Context(), r.access); err != nil {
				writeProblem(w, err)
				return
			}
			err := d.service.visible(req.PathValue("id"))
			if err == nil {
				err = r.handle(d, w, req)
			}
			switch a := w.(*answer); {
			case err == nil:
			case a.began:
				d.log.Info("answer broke off", "method", req.Method, "path", req.URL.Path, "error", err)
				panic(http.ErrAbortHandler) // half an answer must not look like a whole one
			default:
				if p := ProblemOf(err); p.Code == api.CodeInternal {
					d.log.Error("request failed", "method", req.Method, "path", req.URL.Path, "error", err)
				}
				writeProblem(w, err)
			}
		})
	}
	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		w := &answer{ResponseWriter: rw}
		if !d.enter() {
			writeProblem(w, ErrStopping)
			return
		}
		defer d.leave()
		// What the last request on this connection set does not hold for this one.
		_ = http.NewResponseController(rw).SetWriteDeadline(time.Time{}) // every connection of ours has deadlines
		defer d.recover(w, req)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		// The mux would clean such a path and redirect; nobody who means well sends one.
		if p := req.URL.Path; p != path.Clean(p) {
			writeProblem(w, classify(ErrNoRoute, fmt.Errorf("path %q: not in its shortest form", clip(p))))
			return
		}
		if _, pattern := mux.Handler(req); pattern == "" {
			writeProblem(w, noRoute(mux, w, req))
			return
		}
		mux.ServeHTTP(w, req)
	})
}

// noRoute tells a path that does not exist from a method that it does not have.
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
		return classify(ErrNoRoute, fmt.Errorf("no route %s %q", clip(req.Method), clip(req.URL.Path)))
	}
	allow := strings.Join(methods, ", ")
	w.Header().Set("Allow", allow)
	return classify(ErrNoMethod, fmt.Errorf("%q cannot be asked with %s, only with %s", clip(req.URL.Path), clip(req.Method), allow))
}

func allowed(ctx context.Context, a access) error {
	uid := peerOf(ctx)
	switch {
	case a == anyone, uid == 0, int64(uid) == int64(os.Geteuid()):
		return nil
	case uid == nobody:
		return classify(ErrForbidden, errors.New("the kernel does not say who calls"))
	}
	return classify(ErrForbidden, fmt.Errorf("uid %d may not use the daemon of uid %d", uid, os.Geteuid()))
}

// recover answers for a handler that panicked.
func (d *Daemon) recover(w *answer, req *http.Request) {
	v := recover()
	if v == nil {
		return
	}
	if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(v) // the way to break a connection off
	}
	d.log.Error("panic in a request", "method", req.Method, "path", req.URL.Path, "panic", v, "stack", string(debug.Stack()))
	if w.began {
		panic(http.ErrAbortHandler) // the client must not take the rest for a whole answer
	}
	writeProblem(w, errPanic)
}

// answer knows whether an answer has begun.
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
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	w.Header().Set("Content-Type", api.TypeJSON)
	w.Header().Set("Cache-Control", "no-store")
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTimeout)) // every connection of ours has deadlines
	w.WriteHeader(status)
	_, _ = w.Write(append(data, '\n')) // a client that is gone does not need it
	return nil
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
			return invalidf("body: empty, a JSON object is needed")
		}
		if te, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return invalidf("body: field %q cannot be a %s", te.Field, te.Value)
		}
		return invalidf("body: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return invalidf("body: something follows the JSON object")
	}
	return nil
}

// bodyError classifies what can go wrong while a body is read.
func bodyError(err error) error {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return classify(ErrTooLarge, fmt.Errorf("body: larger than %d bytes", tooLarge.Limit))
	case errors.Is(err, os.ErrDeadlineExceeded):
		return invalidf("body: nothing came for %s", bodyTimeout)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return invalidf("body: it broke off")
	}
	return fmt.Errorf("read body: %w", err)
}

// patientBody gives the client a time for each part of a body.
type patientBody struct {
	io.ReadCloser
	rc *http.ResponseController
}

func (b *patientBody) Read(p []byte) (int, error) {
	_ = b.rc.SetReadDeadline(time.Now().Add(bodyTimeout)) // every connection of ours has deadlines
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		_ = b.rc.SetReadDeadline(time.Time{}) // or the server would take a long handler for a dead client
	}
	return n, err
}

// errnoOf finds the errno of an error of package os.
func errnoOf(err error) syscall.Errno {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno
	}
	if errors.Is(err, fs.ErrNotExist) {
		return syscall.ENOENT
	}
	return syscall.EIO
}
