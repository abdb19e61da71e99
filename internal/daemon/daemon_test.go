package daemon

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestSandboxesOverTheSocket(t *testing.T) {
	r := newBench(t, nil).start()
	one := r.create(api.CreateSandbox{Name: "one", Labels: map[string]string{"k": "v"}})
	if one.State != api.StateRunning || one.Image != api.HostImage || one.Profile != "default" || one.Limits.Pids != 512 || one.Cwd != "/" {
		t.Errorf("%+v", one)
	}
	two := r.create(api.CreateSandbox{Image: "example.org/app:1", Profile: "hardened"})
	if two.ImageDigest != "sha256:11" || two.Cwd != "/tmp" {
		t.Errorf("%+v", two)
	}
	for _, ref := range []string{one.ID, "one"} {
		if got := decode[api.Sandbox](t, r.do("GET", "/v1/sandboxes/"+ref, nil), 200); got.ID != one.ID {
			t.Errorf("get %s: %+v", ref, got)
		}
	}
	for query, want := range map[string]int{
		"": 2, "?label=k=v": 1, "?label=k=w": 0, "?state=running": 2, "?state=lost": 0, "?limit=1": 1, "?label=k=v&state=running&limit=5": 1,
	} {
		if got := decode[api.SandboxList](t, r.do("GET", "/v1/sandboxes"+query, nil), 200); len(got.Sandboxes) != want || got.Sandboxes == nil {
			t.Errorf("list %q: %d, want %d", query, len(got.Sandboxes), want)
		}
	}
	if rep := r.do("DELETE", "/v1/sandboxes/one", nil); rep.status != http.StatusNoContent {
		t.Errorf("delete: %d %s", rep.status, rep.body)
	}
	problem(t, r.do("GET", "/v1/sandboxes/one", nil), api.CodeNotFound)
	problem(t, r.do("DELETE", "/v1/sandboxes/one", nil), api.CodeNotFound)
}

func TestSystemRoutes(t *testing.T) {
	b := newBench(t, nil)
	b.options.LauncherInfo = func(context.Context) (int, api.Enforced, error) { return 42, api.Enforced{IDs: "single"}, nil }
	r := b.start()
	r.create(api.CreateSandbox{})
	info := decode[api.SystemInfo](t, r.do("GET", "/v1/system", nil), 200)
	if info.Version != "test" || info.UID != os.Getuid() || info.Launcher != 42 || info.Sandboxes != 1 || info.Enforced.IDs != "single" {
		t.Errorf("%+v", info)
	}
	if checks := decode[api.CheckList](t, r.do("GET", "/v1/system/checks", nil), 200); len(checks.Checks) != 1 {
		t.Errorf("%+v", checks)
	}
	if rep := r.do("GET", "/healthz", nil); rep.status != 200 {
		t.Errorf("health: %d", rep.status)
	}
	if imgs := decode[api.ImageList](t, r.do("GET", "/v1/images", nil), 200); len(imgs.Images) != 1 {
		t.Errorf("%+v", imgs)
	}
}

// listed is an engine that says when it is first asked what runs.
type listed struct {
	runtime.Engine
	asked func()
}

func (l listed) List(ctx context.Context) ([]*runtime.Started, error) {
	l.asked()
	return l.Engine.List(ctx)
}

