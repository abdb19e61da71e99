// Package daemontest runs a whole daemon on the in-memory engine, for tests that talk to it over
// its socket.
package daemontest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

// Bench is a daemon with everything that outlives it.
type Bench struct {
	t       testing.TB
	Engine  *runtimetest.Engine
	Images  *Images
	Options daemon.Options
	Log     *Log
	Prepare func(*daemon.Daemon) // called before the daemon serves; nil: nothing
}

// New returns a bench whose sandboxes have this init; nil: none that answers.
func New(tb testing.TB, init runtimetest.Init) *Bench {
	tb.Helper()
	CheckGoroutines(tb)
	b := &Bench{t: tb, Engine: runtimetest.NewEngine(init), Images: &Images{}, Log: &Log{}}
	tb.Cleanup(b.Engine.Close)
	b.Options = daemon.Options{Options: service.Options{
		Version:    "test",
		DataDir:    tb.TempDir(),
		RuntimeDir: filepath.Join(tb.TempDir(), "run"),
		Engine:     b.Engine,
		Images:     func(string) service.Images { return b.Images },
		Profile: func(name string) (runtime.Profile, api.Limits, error) {
			if name != "default" && name != "hardened" && name != "build" {
				return runtime.Profile{}, api.Limits{}, errors.New("no such profile")
			}
			return runtime.Profile{Name: name, Seccomp: &specs.LinuxSeccomp{}}, api.Limits{Pids: 512}, nil
		},
		Checks: func(context.Context) []api.Check { return []api.Check{{Name: "tests", OK: true}} },
		Log:    slog.New(slog.NewTextHandler(b.Log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}}
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("log of the daemon:\n%s", b.Log)
		}
	})
	return b
}

// CheckGoroutines fails a test that leaves goroutines.
func CheckGoroutines(tb testing.TB) {
	tb.Helper()
	before := goruntime.NumGoroutine()
	tb.Cleanup(func() {
		deadline := time.After(servicetest.Patience)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for goruntime.NumGoroutine() > before {
			select {
			case <-tick.C:
			case <-deadline:
				buf := make([]byte, 1<<18)
				tb.Errorf("goroutines are left:\n%s", buf[:goruntime.Stack(buf, true)])
				return
			}
		}
	})
}

// Running is a daemon that serves, and a client of it.
type Running struct {
	*Bench
	T      testing.TB // fails; a subtest may have its own
	D      *daemon.Daemon
	HTTP   *http.Client
	Cancel context.CancelFunc
	done   chan error
}

// Start starts a daemon, which ends with the test.
func (b *Bench) Start() *Running {
	b.t.Helper()
	d, err := daemon.New(b.t.Context(), b.Options)
	if err != nil {
		b.t.Fatal(err)
	}
	if b.Prepare != nil {
		b.Prepare(d)
	}
	ctx, cancel := context.WithCancel(b.t.Context())
	r := &Running{Bench: b, T: b.t, D: d, Cancel: cancel, done: make(chan error, 1)}
	r.HTTP = &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return servicetest.Dial(ctx, d.Socket()) },
	}}
	go func() { r.done <- d.Serve(ctx) }()
	b.t.Cleanup(func() {
		d.Shutdown(api.Shutdown{})
		r.Wait()
	})
	return r
}

// API returns the service as the daemon's owner sees it.
func (r *Running) API() *service.API {
	return r.D.Service().For(service.Caller{UID: os.Getuid(), Rights: service.Administer})
}

// Of is the same for a subtest.
func (r *Running) Of(t *testing.T) *Running {
	t.Helper()
	sub := *r
	sub.T = t
	return &sub
}

// Wait returns when Serve has. It may be called again.
func (r *Running) Wait() {
	r.T.Helper()
	r.HTTP.CloseIdleConnections()
	select {
	case err := <-r.done:
		if err != nil {
			r.T.Errorf("serve: %v", err)
		}
		r.done <- nil
	case <-time.After(servicetest.Patience):
		buf := make([]byte, 1<<18)
		r.T.Fatalf("the daemon does not end:\n%s", buf[:goruntime.Stack(buf, true)])
	}
	r.Cancel()
}

// Reply is a whole answer.
type Reply struct {
	Status int
	Header http.Header
	Body   []byte
}

// Do sends body, which is JSON unless it is a reader or a string, and reads the whole answer.
func (r *Running) Do(method, path string, body any, headers ...string) Reply {
	r.T.Helper()
	rep, err := r.Try(method, path, body, headers...)
	if err != nil {
		r.T.Fatalf("%s %s: %v", method, path, err)
	}
	return rep
}

// Try is Do for a test that accepts failure.
func (r *Running) Try(method, path string, body any, headers ...string) (Reply, error) {
	var rd io.Reader
	switch v := body.(type) {
	case nil:
	case io.Reader:
		rd = v
	case string:
		rd = strings.NewReader(v)
	default:
		data, err := json.Marshal(v)
		if err != nil {
			return Reply{}, err
		}
		rd = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(r.T.Context(), method, "http://sandboxd"+path, rd)
	if err != nil {
		return Reply{}, err
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := r.HTTP.Do(req)
	if err != nil {
		return Reply{}, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return Reply{resp.StatusCode, resp.Header, data}, err
}

// Decode checks the status and decodes the body.
func Decode[T any](tb testing.TB, rep Reply, status int) T {
	tb.Helper()
	var v T
	if rep.Status != status {
		tb.Fatalf("status %d, want %d: %s", rep.Status, status, rep.Body)
	}
	if err := json.Unmarshal(rep.Body, &v); err != nil {
		tb.Fatalf("%v: %s", err, rep.Body)
	}
	return v
}

// Problem checks that an answer is a problem with this code.
func Problem(tb testing.TB, rep Reply, code api.Code) api.Problem {
	tb.Helper()
	var p api.Problem
	if err := json.Unmarshal(rep.Body, &p); err != nil {
		tb.Fatalf("status %d, not a problem: %q", rep.Status, rep.Body)
	}
	if got := rep.Header.Get("Content-Type"); got != api.TypeProblem {
		tb.Errorf("content type %q", got)
	}
	if p.Code != code || p.Status != rep.Status || p.Title == "" || p.Detail == "" {
		tb.Errorf("status %d, problem %+v, want %s", rep.Status, p, code)
	}
	return p
}

// Create creates a sandbox.
func (r *Running) Create(req api.CreateSandbox) api.Sandbox {
	r.T.Helper()
	return Decode[api.Sandbox](r.T, r.Do("POST", "/v1/sandboxes", req), http.StatusCreated)
}

// Exec runs a program.
func (r *Running) Exec(id string, req api.ExecRequest) api.ExecResult {
	r.T.Helper()
	return Decode[api.ExecResult](r.T, r.Do("POST", "/v1/sandboxes/"+id+"/exec", req), http.StatusOK)
}

// Log collects the log.
type Log struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Write implements io.Writer.
func (b *Log) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

// String returns everything logged so far.
func (b *Log) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
