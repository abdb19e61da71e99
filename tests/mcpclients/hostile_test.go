package mcpclients

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Lines that are no message are answered, and cost the session nothing.
func TestBadMessagesOverStdio(t *testing.T) {
	testenv.SameForAll(t)
	d := serve(t)
	r := start(t, d).open()
	id := r.call("run_command", map[string]any{"command": "echo here > /file"})
	for name, line := range map[string]string{
		"no JSON":        "hello",
		"half of it":     `{"jsonrpc":"2.0","id":1,"method":`,
		"a number":       "7",
		"a batch":        `[{"jsonrpc":"2.0","id":1,"method":"ping"}]`,
		"no version":     `{"id":1,"method":"ping"}`,
		"wrong version":  `{"jsonrpc":"1.0","id":1,"method":"ping"}`,
		"an object id":   `{"jsonrpc":"2.0","id":{},"method":"ping"}`,
		"bytes":          "\x00\xff\xfe",
		"deep":           strings.Repeat("[", 100_000),
		"a giant":        `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":"` + strings.Repeat("x", 9<<20) + `"}}`,
		"unknown method": `{"jsonrpc":"2.0","id":1,"method":"tools/destroy"}`,
		"wrong params":   `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":[1,2]}`,
		"null params":    `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":null}`,
		"no tool":        `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{}}`,
		"unknown tool":   `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"../run_command","arguments":{}}}`,
		"odd resource":   `{"jsonrpc":"2.0","id":1,"method":"resources/read","params":{"uri":"sandbox://default/\u0001\u007f"}}`,
		"foreign":        `{"jsonrpc":"2.0","id":1,"method":"resources/read","params":{"uri":"file:///etc/passwd"}}`,
	} {
		r.send(line)
		if a := r.receive(); a.Error == nil || a.Error.Message == "" {
			t.Errorf("%s: %+v %s", name, a, a.Result)
		}
	}
	// What needs no answer gets none.
	for _, line := range []string{
		"", " \t", `{"jsonrpc":"2.0","method":"notifications/unknown"}`, `{"jsonrpc":"2.0","id":99,"result":{}}`,
		`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":12345}}`,
	} {
		r.send(line)
	}
	if out := r.call("run_command", map[string]any{"command": "cat /file"}); out["stdout"] != "here\n" {
		t.Errorf("%v after %v", out, id)
	}
	_ = r.in.Close()
	if code := r.ends(); code != 0 {
		t.Errorf("exit code %d\n%s", code, &r.err)
	}
	empty(t, d.Client(t))
}

