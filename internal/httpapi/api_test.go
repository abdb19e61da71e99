package httpapi_test

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
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/httpapi"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestSandboxesOverTheSocket(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	one := r.Create(api.CreateSandbox{Name: "one", Labels: map[string]string{"k": "v"}})
	if one.State != api.StateRunning || one.Image != api.HostImage || one.Profile != "default" || one.Limits.Pids != 512 || one.Cwd != "/" {
		t.Errorf("%+v", one)
	}
	two := r.Create(api.CreateSandbox{Image: "example.org/app:1", Profile: "hardened"})
	if two.ImageDigest != "sha256:11" || two.Cwd != "/tmp" {
		t.Errorf("%+v", two)
	}
	for _, ref := range []string{one.ID, "one"} {
		if got := daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/"+ref, nil), 200); got.ID != one.ID {
			t.Errorf("get %s: %+v", ref, got)
		}
	}
	for query, want := range map[string]int{
		"": 2, "?label=k=v": 1, "?label=k=w": 0, "?state=running": 2, "?state=lost": 0, "?limit=1": 1, "?label=k=v&state=running&limit=5": 1,
	} {
		if got := daemontest.Decode[api.SandboxList](t, r.Do("GET", "/v1/sandboxes"+query, nil), 200); len(got.Sandboxes) != want || got.Sandboxes == nil {
			t.Errorf("list %q: %d, want %d", query, len(got.Sandboxes), want)
		}
	}
	if rep := r.Do("DELETE", "/v1/sandboxes/one", nil); rep.Status != http.StatusNoContent {
		t.Errorf("delete: %d %s", rep.Status, rep.Body)
	}
	daemontest.Problem(t, r.Do("GET", "/v1/sandboxes/one", nil), api.CodeNotFound)
	daemontest.Problem(t, r.Do("DELETE", "/v1/sandboxes/one", nil), api.CodeNotFound)
}

// described is an engine with a process of its own.
type described struct{ runtime.Engine }

func (described) Describe(context.Context) (runtime.Description, error) {
	return runtime.Description{PID: 42, Enforced: api.Enforced{IDs: "single"}}, nil
}

func TestSystemRoutes(t *testing.T) {
	b := daemontest.New(t, nil)
	b.Options.Engine = described{b.Engine}
	r := b.Start()
	r.Create(api.CreateSandbox{})
	info := daemontest.Decode[api.SystemInfo](t, r.Do("GET", "/v1/system", nil), 200)
	if info.Version != "test" || info.UID != os.Getuid() || info.Launcher != 42 || info.Sandboxes != 1 || info.Enforced.IDs != "single" {
		t.Errorf("%+v", info)
	}
	if checks := daemontest.Decode[api.CheckList](t, r.Do("GET", "/v1/system/checks", nil), 200); len(checks.Checks) != 1 {
		t.Errorf("%+v", checks)
	}
	if rep := r.Do("GET", "/healthz", nil); rep.Status != 200 {
		t.Errorf("health: %d", rep.Status)
	}
	if imgs := daemontest.Decode[api.ImageList](t, r.Do("GET", "/v1/images", nil), 200); len(imgs.Images) != 1 {
		t.Errorf("%+v", imgs)
	}
}

// No route, health included, is asked by a page of another site.
func TestWebPagesReachNoRoute(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	for _, header := range [][]string{{"Origin", "https://evil.example"}, {"Origin", "null"}, {"Sec-Fetch-Site", "cross-site"}} {
		daemontest.Problem(t, r.Do("GET", "/healthz", nil, header...), api.CodeForbidden)
		daemontest.Problem(t, r.Do("POST", "/v1/sandboxes", api.CreateSandbox{}, header...), api.CodeForbidden)
	}
	if list := daemontest.Decode[api.SandboxList](t, r.Do("GET", "/v1/sandboxes", nil), 200); len(list.Sandboxes) != 0 {
		t.Errorf("%+v", list)
	}
}

