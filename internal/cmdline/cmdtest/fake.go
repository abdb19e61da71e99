package cmdtest

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
)

// Daemon is a fake daemon. It runs nothing: the name of an exec's program decides its outcome.
type Daemon struct {
	Runs []*HostedRun // of the agent

	Mu        sync.Mutex
	Sandboxes []api.Sandbox
	Images    []string
	next      int
	samples   int                 // number of answers to GET /v1/stats
	Log       []string            // "METHOD path" of each request
	Cmd       []string            // CMD of all images
	Creates   []api.CreateSandbox // request bodies
	Execs     []api.ExecRequest   // request bodies
	Updates   []string            // request bodies
	Flows     []api.Flow          // the record of every sandbox's network
	Secrets   []api.SetSecret     // request bodies
	Volumes   []string            // requests that change volumes, with their bodies
	Networks  []string            // requests that change named networks, with their bodies
	Uploads   map[string]string   // PUT archive: path → list of its entries
	Archives  map[string][]Entry  // GET archive: path → its entries
	Files     map[string]bool     // the archives of a single file
	Controls  []string            // text frames of interactive execs, without the first
	Killed    chan struct{}       // receives when an exec has lost its client
	Started   chan struct{}       // receives when an exec that waits has started
	Signals   chan string         // signals to the exec that waits, which end it
	Stop      context.CancelFunc  // called by shutdown
	DeleteErr *api.Problem        // error of delete requests
}

// Entry is one member of a served archive. Its size is that of Body; without a type it is a regular
// file, without a mode 0644.
type Entry struct {
	tar.Header

	Body string
}

// New returns a daemon without sandboxes and images. [Daemon.Start] serves it.
func New() *Daemon {
	return &Daemon{
		Uploads: map[string]string{}, Archives: map[string][]Entry{}, Files: map[string]bool{},
		Killed: make(chan struct{}, 10), Started: make(chan struct{}, 10), Signals: make(chan string, 10), Stop: func() {},
	}
}

func refuse(w http.ResponseWriter, code api.Code, hint, format string, args ...any) {
	w.Header().Set("Content-Type", api.TypeProblem)
	w.WriteHeader(code.Status())
	_ = json.NewEncoder(w).Encode(api.Problem{Code: code, Detail: fmt.Sprintf(format, args...), Hint: hint})
}

func answerJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", api.TypeJSON)
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func (f *Daemon) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/system", func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, 200, api.SystemInfo{Version: "v9.9.9-fake"})
	})
	mux.HandleFunc("GET /v1/system/checks", func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, 200, api.CheckList{Checks: []api.Check{
			{Name: "user namespaces", OK: true, Found: "3 of 3"},
			{Name: "cgroup", Found: "v1", Means: "no memory limit", Remedy: "boot with systemd.unified_cgroup_hierarchy=1"},
		}})
	})
	mux.HandleFunc("POST /v1/system/shutdown", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusAccepted)
		f.Stop()
	})
	mux.HandleFunc("POST /v1/sandboxes", f.create)
	mux.HandleFunc("GET /v1/sandboxes", func(w http.ResponseWriter, r *http.Request) {
		list := []api.Sandbox{}
		for _, s := range f.Sandboxes {
			if l := r.URL.Query().Get("label"); l != "" {
				if k, v, _ := strings.Cut(l, "="); s.Labels[k] != v {
					continue
				}
			}
			list = append(list, s)
		}
		answerJSON(w, 200, api.SandboxList{Sandboxes: list})
	})
	mux.HandleFunc("GET /v1/sandboxes/{id}", f.with(func(w http.ResponseWriter, _ *http.Request, s api.Sandbox) { answerJSON(w, 200, s) }))
	mux.HandleFunc("PATCH /v1/sandboxes/{id}", f.with(func(w http.ResponseWriter, r *http.Request, s api.Sandbox) {
		var body bytes.Buffer
		_, _ = body.ReadFrom(r.Body)
		f.Updates = append(f.Updates, strings.TrimSpace(body.String()))
		answerJSON(w, 200, s)
	}))
	mux.HandleFunc("GET /v1/stats", func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, 200, f.nextStats())
	})
	mux.HandleFunc("GET /v1/snapshots", func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, 200, api.SnapshotList{Snapshots: []api.Snapshot{{ID: "sn1", Name: "clean", Size: 1000}}})
	})
	mux.HandleFunc("GET /v1/system/df", func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, 200, api.DiskUsage{
			Images: api.DiskShare{Count: 2, Active: 1, Bytes: 148_000_000, Reclaimable: 37_000_000}, Sandboxes: api.DiskShare{Count: 2, Bytes: 5_000_000},
			Files: []api.SandboxFiles{{ID: "sb1", Name: "one", State: api.StateRunning, Bytes: 5_000_000, Files: 31}, {ID: "sb2", Name: "t\x1bwo", State: api.StateLost, Unknown: "gone"}},
		})
	})
	mux.HandleFunc("GET /v1/sandboxes/{id}/stats", f.with(func(w http.ResponseWriter, _ *http.Request, _ api.Sandbox) {
		answerJSON(w, 200, api.Stats{
			WallMS: 61_500, Memory: &api.MemoryStats{Current: new(int64(64 << 20))}, CPU: &api.CPUStats{UsageMS: new(1500.0)},
			IO:       []api.IOStats{{Device: "259:0", WriteBytes: 1 << 20, WriteOps: 16}},
			Pressure: map[string]api.Pressure{"cpu": {Some: &api.PressureLine{Avg10: 12.34}}},
		})
	}))
	for verb, state := range map[string]api.SandboxState{
		"stop": api.StateStopped, "start": api.StateRunning, "pause": api.StatePaused, "resume": api.StateRunning,
	} {
		mux.HandleFunc("POST /v1/sandboxes/{id}/"+verb, f.with(func(w http.ResponseWriter, r *http.Request, s api.Sandbox) {
			body, _ := io.ReadAll(r.Body) // the test sees a short body
			f.Updates = append(f.Updates, verb+" "+string(body))
			s.State = state
			answerJSON(w, 200, s)
		}))
	}
	mux.HandleFunc("DELETE /v1/sandboxes/{id}", f.with(func(w http.ResponseWriter, _ *http.Request, s api.Sandbox) {
		if f.DeleteErr != nil {
			refuse(w, f.DeleteErr.Code, f.DeleteErr.Hint, "%s", f.DeleteErr.Detail)
			return
		}
		f.Sandboxes = slices.DeleteFunc(f.Sandboxes, func(o api.Sandbox) bool { return o.ID == s.ID })
		w.WriteHeader(http.StatusNoContent)
	}))
	mux.HandleFunc("POST /v1/sandboxes/{id}/exec", f.with(f.exec))
	mux.HandleFunc("GET /v1/sandboxes/{id}/exec", f.with(f.converse))
	mux.HandleFunc("GET /v1/sandboxes/{id}/files", f.with(f.readFile))
	mux.HandleFunc("GET /v1/sandboxes/{id}/list", f.with(func(w http.ResponseWriter, r *http.Request, _ api.Sandbox) {
		dir := r.URL.Query().Get("path")
		w.Header().Set("Content-Type", api.TypeNDJSON)
		enc := json.NewEncoder(w)
		for _, e := range f.Archives[dir] {
			_ = enc.Encode(api.ListEvent{Entry: &api.FileEntry{Path: dir + "/" + e.Name, Type: api.TypeFile, Size: int64(len(e.Body))}})
		}
		_ = enc.Encode(api.ListEvent{Done: true})
	}))
	mux.HandleFunc("GET /v1/sandboxes/{id}/stat", f.with(f.statFile))
	mux.HandleFunc("GET /v1/sandboxes/{id}/archive", f.with(f.archiveOut))
	mux.HandleFunc("PUT /v1/sandboxes/{id}/archive", f.with(f.archiveIn))
	mux.HandleFunc("GET /v1/images", func(w http.ResponseWriter, _ *http.Request) {
		list := api.ImageList{}
		for _, ref := range f.Images {
			list.Images = append(list.Images, api.Image{Reference: ref, Digest: "sha256:0123456789abcdef", Platform: "linux/amd64", Size: 1_500_000, Layers: 2})
		}
		answerJSON(w, 200, list)
	})
	mux.HandleFunc("POST /v1/images/pull", f.pull)
	f.imageRoutes(mux)
	f.execRoutes(mux)
	f.networkRoutes(mux)
	f.volumeRoutes(mux)
	f.lookRoutes(mux)
	f.agentRoutes(mux)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.Mu.Lock()
		// The fake is of a version without pipes: what it answers comes to the second request.
		if r.URL.Path != "/healthz" && !strings.HasSuffix(r.URL.Path, "/exec/pipes") {
			f.Log = append(f.Log, r.Method+" "+r.URL.Path)
		}
		if !isExec(r) {
			defer f.Mu.Unlock()
			mux.ServeHTTP(w, r)
			return
		}
		f.Mu.Unlock()
		mux.ServeHTTP(w, r) // an exec takes its time, and locks for itself
	})
}

