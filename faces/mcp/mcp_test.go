package mcp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

func TestMain(m *testing.M) { servicetest.Main(m) }

// face is a face of a daemon on the engine in memory.
func face(t *testing.T, opts Options) (*Server, *client.Client) {
	t.Helper()
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	c := client.New(r.D.Socket())
	t.Cleanup(c.Close)
	var err error
	if opts.URLs, err = new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	opts.Client = c
	s := New(opts)
	t.Cleanup(s.Close)
	return s, c
}

// connect connects a client in memory.
func connect(t *testing.T, s *Server) *mcp.ClientSession {
	t.Helper()
	ours, theirs := mcp.NewInMemoryTransports()
	if _, err := s.mcp.Connect(t.Context(), ours, nil); err != nil {
		t.Fatal(err)
	}
	cs, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), theirs, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cs.Close() }) // it may be closed
	return cs
}

// must calls a tool, which must succeed, and returns its output.
func must(t *testing.T, cs *mcp.ClientSession, name string, args map[string]any) map[string]any {
	t.Helper()
	res, err := cs.CallTool(t.Context(), &mcp.CallToolParams{Name: name, Arguments: args})
	if err != nil || res.IsError {
		t.Fatalf("%s: %+v, %v", name, res, err)
	}
	out, _ := res.StructuredContent.(map[string]any)
	return out
}

