package functional

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// simpleSandbox is a face for clients of simple_sandbox, in a process of its own.
type simpleSandbox struct {
	t   *testing.T
	cmd *exec.Cmd
	url string
}

func startSimpleSandbox(t *testing.T, d *harness.Daemon) *simpleSandbox {
	t.Helper()
	cmd := exec.Command(harness.Program(t, "sandboxd"), "face", "simple-sandbox", "--socket", d.Socket, "--listen", "127.0.0.1:0") // the test ends it
	harness.StartsNoDaemon(cmd)
	cmd.Env = append(os.Environ(), cmd.Env...)
	said, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	f := &simpleSandbox{t: t, cmd: cmd}
	t.Cleanup(f.kill)
	lines := bufio.NewScanner(said)
	for lines.Scan() {
		if _, address, ok := strings.Cut(lines.Text(), "served at http://"); ok {
			token, err := os.ReadFile(filepath.Join(filepath.Dir(d.Socket), "simple-sandbox.token"))
			if err != nil {
				t.Fatal(err)
			}
			// The token in the URL, as clients have it that cannot set a header.
			f.url = "http://any:" + strings.TrimSpace(string(token)) + "@" + address
			return f
		}
	}
	t.Fatalf("the face ended before it served: %v", lines.Err())
	return nil
}

// kill ends the face by SIGKILL. Its sandboxes stay.
func (f *simpleSandbox) kill() {
	_ = f.cmd.Process.Kill() // it may have ended before
	_ = f.cmd.Wait()
}

// ask sends a request and returns status and answer.
func (f *simpleSandbox) ask(method, path, kind string, body io.Reader) (int, string) {
	f.t.Helper()
	// A cleanup asks too, when the test's context has ended.
	req, err := http.NewRequestWithContext(context.WithoutCancel(f.t.Context()), method, f.url+path, body)
	if err != nil {
		f.t.Error(err)
		return 0, ""
	}
	req.Header.Set("Content-Type", kind)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		f.t.Error(err)
	}
	return res.StatusCode, string(text)
}

// wants sends a request and compares its answer.
func (f *simpleSandbox) wants(status int, answer, method, path, body string) {
	f.t.Helper()
	got, text := f.ask(method, path, "application/json", strings.NewReader(body))
	if got != status {
		f.t.Errorf("%s %s: status %d, want %d", method, path, got, status)
	}
	if diff := cmp.Diff(answer, text); diff != "" {
		f.t.Errorf("%s %s %s (-want +got):\n%s", method, path, body, diff)
	}
}

func (f *simpleSandbox) create() string {
	f.t.Helper()
	var out struct {
		ID string `json:"sandbox_id"`
	}
	status, text := f.ask(http.MethodPost, "/sandbox/create", "", http.NoBody)
	if err := json.Unmarshal([]byte(text), &out); err != nil || status != 200 || out.ID == "" {
		f.t.Fatalf("create: %d %s", status, text)
	}
	f.t.Cleanup(func() { f.ask(http.MethodPost, "/sandbox/"+out.ID+"/close", "", http.NoBody) })
	return out.ID
}

func code(text string) string {
	b, _ := json.Marshal(map[string]string{"code": text}) // a map of texts has a form
	return string(b)
}

func (f *simpleSandbox) upload(id, query, data string) (int, string) {
	f.t.Helper()
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	part, err := w.CreateFormFile("file", "own name.bin")
	if err == nil {
		_, err = io.WriteString(part, data)
	}
	if err != nil || w.Close() != nil {
		f.t.Fatal(err)
	}
	return f.ask(http.MethodPost, "/sandbox/"+id+"/upload"+query, w.FormDataContentType(), &body)
}