// A daemon is confined before it speaks with what runs, and one that cannot be does not start.
func TestConfinedFirst(t *testing.T) {
	b := newBench(t, nil)
	var confined, asked bool
	b.options.Engine = listed{b.engine, func() {
		if asked = true; !confined {
			t.Error("the engine is asked before the daemon is confined")
		}
	}}
	b.options.Confine = func() (int, error) { return 0, errors.New("no fence") }
	if _, err := New(t.Context(), b.options); err == nil || !strings.Contains(err.Error(), "no fence") {
		t.Errorf("not confined: %v", err)
	}
	if _, err := os.Lstat(b.options.socketPath()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	b.options.Confine = func() (int, error) {
		if _, err := os.Lstat(b.options.socketPath()); err != nil {
			t.Errorf("there is no socket yet: %v", err)
		}
		confined = true
		return 7, nil
	}
	r := b.start()
	if info := decode[api.SystemInfo](t, r.do("GET", "/v1/system", nil), 200); info.Confined != 7 || !asked {
		t.Errorf("confined by %d, the engine was asked: %v", info.Confined, asked)
	}
}

func TestPullTellsProgress(t *testing.T) {
	b := newBench(t, nil)
	r := b.start()
	b.images.pull = func(opts image.PullOptions) (*image.Image, error) {
		opts.Progress(api.PullEvent{Layer: "sha256:aa", Status: "downloading", Bytes: 1, Total: 2})
		return &image.Image{Image: api.Image{Reference: "x"}}, nil
	}
	rep := r.do("POST", "/v1/images/pull", api.PullImage{Reference: "x"})
	got := events[api.PullEvent](t, rep)
	if len(got) != 2 || got[0].Bytes != 1 || got[1].Image == nil || got[1].Image.Reference != "x" {
		t.Errorf("%+v", got)
	}
	// Before the first event an error is a problem; after it, an event.
	b.images.pull = func(image.PullOptions) (*image.Image, error) {
		return nil, classify(image.ErrRegistry, errors.New("connection refused"))
	}
	problem(t, r.do("POST", "/v1/images/pull", api.PullImage{Reference: "x"}), api.CodeRegistry)
	b.images.pull = func(opts image.PullOptions) (*image.Image, error) {
		opts.Progress(api.PullEvent{Status: "downloading"})
		return nil, classify(image.ErrInvalid, errors.New("digest differs"))
	}
	got = events[api.PullEvent](t, r.do("POST", "/v1/images/pull", api.PullImage{Reference: "x"}))
	if len(got) != 2 || got[1].Error == nil || got[1].Error.Code != api.CodeImage {
		t.Errorf("%+v", got)
	}
}

// events reads the lines of a streaming answer.
func events[T any](t testing.TB, rep reply) []T {
	t.Helper()
	if rep.status != http.StatusOK || rep.header.Get("Content-Type") != api.TypeNDJSON {
		t.Fatalf("status %d, %s: %s", rep.status, rep.header.Get("Content-Type"), rep.body)
	}
	var all []T
	for line := range bytes.Lines(rep.body) {
		var v T
		if err := json.Unmarshal(line, &v); err != nil {
			t.Fatalf("%v: %q", err, line)
		}
		all = append(all, v)
	}
	return all
}

// Every bad request gets one clear error, with the right code, and leaves nothing.
func TestBadInput(t *testing.T) {
	r := newBench(t, nil).start()
	sb := r.create(api.CreateSandbox{Name: "taken"})
	exec := "/v1/sandboxes/" + sb.ID + "/exec"
	files := "/v1/sandboxes/" + sb.ID + "/files"
	for name, tc := range map[string]struct {
		method, path string
		body         any
		want         api.Code
		status       int    // 0: the code's
		mention      string // what the detail must name
	}{
		"no such route":             {"GET", "/v1/nothing", nil, api.CodeNotFound, 0, "/v1/nothing"},
		"root":                      {"GET", "/", nil, api.CodeNotFound, 0, ""},
		"trailing slash":            {"GET", "/v1/sandboxes/", nil, api.CodeNotFound, 0, ""},
		"dots in the path":          {"GET", "/v1/../v1/system", nil, api.CodeNotFound, 0, ""},
		"double slash":              {"GET", "/v1//system", nil, api.CodeNotFound, 0, ""},
		"wrong method":              {"PATCH", "/v1/sandboxes", nil, api.CodeInvalid, 405, "PATCH"},
		"wrong method on a sandbox": {"PUT", "/v1/sandboxes/x", nil, api.CodeInvalid, 405, "DELETE"},
		"unknown sandbox":           {"GET", "/v1/sandboxes/nope", nil, api.CodeNotFound, 0, "nope"},
		"id with a slash":           {"GET", "/v1/sandboxes/..%2f..%2fetc", nil, api.CodeNotFound, 0, ""},
		"id with NUL":               {"DELETE", "/v1/sandboxes/%00", nil, api.CodeNotFound, 0, ""},
		"long id":                   {"GET", "/v1/sandboxes/" + strings.Repeat("x", 8000), nil, api.CodeNotFound, 0, ""},

		"empty body":           {"POST", "/v1/sandboxes", "", api.CodeInvalid, 0, "empty"},
		"not JSON":             {"POST", "/v1/sandboxes", "hello", api.CodeInvalid, 0, "body"},
		"array":                {"POST", "/v1/sandboxes", "[]", api.CodeInvalid, 0, ""},
		"broken JSON":          {"POST", "/v1/sandboxes", `{"name":`, api.CodeInvalid, 0, ""},
		"unknown field":        {"POST", "/v1/sandboxes", `{"title":"x"}`, api.CodeInvalid, 0, "title"},
		"unknown inner field":  {"POST", "/v1/sandboxes", `{"limits":{"disk":1}}`, api.CodeInvalid, 0, "disk"},
		"something behind":     {"POST", "/v1/sandboxes", `{} {}`, api.CodeInvalid, 0, "follows"},
		"wrong type":           {"POST", "/v1/sandboxes", `{"name":5}`, api.CodeInvalid, 0, "name"},
		"number too large":     {"POST", "/v1/sandboxes", `{"timeout":1e999}`, api.CodeInvalid, 0, "timeout"},
		"huge body":            {"POST", "/v1/sandboxes", `{"name":"` + strings.Repeat("x", maxBody) + `"}`, api.CodeTooLarge, 0, "larger"},
		"unknown image":        {"POST", "/v1/sandboxes", api.CreateSandbox{Image: "nowhere"}, api.CodeNotFound, 0, "nowhere"},
		"hostile image":        {"POST", "/v1/sandboxes", api.CreateSandbox{Image: "example.org/hostile:1"}, api.CodeImage, 0, "../../etc"},
		"hostile image's user": {"POST", "/v1/sandboxes", api.CreateSandbox{Image: "example.org/hostile:2"}, api.CodeImage, 0, "-1"},
		"unknown profile":      {"POST", "/v1/sandboxes", api.CreateSandbox{Profile: "lax"}, api.CodeInvalid, 0, "lax"},
		"taken name":           {"POST", "/v1/sandboxes", api.CreateSandbox{Name: "taken"}, api.CodeExists, 0, "taken"},
		"name that is an id":   {"POST", "/v1/sandboxes", api.CreateSandbox{Name: sb.ID}, api.CodeExists, 0, sb.ID},
		"bad name":             {"POST", "/v1/sandboxes", api.CreateSandbox{Name: "a b"}, api.CodeInvalid, 0, "a b"},
		"negative memory":      {"POST", "/v1/sandboxes", api.CreateSandbox{Limits: api.Limits{Memory: -5}}, api.CodeInvalid, 0, "-5"},
		"unknown state":        {"GET", "/v1/sandboxes?state=happy", nil, api.CodeInvalid, 0, "happy"},
		"label without =":      {"GET", "/v1/sandboxes?label=x", nil, api.CodeInvalid, 0, "x"},
		"negative limit":       {"GET", "/v1/sandboxes?limit=-1", nil, api.CodeInvalid, 0, "-1"},
		"unknown parameter":    {"GET", "/v1/sandboxes?lable=x", nil, api.CodeInvalid, 0, "lable"},
		"parameter twice":      {"GET", "/v1/sandboxes?limit=1&limit=2", nil, api.CodeInvalid, 0, "limit"},
		"broken query":         {"GET", "/v1/sandboxes?%zz", nil, api.CodeInvalid, 0, "query"},

		"exec in no sandbox":    {"POST", "/v1/sandboxes/nope/exec", api.ExecRequest{Argv: []string{"true"}}, api.CodeNotFound, 0, "nope"},
		"exec of nothing":       {"POST", exec, api.ExecRequest{}, api.CodeInvalid, 0, "argv"},
		"exec with NUL":         {"POST", exec, api.ExecRequest{Argv: []string{"a\x00"}}, api.CodeInvalid, 0, "NUL"},
		"exec in relative cwd":  {"POST", exec, api.ExecRequest{Argv: []string{"a"}, Cwd: "b"}, api.CodeInvalid, 0, "cwd"},
		"exec with bad base64":  {"POST", exec, `{"argv":["a"],"stdin":"***"}`, api.CodeInvalid, 0, ""},
		"exec, unknown field":   {"POST", exec, `{"argv":["a"],"cmd":"b"}`, api.CodeInvalid, 0, "cmd"},
		"exec by GET":           {"GET", exec, nil, api.CodeInvalid, 0, "WebSocket"},
		"run of nothing":        {"POST", "/v1/run", api.RunRequest{}, api.CodeInvalid, 0, "argv"},
		"run of unknown image":  {"POST", "/v1/run", api.RunRequest{Sandbox: api.CreateSandbox{Image: "x"}, Exec: api.ExecRequest{Argv: []string{"a"}}}, api.CodeNotFound, 0, "x"},
		"file without a path":   {"GET", files, nil, api.CodeInvalid, 0, "path"},
		"file, relative path":   {"GET", files + "?path=etc/passwd", nil, api.CodeInvalid, 0, "etc/passwd"},
		"file, NUL":             {"GET", files + "?path=/a%00b", nil, api.CodeInvalid, 0, "NUL"},
		"file, dots":            {"GET", files + "?path=/a/../../b", nil, api.CodeInvalid, 0, ".."},
		"file, long path":       {"GET", files + "?path=/" + strings.Repeat("a", 5000), nil, api.CodeInvalid, 0, "longer"},
		"put, bad mode":         {"PUT", files + "?path=/a&mode=7777", "x", api.CodeInvalid, 0, "7777"},
		"put, mode in words":    {"PUT", files + "?path=/a&mode=rwx", "x", api.CodeInvalid, 0, "rwx"},
		"put, bad user":         {"PUT", files + "?path=/a&user=-1", "x", api.CodeInvalid, 0, "-1"},
		"archive, dots":         {"GET", "/v1/sandboxes/" + sb.ID + "/archive?path=/..", nil, api.CodeInvalid, 0, ".."},
		"pull of nothing":       {"POST", "/v1/images/pull", `{}`, api.CodeInvalid, 0, "reference"},
		"shutdown, wrong field": {"POST", "/v1/system/shutdown", `{"force":true}`, api.CodeInvalid, 0, "force"},
	} {
		t.Run(name, func(t *testing.T) {
			rep := r.of(t).do(tc.method, tc.path, tc.body)
			p := problem(t, rep, tc.want)
			if tc.status == 0 {
				tc.status = tc.want.Status()
			}
			if rep.status != tc.status {
				t.Errorf("status %d, want %d", rep.status, tc.status)
			}
			if !strings.Contains(p.Detail, tc.mention) {
				t.Errorf("%q does not mention %q", p.Detail, tc.mention)
			}
			if tc.status == 405 && rep.header.Get("Allow") == "" {
				t.Error("no Allow header")
			}
		})
	}
	if list := decode[api.SandboxList](t, r.do("GET", "/v1/sandboxes", nil), 200); len(list.Sandboxes) != 1 {
		t.Errorf("something is left: %+v", list)
	}
}

func TestUnenforceableLimitIsAnError(t *testing.T) {
	b := newBench(t, nil)
	b.engine.CreateError = func(s *runtime.Spec) error {
		if s.Explicit.Memory != 0 {
			return fmt.Errorf("memory: %w", runtime.ErrUnenforceable)
		}
		return nil
	}
	r := b.start()
	p := problem(t, r.do("POST", "/v1/sandboxes", api.CreateSandbox{Limits: api.Limits{Memory: 1 << 30}}), api.CodeUnenforceable)
	if !strings.Contains(p.Hint, "doctor") {
		t.Errorf("%+v", p)
	}
	r.create(api.CreateSandbox{})
}

func TestPanicIsAProblem(t *testing.T) {
	b := newBench(t, nil)
	b.images.pull = func(image.PullOptions) (*image.Image, error) { panic("oops") }
	r := b.start()
	p := problem(t, r.do("POST", "/v1/images/pull", api.PullImage{Reference: "x"}), api.CodeInternal)
	if strings.Contains(p.Detail, "oops") {
		t.Errorf("%+v", p)
	}
	if !strings.Contains(b.log.String(), "oops") || !strings.Contains(b.log.String(), "TestPanicIsAProblem") {
		t.Error("the log does not say where")
	}
	r.create(api.CreateSandbox{})
}

func TestOtherUsersAreRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		access access
		uid    uint32
		ok     bool
	}{
		"owner":             {owner, uint32(os.Geteuid()), true},
		"root":              {owner, 0, true},
		"another":           {owner, uint32(os.Geteuid()) + 1, false},
		"unknown":           {owner, nobody, false},
		"health to another": {anyone, 12345, true},
	} {
		err := allowed(context.WithValue(t.Context(), peerKey{}, tc.uid), tc.access)
		if (err == nil) != tc.ok {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && ProblemOf(err).Status != http.StatusForbidden {
			t.Errorf("%s: %+v", name, ProblemOf(err))
		}
	}
	if err := allowed(t.Context(), owner); err == nil {
		t.Error("a connection without a peer was let in")
	}
	for _, route := range routes {
		if route.access != owner && route.pattern != "/healthz" {
			t.Errorf("%s is open to all", route.pattern)
		}
	}
}