func TestPullTellsProgress(t *testing.T) {
	b := daemontest.New(t, nil)
	r := b.Start()
	b.Images.PullImage = func(opts image.PullOptions) (*image.Image, error) {
		opts.Progress(api.PullEvent{Layer: "sha256:aa", Status: "downloading", Bytes: 1, Total: 2})
		return &image.Image{Image: api.Image{Reference: "x"}}, nil
	}
	rep := r.Do("POST", "/v1/images/pull", api.PullImage{Reference: "x"})
	got := daemontest.Events[api.PullEvent](t, rep)
	if len(got) != 2 || got[0].Bytes != 1 || got[1].Image == nil || got[1].Image.Reference != "x" {
		t.Errorf("%+v", got)
	}
	// Before the first event an error is a problem; after it, an event.
	b.Images.PullImage = func(image.PullOptions) (*image.Image, error) {
		return nil, class.Mark(image.ErrRegistry, errors.New("connection refused"))
	}
	daemontest.Problem(t, r.Do("POST", "/v1/images/pull", api.PullImage{Reference: "x"}), api.CodeRegistry)
	b.Images.PullImage = func(opts image.PullOptions) (*image.Image, error) {
		opts.Progress(api.PullEvent{Status: "downloading"})
		return nil, class.Mark(image.ErrInvalid, errors.New("digest differs"))
	}
	got = daemontest.Events[api.PullEvent](t, r.Do("POST", "/v1/images/pull", api.PullImage{Reference: "x"}))
	if len(got) != 2 || got[1].Error == nil || got[1].Error.Code != api.CodeImage {
		t.Errorf("%+v", got)
	}
}

// Every bad request gets one clear error, with the right code, and leaves nothing.
func TestBadInput(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	sb := r.Create(api.CreateSandbox{Name: "taken"})
	exec := "/v1/sandboxes/" + sb.ID + "/exec"
	files := "/v1/sandboxes/" + sb.ID + "/files"
	for name, tc := range map[string]struct {
		method, path string
		body         any
		want         api.Code
		status       int    // 0: the code's
		mention      string // words that the detail must have
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
		"huge body":            {"POST", "/v1/sandboxes", `{"name":"` + strings.Repeat("x", httpapi.MaxBody) + `"}`, api.CodeTooLarge, 0, "larger"},
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
			rep := r.Of(t).Do(tc.method, tc.path, tc.body)
			p := daemontest.Problem(t, rep, tc.want)
			if tc.status == 0 {
				tc.status = tc.want.Status()
			}
			if rep.Status != tc.status {
				t.Errorf("status %d, want %d", rep.Status, tc.status)
			}
			if !strings.Contains(p.Detail, tc.mention) {
				t.Errorf("%q does not mention %q", p.Detail, tc.mention)
			}
			if tc.status == 405 && rep.Header.Get("Allow") == "" {
				t.Error("no Allow header")
			}
		})
	}
	if list := daemontest.Decode[api.SandboxList](t, r.Do("GET", "/v1/sandboxes", nil), 200); len(list.Sandboxes) != 1 {
		t.Errorf("something is left: %+v", list)
	}
}

func TestUnenforceableLimitIsAnError(t *testing.T) {
	b := daemontest.New(t, nil)
	b.Engine.CreateError = func(s *runtime.Spec) error {
		if s.Explicit.Memory != 0 {
			return fmt.Errorf("memory: %w", runtime.ErrUnenforceable)
		}
		return nil
	}
	r := b.Start()
	p := daemontest.Problem(t, r.Do("POST", "/v1/sandboxes", api.CreateSandbox{Limits: api.Limits{Memory: 1 << 30}}), api.CodeUnenforceable)
	if !strings.Contains(p.Hint, "doctor") {
		t.Errorf("%+v", p)
	}
	r.Create(api.CreateSandbox{})
}

