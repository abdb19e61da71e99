package simplesandbox

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

const token = "0123456789abcdefghijkl"

// stub is a daemon that knows sandboxes and files, and no more.
type stub struct {
	mu        sync.Mutex
	sandboxes map[string]*api.Sandbox
	files     map[string]string // written whole, by path
	contexts  int               // made
	created   int               // sandboxes made
	begun     chan struct{}     // if not nil, runs of code send to it, and end when gate is closed
	gate      chan struct{}
	running   int    // runs of code
	most      int    // of running
	missing   string // context that does not exist
}

func (s *stub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	problem := func(code api.Code, detail string) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(code.Status())
		_ = json.NewEncoder(w).Encode(api.Problem{Code: code, Status: code.Status(), Title: "a title", Detail: detail})
	}
	parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/v1/sandboxes/"), "/")
	s.mu.Lock()
	sb := s.sandboxes[parts[0]]
	s.mu.Unlock()
	var answer any
	switch {
	case r.URL.Path == "/v1/sandboxes" && r.Method == http.MethodPost:
		s.mu.Lock()
		defer s.mu.Unlock()
		s.created++
		made := &api.Sandbox{ID: fmt.Sprintf("made%d", s.created), Cwd: "/sandbox"}
		_ = json.NewDecoder(r.Body).Decode(made)
		s.sandboxes[made.ID] = made
		answer = made
	case r.URL.Path == "/v1/sandboxes":
		s.mu.Lock()
		defer s.mu.Unlock()
		var list api.SandboxList
		for _, sb := range s.sandboxes {
			list.Sandboxes = append(list.Sandboxes, *sb)
		}
		answer = list
	case r.URL.Path == "/v1/system":
		answer = api.SystemInfo{}
	case sb == nil:
		problem(api.CodeNotFound, "find sandbox: there is none")
		return
	case len(parts) == 1 && r.Method == http.MethodPatch:
		var in api.UpdateSandbox
		_ = json.NewDecoder(r.Body).Decode(&in)
		s.mu.Lock()
		changed := *sb
		changed.Labels = map[string]string{}
		maps.Copy(changed.Labels, sb.Labels)
		for k, v := range in.Labels {
			changed.Labels[k] = *v
		}
		s.sandboxes[parts[0]] = &changed
		s.mu.Unlock()
		answer = changed
	case len(parts) == 1:
		answer = sb
	case parts[1] == "contexts":
		s.mu.Lock()
		s.contexts++
		answer = api.Context{ID: fmt.Sprintf("context%d", s.contexts)}
		s.mu.Unlock()
	case parts[1] == "code":
		var in api.CodeRequest
		_ = json.NewDecoder(r.Body).Decode(&in)
		if s.begun != nil {
			s.count(1)
			s.begun <- struct{}{}
			<-s.gate
			s.count(-1)
		}
		if in.Context == s.missing {
			problem(api.CodeNotFound, "find context: there is none")
			return
		}
		if in.Code == "paths" {
			problem(api.CodeInternal, "open /home/ann/.local/share: denied")
			return
		}
		answer = api.CodeResult{Logs: api.CodeLogs{Stdout: in.Context}}
	case parts[1] == "files" && r.Method == http.MethodPut:
		data, err := io.ReadAll(r.Body)
		if err == nil {
			s.mu.Lock()
			s.files[r.URL.Query().Get("path")] = string(data)
			s.mu.Unlock()
		}
		w.WriteHeader(http.StatusNoContent)
		return
	default:
		problem(api.CodeNotFound, "no such file")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer)
}

// count counts runs of code.
func (s *stub) count(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running += n
	s.most = max(s.most, s.running)
}

// newFace returns a face on a stub.
func newFace(t *testing.T) (*Face, *stub) {
	t.Helper()
	s := &stub{files: make(map[string]string), sandboxes: map[string]*api.Sandbox{
		"mine":    {ID: "mine", Cwd: "/sandbox", Labels: map[string]string{labelFace: "mine", labelContext: "c"}},
		"another": {ID: "another", Cwd: "/sandbox"},
		"aname":   {ID: "mine2", Cwd: "/sandbox", Labels: map[string]string{labelFace: "mine2"}},
		"fork":    {ID: "fork", Cwd: "/sandbox", Labels: map[string]string{labelFace: "mine", labelContext: "c"}},
	}}
	socket := filepath.Join(t.TempDir(), "s")
	l, err := new(net.ListenConfig).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: s, ReadHeaderTimeout: time.Minute}}
	server.Start()
	t.Cleanup(server.Close)
	c := client.New(socket)
	t.Cleanup(c.Close)
	return New(Options{Client: c, Token: token}), s
}