func TestSocketIsPrivate(t *testing.T) {
	r := newBench(t, nil).start()
	for path, want := range map[string]os.FileMode{
		r.options.RuntimeDir: os.ModeDir | 0o700,
		r.d.Socket():         os.ModeSocket | 0o600,
	} {
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if st.Mode() != want {
			t.Errorf("%s: %v, want %v", path, st.Mode(), want)
		}
	}
}

func TestSecondDaemonIsRefusedAndAStaleSocketReplaced(t *testing.T) {
	b := newBench(t, nil)
	if err := os.MkdirAll(b.options.RuntimeDir, 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := listenStale(b.options.RuntimeDir)
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close() // the path stays
	r := b.start()
	if _, err := New(t.Context(), b.options); err == nil || !strings.Contains(err.Error(), "another sandboxd") {
		t.Errorf("second daemon: %v", err)
	}
	// Another data directory, but the same socket.
	options := b.options
	options.DataDir = t.TempDir()
	if _, err := New(t.Context(), options); err == nil || !strings.Contains(err.Error(), "another sandboxd") {
		t.Errorf("second daemon on one socket: %v", err)
	}
	// Another runtime directory too, as a command has that starts a daemon: nothing but the socket itself is common to them.
	options.RuntimeDir, options.Socket = t.TempDir(), r.d.Socket()
	if _, err := New(t.Context(), options); err == nil || !strings.Contains(err.Error(), "another sandboxd serves it, or is about to") {
		t.Errorf("second daemon with a runtime directory of its own: %v", err)
	}
	if rep := r.do("GET", "/healthz", nil); rep.status != 200 {
		t.Errorf("the first does not answer any more: %d", rep.status)
	}
}

// Of several that find the socket of a daemon that was killed, one gets its place.
func TestOneDaemonTakesAStaleSocket(t *testing.T) {
	for range 5 {
		dir := t.TempDir()
		l, err := listenStale(dir)
		if err != nil {
			t.Fatal(err)
		}
		_ = l.Close() // the path stays
		var wg sync.WaitGroup
		sockets := make([]*socket, 4)
		errs := make([]error, len(sockets))
		for i := range sockets {
			own := t.TempDir()
			wg.Go(func() { sockets[i], errs[i] = listen(t.Context(), own, filepath.Join(dir, SocketName)) })
		}
		wg.Wait()
		got := 0
		for i, s := range sockets {
			switch {
			case errs[i] == nil:
				got++
				if err := s.remove(); err != nil {
					t.Error(err)
				}
			case !errors.Is(errs[i], errServed):
				t.Error(errs[i])
			}
		}
		if got != 1 {
			t.Fatalf("%d of them serve it", got)
		}
	}
}

// A daemon that ends does not answer any more before it takes its socket away. Who has taken its path meanwhile keeps it.
func TestEndingDaemonLeavesAnothersSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), SocketName)
	first, err := listen(t.Context(), t.TempDir(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil { // as http.Server does when the shutdown begins
		t.Fatal(err)
	}
	second, err := listen(t.Context(), t.TempDir(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.remove(); err != nil {
		t.Error(err)
	}
	if c, err := dial(t.Context(), path); err != nil {
		t.Errorf("the second: %v", err)
	} else {
		_ = c.Close()
	}
	if err := second.remove(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its socket is left: %v", err)
	}
}

func listenStale(dir string) (*net.UnixListener, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), SocketName)})
	if err == nil {
		l.SetUnlinkOnClose(false)
	}
	return l, err
}