// A client of simple_sandbox finds its routes, and nothing but its sandboxes.
func TestSimpleSandbox(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	f := startSimpleSandbox(t, d)
	f.wants(200, `{"status":"healthy"}`, "GET", "/health", "")
	id := f.create()
	at := "/sandbox/" + id
	for _, run := range []struct{ code, answer string }{
		{"x = 6", `{"stdout":[],"stderr":[],"error":null,"results":[]}`},
		{"print('é'); x * 7", `{"stdout":["é\n"],"stderr":[],"error":null,"results":[{"type":"text/plain","data":"42"}]}`},
		{"import sys; sys.stderr.write('no')", `{"stdout":[],"stderr":["no"],"error":null,"results":[{"type":"text/plain","data":"2"}]}`},
		{"raise KeyError('k')", `{"stdout":[],"stderr":[],"error":{"name":"KeyError","value":"'k'","traceback":["Traceback (most recent call last):",` +
			`"  File \"\u003ccell 4\u003e\", line 1, in \u003cmodule\u003e","    raise KeyError('k')","KeyError: 'k'"]},"results":[]}`},
		{
			"class A:\n  def _repr_mimebundle_(self, **k): return {'text/plain': 't', 'image/png': b'p', 'x/y': 1}\nA()",
			`{"stdout":[],"stderr":[],"error":null,"results":[{"type":"text/plain","data":"t"},{"type":"image/png","data":"cA=="},{"type":"x/y","data":1}]}`,
		},
		{"import os; os.getcwd()", `{"stdout":[],"stderr":[],"error":null,"results":[{"type":"text/plain","data":"/sandbox"}]}`},
	} {
		f.wants(200, run.answer, "POST", at+"/execute", code(run.code))
	}

	data := strings.Repeat("\x00\xff\r\n", 1<<18) // 1 MiB
	if status, text := f.upload(id, "?file_path=d/data", data); status != 200 || text != `{"file_path":"/sandbox/d/data"}` {
		t.Errorf("upload: %d %s", status, text)
	}
	if status, text := f.upload(id, "", "own"); status != 200 || text != `{"file_path":"/sandbox/own name.bin"}` {
		t.Errorf("upload: %d %s", status, text)
	}
	for _, query := range []string{"?file_path=../b", "?file_path=/etc/passwd", "?file_path=d/../../etc/b"} {
		if status, text := f.upload(id, query, "x"); status != 403 || text != `{"detail":"File access denied"}` {
			t.Errorf("upload to %s: %d %s", query, status, text)
		}
	}
	f.wants(200, `{"stdout":[],"stderr":[],"error":null,"results":[{"type":"text/plain","data":"1048576"}]}`,
		"POST", at+"/execute", code("len(open('d/data', 'rb').read())"))
	f.wants(200, `[{"path":"d/data","size":1048576},{"path":"own name.bin","size":3}]`, "GET", at+"/files", "")
	if status, text := f.ask("GET", at+"/download/d/data", "", http.NoBody); status != 200 || text != data {
		t.Errorf("download: %d, %d bytes", status, len(text))
	}
	f.wants(200, "own", "GET", at+"/download/own%20name.bin", "")
	f.wants(403, `{"detail":"File access denied"}`, "GET", at+"/download/..%2f..%2fetc/passwd", "")
	f.wants(404, `{"detail":"File not found"}`, "GET", at+"/download/d", "")
	// A link of the code leads to files of its own sandbox only.
	f.wants(200, `{"stdout":[],"stderr":[],"error":null,"results":[]}`, "POST", at+"/execute", code("os.symlink('"+d.DataDir+"', 'host'); os.symlink('/etc/hostname', 'name')"))
	f.wants(404, `{"detail":"File not found"}`, "GET", at+"/download/host/blobs/oci-layout", "")

	var installed struct {
		Success bool   `json:"success"`
		Stderr  string `json:"stderr"`
		Message string `json:"message"`
	}
	status, text := f.ask("POST", at+"/install", "application/json", strings.NewReader(`{"package_name":"--index-url=http://x"}`))
	if err := json.Unmarshal([]byte(text), &installed); err != nil || status != 200 || installed.Success || installed.Stderr == "" || installed.Message == "" {
		t.Errorf("install of an option: %d %s, %v", status, text, err)
	}

	other := d.Create(t, api.CreateSandbox{})
	for _, path := range []string{"/files", "/download/x"} {
		f.wants(404, `{"detail":"Sandbox not found"}`, "GET", "/sandbox/"+other.ID+path, "")
	}
	f.wants(404, `{"detail":"Sandbox not found"}`, "POST", "/sandbox/"+other.ID+"/execute", code("1"))
	f.wants(404, `{"detail":"Sandbox not found"}`, "POST", "/sandbox/"+other.ID+"/close", "")
	forks, err := d.Client(t).Fork(t.Context(), id, api.ForkSandbox{})
	if err != nil {
		t.Fatal(err)
	}
	fork := &forks.Sandboxes[0] // it has the face's labels
	t.Cleanup(func() { _ = d.Client(t).DeleteSandbox(context.WithoutCancel(t.Context()), fork.ID) })
	if fork.Labels["sandboxd.simple-sandbox"] != id {
		t.Errorf("labels of a fork: %v", fork.Labels)
	}
	f.wants(404, `{"detail":"Sandbox not found"}`, "POST", "/sandbox/"+fork.ID+"/execute", code("1"))
	f.wants(404, `{"detail":"Sandbox not found"}`, "POST", "/sandbox/"+fork.ID+"/close", "")
	status, text = f.ask("GET", "/sandboxes", "", http.NoBody)
	var all map[string]struct {
		CreatedAt float64 `json:"created_at"`
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil || status != 200 || all[id].CreatedAt < 1e9 || all[other.ID].CreatedAt != 0 || all[fork.ID].CreatedAt != 0 {
		t.Errorf("sandboxes: %d %s, %v", status, text, err)
	}
	f.wants(200, `{"message":"Sandbox closed","status":"success"}`, "POST", at+"/close", "")
	f.wants(404, `{"detail":"Sandbox not found"}`, "POST", at+"/close", "")
	f.wants(404, `{"detail":"Sandbox not found"}`, "POST", at+"/execute", code("1"))

	for _, args := range [][]string{{"--listen", "0.0.0.0:0"}, {"--listen", "unix:/x"}, {"--listen", "8000"}, {"--timeout", "-1s"}, {"--name", "x"}, {"image"}} {
		if r := d.CLI(t, append([]string{"face", "simple-sandbox"}, args...)...); r.Code != 2 || r.Stderr == "" {
			t.Errorf("%v: %+v", args, r)
		}
	}
	confined, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", f.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"NoNewPrivs:\t1\n", "Seccomp:\t2\n", "CapEff:\t0000000000000000\n"} {
		if !bytes.Contains(confined, []byte(line)) {
			t.Errorf("the face is not confined: no %q in\n%s", line, confined)
		}
	}
}