// ask sends a request and returns status and detail of the answer.
func ask(f http.Handler, r *http.Request) (int, string) {
	w := httptest.NewRecorder()
	f.ServeHTTP(w, r)
	var out struct {
		Detail json.RawMessage `json:"detail"`
	}
	_ = json.Unmarshal(w.Body.Bytes(), &out)
	return w.Code, string(out.Detail)
}

func request(t *testing.T, method, target, body string) *http.Request {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, target, strings.NewReader(body))
	r.Host = "127.0.0.1:8000"
	r.Header.Set("Authorization", "Bearer "+token)
	return r
}

func TestAdmission(t *testing.T) {
	f, _ := newFace(t)
	for _, tc := range []struct {
		name   string
		change func(*http.Request)
		status int
	}{
		{"bearer", func(*http.Request) {}, 200},
		{"basic", func(r *http.Request) { r.SetBasicAuth("any", token) }, 200},
		{"IPv6", func(r *http.Request) { r.Host = "[::1]:8000" }, 200},
		{"localhost", func(r *http.Request) { r.Host = "localhost" }, 200},
		{"opened by a person", func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "none") }, 200},
		{"no token", func(r *http.Request) { r.Header.Del("Authorization") }, 401},
		{"empty token", func(r *http.Request) { r.Header.Set("Authorization", "Bearer ") }, 401},
		{"beginning of the token", func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token[:21]) }, 401},
		{"more than the token", func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token+"x") }, 401},
		{"another scheme", func(r *http.Request) { r.Header.Set("Authorization", token) }, 401},
		{"token as user", func(r *http.Request) { r.SetBasicAuth(token, "") }, 401},
		{"another site's name", func(r *http.Request) { r.Host = "rebound.example:8000" }, 403},
		{"name like a loopback one", func(r *http.Request) { r.Host = "localhost.example" }, 403},
		{"name of a sandbox's page", func(r *http.Request) { r.Host = "8080-mine.localhost:8000" }, 403},
		{"address of a network", func(r *http.Request) { r.Host = "10.0.0.1:8000" }, 403},
		{"no host", func(r *http.Request) { r.Host = "" }, 403},
		{"web page", func(r *http.Request) { r.Header.Set("Origin", "https://site.example") }, 403},
		{"web page of this host", func(r *http.Request) { r.Header.Set("Origin", "http://127.0.0.1:3000") }, 403},
		{"sandboxed web page", func(r *http.Request) { r.Header.Set("Origin", "null") }, 403},
		{"picture of a web page", func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") }, 403},
	} {
		r := request(t, http.MethodPost, "/sandbox/mine/execute", `{"code":"x"}`)
		tc.change(r)
		if status, detail := ask(f, r); status != tc.status || status != 200 && detail == "" {
			t.Errorf("%s: %d %s, want %d", tc.name, status, detail, tc.status)
		}
	}
}