func TestShutdownDeletesOrKeeps(t *testing.T) {
	b := newBench(t, nil)
	ended := 0
	b.options.EndEngine = func(context.Context) error { ended++; return nil }
	r := b.start()
	sb := r.create(api.CreateSandbox{Name: "kept"})
	if rep := r.do("POST", "/v1/system/shutdown", api.Shutdown{KeepSandboxes: true}); rep.status != http.StatusAccepted {
		t.Fatalf("shutdown: %d %s", rep.status, rep.body)
	}
	r.wait()
	if _, err := os.Stat(r.d.Socket()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	if ids := b.engine.IDs(); !slices.Equal(ids, []string{sb.ID}) || ended != 0 {
		t.Fatalf("engine has %v, ended %d times", ids, ended)
	}
	r = b.start()
	if got := decode[api.Sandbox](t, r.do("GET", "/v1/sandboxes/kept", nil), 200); got.State != api.StateRunning {
		t.Errorf("%+v", got)
	}
	if rep := r.do("POST", "/v1/system/shutdown", nil); rep.status != http.StatusAccepted {
		t.Fatalf("shutdown: %d %s", rep.status, rep.body)
	}
	r.wait()
	if ids := b.engine.IDs(); len(ids) != 0 || ended != 1 {
		t.Errorf("engine has %v, ended %d times", ids, ended)
	}
	// A signal, too, leaves sandboxes to the next daemon.
	r = b.start()
	r.create(api.CreateSandbox{})
	r.cancel()
	r.wait()
	if ids := b.engine.IDs(); len(ids) != 1 {
		t.Errorf("engine has %v", ids)
	}
}

// A client that announces a request and stays silent holds a connection only.
func TestHalfOpenRequestsDoNotHoldUpTheEnd(t *testing.T) {
	r := newBench(t, nil).start()
	sb := r.create(api.CreateSandbox{})
	for _, send := range []string{
		"", "POST /v1/sand", "POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
		"PUT /v1/sandboxes/" + sb.ID + "/files?path=/tmp/x HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc",
	} {
		c, err := dial(t.Context(), r.d.Socket())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, send); err != nil {
			t.Fatal(err)
		}
	}
	r.do("GET", "/healthz", nil)
	r.d.drain = 0 // it is in vain, and not what this is about
	begun := time.Now()
	r.d.Shutdown(api.Shutdown{})
	r.wait()
	if d := time.Since(begun); d > 10*time.Second {
		t.Errorf("the end took %s", d)
	}
}

func TestExec(t *testing.T) {
	r := newBench(t, realInit(t)).start()
	sb := r.create(api.CreateSandbox{Image: "example.org/app:1", Env: []string{"S=sandbox", "LANG=de"}})
	run := func(req api.ExecRequest) api.ExecResult { t.Helper(); return r.exec(sb.ID, req) }

	res := run(api.ExecRequest{Argv: []string{"sh", "-c", "echo out; echo err >&2; exit 3"}})
	if res.Exit != (api.Exit{Code: 3}) || res.Stdout != "out\n" || res.Stderr != "err\n" || res.Usage.WallMS <= 0 || res.Truncated {
		t.Errorf("%+v", res)
	}
	res = run(api.ExecRequest{Argv: []string{"sh", "-c", "kill -TERM $$"}})
	if res.Exit != (api.Exit{Code: 143, Signal: "SIGTERM"}) {
		t.Errorf("%+v", res)
	}
	res = run(api.ExecRequest{Argv: []string{"sh", "-c", "echo $S $LANG $FROM $E $HOME; pwd"}, Env: []string{"E=exec"}, Cwd: "/usr"})
	if res.Stdout != "sandbox de image exec /root\n/usr\n" {
		t.Errorf("%q", res.Stdout)
	}
	res = run(api.ExecRequest{Argv: []string{"cat"}, Stdin: bytes.Repeat([]byte("0123456789abcdef"), 20000)})
	if len(res.Stdout) != 320000 || res.Exit.Code != 0 {
		t.Errorf("%d bytes came back, %+v", len(res.Stdout), res.Exit)
	}
	res = run(api.ExecRequest{Argv: []string{"true"}, Stdin: make([]byte, 1<<20)})
	if res.Exit.Code != 0 {
		t.Errorf("stdin that nobody reads: %+v", res)
	}
	res = run(api.ExecRequest{Argv: []string{"head", "-c", "100000", "/dev/zero"}, OutputLimit: 1000})
	if len(res.Stdout) != 1000 || !res.Truncated || res.Exit.Code != 0 {
		t.Errorf("%d bytes, %v", len(res.Stdout), res.Truncated)
	}
	res = run(api.ExecRequest{Argv: []string{"printf", `a\377b`}})
	if string(res.StdoutBytes) != "a\xffb" || res.Stdout != "a\uFFFDb" {
		t.Errorf("%q %q", res.Stdout, res.StdoutBytes)
	}
	begun := time.Now()
	res = run(api.ExecRequest{Argv: []string{"sh", "-c", "sleep 100 & sleep 100"}, Timeout: 0.2})
	if !res.Exit.Timeout || res.Exit.Signal != "SIGKILL" || time.Since(begun) > patience {
		t.Errorf("%+v after %s", res, time.Since(begun))
	}
	// What the program leaves behind holds the pipes open, but not the answer up.
	begun = time.Now()
	res = run(api.ExecRequest{Argv: []string{"sh", "-c", "sleep 100 & echo done"}})
	if res.Stdout != "done\n" || time.Since(begun) > patience {
		t.Errorf("%+v after %s", res, time.Since(begun))
	}
	res = run(api.ExecRequest{Argv: []string{"sh", "-c", "test -t 0 && test -t 1 && stty size && echo $TERM"}, TTY: true, Rows: 33, Cols: 99})
	if res.Stdout != "33 99\r\nxterm\r\n" {
		t.Errorf("%+v", res)
	}
	res = run(api.ExecRequest{Argv: []string{"cat"}, TTY: true, Stdin: []byte("typed")})
	if !strings.Contains(res.Stdout, "typed") || res.Exit.Code != 0 {
		t.Errorf("%+v", res)
	}
	if r.engine.OOM(sb.ID); run(api.ExecRequest{Argv: []string{"true"}}).Exit.OOM {
		t.Error("an older kill for want of memory was counted")
	}
	for name, tc := range map[string]struct {
		req  api.ExecRequest
		want api.Code
	}{
		"missing program": {api.ExecRequest{Argv: []string{"no-such-program"}}, api.CodeProgramMissing},
		"missing path":    {api.ExecRequest{Argv: []string{"/no/such/program"}}, api.CodeProgramMissing},
		"not executable":  {api.ExecRequest{Argv: []string{"/etc/passwd"}}, api.CodeProgramDenied},
		"a directory":     {api.ExecRequest{Argv: []string{"/etc"}}, api.CodeProgramDenied},
		"missing cwd":     {api.ExecRequest{Argv: []string{"true"}, Cwd: "/no/such/dir"}, api.CodeInvalid},
		"unknown user":    {api.ExecRequest{Argv: []string{"true"}, User: "nobody-at-all"}, api.CodeInvalid},
	} {
		p := problem(t, r.do("POST", "/v1/sandboxes/"+sb.ID+"/exec", tc.req), tc.want)
		if p.Hint == "" && tc.want != api.CodeInvalid {
			t.Errorf("%s: no hint: %+v", name, p)
		}
	}
}

func TestExecAsAUser(t *testing.T) {
	testenv.RequireRoot(t) // the single-id namespace of an ordinary user's test has no other users
	r := newBench(t, realInit(t)).start()
	sb := r.create(api.CreateSandbox{User: "daemon"})
	res := r.exec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "id -u; id -g; echo $HOME"}})
	if res.Stdout != "1\n1\n/usr/sbin\n" {
		t.Errorf("%+v", res)
	}
	res = r.exec(sb.ID, api.ExecRequest{Argv: []string{"id", "-u"}, User: "4242:4243"})
	if res.Stdout != "4242\n" {
		t.Errorf("%+v", res)
	}
}