func isExec(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, "/exec") }

// with finds the sandbox by id or name.
func (f *Daemon) with(h func(http.ResponseWriter, *http.Request, api.Sandbox)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		id := r.PathValue("id")
		if isExec(r) {
			f.Mu.Lock()
		}
		list := slices.Clone(f.Sandboxes)
		if isExec(r) {
			f.Mu.Unlock()
		}
		for _, s := range list {
			if s.ID == id || s.Name == id {
				h(w, r, s)
				return
			}
		}
		refuse(w, api.CodeNotFound, "sandboxd ps lists them", "there is no sandbox %q", id)
	}
}

func (f *Daemon) create(w http.ResponseWriter, r *http.Request) {
	var req api.CreateSandbox
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	if err := d.Decode(&req); err != nil {
		refuse(w, api.CodeInvalid, "", "decode: %v", err)
		return
	}
	f.Creates = append(f.Creates, req)
	if req.Image != "" && req.Image != "host" && !slices.Contains(f.Images, req.Image) {
		refuse(w, api.CodeNotFound, "pull it", "there is no image %q", req.Image)
		return
	}
	f.next++
	s := api.Sandbox{ID: fmt.Sprintf("sb%d", f.next), Name: req.Name, Image: cmp.Or(req.Image, api.HostImage), State: api.StateRunning, Labels: req.Labels}
	if s.Cmd = f.Cmd; len(req.Entrypoint) > 0 {
		s.Entrypoint, s.Cmd = slices.DeleteFunc(req.Entrypoint, func(a string) bool { return a == "" }), nil
	}
	if s.Name == "" {
		s.Name = fmt.Sprintf("name%d", f.next)
	}
	f.Sandboxes = append(f.Sandboxes, s)
	answerJSON(w, http.StatusCreated, s)
}

func (f *Daemon) pull(w http.ResponseWriter, r *http.Request) {
	var req api.PullImage
	_ = json.NewDecoder(r.Body).Decode(&req)
	w.Header().Set("Content-Type", api.TypeNDJSON)
	e := json.NewEncoder(w)
	_ = e.Encode(api.PullEvent{Layer: "sha256:aabbccddeeff00112233", Status: "downloading", Bytes: 500, Total: 1000})
	if strings.Contains(req.Reference, "missing") {
		_ = e.Encode(api.PullEvent{Error: &api.Problem{
			Code: api.CodeRegistry, Detail: "pull " + req.Reference + ": the registry says \x1b[31mMANIFEST_UNKNOWN", Hint: "check the name",
		}})
		return
	}
	f.Images = append(f.Images, req.Reference)
	_ = e.Encode(api.PullEvent{Layer: "sha256:aabbccddeeff00112233", Status: "done", Bytes: 1000, Total: 1000})
	_ = e.Encode(api.PullEvent{Image: &api.Image{Reference: req.Reference, Digest: "sha256:0123"}})
}