// Values of wrong types are the model's mistakes: it reads about them.
func TestWrongArguments(t *testing.T) {
	testenv.SameForAll(t)
	d := serve(t)
	r := start(t, d).open()
	for _, tc := range []struct{ tool, args string }{
		{"run_command", `{"command":["ls"]}`},
		{"run_command", `{"command":"ls","shell":true}`},
		{"run_command", `{"argv":"ls"}`},
		{"run_command", `{"command":"ls","timeout":"soon"}`},
		{"run_command", `{"command":"ls","env":[]}`},
		{"run_command", `{"command":"ls","cwd":"/no/such/directory"}`},
		{"run_command", `{"command":"ls","cwd":"/\u0000"}`},
		{"run_command", `{"argv":["a\u0000b"]}`},
		{"run_command", `{"argv":[""]}`},
		{"run_command", `7`},
		{"file_read", `{}`},
		{"file_read", `{"path":"/etc/passwd","offset":-1}`},
		{"file_read", `{"path":"/etc/passwd","length":1e9}`},
		{"file_read", `{"path":"/etc/passwd","length":1e300}`},
		{"file_read", `{"path":"/dev/zero"}`},
		{"file_read", `{"path":"/etc"}`},
		{"file_write", `{"path":"/etc","content":"x"}`},
		{"file_write", `{"path":"/proc/sys/kernel/core_pattern","content":"x"}`},
		{"file_write", `{"path":"/x","content":"x","mode":"04755"}`},
		{"file_write", `{"path":"/x","content":"x","mode":"rwx"}`},
		{"file_edit", `{"path":"/dev/null","old_text":"a","new_text":"b"}`},
		{"file_edit", `{"path":"/etc/passwd","old_text":"","new_text":"b"}`},
		{"file_list", `{"path":"/","depth":99}`},
		{"file_list", `{"path":"/etc/passwd"}`},
		{"sandbox_create", `{"name":"../x"}`},
		{"sandbox_create", `{"image":"host","snapshot":"x"}`},
		{"sandbox_create", `{"memory_mb":-1}`},
		{"sandbox_create", `{"network":"host"}`},
		{"sandbox_create", `{"user":"0"}`},
		{"sandbox_fork", `{"sandbox":"` + strings.Repeat("x", 10_000) + `"}`},
		{"command_output", `{"id":"main","wait":1e9}`},
		{"command_kill", `{"id":"..","signal":"SIGKILL"}`},
		{"get_url", `{"port":0}`},
		{"snapshot_delete", `{"snapshot":""}`},
	} {
		r.n++
		r.send(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":%q,"arguments":%s}}`, r.n, tc.tool, tc.args))
		a := r.receive()
		var res toolResult
		if a.Error == nil {
			if err := json.Unmarshal(a.Result, &res); err != nil {
				t.Fatal(err)
			}
		}
		if a.Error == nil && (!res.IsError || len(res.Content) == 0 || res.Content[0].Text == "") {
			t.Errorf("%s %.100s: %.300s", tc.tool, tc.args, a.Result)
		}
		for _, dir := range []string{d.DataDir, d.RuntimeDir} {
			if strings.Contains(string(a.Result), dir) || a.Error != nil && strings.Contains(a.Error.Message, dir) {
				t.Errorf("%s %.100s names a directory of the daemon: %.500s", tc.tool, tc.args, a.Result)
			}
		}
	}
	_ = r.in.Close()
	r.ends()
	empty(t, d.Client(t))
}

// Sandboxes and snapshots of the user's own are out of a model's reach, whatever it calls them.
func TestOthersAreOutOfReach(t *testing.T) {
	d := serve(t)
	c := d.Client(t)
	other := d.Create(t, api.CreateSandbox{Name: "mine"})
	snap, err := c.TakeSnapshot(t.Context(), other.ID, api.TakeSnapshot{Name: "kept"})
	if err != nil {
		t.Fatal(err)
	}
	a, b := start(t, d).open(), start(t, d).open()
	own := b.call("sandbox_create", map[string]any{})["id"].(string)
	for _, name := range []string{other.ID, "mine", own, "../" + other.ID, other.ID + "/exec"} {
		for tool, args := range map[string]map[string]any{
			"run_command": {"command": "id"}, "file_read": {"path": "/etc/passwd"}, "file_write": {"path": "/x", "content": "x"}, "sandbox_kill": {},
			"sandbox_pause": {}, "sandbox_snapshot": {}, "sandbox_fork": {}, "get_url": {"port": 80}, "command_output": {"id": "main"},
		} {
			args["sandbox"] = name
			a.begin(tool, args)
			var res toolResult
			if err := json.Unmarshal(a.receive().Result, &res); err != nil || !res.IsError || !strings.Contains(res.Content[0].Text, "no sandbox") {
				t.Errorf("%s of %s: %+v, %v", tool, name, res, err)
			}
		}
	}
	for tool, ref := range map[string]string{"sandbox_create": "kept", "snapshot_delete": snap.ID} {
		a.begin(tool, map[string]any{"snapshot": ref})
		var res toolResult
		if err := json.Unmarshal(a.receive().Result, &res); err != nil || !res.IsError {
			t.Errorf("%s of %s: %+v, %v", tool, ref, res, err)
		}
	}
	if got := a.call("snapshot_list", map[string]any{})["snapshots"].([]any); len(got) > 0 {
		t.Errorf("the user's snapshots are listed: %v", got)
	}
	_, _ = a.in.Close(), b.in.Close()
	a.ends()
	b.ends()
	if !running(t, c, other.ID) {
		t.Error("the user's sandbox is gone")
	}
	if _, err := c.RemoveSnapshot(t.Context(), snap.ID); err != nil {
		t.Error(err)
	}
}

// A snapshot has what the flags of its session gave, such as variables: sessions with other flags
// do not reach it.
func TestSnapshotsWidenNothing(t *testing.T) {
	testenv.SameForAll(t)
	d := serve(t)
	c := d.Client(t)
	flags := []string{"--network", "full", "--env", "TOKEN=secret"}
	wide := start(t, d, flags...).open()
	wide.call("sandbox_snapshot", map[string]any{"name": "wide"})
	again := start(t, d, flags...).open()
	again.call("sandbox_create", map[string]any{"snapshot": "wide"})
	narrow := start(t, d, "--profile", "hardened").open()
	refused := func(r *raw, snapshot, says string) {
		t.Helper()
		r.begin("sandbox_create", map[string]any{"snapshot": snapshot})
		var res toolResult
		if err := json.Unmarshal(r.receive().Result, &res); err != nil || !res.IsError || !strings.Contains(res.Content[0].Text, says) {
			t.Errorf("%+v, %v", res, err)
		}
	}
	refused(narrow, "wide", "no snapshot")
	if got := narrow.call("snapshot_list", map[string]any{})["snapshots"].([]any); len(got) > 0 {
		t.Errorf("snapshots of other flags are listed: %v", got)
	}
	inherits := start(t, d, "--snapshot", "wide").open()
	refused(inherits, "wide", "no snapshot")
	inherits.call("sandbox_snapshot", map[string]any{"name": "own"})
	refused(inherits, "own", "--profile")
	inherits.call("snapshot_delete", map[string]any{"snapshot": "own"})
	wide.call("snapshot_delete", map[string]any{"snapshot": "wide"})
	for _, r := range []*raw{wide, again, narrow, inherits} {
		_ = r.in.Close()
		r.ends()
	}
	empty(t, c)
	noSnapshots(t, c)
}

// Whatever ends a face, or its client, no sandbox stays, and no process.
func TestNothingIsLeftBehind(t *testing.T) {
	testenv.SameForAll(t)
	d := serve(t)
	c := d.Client(t)
	for name, end := range map[string]func(*raw){
		"the client's end": func(r *raw) { _ = r.in.Close() },
		"SIGTERM":          func(r *raw) { _ = r.cmd.Process.Signal(syscall.SIGTERM) },
		"SIGKILL":          func(r *raw) { _ = r.cmd.Process.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, d).open()
			one := r.call("run_command", map[string]any{"command": "exec sleep 31536000", "background": true})["sandbox"].(string)
			r.call("sandbox_create", map[string]any{})
			r.call("sandbox_fork", map[string]any{})
			r.begin("run_command", map[string]any{"command": "trap '' TERM HUP; touch /begun; while :; do sleep 1000; done"})
			harness.Eventually(t, func() error {
				_, err := c.StatFile(t.Context(), one, "/begun", false)
				return err
			})
			end(r)
			r.ends()
			empty(t, c)
			noSnapshots(t, c)
		})
	}
}