func TestExecStreams(t *testing.T) {
	r := newBench(t, realInit(t)).start()
	sb := r.create(api.CreateSandbox{})
	rep := r.do("POST", "/v1/sandboxes/"+sb.ID+"/exec",
		api.ExecRequest{Argv: []string{"sh", "-c", `echo out; printf '\377' >&2; exit 7`}}, "Accept", api.TypeNDJSON)
	all := events[api.ExecEvent](t, rep)
	first, last := all[0], all[len(all)-1]
	if first.PID < 2 || last.Exit == nil || last.Exit.Code != 7 || last.Usage == nil {
		t.Errorf("%+v", all)
	}
	var out, errs string
	for _, e := range all {
		switch e.Stream {
		case "stdout":
			out += e.Text
		case "stderr":
			errs += string(e.Data)
		}
	}
	if out != "out\n" || errs != "\xff" {
		t.Errorf("%q %q", out, errs)
	}
	problem(t, r.do("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"nope"}}, "Accept", api.TypeNDJSON), api.CodeProgramMissing)
}

// stream starts an exec and returns when its first output is there.
func (r *running) stream(ctx context.Context, id string, argv ...string) (*bufio.Scanner, io.Closer) {
	r.t.Helper()
	data, err := json.Marshal(api.ExecRequest{Argv: argv})
	if err != nil {
		r.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(ctx, "POST", "http://sandboxd/v1/sandboxes/"+id+"/exec", bytes.NewReader(data))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Accept", api.TypeNDJSON)
	resp, err := r.http.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if strings.Contains(lines.Text(), "stdout") {
			return lines, resp.Body
		}
	}
	r.t.Fatalf("no output: %v", lines.Err())
	return nil, nil
}

func TestDisconnectedClientEndsItsExec(t *testing.T) {
	r := newBench(t, realInit(t)).start()
	sb := r.create(api.CreateSandbox{})
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, body := r.stream(ctx, sb.ID, "sh", "-c", `exec 3<>"$0"; echo ready; sleep 1000`, fifo)
	// The fifo hangs up when the last process that has it open is dead.
	f, err := os.OpenFile(fifo, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cancel()
	_ = body.Close() // cancelled
	if err := f.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if n, err := f.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("the exec goes on: %d, %v", n, err)
	}
	if res := r.exec(sb.ID, api.ExecRequest{Argv: []string{"true"}}); res.Exit.Code != 0 {
		t.Errorf("%+v", res)
	}
}

func TestSandboxThatEndsDuringAnExec(t *testing.T) {
	for name, end := range map[string]func(*running, string){
		"deleted": func(r *running, id string) { r.do("DELETE", "/v1/sandboxes/"+id, nil) },
		"killed":  func(r *running, id string) { _ = r.engine.Kill(r.t.Context(), id) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newBench(t, realInit(t)).start()
			sb := r.create(api.CreateSandbox{})
			lines, body := r.stream(t.Context(), sb.ID, "sh", "-c", "echo ready; sleep 1000")
			defer body.Close()
			end(r, sb.ID)
			var last api.ExecEvent
			for lines.Scan() {
				last = api.ExecEvent{}
				if err := json.Unmarshal(lines.Bytes(), &last); err != nil {
					t.Fatal(err)
				}
			}
			if last.Error == nil || last.Error.Code != api.CodeGone {
				t.Errorf("%+v", last)
			}
			// And the next exec says what became of it.
			rep := r.do("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"true"}})
			if name == "deleted" {
				problem(t, rep, api.CodeNotFound)
			} else {
				problem(t, rep, api.CodeConflict)
			}
		})
	}
}

func TestRunLeavesNothing(t *testing.T) {
	r := newBench(t, realInit(t)).start()
	req := api.RunRequest{Exec: api.ExecRequest{Argv: []string{"sh", "-c", "echo hi; exit 3"}}}
	res := decode[api.ExecResult](t, r.do("POST", "/v1/run", req), 200)
	if res.Stdout != "hi\n" || res.Exit.Code != 3 {
		t.Errorf("%+v", res)
	}
	all := events[api.ExecEvent](t, r.do("POST", "/v1/run", req, "Accept", api.TypeNDJSON))
	if last := all[len(all)-1]; last.Exit == nil || last.Exit.Code != 3 {
		t.Errorf("%+v", all)
	}
	req.Exec.Argv = []string{"nope"}
	problem(t, r.do("POST", "/v1/run", req), api.CodeProgramMissing)
	problem(t, r.do("POST", "/v1/run", req, "Accept", api.TypeNDJSON), api.CodeProgramMissing)
	if ids := r.engine.IDs(); len(ids) != 0 {
		t.Errorf("left: %v", ids)
	}
}

func TestFiles(t *testing.T) {
	r := newBench(t, realInit(t)).start()
	sb := r.create(api.CreateSandbox{})
	dir := t.TempDir()
	at := func(name string) string {
		return "/v1/sandboxes/" + sb.ID + "/files?path=" + url.QueryEscape(filepath.Join(dir, name))
	}
	content := bytes.Repeat([]byte("all of it\n"), 300000)
	if rep := r.do("PUT", at("new/dir/file")+"&mode=750", bytes.NewReader(content)); rep.status != http.StatusNoContent {
		t.Fatalf("put: %d %s", rep.status, rep.body)
	}
	st, err := os.Stat(filepath.Join(dir, "new/dir/file"))
	if err != nil || st.Mode() != 0o750 || st.Size() != int64(len(content)) {
		t.Fatalf("%v %v", st, err)
	}
	rep := r.do("GET", at("new/dir/file"), nil)
	if rep.status != 200 || !bytes.Equal(rep.body, content) || rep.header.Get("Content-Type") != api.TypeBytes {
		t.Errorf("get: %d, %d bytes, %v", rep.status, len(rep.body), rep.header)
	}
	rep = r.do("GET", at("new/dir/file"), nil, "Range", "bytes=4-6")
	if rep.status != http.StatusPartialContent || string(rep.body) != "of " {
		t.Errorf("range: %d %q", rep.status, rep.body)
	}
	if rep := r.do("PUT", at("empty"), nil); rep.status != http.StatusNoContent {
		t.Errorf("put of nothing: %d %s", rep.status, rep.body)
	}
	if rep := r.do("GET", at("empty"), nil); rep.status != 200 || len(rep.body) != 0 {
		t.Errorf("get of nothing: %d %q", rep.status, rep.body)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	problem(t, r.do("GET", at("fifo"), nil), api.CodeInvalid)
	problem(t, r.do("GET", at("new"), nil), api.CodeInvalid)
	problem(t, r.do("GET", at("missing"), nil), api.CodeNotFound)
	problem(t, r.do("GET", "/v1/sandboxes/"+sb.ID+"/files?path=/dev/zero", nil), api.CodeInvalid)
	problem(t, r.do("GET", "/v1/sandboxes/"+sb.ID+"/files?path=/proc/self/mem", nil), api.CodeInvalid)
	problem(t, r.do("PUT", at("new"), "x"), api.CodeInvalid)
}

// The end of the daemon does not wait for a watch, whose own end nobody knows.
func TestShutdownEndsWatches(t *testing.T) {
	r := newBench(t, realInit(t)).start()
	sb := r.create(api.CreateSandbox{})
	dir := t.TempDir()
	c, err := dial(t.Context(), r.d.Socket())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	fmt.Fprintf(c, "GET /v1/sandboxes/%s/watch?path=%s HTTP/1.1\r\nHost: x\r\n\r\n", sb.ID, url.QueryEscape(dir))
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(resp.Body)
	var e api.FileChange
	if err := dec.Decode(&e); err != nil || e.Kind != api.WatchReady || e.Path != dir {
		t.Fatalf("%+v, %v", e, err)
	}
	r.d.drain = time.Hour // what ends with the requests that are cut off does not end
	r.d.Shutdown(api.Shutdown{})
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	e = api.FileChange{}
	if err := dec.Decode(&e); err != nil || e.Error == nil || e.Error.Code != api.CodeUnavailable {
		t.Errorf("%+v, %v", e, err)
	}
}

func TestRangesOfFiles(t *testing.T) {
	r := newBench(t, realInit(t)).start()
	sb := r.create(api.CreateSandbox{})
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("0123456789"), 0o600); err != nil {
		t.Fatal(err)
	}
	at := "/v1/sandboxes/" + sb.ID + "/files?path=" + url.QueryEscape(path)
	for span, want := range map[string]string{"bytes=0-0": "0", "bytes=-3": "789", "bytes=8-100": "89", "bytes=4-": "456789"} {
		rep := r.do("GET", at, nil, "Range", span)
		if rep.status != http.StatusPartialContent || string(rep.body) != want {
			t.Errorf("%s: %d %q", span, rep.status, rep.body)
		}
	}
	rep := r.do("GET", at, nil, "Range", "bytes=10-")
	if rep.header.Get("Content-Range") != "bytes */10" || rep.status != http.StatusRequestedRangeNotSatisfiable {
		t.Errorf("%d %v", rep.status, rep.header)
	}
	if p := problem(t, rep, api.CodeInvalid); !strings.Contains(p.Detail, "10 bytes") {
		t.Errorf("%+v", p)
	}
	if rep := r.do("HEAD", at, nil); rep.status != 200 || rep.header.Get("Content-Length") != "10" || len(rep.body) != 0 {
		t.Errorf("HEAD: %d %v %q", rep.status, rep.header, rep.body)
	}
}

// A body that breaks off must not become a file, nor replace one.
func TestHalfABodyIsNoFile(t *testing.T) {
	r := newBench(t, realInit(t)).start()
	sb := r.create(api.CreateSandbox{})
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := dial(t.Context(), r.d.Socket())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(c, "PUT /v1/sandboxes/%s/files?path=%s HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf", sb.ID, url.QueryEscape(path))
	if err := c.(*net.UnixConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	problem(t, reply{resp.StatusCode, resp.Header, body}, api.CodeInvalid)
	_ = c.Close() // read to its end
	got, err := os.ReadFile(path)
	entries, derr := os.ReadDir(dir)
	if string(got) != "old" || len(entries) != 1 || err != nil || derr != nil {
		t.Errorf("%q, %v, %v, %v", got, entries, err, derr)
	}
}

func TestArchives(t *testing.T) {
	r := newBench(t, realInit(t)).start()
	sb := r.create(api.CreateSandbox{})
	dir := t.TempDir()
	at := func(name string) string {
		return "/v1/sandboxes/" + sb.ID + "/archive?path=" + url.QueryEscape(filepath.Join(dir, name))
	}
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	big := bytes.Repeat([]byte("x"), 3<<20)
	for name, content := range map[string][]byte{"a": []byte("A"), "d/b": []byte("B"), "d/big": big} {
		if err := tw.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
			t.Fatal(err)
		}
		if _, err := tw.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	whole := buf.Bytes()
	if rep := r.do("PUT", at("in"), bytes.NewReader(whole)); rep.status != http.StatusNoContent {
		t.Fatalf("put: %d %s", rep.status, rep.body)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "in/d/b")); string(got) != "B" {
		t.Errorf("%q %v", got, err)
	}
	rep := r.do("GET", at("in"), nil)
	if rep.status != 200 || rep.header.Get("Content-Type") != api.TypeTar {
		t.Fatalf("get: %d %v", rep.status, rep.header)
	}
	found := make(map[string]int64)
	for tr := tar.NewReader(bytes.NewReader(rep.body)); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		found[strings.TrimPrefix(h.Name, "./")] = h.Size
	}
	if found["a"] != 1 || found["d/big"] != 3<<20 {
		t.Errorf("%v", found)
	}
	problem(t, r.do("GET", at("missing"), nil), api.CodeNotFound)
	problem(t, r.do("PUT", at("cut"), bytes.NewReader(whole[:1<<20])), api.CodeInvalid)
	// More than a pipe takes, and less than what a server leaves unread when it has answered: it closes the connection then, and who is
	// late to read the answer sees that first.
	problem(t, r.do("PUT", at("garbage"), strings.NewReader(strings.Repeat("garbage ", 1<<14))), api.CodeInvalid)
	if res := r.exec(sb.ID, api.ExecRequest{Argv: []string{"true"}}); res.Exit.Code != 0 {
		t.Errorf("%+v", res)
	}
}

// dialExec opens the WebSocket of an exec.
func (r *running) dialExec(id string, req any) *websocket.Conn {
	r.t.Helper()
	c, resp, err := websocket.Dial(r.t.Context(), "ws://sandboxd/v1/sandboxes/"+id+"/exec", &websocket.DialOptions{HTTPClient: r.http})
	if err != nil {
		r.t.Fatalf("dial: %v (%v)", err, resp)
	}
	c.SetReadLimit(1 << 20)
	r.t.Cleanup(func() { _ = c.CloseNow() }) // most tests have read the end
	r.send(c, req)
	return c
}

func (r *running) send(c *websocket.Conn, v any) {
	r.t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := c.Write(r.t.Context(), websocket.MessageText, data); err != nil {
		r.t.Fatal(err)
	}
}

// converse reads until the last event and calls on with all output so far, by channel, after each frame.
func (r *running) converse(c *websocket.Conn, on func(out [3]string)) ([3]string, api.ExecEvent) {
	r.t.Helper()
	var out [3]string
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	for {
		kind, data, err := c.Read(ctx)
		if err != nil {
			r.t.Fatalf("read: %v (so far %q)", err, out)
		}
		if kind == websocket.MessageBinary {
			out[data[0]] += string(data[1:])
			if on != nil {
				on(out)
			}
			continue
		}
		var e api.ExecEvent
		if err := json.Unmarshal(data, &e); err != nil {
			r.t.Fatal(err)
		}
		if e.Exit != nil || e.Error != nil {
			if _, _, err := c.Read(ctx); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
				r.t.Errorf("after the last event: %v", err)
			}
			return out, e
		}
	}
}