// exec plays the program named in argv.
func (f *Daemon) exec(w http.ResponseWriter, r *http.Request, _ api.Sandbox) {
	var req api.ExecRequest
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	if err := d.Decode(&req); err != nil {
		refuse(w, api.CodeInvalid, "", "decode: %v", err)
		return
	}
	f.Mu.Lock()
	f.Execs = append(f.Execs, req)
	f.Mu.Unlock()
	if req.Detach {
		answerJSON(w, http.StatusCreated, api.Exec{ID: "x1", Sandbox: "sb1", Argv: req.Argv, State: api.ExecRunning, Detached: true})
		return
	}
	var events []api.ExecEvent
	exit := api.Exit{}
	switch req.Argv[0] {
	case "missing":
		refuse(w, api.CodeProgramMissing, "name a program that is in the image", "there is no program %q in the sandbox", req.Argv[0])
		return
	case "denied":
		refuse(w, api.CodeProgramDenied, "chmod +x it", "%q is not executable", req.Argv[0])
		return
	case "echo":
		events = append(events, api.ExecEvent{Stream: "stdout", Text: strings.Join(req.Argv[1:], " ") + "\n"},
			api.ExecEvent{Stream: "stderr", Data: []byte{0xff, '\n'}})
	case "exit3":
		exit.Code = 3
	case "killed":
		exit = api.Exit{Code: 137, Signal: "SIGKILL", OOM: true}
	case "slow":
		exit = api.Exit{Code: 137, Signal: "SIGKILL", Timeout: true}
	case "wild":
		exit.Code = 1 << 20
	case "flood":
		w.Header().Set("Content-Type", api.TypeNDJSON)
		line, _ := json.Marshal(api.ExecEvent{Stream: "stdout", Text: strings.Repeat("y\n", 1000)})
		for r.Context().Err() == nil {
			if _, err := w.Write(append(line, '\n')); err != nil {
				break
			}
		}
		f.Killed <- struct{}{}
		return
	case "wait":
		w.Header().Set("Content-Type", api.TypeNDJSON)
		_, _ = io.WriteString(w, `{"pid":1,"exec":"x1"}`+"\n")
		_ = http.NewResponseController(w).Flush()
		f.Started <- struct{}{}
		select {
		case <-r.Context().Done():
			f.Killed <- struct{}{}
			return
		case sig := <-f.Signals:
			exit = signalled(sig)
		}
	case "die":
		w.Header().Set("Content-Type", api.TypeNDJSON)
		_ = json.NewEncoder(w).Encode(api.ExecEvent{Error: &api.Problem{Code: api.CodeGone, Detail: "the sandbox ended", Hint: "see its reason"}})
		return
	}
	if r.Header.Get("Accept") == api.TypeJSON {
		answerJSON(w, 200, api.ExecResult{Exit: exit, Stdout: "out", Stderr: "err"})
		return
	}
	w.Header().Set("Content-Type", api.TypeNDJSON)
	e := json.NewEncoder(w)
	for _, ev := range append(events, api.ExecEvent{Exit: &exit, Usage: &api.Usage{}}) {
		_ = e.Encode(ev)
	}
}

// converse plays cat: it copies stdin to stdout until stdin is closed, a q arrives, or a signal.
func (f *Daemon) converse(w http.ResponseWriter, r *http.Request, _ api.Sandbox) {
	conn, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer func() { _ = conn.CloseNow() }()
	ctx := r.Context()
	_, b, err := conn.Read(ctx)
	var req api.ExecRequest
	if err := errors.Join(err, json.Unmarshal(b, &req)); err != nil {
		return
	}
	f.Mu.Lock()
	f.Execs = append(f.Execs, req)
	f.Mu.Unlock()
	f.Started <- struct{}{}
	end := func(e api.ExecEvent) {
		b, _ := json.Marshal(e)
		_ = conn.Write(ctx, websocket.MessageText, b)
		_ = conn.Close(websocket.StatusNormalClosure, "")
	}
	for {
		typ, b, err := conn.Read(ctx)
		if err != nil {
			f.Killed <- struct{}{}
			return
		}
		if typ == websocket.MessageBinary {
			_ = conn.Write(ctx, websocket.MessageBinary, append([]byte{1}, b[1:]...))
			if bytes.ContainsRune(b, 'q') {
				end(api.ExecEvent{Exit: &api.Exit{Code: 7}})
				return
			}
			continue
		}
		f.Mu.Lock()
		f.Controls = append(f.Controls, string(b))
		f.Mu.Unlock()
		if strings.Contains(string(b), "stdin_close") && !req.TTY {
			end(api.ExecEvent{Exit: &api.Exit{}})
			return
		}
		var control api.ExecControl
		if err := json.Unmarshal(b, &control); err == nil && control.Signal != "" {
			end(api.ExecEvent{Exit: new(signalled(control.Signal))})
			return
		}
		if strings.Contains(string(b), "resize") {
			_ = conn.Write(ctx, websocket.MessageBinary, append([]byte{1}, b...))
		}
	}
}