// A request that is cancelled ends the command with its processes, and the session goes on.
func TestCancelledCommandEnds(t *testing.T) {
	testenv.SameForAll(t)
	d := serve(t)
	c := d.Client(t)
	r := start(t, d).open()
	r.call("file_write", map[string]any{"path": "/x", "content": ""})
	all, err := c.ListSandboxes(t.Context(), client.ListOptions{})
	if err != nil || len(all) != 1 {
		t.Fatal(all, err)
	}
	r.begin("run_command", map[string]any{"command": "sleep 31536000 & touch /begun; wait"})
	harness.Eventually(t, func() error {
		_, err := c.StatFile(t.Context(), all[0].ID, "/begun", false)
		return err
	})
	r.send(fmt.Sprintf(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%d,"reason":"enough"}}`, r.n))
	harness.Eventually(t, func() error {
		list, err := c.Processes(t.Context(), all[0].ID)
		if err == nil && len(list) > 0 {
			err = fmt.Errorf("these run: %+v", list)
		}
		return err
	})
	r.n++
	r.send(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"ping"}`, r.n))
	for {
		if id, ok := r.receive().ID.(float64); ok && int(id) == r.n { // the cancelled call may have an answer
			break
		}
	}
	_ = r.in.Close()
	r.ends()
	empty(t, c)
}

// The restart of a daemon costs a session nothing, and its sandboxes are removed at its end all the
// same.
func TestDaemonIsReplaced(t *testing.T) {
	testenv.SameForAll(t)
	d := serve(t)
	c := d.Client(t)
	r := start(t, d).open()
	r.call("file_write", map[string]any{"path": "/x", "content": "kept"})
	d.Kill9(t)
	d.Launch(t)
	if out := r.call("run_command", map[string]any{"command": "cat /x"}); out["stdout"] != "kept" {
		t.Errorf("%v", out)
	}
	_ = r.in.Close()
	r.ends()
	empty(t, c)
}