func TestPanicIsAProblem(t *testing.T) {
	b := daemontest.New(t, nil)
	b.Images.PullImage = func(image.PullOptions) (*image.Image, error) { panic("oops") }
	r := b.Start()
	p := daemontest.Problem(t, r.Do("POST", "/v1/images/pull", api.PullImage{Reference: "x"}), api.CodeInternal)
	if strings.Contains(p.Detail, "oops") {
		t.Errorf("%+v", p)
	}
	if !strings.Contains(b.Log.String(), "oops") || !strings.Contains(b.Log.String(), "TestPanicIsAProblem") {
		t.Error("the log does not say where")
	}
	r.Create(api.CreateSandbox{})
}

func TestExec(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	sb := r.Create(api.CreateSandbox{Image: "example.org/app:1", Env: []string{"S=sandbox", "LANG=de"}})
	run := func(req api.ExecRequest) api.ExecResult { t.Helper(); return r.Exec(sb.ID, req) }

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
	if !res.Exit.Timeout || res.Exit.Signal != "SIGKILL" || time.Since(begun) > servicetest.Patience {
		t.Errorf("%+v after %s", res, time.Since(begun))
	}
	// Descendants of the program hold the pipes open, but do not delay the answer.
	begun = time.Now()
	res = run(api.ExecRequest{Argv: []string{"sh", "-c", "sleep 100 & echo done"}})
	if res.Stdout != "done\n" || time.Since(begun) > servicetest.Patience {
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
	if r.Engine.OOM(sb.ID); run(api.ExecRequest{Argv: []string{"true"}}).Exit.OOM {
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
		p := daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/"+sb.ID+"/exec", tc.req), tc.want)
		if p.Hint == "" && tc.want != api.CodeInvalid {
			t.Errorf("%s: no hint: %+v", name, p)
		}
	}
}

func TestExecAsAUser(t *testing.T) {
	testenv.RequireRoot(t) // the single-id namespace of an ordinary user's test has no other users
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	sb := r.Create(api.CreateSandbox{User: "daemon"})
	res := r.Exec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "id -u; id -g; echo $HOME"}})
	if res.Stdout != "1\n1\n/usr/sbin\n" {
		t.Errorf("%+v", res)
	}
	res = r.Exec(sb.ID, api.ExecRequest{Argv: []string{"id", "-u"}, User: "4242:4243"})
	if res.Stdout != "4242\n" {
		t.Errorf("%+v", res)
	}
}

func TestExecStreams(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	sb := r.Create(api.CreateSandbox{})
	rep := r.Do("POST", "/v1/sandboxes/"+sb.ID+"/exec",
		api.ExecRequest{Argv: []string{"sh", "-c", `echo out; printf '\377' >&2; exit 7`}}, "Accept", api.TypeNDJSON)
	all := daemontest.Events[api.ExecEvent](t, rep)
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
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"nope"}}, "Accept", api.TypeNDJSON), api.CodeProgramMissing)
}

func TestDisconnectedClientEndsItsExec(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	sb := r.Create(api.CreateSandbox{})
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, body := r.Stream(ctx, sb.ID, "sh", "-c", `exec 3<>"$0"; echo ready; sleep 1000`, fifo)
	// The fifo hangs up when the last process that has it open is dead.
	f, err := os.OpenFile(fifo, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cancel()
	_ = body.Close() // cancelled
	if err := f.SetReadDeadline(time.Now().Add(servicetest.Patience)); err != nil {
		t.Fatal(err)
	}
	if n, err := f.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("the exec goes on: %d, %v", n, err)
	}
	if res := r.Exec(sb.ID, api.ExecRequest{Argv: []string{"true"}}); res.Exit.Code != 0 {
		t.Errorf("%+v", res)
	}
}