func TestRequestsThatAreRefused(t *testing.T) {
	f, s := newFace(t)
	huge := `{"code":"` + strings.Repeat("x", maxBody) + `"}`
	for _, tc := range []struct {
		method, path, body string
		status             int
		detail             string
	}{
		{"GET", "/", "", 404, `"Not Found"`},
		{"GET", "/sandbox", "", 404, `"Not Found"`},
		{"GET", "/sandbox/mine", "", 404, `"Not Found"`},
		{"GET", "/sandbox/mine/files/", "", 404, `"Not Found"`},
		{"GET", "/docs", "", 404, `"Not Found"`},
		{"GET", "/sandbox/create", "", 405, `"Method Not Allowed"`},
		{"DELETE", "/sandbox/mine/close", "", 405, `"Method Not Allowed"`},
		{"POST", "/sandbox/mine/download/x", "", 405, `"Method Not Allowed"`},
		{"POST", "/sandbox/none/execute", `{"code":"1"}`, 404, `"Sandbox not found"`},
		{"POST", "/sandbox/another/execute", `{"code":"1"}`, 404, `"Sandbox not found"`},
		{"POST", "/sandbox/another/close", "", 404, `"Sandbox not found"`},
		{"POST", "/sandbox/another/install", `{"package_name":"x"}`, 404, `"Sandbox not found"`},
		{"POST", "/sandbox/another/upload", "", 404, `"Sandbox not found"`},
		{"GET", "/sandbox/another/files", "", 404, `"Sandbox not found"`},
		{"GET", "/sandbox/another/download/x", "", 404, `"Sandbox not found"`},
		{"POST", "/sandbox/fork/execute", `{"code":"1"}`, 404, `"Sandbox not found"`},
		{"POST", "/sandbox/fork/close", "", 404, `"Sandbox not found"`},
		{"POST", "/sandbox/aname/close", "", 404, `"Sandbox not found"`},
		{"POST", "/sandbox//close", "", 404, `"Sandbox not found"`},
		{"POST", "/sandbox/%2e%2e/close", "", 404, `"Sandbox not found"`},
		{"POST", "/sandbox/mine%2f..%2fanother/close", "", 404, `"Not Found"`},
		{"POST", "/sandbox/mine%3fx/close", "", 404, `"Sandbox not found"`},
		{"GET", "/sandbox/mine/download/../../etc/passwd", "", 403, `"File access denied"`},
		{"GET", "/sandbox/mine/download/%2e%2e/x", "", 403, `"File access denied"`},
		{"GET", "/sandbox/mine/download//etc/passwd", "", 403, `"File access denied"`},
		{"GET", "/sandbox/mine/download//sandbox2/x", "", 403, `"File access denied"`},
		{"GET", "/sandbox/mine/download/", "", 403, `"File access denied"`},
		{"GET", "/sandbox/mine/download/a%00b", "", 403, `"File access denied"`},
		{"GET", "/sandbox/mine/download/none", "", 404, `"File not found"`},
		{"POST", "/sandbox/mine/execute", `{}`, 422, `[{"loc":["body","code"],"msg":"Field required","type":"missing"}]`},
		{"POST", "/sandbox/mine/install", `{"code":"1"}`, 422, `[{"loc":["body","package_name"],"msg":"Field required","type":"missing"}]`},
		{"POST", "/sandbox/mine/execute", huge, 413, `"the body is too large"`},
		{"POST", "/sandbox/create", huge, 413, `"the body is too large"`},
		{"POST", "/sandbox/mine/execute", `{"code":"paths"}`, 500, `"the daemon could not do it: a title"`},
	} {
		status, detail := ask(f, request(t, tc.method, tc.path, tc.body))
		if status != tc.status || detail != tc.detail {
			t.Errorf("%s %s: %d %s, want %d %s", tc.method, tc.path, status, detail, tc.status, tc.detail)
		}
	}
	for _, body := range []string{"", "print(1)", `"print(1)"`, `{"code":1}`, `{"code":"1"`, "\xff"} {
		if status, detail := ask(f, request(t, http.MethodPost, "/sandbox/mine/execute", body)); status != 422 || !strings.Contains(detail, "json_invalid") && !strings.Contains(detail, "missing") {
			t.Errorf("body %q: %d %s", body, status, detail)
		}
	}
	if s.contexts != 0 || len(s.files) != 0 {
		t.Errorf("refused requests have made %d contexts and %d files", s.contexts, len(s.files))
	}
}