// Over HTTP a request needs the token, comes from no web page, and is bounded.
func TestHTTPIsGuarded(t *testing.T) {
	testenv.SameForAll(t)
	d := serve(t)
	f := listen(t, d)
	const hello = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"x","version":"1"}}}`
	for _, tc := range []struct {
		name, method, path, body string
		header                   map[string]string
		want                     int
	}{
		{"as it should be", "POST", "/mcp", hello, nil, 200},
		{"no token", "POST", "/mcp", hello, map[string]string{"Authorization": ""}, 401},
		{"a wrong token", "POST", "/mcp", hello, map[string]string{"Authorization": "Bearer " + f.token + "x"}, 401},
		{"another scheme", "POST", "/mcp", hello, map[string]string{"Authorization": "Basic " + f.token}, 401},
		{"a web page", "POST", "/mcp", hello, map[string]string{"Origin": "https://example.com"}, 403},
		{"a page of no site", "POST", "/mcp", hello, map[string]string{"Origin": "null"}, 403},
		{"a page of this host", "POST", "/mcp", hello, map[string]string{"Origin": "http://localhost:3000"}, 200},
		{"another host", "POST", "/mcp", hello, map[string]string{"Host": "example.com"}, 403},
		{"another path", "POST", "/v1/sandboxes", hello, nil, 404},
		{"another session", "POST", "/mcp", `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`, map[string]string{"Mcp-Session-Id": "AAAA"}, 404},
		{"no session", "GET", "/mcp", "", nil, 400},
		{"another method", "PUT", "/mcp", hello, nil, 405},
		{"no JSON", "POST", "/mcp", "hello", nil, 400},
		{"another type", "POST", "/mcp", hello, map[string]string{"Content-Type": "text/plain"}, 415},
		{"a giant", "POST", "/mcp", `{"x":"` + strings.Repeat("x", 9<<20) + `"}`, nil, 413},
	} {
		req, err := http.NewRequestWithContext(t.Context(), tc.method, strings.TrimSuffix(f.url, "/mcp")+tc.path, strings.NewReader(tc.body))
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range map[string]string{"Authorization": "Bearer " + f.token, "Content-Type": "application/json", "Accept": "application/json, text/event-stream"} {
			req.Header.Set(k, v)
		}
		for k, v := range tc.header {
			if k == "Host" {
				req.Host = v
			}
			req.Header.Set(k, v)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 1000)) // shown only
		_ = resp.Body.Close()
		if resp.StatusCode != tc.want {
			t.Errorf("%s: %d, want %d: %s", tc.name, resp.StatusCode, tc.want, body)
		}
	}
	if fi, err := os.Stat(filepath.Join(d.RuntimeDir, "mcp.token")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the token's file: %v, %v", fi, err)
	}
	for _, tc := range []struct{ args []string }{
		{[]string{"--listen", "0.0.0.0:0"}},
		{[]string{"--listen", "example.com:80"}},
		{[]string{"--listen", "unix:"}},
		{[]string{"--listen", "7600"}},
		{[]string{"--timeout", "-1s"}},
		{[]string{"image"}},
		{[]string{"--publish", "80"}},
	} {
		if r := d.CLI(t, append([]string{"mcp"}, tc.args...)...); r.Code != 2 || r.Stderr == "" {
			t.Errorf("%v: %+v", tc.args, r)
		}
	}
	if err := os.Chmod(filepath.Join(d.RuntimeDir, "mcp.token"), 0o644); err != nil {
		t.Fatal(err)
	}
	if r := d.CLI(t, "mcp", "--listen", "127.0.0.1:0"); r.Code != 1 || !strings.Contains(r.Stderr, "only you can read") {
		t.Errorf("a token that others read: %+v", r)
	}
}

// The face has no more than a client needs: it reads no file, and makes no connection but to the
// daemon.
func TestFaceIsConfined(t *testing.T) {
	d := serve(t)
	r := start(t, d).open()
	isConfined(t, r.cmd.Process.Pid)
	_ = r.in.Close()
	r.ends()
}

// isConfined fails the test if a process has no filter, or a capability.
func isConfined(t *testing.T, pid int) {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"NoNewPrivs:\t1\n", "Seccomp:\t2\n", "CapEff:\t0000000000000000\n"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("no %q in\n%s", want, status)
		}
	}
}