// gone waits until the daemon has no sandbox.
func gone(t *testing.T, c *client.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	for {
		all, err := c.ListSandboxes(ctx, client.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(all) == 0 {
			return
		}
	}
}

func TestSandboxesEndWithTheirSession(t *testing.T) {
	s, c := face(t, Options{})
	one, other := connect(t, s), connect(t, s)
	must(t, one, "sandbox_create", map[string]any{"name": "first"})
	must(t, one, "sandbox_create", nil)
	must(t, other, "sandbox_create", map[string]any{"name": "others"})
	if got := must(t, one, "sandbox_list", nil)["sandboxes"].([]any); len(got) != 2 {
		t.Errorf("a session sees %v", got)
	}
	if err := one.Close(); err != nil {
		t.Error(err)
	}
	for {
		all, err := c.ListSandboxes(t.Context(), client.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(all) == 1 && all[0].Name == "others" && all[0].Labels[labelKey] == labelSession {
			break
		}
	}
	s.Close()
	gone(t, c)
}

func TestSandboxesOfASessionAreBounded(t *testing.T) {
	s, _ := face(t, Options{})
	cs := connect(t, s)
	for range maxSandboxes {
		must(t, cs, "sandbox_create", nil)
	}
	res, err := cs.CallTool(t.Context(), &mcp.CallToolParams{Name: "sandbox_create"})
	if err != nil || !res.IsError {
		t.Errorf("%+v, %v", res, err)
	}
	name := must(t, cs, "sandbox_list", nil)["sandboxes"].([]any)[0].(map[string]any)["name"]
	must(t, cs, "sandbox_kill", map[string]any{"sandbox": name})
	must(t, cs, "sandbox_create", nil)
}

// The operator's request is the most that a tool can have.
func TestLowered(t *testing.T) {
	s, _ := face(t, Options{Images: []string{"python:3"}, Sandbox: api.CreateSandbox{
		Name: "own", Image: "debian:12", Profile: "hardened", Env: []string{"A=1"}, Limits: api.Limits{Memory: 256 << 20, CPUs: 2},
		Network: api.Network{Mode: api.NetworkEgress, Policy: "p"},
		Ports:   []api.PortMapping{{HostPort: 8080, Port: 80}, {Socket: "s", Port: 81}},
	}})
	for name, tc := range map[string]struct {
		in      createIn
		refused string
		check   func(api.CreateSandbox) bool
	}{
		"nothing": {in: createIn{}, check: func(r api.CreateSandbox) bool {
			return r.Name == "" && r.Image == "debian:12" && r.Profile == "hardened"
		}},
		"ports of its own":    {in: createIn{}, check: func(r api.CreateSandbox) bool { return len(r.Ports) == 1 && r.Ports[0].HostPort == 0 }},
		"the same image":      {in: createIn{Image: "debian:12"}, check: func(r api.CreateSandbox) bool { return r.Image == "debian:12" }},
		"an allowed image":    {in: createIn{Image: "python:3"}, check: func(r api.CreateSandbox) bool { return r.Image == "python:3" && r.Profile == "hardened" }},
		"another image":       {in: createIn{Image: "python:3@sha256:0"}, refused: "not allowed"},
		"the host's image":    {in: createIn{Image: "host"}, refused: "not allowed"},
		"less memory":         {in: createIn{MemoryMB: 64}, check: func(r api.CreateSandbox) bool { return r.Limits.Memory == 64<<20 }},
		"as much memory":      {in: createIn{MemoryMB: 256}, check: func(r api.CreateSandbox) bool { return r.Limits.Memory == 256<<20 }},
		"more memory":         {in: createIn{MemoryMB: 257}, refused: "at most 256"},
		"memory that wraps":   {in: createIn{MemoryMB: 1 << 44}, refused: "no size"},
		"less than no memory": {in: createIn{MemoryMB: -1}, refused: "no size"},
		"fewer cores":         {in: createIn{CPUs: 0.5}, check: func(r api.CreateSandbox) bool { return r.Limits.CPUs == 0.5 }},
		"more cores":          {in: createIn{CPUs: 2.5}, refused: "at most 2"},
		"no network": {in: createIn{Network: "none"}, check: func(r api.CreateSandbox) bool {
			return r.Network.Mode == api.NetworkNone && r.Network.Policy == "" && r.Ports == nil
		}},
		"more network":       {in: createIn{Network: "full"}, refused: "operator"},
		"variables":          {in: createIn{Env: map[string]string{"C": "3", "B": "2"}}, check: func(r api.CreateSandbox) bool { return slices.Equal(r.Env, []string{"A=1", "B=2", "C=3"}) }},
		"a wrong variable":   {in: createIn{Env: map[string]string{"": "x"}}, refused: "env"},
		"too many variables": {in: createIn{Env: map[string]string{"X": strings.Repeat("x", maxEnv)}}, refused: "more than"},
		"both origins":       {in: createIn{Image: "python:3", Snapshot: "s"}, refused: "exclude"},
	} {
		req, err := s.lowered(t.Context(), tc.in)
		switch {
		case tc.refused != "" && (err == nil || !strings.Contains(err.Error(), tc.refused)):
			t.Errorf("%s: %v, want %q", name, err, tc.refused)
		case tc.refused == "" && (err != nil || !tc.check(req)):
			t.Errorf("%s: %+v, %v", name, req, err)
		}
	}
	if own := s.opts.Sandbox; own.Ports[0].HostPort != 8080 || len(own.Ports) != 2 || !slices.Equal(own.Env, []string{"A=1"}) {
		t.Errorf("the operator's request was changed: %+v", own)
	}
}

// A tool cannot choose a value that the operator has not bounded.
func TestLoweredWithoutLimits(t *testing.T) {
	s, _ := face(t, Options{})
	for _, in := range []createIn{{MemoryMB: 1}, {CPUs: 0.1}, {Image: "debian:12"}} {
		if req, err := s.lowered(t.Context(), in); err == nil {
			t.Errorf("%+v became %+v", in, req)
		}
	}
	if _, err := s.lowered(t.Context(), createIn{Image: "host"}); err != nil {
		t.Error(err)
	}
}

func TestMiddle(t *testing.T) {
	for _, piece := range []int{1, 7, 4096, half, half + 1, maxOutput, 3 * maxOutput} {
		for _, total := range []int{0, 1, half, half + 1, maxOutput - 1, maxOutput, maxOutput + 1, 5 * maxOutput} {
			all := bytes.Repeat([]byte("0123456789abcdef\n"), total/17+1)[:total]
			var m middle
			for rest := all; len(rest) > 0; {
				n := min(piece, len(rest))
				m.add(rest[:n])
				rest = rest[n:]
			}
			text, want := m.String(), string(all)
			if total > maxOutput {
				want = fmt.Sprintf("%s\n[... %d bytes are left out ...]\n%s", all[:half], total-maxOutput, all[total-half:])
			}
			if text != want || m.omitted() != int64(max(0, total-maxOutput)) {
				t.Errorf("%d bytes in pieces of %d: %d bytes, %d omitted", total, piece, len(text), m.omitted())
			}
		}
	}
}

// Paths of the host, and the daemon's own troubles, are no business of a model.
func TestErrorsNameNoPathOfTheHost(t *testing.T) {
	s, _ := face(t, Options{HostPaths: []string{"/srv/data", "/"}})
	problem := func(code api.Code, detail string) error {
		return &api.Problem{Code: code, Title: "title", Detail: detail, Hint: "hint"}
	}
	for _, tc := range []struct {
		err  error
		want string
	}{
		{problem(api.CodeNotFound, "file /x: not there"), "file /x: not there"},
		{fmt.Errorf("read: %w", problem(api.CodeInvalid, "bad /srv/data/y")), "read: bad (a directory of the daemon)/y"},
		{problem(api.CodeInternal, "open /srv/data/z"), "the daemon could not do it: title"},
		{&client.NotRunning{Socket: "/run/s"}, "no daemon is running; the user starts one with any command of sandboxd"},
		{fmt.Errorf("call: %w", context.Canceled), "cancelled"},
		{errors.New("bad \xff"), "bad \uFFFD"},
	} {
		if got := s.explain(tc.err).Error(); got != tc.want {
			t.Errorf("%v: %q, want %q", tc.err, got, tc.want)
		}
	}
	if got := s.explain(errors.New(strings.Repeat("x", 1<<20))).Error(); len(got) > maxError+3 {
		t.Errorf("an error of %d bytes", len(got))
	}
}

// read reads all messages of an input, and returns their number and the lines that were answered.
func read(t testing.TB, input []byte) (messages int, answers []string, err error) {
	t.Helper()
	var out bytes.Buffer
	l := newLines(io.NopCloser(bytes.NewReader(input)), &out)
	for {
		_, err := l.Read(t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		messages++
	}
	_ = l.Close()
	for line := range strings.Lines(out.String()) {
		answers = append(answers, line)
	}
	return messages, answers, l.failed()
}

const ping = `{"jsonrpc":"2.0","id":1,"method":"ping"}`

func TestLines(t *testing.T) {
	long := strings.Repeat("x", maxMessage)
	for name, tc := range map[string]struct {
		input             string
		messages, refused int
	}{
		"nothing":             {"", 0, 0},
		"one":                 {ping + "\n", 1, 0},
		"without an end":      {ping, 1, 0},
		"carriage returns":    {ping + "\r\n" + ping + "\r\n", 2, 0},
		"empty lines":         {"\n\n \n" + ping + "\n\n", 1, 0},
		"nonsense between":    {ping + "\nnonsense\n" + ping + "\n", 2, 1},
		"two on a line":       {ping + ping + "\n" + ping + "\n", 1, 1},
		"too long":            {long + "xx\n" + ping + "\n", 1, 1},
		"too long at the end": {ping + "\n" + long + "xx", 1, 1},
	} {
		n, answers, err := read(t, []byte(tc.input))
		if err != nil || n != tc.messages || len(answers) != tc.refused {
			t.Errorf("%s: %d messages, %q, %v", name, n, answers, err)
		}
	}
}

// FuzzLines reads any input: each line is a message, or is refused in a line of JSON.
func FuzzLines(f *testing.F) {
	f.Add([]byte(ping + "\n"))
	f.Add([]byte("[" + ping + "]\nx\n\n{}\n"))
	f.Add([]byte("{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"\"}\r\n\xff\x00"))
	f.Fuzz(func(t *testing.T, input []byte) {
		n, answers, err := read(t, input)
		if err != nil {
			t.Fatal(err)
		}
		want := 0
		for line := range bytes.SplitSeq(input, []byte("\n")) {
			if len(bytes.TrimSpace(line)) > 0 {
				want++
			}
		}
		if n+len(answers) != want {
			t.Errorf("%d lines, %d messages and %d refusals", want, n, len(answers))
		}
		for _, a := range answers {
			if !json.Valid([]byte(a)) {
				t.Errorf("refused with %q", a)
			}
		}
	})
}

// post sends a request over HTTP and returns its answer, with the session.
func post(t *testing.T, h http.Handler, session, body string) *httptest.ResponseRecorder {
	t.Helper()
	req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, Path, strings.NewReader(body))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	if session != "" {
		req.Header.Set(sessionHeader, session)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w
}

const hello = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"x","version":"1"}}}`

const creation = `{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"sandbox_create","arguments":{}}}`

// A client over HTTP that says nothing more has no sandbox for long. One that listens keeps it.
func TestLostClientEnds(t *testing.T) {
	s, c := face(t, Options{})
	h := s.endpoint("", time.Millisecond, time.Millisecond)
	for _, listens := range []bool{false, true} {
		// The sandbox is made before the session's grace begins: a request that listens is open.
		session := ""
		for session == "" || post(t, h, session, creation).Code != http.StatusOK {
			session = post(t, h, "", hello).Header().Get(sessionHeader)
			if !listens {
				continue
			}
			ctx, leave := context.WithCancel(t.Context())
			req := httptest.NewRequestWithContext(ctx, http.MethodGet, Path, http.NoBody)
			req.Header.Set("Accept", "text/event-stream")
			req.Header.Set(sessionHeader, session)
			done := make(chan struct{})
			go func() {
				defer close(done)
				h.ServeHTTP(httptest.NewRecorder(), req)
			}()
			post(t, h, session, creation)
			leave()
			<-done
		}
		gone(t, c)
		if w := post(t, h, session, creation); w.Code != http.StatusNotFound {
			t.Errorf("a session that has ended: %d %s", w.Code, w.Body)
		}
	}
}

func TestSessionsAreBounded(t *testing.T) {
	s, _ := face(t, Options{})
	h := s.Handler("")
	first := ""
	for range maxSessions {
		w := post(t, h, "", hello)
		if w.Code != http.StatusOK {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
		first = w.Header().Get(sessionHeader)
	}
	if w := post(t, h, "", hello); w.Code != http.StatusServiceUnavailable {
		t.Errorf("one more: %d %s", w.Code, w.Body)
	}
	req := httptest.NewRequestWithContext(t.Context(), http.MethodDelete, Path, http.NoBody)
	req.Header.Set(sessionHeader, first)
	w := httptest.NewRecorder()
	if h.ServeHTTP(w, req); w.Code != http.StatusNoContent {
		t.Errorf("delete: %d %s", w.Code, w.Body)
	}
	if w := post(t, h, "", hello); w.Code != http.StatusOK {
		t.Errorf("after one has ended: %d %s", w.Code, w.Body)
	}
	// What opens no session counts as none.
	for range 2 * maxSessions {
		post(t, h, "unknown", hello)
	}
}

func TestToken(t *testing.T) {
	s, _ := face(t, Options{})
	h := s.Handler("secret")
	for header, want := range map[string]int{"": 401, "secret": 401, "Bearer": 401, "Bearer ": 401, "Bearer secre": 401, "Bearer secret ": 401, "bearer secret": 401, "Bearer secret": 404} {
		req := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
		req.Header.Set("Authorization", header)
		w := httptest.NewRecorder()
		if h.ServeHTTP(w, req); w.Code != want {
			t.Errorf("%q: %d, want %d", header, w.Code, want)
		}
	}
}

func TestOrigin(t *testing.T) {
	for origin, want := range map[string]bool{
		"": true, "http://localhost": true, "http://127.0.0.1:3000": true, "http://[::1]:1": true, "https://localhost:5": true,
		"null": false, "http://example.com": false, "http://localhost.example.com": false, "http://127.0.0.1.example.com": false,
		"file://localhost": false, "http://user@example.com": false, "://": false, "http://10.0.0.1": false,
	} {
		if fromHere(origin) != want {
			t.Errorf("%q: %v", origin, !want)
		}
	}
}

func TestDoorHasNames(t *testing.T) {
	s, _ := face(t, Options{})
	at, err := s.door.add(target{"abc", 80})
	if err != nil {
		t.Fatal(err)
	}
	host := strings.TrimSuffix(strings.TrimPrefix(at, "http://"), "/")
	for name, want := range map[string]bool{host: true, "80-ABC.localhost": true, "81-abc.localhost": false, "127.0.0.1": false, "": false, "80-abc.localhost.example.com": false} {
		if _, ok := s.door.target(name); ok != want {
			t.Errorf("%q: %v", name, ok)
		}
	}
	s.door.forget("abc")
	if _, ok := s.door.target(host); ok {
		t.Error("a sandbox that is gone has its port")
	}
	for i := range maxTargets {
		if _, err := s.door.add(target{"x", uint16(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.door.add(target{"y", 1}); err == nil {
		t.Error("there is no bound")
	}
}

func TestAsText(t *testing.T) {
	for _, tc := range []struct {
		data, want string
		cut, ok    bool
	}{
		{"plain", "plain", false, true},
		{"", "", true, true},
		{"a\xc3", "a", true, true},
		{"a\xe2\x82", "a", true, true},
		{"a€", "a€", true, true},
		{"a\xc3", "a\xc3", false, false},
		{"a\xffb", "a\xffb", true, false},
		{"a\x00b", "a\x00b", false, false},
	} {
		if got, ok := asText([]byte(tc.data), tc.cut); got != tc.want || ok != tc.ok {
			t.Errorf("%q, %v: %q, %v", tc.data, tc.cut, got, ok)
		}
	}
}