// A cell that waits holds up nothing else, and a face that is killed meanwhile loses nothing.
func TestSimpleSandboxFaceIsKilled(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	f := startSimpleSandbox(t, d)
	id, second := f.create(), f.create()
	at := "/sandbox/" + id
	const wait = "\nimport os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nos.remove('go')\nx"
	type answer struct {
		status int
		text   string
	}
	begin := func(setup string) chan answer {
		ended := make(chan answer, 1)
		go func() {
			status, text := f.ask("POST", at+"/execute", "application/json", strings.NewReader(code(setup+"; open('begun', 'w').close()"+wait)))
			ended <- answer{status, text}
		}()
		harness.Eventually(t, func() error {
			if status, text := f.ask("GET", at+"/download/begun", "", http.NoBody); status != 200 {
				return fmt.Errorf("%d %s", status, text)
			}
			return nil
		})
		return ended
	}
	cell := begin("x = 41")
	f.wants(200, `{"status":"healthy"}`, "GET", "/health", "")
	f.wants(200, `{"stdout":[],"stderr":[],"error":null,"results":[{"type":"text/plain","data":"2"}]}`, "POST", "/sandbox/"+second+"/execute", code("1 + 1"))
	f.wants(200, `{"message":"Sandbox closed","status":"success"}`, "POST", "/sandbox/"+second+"/close", "")
	if status, text := f.upload(id, "?file_path=go", ""); status != 200 {
		t.Fatalf("upload: %d %s", status, text)
	}
	if got := <-cell; got.status != 200 || !strings.Contains(got.text, `"data":"41"`) {
		t.Errorf("the cell that waited: %d %s", got.status, got.text)
	}
	f.wants(200, `{"stdout":[],"stderr":[],"error":null,"results":[]}`, "POST", at+"/execute", code("os.remove('begun')"))

	cell = begin("x += 1")
	f.kill()
	if got := <-cell; got.status != 0 {
		t.Errorf("a face that was killed answered %d %s", got.status, got.text)
	}
	f = startSimpleSandbox(t, d)
	f.wants(200, `[{"path":"begun","size":0}]`, "GET", at+"/files", "")
	f.wants(200, `{"stdout":[],"stderr":[],"error":null,"results":[{"type":"text/plain","data":"42"}]}`, "POST", at+"/execute", code("x"))
	f.wants(200, `{"message":"Sandbox closed","status":"success"}`, "POST", at+"/close", "")
}