func TestSandboxThatEndsDuringAnExec(t *testing.T) {
	for name, end := range map[string]func(*daemontest.Running, string){
		"deleted": func(r *daemontest.Running, id string) { r.Do("DELETE", "/v1/sandboxes/"+id, nil) },
		"killed":  func(r *daemontest.Running, id string) { _ = r.Engine.Kill(r.T.Context(), id) },
	} {
		t.Run(name, func(t *testing.T) {
			r := daemontest.New(t, servicetest.RealInit(t)).Start()
			sb := r.Create(api.CreateSandbox{})
			lines, body := r.Stream(t.Context(), sb.ID, "sh", "-c", "echo ready; sleep 1000")
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
			rep := r.Do("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"true"}})
			if name == "deleted" {
				daemontest.Problem(t, rep, api.CodeNotFound)
			} else {
				daemontest.Problem(t, rep, api.CodeConflict)
			}
		})
	}
}

func TestRunLeavesNothing(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	req := api.RunRequest{Exec: api.ExecRequest{Argv: []string{"sh", "-c", "echo hi; exit 3"}}}
	res := daemontest.Decode[api.ExecResult](t, r.Do("POST", "/v1/run", req), 200)
	if res.Stdout != "hi\n" || res.Exit.Code != 3 {
		t.Errorf("%+v", res)
	}
	all := daemontest.Events[api.ExecEvent](t, r.Do("POST", "/v1/run", req, "Accept", api.TypeNDJSON))
	if last := all[len(all)-1]; last.Exit == nil || last.Exit.Code != 3 {
		t.Errorf("%+v", all)
	}
	req.Exec.Argv = []string{"nope"}
	daemontest.Problem(t, r.Do("POST", "/v1/run", req), api.CodeProgramMissing)
	daemontest.Problem(t, r.Do("POST", "/v1/run", req, "Accept", api.TypeNDJSON), api.CodeProgramMissing)
	if ids := r.Engine.IDs(); len(ids) != 0 {
		t.Errorf("left: %v", ids)
	}
}

func TestFiles(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	sb := r.Create(api.CreateSandbox{})
	dir := t.TempDir()
	at := func(name string) string {
		return "/v1/sandboxes/" + sb.ID + "/files?path=" + url.QueryEscape(filepath.Join(dir, name))
	}
	content := bytes.Repeat([]byte("all of it\n"), 300000)
	if rep := r.Do("PUT", at("new/dir/file")+"&mode=750", bytes.NewReader(content)); rep.Status != http.StatusNoContent {
		t.Fatalf("put: %d %s", rep.Status, rep.Body)
	}
	st, err := os.Stat(filepath.Join(dir, "new/dir/file"))
	if err != nil || st.Mode() != 0o750 || st.Size() != int64(len(content)) {
		t.Fatalf("%v %v", st, err)
	}
	rep := r.Do("GET", at("new/dir/file"), nil)
	if rep.Status != 200 || !bytes.Equal(rep.Body, content) || rep.Header.Get("Content-Type") != api.TypeBytes {
		t.Errorf("get: %d, %d bytes, %v", rep.Status, len(rep.Body), rep.Header)
	}
	rep = r.Do("GET", at("new/dir/file"), nil, "Range", "bytes=4-6")
	if rep.Status != http.StatusPartialContent || string(rep.Body) != "of " {
		t.Errorf("range: %d %q", rep.Status, rep.Body)
	}
	if rep := r.Do("PUT", at("empty"), nil); rep.Status != http.StatusNoContent {
		t.Errorf("put of nothing: %d %s", rep.Status, rep.Body)
	}
	if rep := r.Do("GET", at("empty"), nil); rep.Status != 200 || len(rep.Body) != 0 {
		t.Errorf("get of nothing: %d %q", rep.Status, rep.Body)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	daemontest.Problem(t, r.Do("GET", at("fifo"), nil), api.CodeInvalid)
	daemontest.Problem(t, r.Do("GET", at("new"), nil), api.CodeInvalid)
	daemontest.Problem(t, r.Do("GET", at("missing"), nil), api.CodeNotFound)
	daemontest.Problem(t, r.Do("GET", "/v1/sandboxes/"+sb.ID+"/files?path=/dev/zero", nil), api.CodeInvalid)
	daemontest.Problem(t, r.Do("GET", "/v1/sandboxes/"+sb.ID+"/files?path=/proc/self/mem", nil), api.CodeInvalid)
	daemontest.Problem(t, r.Do("PUT", at("new"), "x"), api.CodeInvalid)
}

func TestRangesOfFiles(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	sb := r.Create(api.CreateSandbox{})
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("0123456789"), 0o600); err != nil {
		t.Fatal(err)
	}
	at := "/v1/sandboxes/" + sb.ID + "/files?path=" + url.QueryEscape(path)
	for span, want := range map[string]string{"bytes=0-0": "0", "bytes=-3": "789", "bytes=8-100": "89", "bytes=4-": "456789"} {
		rep := r.Do("GET", at, nil, "Range", span)
		if rep.Status != http.StatusPartialContent || string(rep.Body) != want {
			t.Errorf("%s: %d %q", span, rep.Status, rep.Body)
		}
	}
	rep := r.Do("GET", at, nil, "Range", "bytes=10-")
	if rep.Header.Get("Content-Range") != "bytes */10" || rep.Status != http.StatusRequestedRangeNotSatisfiable {
		t.Errorf("%d %v", rep.Status, rep.Header)
	}
	if p := daemontest.Problem(t, rep, api.CodeInvalid); !strings.Contains(p.Detail, "10 bytes") {
		t.Errorf("%+v", p)
	}
	if rep := r.Do("HEAD", at, nil); rep.Status != 200 || rep.Header.Get("Content-Length") != "10" || len(rep.Body) != 0 {
		t.Errorf("HEAD: %d %v %q", rep.Status, rep.Header, rep.Body)
	}
}

// A body that breaks off must not become a file, nor replace one.
func TestHalfABodyIsNoFile(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	sb := r.Create(api.CreateSandbox{})
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := servicetest.Dial(t.Context(), r.D.Socket())
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
	daemontest.Problem(t, daemontest.Reply{Status: resp.StatusCode, Header: resp.Header, Body: body}, api.CodeInvalid)
	_ = c.Close() // read to its end
	got, err := os.ReadFile(path)
	entries, derr := os.ReadDir(dir)
	if string(got) != "old" || len(entries) != 1 || err != nil || derr != nil {
		t.Errorf("%q, %v, %v, %v", got, entries, err, derr)
	}
}

func TestArchives(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	sb := r.Create(api.CreateSandbox{})
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
	if rep := r.Do("PUT", at("in"), bytes.NewReader(whole)); rep.Status != http.StatusNoContent {
		t.Fatalf("put: %d %s", rep.Status, rep.Body)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "in/d/b")); string(got) != "B" {
		t.Errorf("%q %v", got, err)
	}
	rep := r.Do("GET", at("in"), nil)
	if rep.Status != 200 || rep.Header.Get("Content-Type") != api.TypeTar {
		t.Fatalf("get: %d %v", rep.Status, rep.Header)
	}
	found := make(map[string]int64)
	for tr := tar.NewReader(bytes.NewReader(rep.Body)); ; {
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
	daemontest.Problem(t, r.Do("GET", at("missing"), nil), api.CodeNotFound)
	daemontest.Problem(t, r.Do("PUT", at("cut"), bytes.NewReader(whole[:1<<20])), api.CodeInvalid)
	// More than a pipe takes, and less than a server leaves unread after its answer. A server closes
	// the connection then, and a client that is late to read the answer sees the close first.
	daemontest.Problem(t, r.Do("PUT", at("garbage"), strings.NewReader(strings.Repeat("garbage ", 1<<14))), api.CodeInvalid)
	if res := r.Exec(sb.ID, api.ExecRequest{Argv: []string{"true"}}); res.Exit.Code != 0 {
		t.Errorf("%+v", res)
	}
}

func TestInteractiveExec(t *testing.T) {
	whole := daemontest.New(t, servicetest.RealInit(t)).Start()
	sb := whole.Create(api.CreateSandbox{})

	t.Run("pipes", func(t *testing.T) {
		r := whole.Of(t)
		c := r.DialExec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "echo ready; cat; echo bye >&2; exit 5"}})
		sent := false
		out, last := r.Converse(c, func(out [3]string) {
			if !sent && out[api.ChannelStdout] == "ready\n" {
				sent = true
				if err := c.Write(t.Context(), websocket.MessageBinary, []byte("\x00typed")); err != nil {
					t.Error(err)
				}
				r.Send(c, api.ExecControl{StdinClose: true})
			}
		})
		if out[api.ChannelStdout] != "ready\ntyped" || out[api.ChannelStderr] != "bye\n" || last.Exit == nil || last.Exit.Code != 5 {
			t.Errorf("%q %+v", out, last)
		}
	})
	t.Run("terminal", func(t *testing.T) {
		r := whole.Of(t)
		c := r.DialExec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "echo ready; read x; stty size; trap 'echo got it; exit 6' INT; echo waiting; while :; do sleep 0.01; done"}, TTY: true})
		step := 0
		_, last := r.Converse(c, func(out [3]string) {
			switch {
			case step == 0 && strings.Contains(out[1], "ready"):
				step++
				r.Send(c, api.ExecControl{Resize: &api.TerminalSize{Rows: 50, Cols: 150}})
				if err := c.Write(t.Context(), websocket.MessageBinary, []byte("\x00go\n")); err != nil {
					t.Error(err)
				}
			case step == 1 && strings.Contains(out[1], "waiting"):
				step++
				if !strings.Contains(out[1], "50 150") {
					t.Errorf("size: %q", out[1])
				}
				r.Send(c, api.ExecControl{Signal: "SIGINT"})
			}
		})
		if last.Exit == nil || last.Exit.Code != 6 {
			t.Errorf("%+v", last)
		}
	})
	t.Run("missing program", func(t *testing.T) {
		r := whole.Of(t)
		_, last := r.Converse(r.DialExec(sb.ID, api.ExecRequest{Argv: []string{"nope"}}), nil)
		if last.Error == nil || last.Error.Code != api.CodeProgramMissing {
			t.Errorf("%+v", last)
		}
	})
	t.Run("unknown field", func(t *testing.T) {
		r := whole.Of(t)
		_, last := r.Converse(r.DialExec(sb.ID, map[string]any{"argv": []string{"true"}, "nope": 1}), nil)
		if last.Error == nil || last.Error.Code != api.CodeInvalid {
			t.Errorf("%+v", last)
		}
	})
	for name, control := range map[string]any{
		"unknown signal": api.ExecControl{Signal: "SIGNOPE"}, "empty control": map[string]any{}, "unknown control": map[string]any{"kill": true},
		"resize without a terminal": api.ExecControl{Resize: &api.TerminalSize{Rows: 1, Cols: 1}},
		"detach without a terminal": api.ExecControl{Detach: api.DetachExec}, "unknown detach": api.ExecControl{Detach: "nope"},
	} {
		t.Run(name, func(t *testing.T) {
			r := whole.Of(t)
			c := r.DialExec(sb.ID, api.ExecRequest{Argv: []string{"sleep", "1000"}})
			r.Send(c, control)
			if _, last := r.Converse(c, nil); last.Error == nil || last.Error.Code != api.CodeInvalid {
				t.Errorf("%+v", last)
			}
		})
	}
	t.Run("client that vanishes", func(t *testing.T) {
		r := whole.Of(t)
		c := r.DialExec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "echo ready; sleep 1000"}})
		_ = c.CloseNow() // the point
		if res := r.Exec(sb.ID, api.ExecRequest{Argv: []string{"true"}}); res.Exit.Code != 0 {
			t.Errorf("%+v", res)
		}
	})
	t.Run("no such sandbox", func(t *testing.T) {
		r := whole.Of(t)
		_, resp, err := websocket.Dial(t.Context(), "ws://sandboxd/v1/sandboxes/nope/exec", &websocket.DialOptions{HTTPClient: r.HTTP})
		if err == nil || resp == nil || resp.StatusCode != http.StatusNotFound {
			t.Errorf("%v %v", resp, err)
		}
	})
	t.Run("daemon that stops", func(t *testing.T) {
		r := whole.Of(t)
		c := r.DialExec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "echo ready; sleep 1000"}})
		_, last := r.Converse(c, func([3]string) { r.D.Shutdown(api.Shutdown{}) })
		if last.Error == nil || last.Error.Code != api.CodeUnavailable {
			t.Errorf("%+v", last)
		}
		r.Wait()
	})
}