func TestInteractiveExec(t *testing.T) {
	whole := newBench(t, realInit(t)).start()
	sb := whole.create(api.CreateSandbox{})

	t.Run("pipes", func(t *testing.T) {
		r := whole.of(t)
		c := r.dialExec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "echo ready; cat; echo bye >&2; exit 5"}})
		sent := false
		out, last := r.converse(c, func(out [3]string) {
			if !sent && out[api.ChannelStdout] == "ready\n" {
				sent = true
				if err := c.Write(t.Context(), websocket.MessageBinary, []byte("\x00typed")); err != nil {
					t.Error(err)
				}
				r.send(c, api.ExecControl{StdinClose: true})
			}
		})
		if out[api.ChannelStdout] != "ready\ntyped" || out[api.ChannelStderr] != "bye\n" || last.Exit == nil || last.Exit.Code != 5 {
			t.Errorf("%q %+v", out, last)
		}
	})
	t.Run("terminal", func(t *testing.T) {
		r := whole.of(t)
		c := r.dialExec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "echo ready; read x; stty size; trap 'echo got it; exit 6' INT; echo waiting; while :; do sleep 0.01; done"}, TTY: true})
		step := 0
		_, last := r.converse(c, func(out [3]string) {
			switch {
			case step == 0 && strings.Contains(out[1], "ready"):
				step++
				r.send(c, api.ExecControl{Resize: &api.TerminalSize{Rows: 50, Cols: 150}})
				if err := c.Write(t.Context(), websocket.MessageBinary, []byte("\x00go\n")); err != nil {
					t.Error(err)
				}
			case step == 1 && strings.Contains(out[1], "waiting"):
				step++
				if !strings.Contains(out[1], "50 150") {
					t.Errorf("size: %q", out[1])
				}
				r.send(c, api.ExecControl{Signal: "SIGINT"})
			}
		})
		if last.Exit == nil || last.Exit.Code != 6 {
			t.Errorf("%+v", last)
		}
	})
	t.Run("missing program", func(t *testing.T) {
		r := whole.of(t)
		_, last := r.converse(r.dialExec(sb.ID, api.ExecRequest{Argv: []string{"nope"}}), nil)
		if last.Error == nil || last.Error.Code != api.CodeProgramMissing {
			t.Errorf("%+v", last)
		}
	})
	t.Run("unknown field", func(t *testing.T) {
		r := whole.of(t)
		_, last := r.converse(r.dialExec(sb.ID, map[string]any{"argv": []string{"true"}, "nope": 1}), nil)
		if last.Error == nil || last.Error.Code != api.CodeInvalid {
			t.Errorf("%+v", last)
		}
	})
	for name, control := range map[string]any{
		"unknown signal": api.ExecControl{Signal: "SIGNOPE"}, "empty control": map[string]any{}, "unknown control": map[string]any{"kill": true},
		"resize without a terminal": api.ExecControl{Resize: &api.TerminalSize{Rows: 1, Cols: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			r := whole.of(t)
			c := r.dialExec(sb.ID, api.ExecRequest{Argv: []string{"sleep", "1000"}})
			r.send(c, control)
			if _, last := r.converse(c, nil); last.Error == nil || last.Error.Code != api.CodeInvalid {
				t.Errorf("%+v", last)
			}
		})
	}
	t.Run("client that vanishes", func(t *testing.T) {
		r := whole.of(t)
		c := r.dialExec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "echo ready; sleep 1000"}})
		_ = c.CloseNow() // the point
		if res := r.exec(sb.ID, api.ExecRequest{Argv: []string{"true"}}); res.Exit.Code != 0 {
			t.Errorf("%+v", res)
		}
	})
	t.Run("no such sandbox", func(t *testing.T) {
		r := whole.of(t)
		_, resp, err := websocket.Dial(t.Context(), "ws://sandboxd/v1/sandboxes/nope/exec", &websocket.DialOptions{HTTPClient: r.http})
		if err == nil || resp == nil || resp.StatusCode != http.StatusNotFound {
			t.Errorf("%v %v", resp, err)
		}
	})
	t.Run("daemon that stops", func(t *testing.T) {
		r := whole.of(t)
		c := r.dialExec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "echo ready; sleep 1000"}})
		_, last := r.converse(c, func([3]string) { r.d.Shutdown(api.Shutdown{}) })
		if last.Error == nil || last.Error.Code != api.CodeUnavailable {
			t.Errorf("%+v", last)
		}
		r.wait()
	})
}