// signalled returns the exit of a program that a signal has ended.
func signalled(sig string) api.Exit {
	return api.Exit{Code: 128 + int(unix.SignalNum(sig)), Signal: sig}
}

// readFile serves a file from its archive of one entry.
func (f *Daemon) readFile(w http.ResponseWriter, r *http.Request, _ api.Sandbox) {
	p := r.URL.Query().Get("path")
	entries, ok := f.Archives[p]
	switch {
	case !ok:
		refuse(w, api.CodeNotFound, "", "there is no %q in the sandbox", p)
	case len(entries) > 0 && f.Files[p]:
		w.Header().Set("Content-Type", api.TypeBytes)
		_, _ = io.WriteString(w, entries[0].Body)
	default:
		refuse(w, api.CodeInvalid, "", "%q: not a regular file", p)
	}
}

// statFile describes what an archive is of.
func (f *Daemon) statFile(w http.ResponseWriter, r *http.Request, _ api.Sandbox) {
	p := r.URL.Query().Get("path")
	_, known := f.Archives[p]
	if !known {
		refuse(w, api.CodeNotFound, "", "there is no %q in the sandbox", p)
		return
	}
	kind := api.TypeDirectory
	if f.Files[p] {
		kind = api.TypeFile
	}
	answerJSON(w, http.StatusOK, api.FileEntry{Path: p, Type: kind, Mode: "0750"})
}

func (f *Daemon) archiveOut(w http.ResponseWriter, r *http.Request, _ api.Sandbox) {
	p := r.URL.Query().Get("path")
	entries, ok := f.Archives[p]
	if !ok {
		refuse(w, api.CodeNotFound, "", "there is no %q in the sandbox", p)
		return
	}
	w.Header().Set("Content-Type", api.TypeTar)
	t := tar.NewWriter(w)
	for _, e := range entries {
		e.Size = int64(len(e.Body))
		if e.Typeflag == 0 {
			e.Typeflag = tar.TypeReg
		}
		if e.Mode == 0 {
			e.Mode = 0o644
		}
		if err := t.WriteHeader(&e.Header); err != nil {
			panic(err)
		}
		_, _ = io.WriteString(t, e.Body)
	}
	_ = t.Close()
}

func (f *Daemon) archiveIn(w http.ResponseWriter, r *http.Request, _ api.Sandbox) {
	p := r.URL.Query().Get("path")
	if p == "/full" {
		refuse(w, api.CodeConflict, "", "the disk is full")
		return
	}
	var b strings.Builder
	t := tar.NewReader(r.Body)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			refuse(w, api.CodeInvalid, "", "tar: %v", err)
			return
		}
		body, _ := io.ReadAll(t)
		fmt.Fprintf(&b, "%c %s %o %s%s\n", h.Typeflag, h.Name, h.Mode, h.Linkname, body)
	}
	f.Uploads[p] = b.String()
	w.WriteHeader(http.StatusNoContent)
}

// Serve is the main function of a fake daemon: it serves the socket until ctx ends or a client
// shuts it down.
func Serve(ctx context.Context, socket string) error {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	f := New()
	ctx, f.Stop = context.WithCancel(ctx)
	s := &http.Server{Handler: f.handler(), ReadHeaderTimeout: time.Minute}
	stopped := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stopped()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Start serves the fake on a new socket.
func (f *Daemon) Start(t *testing.T) (socket string) {
	t.Helper()
	socket = filepath.Join(ShortDir(t), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(f.handler())
	s.Listener = l
	f.Stop = func() { _ = l.Close() }
	s.Start()
	t.Cleanup(s.Close)
	return socket
}

// Left describes the sandboxes that are not deleted; empty if there are none.
func (f *Daemon) Left() string {
	if len(f.Sandboxes) > 0 {
		return fmt.Sprintf("left behind: %v", f.Sandboxes)
	}
	return ""
}