// The client that ships with us and this server mean the same.
func TestShippedClient(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.RuntimeDir = shortDir(t) // the client dials the path as it is
	r := b.Start()
	c := client.New(r.D.Socket())
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
	r.Wait()
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

// hostileInit accepts every connection and answers with arbitrary bytes.
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
	r := daemontest.New(t, func(spec *runtime.Spec, control *os.File, stop <-chan struct{}) {
		hostileInit(answers[spec.Hostname])(spec, control, stop)
	}).Start()
	answers["bystander"] = send()
	r.Create(api.CreateSandbox{Name: "bystander"})
	for name := range answers {
		if name != "bystander" {
			r.Create(api.CreateSandbox{Name: name})
		}
	}
	var wg sync.WaitGroup
	for name := range answers {
		if name == "bystander" {
			continue
		}
		wg.Go(func() {
			rep, err := r.Try("POST", "/v1/sandboxes/"+name+"/exec", api.ExecRequest{Argv: []string{"true"}})
			if err != nil || rep.Status != api.CodeGone.Status() {
				t.Errorf("%s: %d %s, %v", name, rep.Status, rep.Body, err)
			}
			if rec, err := r.API().GetSandbox(name); err != nil || rec.State != api.StateStopped || !strings.Contains(rec.Reason, "init") {
				t.Errorf("%s: %s: %s, %v", name, rec.State, rec.Reason, err)
			}
		})
	}
	wg.Wait()
	if got := daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/bystander", nil), 200); got.State != api.StateRunning {
		t.Errorf("another sandbox: %s", got.State)
	}
}