// The client that ships with us and this server mean the same.
func TestShippedClient(t *testing.T) {
	b := newBench(t, realInit(t))
	b.options.RuntimeDir = shortDir(t) // the client dials the path as it is
	r := b.start()
	c := client.New(r.d.Socket())
	defer c.Close()
	sb, err := c.CreateSandbox(t.Context(), api.CreateSandbox{Name: "one"})
	if err != nil {
		t.Fatal(err)
	}
	res, err := c.Exec(t.Context(), "one", api.ExecRequest{Argv: []string{"sh", "-c", "echo hi; exit 3"}})
	if err != nil || res.Stdout != "hi\n" || res.Exit.Code != 3 {
		t.Errorf("%+v, %v", res, err)
	}
	if _, err := c.Exec(t.Context(), "one", api.ExecRequest{Argv: []string{"nope"}}); !errors.Is(err, &api.Problem{Code: api.CodeProgramMissing}) {
		t.Errorf("%v", err)
	}
	var stdout, stderr bytes.Buffer
	end, err := c.ExecInteractive(t.Context(), "one", api.ExecRequest{Argv: []string{"sh", "-c", "cat; echo bye >&2; exit 4"}},
		client.Streams{Stdin: strings.NewReader("typed"), Stdout: &stdout, Stderr: &stderr})
	if err != nil || end.Exit.Code != 4 || stdout.String() != "typed" || stderr.String() != "bye\n" {
		t.Errorf("%+v, %v, %q, %q", end, err, &stdout, &stderr)
	}
	path := filepath.Join(t.TempDir(), "file")
	if err := c.WriteFile(t.Context(), sb.ID, path, strings.NewReader("content"), 0o600, ""); err != nil {
		t.Error(err)
	}
	f, err := c.ReadFile(t.Context(), sb.ID, path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if data, err := io.ReadAll(f); string(data) != "content" || err != nil {
		t.Errorf("%q, %v", data, err)
	}
	if checks, err := c.Checks(t.Context()); err != nil || len(checks) != 1 {
		t.Errorf("%v, %v", checks, err)
	}
	if err := c.DeleteSandbox(t.Context(), "one"); err != nil {
		t.Error(err)
	}
	if end, err := c.RunStream(t.Context(), api.RunRequest{Exec: api.ExecRequest{Argv: []string{"false"}}}, func(api.ExecEvent) error { return nil }); err != nil || end.Exit.Code != 1 {
		t.Errorf("%+v, %v", end, err)
	}
	if err := c.Shutdown(t.Context(), api.Shutdown{}); err != nil {
		t.Error(err)
	}
	r.wait()
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sb") //nolint:usetesting // t.TempDir holds the name of the test, which is too long
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// hostileInit accepts every connection and answers with what it likes.
func hostileInit(answer func(conn int)) func(*runtime.Spec, *os.File, <-chan struct{}) {
	return func(_ *runtime.Spec, control *os.File, stop <-chan struct{}) {
		fd := int(control.Fd())
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				conn, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
				if err != nil {
					return
				}
				_, _ = unix.Read(conn, make([]byte, 1<<16)) // whatever it is
				answer(conn)
				defer func() { _ = unix.Close(conn) }()
			}
		})
		<-stop
		_ = unix.Shutdown(fd, unix.SHUT_RDWR) // wakes accept
		wg.Wait()
		_ = control.Close() // a socket without data
	}
}