func TestUploads(t *testing.T) {
	const boundary = "b"
	form := func(name, file, data string) string {
		return "--b\r\nContent-Disposition: form-data; name=\"" + name + "\"; filename=\"" + file + "\"\r\n\r\n" + data + "\r\n--b--\r\n"
	}
	for _, tc := range []struct {
		name, query, body string
		status            int
		written           map[string]string
	}{
		{"file's own name", "", form("file", "a.txt", "x"), 200, map[string]string{"/sandbox/a.txt": "x"}},
		{"file's own path", "", form("file", "d/a.txt", "x"), 200, map[string]string{"/sandbox/d/a.txt": "x"}},
		{"file's own path that leads out", "", form("file", "../../etc/a.txt", "x"), 403, nil},
		{"path", "file_path=d/b", form("file", "a", "\x00\r\n"), 200, map[string]string{"/sandbox/d/b": "\x00\r\n"}},
		{"path whose dots stay inside", "file_path=d/../b", form("file", "a", "x"), 200, map[string]string{"/sandbox/b": "x"}},
		{"absolute path inside", "file_path=/sandbox/b", form("file", "a", "x"), 200, map[string]string{"/sandbox/b": "x"}},
		{"empty file", "file_path=b", form("file", "a", ""), 200, map[string]string{"/sandbox/b": ""}},
		{"second field", "file_path=b", "--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\ny\r\n" + form("file", "a", "x"), 200, map[string]string{"/sandbox/b": "x"}},
		{"path that leads out", "file_path=../b", form("file", "a", "x"), 403, nil},
		{"path that leads out later", "file_path=d/../../b", form("file", "a", "x"), 403, nil},
		{"absolute path outside", "file_path=/etc/passwd", form("file", "a", "x"), 403, nil},
		{"directory itself", "file_path=.", form("file", "a", "x"), 403, nil},
		{"file whose name is no file", "", form("file", "..", "x"), 403, nil},
		{"file without a name", "", form("file", "", "x"), 403, nil},
		{"another field only", "file_path=b", form("data", "a", "x"), 422, nil},
		{"no form", "file_path=b", "x", 422, nil},
		{"form that breaks off", "file_path=b", strings.TrimSuffix(form("file", "a", "xy"), "\r\n--b--\r\n"), 400, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f, s := newFace(t)
			r := request(t, http.MethodPost, "/sandbox/mine/upload?"+tc.query, tc.body)
			r.Header.Set("Content-Type", "multipart/form-data; boundary="+boundary)
			status, detail := ask(f, r)
			if status != tc.status {
				t.Errorf("%d %s, want %d", status, detail, tc.status)
			}
			if tc.written == nil {
				tc.written = map[string]string{}
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			if diff := cmp.Diff(tc.written, s.files); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
}

// TestBodiesThatDoNotCome has clients that announce a body and send no more of it.
func TestBodiesThatDoNotCome(t *testing.T) {
	f, s := newFace(t)
	f.patience = time.Millisecond
	server := httptest.NewServer(f)
	defer server.Close()
	for path, head := range map[string]string{
		"/sandbox/mine/execute": "Content-Length: 100\r\n\r\n{",
		"/sandbox/create":       "Transfer-Encoding: chunked\r\n\r\n",
		"/sandbox/mine/upload?file_path=b": "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 1000\r\n\r\n" +
			"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nbegun",
	} {
		c, err := new(net.Dialer).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n%s", path, token, head)
		answer, err := io.ReadAll(c) // until the face closes it
		if err != nil || !bytes.HasPrefix(answer, []byte("HTTP/1.1 408 ")) {
			t.Errorf("%s: %q, %v", path, answer, err)
		}
		_ = c.Close()
	}
	if len(s.files) != 0 {
		t.Errorf("files %v were written", s.files)
	}
}

// TestContextThatIsLost has many runs at once find their context missing: they share a new one.
func TestContextThatIsLost(t *testing.T) {
	f, s := newFace(t)
	s.missing = "c"
	var runs sync.WaitGroup
	for range 20 {
		runs.Go(func() {
			w := httptest.NewRecorder()
			f.ServeHTTP(w, request(t, http.MethodPost, "/sandbox/mine/execute", `{"code":"x"}`))
			if got, want := w.Body.String(), `{"stdout":["context1"],"stderr":[],"error":null,"results":[]}`; got != want {
				t.Errorf("%d %s, want %s", w.Code, got, want)
			}
		})
	}
	runs.Wait()
	// A request that has read the label before the others began finds what they have made.
	if late, err := f.newContext(t.Context(), "mine", "c"); late != "context1" || err != nil {
		t.Errorf("a late request has context %q, %v", late, err)
	}
	if s.contexts != 1 {
		t.Errorf("%d contexts were made", s.contexts)
	}
}

func TestTranslate(t *testing.T) {
	res := api.CodeResult{
		Logs:    api.CodeLogs{Stdout: "a\nb\n"},
		Failure: &api.CodeFailure{Name: "E", Value: "v", Traceback: "one\n  two\n"},
		Results: []api.CodeValue{
			{Text: "t", HTML: "<b>", PNG: []byte{1}, JSON: map[string]any{"a": 1.0}, Extra: map[string]any{"z/z": "z", "a/a": 1.0}, Main: true},
			{SVG: "<svg>", Extra: "nonsense"},
		},
	}
	got, err := json.Marshal(translate(&res))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"stdout":["a\nb\n"],"stderr":[],"error":{"name":"E","value":"v","traceback":["one","  two"]},"results":[` +
		`{"type":"text/plain","data":"t"},{"type":"text/html","data":"\u003cb\u003e"},{"type":"image/png","data":"AQ=="},` +
		`{"type":"application/json","data":{"a":1}},{"type":"a/a","data":1},{"type":"z/z","data":"z"},{"type":"image/svg+xml","data":"\u003csvg\u003e"}]}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	got, err = json.Marshal(translate(new(api.CodeResult)))
	if err != nil || string(got) != `{"stdout":[],"stderr":[],"error":null,"results":[]}` {
		t.Errorf("an empty run: %s, %v", got, err)
	}
}

func TestWithoutADaemon(t *testing.T) {
	c := client.New(filepath.Join(t.TempDir(), "none"))
	defer c.Close()
	f := New(Options{Client: c, Token: token})
	r := request(t, http.MethodGet, "/health", "")
	r.Header.Del("Authorization")
	if status, detail := ask(f, r); status != 503 || detail != `"no daemon is running"` {
		t.Errorf("%d %s", status, detail)
	}
}

// TestSandboxesAreBounded has clients create sandboxes at once, more than there may be.
func TestSandboxesAreBounded(t *testing.T) {
	f, s := newFace(t)
	delete(s.sandboxes, "aname") // "mine" is one of the face
	var creations sync.WaitGroup
	for range 2 * maxSandboxes {
		creations.Go(func() { ask(f, request(t, http.MethodPost, "/sandbox/create", "{}")) })
	}
	creations.Wait()
	if s.created >= maxSandboxes {
		t.Errorf("%d sandboxes were made beside one", s.created)
	}
	for s.created < maxSandboxes-1 { // those that were counted twice, as being made and as made
		if status, detail := ask(f, request(t, http.MethodPost, "/sandbox/create", "{}")); status != 200 {
			t.Fatalf("sandbox %d: %d %s", s.created+2, status, detail)
		}
	}
	const full = `"there are 64 sandboxes, and no more are possible: close one"`
	if status, detail := ask(f, request(t, http.MethodPost, "/sandbox/create", "{}")); status != 429 || detail != full {
		t.Errorf("one too many: %d %s", status, detail)
	}
	delete(s.sandboxes, "made1")
	if status, detail := ask(f, request(t, http.MethodPost, "/sandbox/create", "{}")); status != 200 {
		t.Errorf("in the place of another: %d %s", status, detail)
	}
	if got := s.sandboxes["made2"].Labels; got[labelFace] != "made2" || !strings.HasPrefix(got[labelContext], "context") {
		t.Errorf("labels of a new sandbox: %v", got)
	}
}

// TestCallsAreBounded has more runs at once than may be: the others wait, and health answers.
func TestCallsAreBounded(t *testing.T) {
	f, s := newFace(t)
	s.begun, s.gate = make(chan struct{}), make(chan struct{})
	var runs sync.WaitGroup
	for range 2 * maxCalls {
		runs.Go(func() {
			if status, detail := ask(f, request(t, http.MethodPost, "/sandbox/mine/execute", `{"code":"x"}`)); status != 200 {
				t.Errorf("%d %s", status, detail)
			}
		})
	}
	for range maxCalls {
		<-s.begun
	}
	if status, detail := ask(f, request(t, http.MethodGet, "/health", "")); status != 200 {
		t.Errorf("health: %d %s", status, detail)
	}
	close(s.gate)
	for range maxCalls {
		<-s.begun
	}
	runs.Wait()
	if s.most > maxCalls {
		t.Errorf("%d runs at once", s.most)
	}
}