// Creations, execs, file requests and deletions of the same few sandboxes at once: every answer is
// one that makes sense, and nothing is left.
func TestRacesOfDeleteAndExec(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	const rounds = 6
	var wg sync.WaitGroup
	try := func(method, path string, body any, ok ...int) {
		rep, err := r.Try(method, path, body)
		if err != nil {
			t.Errorf("%s %s: %v", method, path, err)
		} else if !slices.Contains(ok, rep.Status) {
			t.Errorf("%s %s: %d %s", method, path, rep.Status, rep.Body)
		}
	}
	for i := range rounds {
		sb := r.Create(api.CreateSandbox{Name: fmt.Sprint("raced-", i)})
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
	if ids := r.Engine.IDs(); len(ids) != 0 {
		t.Errorf("left: %v", ids)
	}
	entries, err := os.ReadDir(filepath.Join(r.Options.RuntimeDir, "s"))
	if err != nil || len(entries) != 0 {
		t.Errorf("sockets are left: %v %v", entries, err)
	}
}

func TestExecsKeepASandboxFromIdling(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	sb := r.Create(api.CreateSandbox{})
	c := r.DialExec(sb.ID, api.ExecRequest{Argv: []string{"sh", "-c", "echo ready; read x; exit 3"}})
	_, last := r.Converse(c, func([3]string) {
		r.IdlesAfter(sb.ID, 0.1)
		<-time.After(500 * time.Millisecond) // no event tells that a sandbox has not been ended
		if err := c.Write(t.Context(), websocket.MessageBinary, []byte("\x00\n")); err != nil {
			t.Error(err)
		}
	})
	if last.Exit == nil || last.Exit.Code != 3 {
		t.Errorf("%+v", last)
	}
}