func TestHostileInitHurtsItsOwnSandboxOnly(t *testing.T) {
	send := func(packets ...string) func(int) {
		return func(conn int) {
			for _, p := range packets {
				_ = unix.Sendto(conn, []byte(p), 0, nil) // the daemon may have had enough
			}
		}
	}
	answers := map[string]func(int){
		"nonsense":        send("nonsense"),
		"empty":           send(""),
		"another-s":       send(`pong {}`),
		"impossible-pid":  send(`started {"pid":-5}`),
		"impossible-exit": send(`started {"pid":5}`, `exited {"code":99999}`),
		"huge":            send("started " + strings.Repeat("x", 60000)),
		"hangs-up":        func(conn int) { _ = unix.Shutdown(conn, unix.SHUT_RDWR) },
	}
	r := newBench(t, func(spec *runtime.Spec, control *os.File, stop <-chan struct{}) {
		hostileInit(answers[spec.Hostname])(spec, control, stop)
	}).start()
	answers["bystander"] = send()
	r.create(api.CreateSandbox{Name: "bystander"})
	for name := range answers {
		if name != "bystander" {
			r.create(api.CreateSandbox{Name: name})
		}
	}
	var wg sync.WaitGroup
	for name := range answers {
		if name == "bystander" {
			continue
		}
		wg.Go(func() {
			rep, err := r.try("POST", "/v1/sandboxes/"+name+"/exec", api.ExecRequest{Argv: []string{"true"}})
			if err != nil || rep.status != api.CodeGone.Status() {
				t.Errorf("%s: %d %s, %v", name, rep.status, rep.body, err)
			}
			if rec, err := r.d.Service().GetSandbox(name); err != nil || rec.State != api.StateStopped || !strings.Contains(rec.Reason, "init") {
				t.Errorf("%s: %s: %s, %v", name, rec.State, rec.Reason, err)
			}
		})
	}
	wg.Wait()
	if got := decode[api.Sandbox](t, r.do("GET", "/v1/sandboxes/bystander", nil), 200); got.State != api.StateRunning {
		t.Errorf("another sandbox: %s", got.State)
	}
}

// Files go out with sendfile, and no further than they were announced.
func TestConnectionSendsFiles(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close() // c has its own
		defer c.Close()
		conns[i] = c.(*net.UnixConn)
	}
	content := bytes.Repeat([]byte("0123456789"), 500000)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	received := make(chan []byte)
	go func() {
		data, _ := io.ReadAll(conns[1]) // compared below
		received <- data
	}()
	out := &peerConn{UnixConn: conns[0]}
	if n, _, handled := out.sendfile(f, 7); n != 7 || !handled {
		t.Errorf("sent %d, %v", n, handled)
	}
	rest := &io.LimitedReader{R: f, N: int64(len(content)) - 10}
	if n, err := out.ReadFrom(rest); n != int64(len(content))-10 || err != nil || rest.N != 0 {
		t.Errorf("sent %d, %v, left %d", n, err, rest.N)
	}
	if n, err := out.ReadFrom(&io.LimitedReader{R: f, N: 100}); n != 3 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("beyond the end: %d, %v", n, err)
	}
	// Parts of a file are copied. Each has its time, as what the kernel sends.
	if err := out.SetWriteDeadline(longPast); err != nil {
		t.Fatal(err)
	}
	if n, err := out.ReadFrom(strings.NewReader("parts")); n != 5 || err != nil {
		t.Errorf("parts: %d, %v", n, err)
	}
	content = append(content, "parts"...)
	_ = conns[0].Close() // everything was acknowledged above
	if got := <-received; !bytes.Equal(got, content) {
		t.Errorf("%d bytes came, want %d", len(got), len(content))
	}
}

// Creations, execs, file requests and deletions of the same few sandboxes at once: every answer is one that makes
// sense, and nothing is left.
func TestRacesOfDeleteAndExec(t *testing.T) {
	r := newBench(t, realInit(t)).start()
	const rounds = 6
	var wg sync.WaitGroup
	try := func(method, path string, body any, ok ...int) {
		rep, err := r.try(method, path, body)
		if err != nil {
			t.Errorf("%s %s: %v", method, path, err)
		} else if !slices.Contains(ok, rep.status) {
			t.Errorf("%s %s: %d %s", method, path, rep.status, rep.body)
		}
	}
	for i := range rounds {
		sb := r.create(api.CreateSandbox{Name: fmt.Sprint("raced-", i)})
		base := "/v1/sandboxes/" + sb.ID
		for range 3 {
			wg.Go(func() {
				try("POST", base+"/exec", api.ExecRequest{Argv: []string{"sh", "-c", "echo x; sleep 0.05"}}, 200, 404, 409, 410)
			})
			wg.Go(func() { try("GET", base+"/files?path=/etc/passwd", nil, 200, 404, 409, 410) })
		}
		for range 2 {
			wg.Go(func() { try("DELETE", base, nil, 204, 404) })
		}
	}
	wg.Wait()
	if ids := r.engine.IDs(); len(ids) != 0 {
		t.Errorf("left: %v", ids)
	}
	entries, err := os.ReadDir(filepath.Join(r.options.RuntimeDir, "s"))
	if err != nil || len(entries) != 0 {
		t.Errorf("sockets are left: %v %v", entries, err)
	}
}

func TestExecsKeepASandboxFromIdling(t *testing.T) {
	r := newBench(t, realInit(t)).start()
	sb := r.create(api.CreateSandbox{})
	c := r.dialExec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "echo ready; read x; exit 3"}})
	_, last := r.converse(c, func([3]string) {
		r.idlesAfter(sb.ID, 0.1)
		<-time.After(500 * time.Millisecond) // no event tells that a sandbox has not been ended
		if err := c.Write(t.Context(), websocket.MessageBinary, []byte("\x00\n")); err != nil {
			t.Error(err)
		}
	})
	if last.Exit == nil || last.Exit.Code != 3 {
		t.Errorf("%+v", last)
	}
}

// idlesAfter gives a sandbox its idle time when something already keeps it from idling: from its creation on that might be over
// before the test has come to its first use of it.
func (r *running) idlesAfter(id string, seconds float64) {
	r.t.Helper()
	decode[api.Sandbox](r.t, r.do("PATCH", "/v1/sandboxes/"+id, api.UpdateSandbox{IdleTimeout: seconds}), http.StatusOK)
}

func FuzzBodies(f *testing.F) {
	f.Add([]byte(`{"argv":["a"],"env":["K=V"],"cwd":"/","user":"0:0","stdin":"AA==","timeout":1.5}`))
	f.Add([]byte(`{"name":"a","limits":{"memory":5,"swap":0},"labels":{"a":"b"}}`))
	f.Fuzz(func(_ *testing.T, data []byte) {
		var e api.ExecRequest
		if decodeJSON(data, &e) == nil {
			_ = validateExec(&e)
		}
		var c api.CreateSandbox
		if decodeJSON(data, &c) == nil {
			_ = validateCreate(&c)
		}
	})
}
