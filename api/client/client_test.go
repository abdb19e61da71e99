package client_test

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
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/dirs"
)

// listen starts an HTTP server on a Unix socket and returns a client for it.
func listen(t *testing.T, h http.Handler) *client.Client {
	t.Helper()
	return listenAt(t, filepath.Join(shortDir(t), "api.sock"), h)
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sbx") //nolint:usetesting // t.TempDir is too long for a socket's address
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func listenAt(t *testing.T, socket string, h http.Handler) *client.Client {
	t.Helper()
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(h)
	s.Listener = l
	s.Start()
	c := client.New(socket)
	t.Cleanup(func() {
		c.Close()
		s.Close()
	})
	return c
}

func answer(w http.ResponseWriter, typ string, status int, body string) {
	w.Header().Set("Content-Type", typ)
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

// TestRoutes checks the table of routes in both directions: the requests that the client sends, and
// its results.
func TestRoutes(t *testing.T) {
	created := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	sandbox := api.Sandbox{ID: "abc123", Name: "n", State: api.StateRunning, CreatedAt: created}
	tests := []struct {
		name       string
		call       func(context.Context, *client.Client) (any, error)
		method     string
		uri        string
		accept     string
		send       string // expected body; JSON is compared as JSON
		answerType string
		status     int
		answer     string
		want       any
	}{
		{
			name:   "health",
			call:   func(ctx context.Context, c *client.Client) (any, error) { return nil, c.Health(ctx) },
			method: "GET", uri: "/healthz", answerType: "text/plain", status: 200, answer: "ok",
		},
		{
			name:   "system",
			call:   func(ctx context.Context, c *client.Client) (any, error) { return c.System(ctx) },
			method: "GET", uri: "/v1/system", status: 200, answer: `{"version":"1","uid":7}`,
			want: &api.SystemInfo{Version: "1", UID: 7},
		},
		{
			name:   "checks",
			call:   func(ctx context.Context, c *client.Client) (any, error) { return c.Checks(ctx) },
			method: "GET", uri: "/v1/system/checks", status: 200, answer: `{"checks":[{"name":"x","ok":true}]}`,
			want: []api.Check{{Name: "x", OK: true}},
		},
		{
			name: "shutdown",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return nil, c.Shutdown(ctx, api.Shutdown{KeepSandboxes: true})
			},
			method: "POST", uri: "/v1/system/shutdown", send: `{"keep_sandboxes":true}`, status: 202,
		},
		{
			name: "create",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return c.CreateSandbox(ctx, api.CreateSandbox{Image: "host", Env: []string{"A=b"}})
			},
			method: "POST", uri: "/v1/sandboxes", send: `{"image":"host","env":["A=b"]}`, status: 201,
			answer: `{"id":"abc123","name":"n","state":"running","created_at":"2026-01-02T03:04:05Z"}`, want: &sandbox,
		},
		{
			name:   "get",
			call:   func(ctx context.Context, c *client.Client) (any, error) { return c.GetSandbox(ctx, "abc123") },
			method: "GET", uri: "/v1/sandboxes/abc123", status: 200,
			answer: `{"id":"abc123","name":"n","state":"running","created_at":"2026-01-02T03:04:05Z"}`, want: &sandbox,
		},
		{
			name:   "an id with a slash stays one segment",
			call:   func(ctx context.Context, c *client.Client) (any, error) { return c.GetSandbox(ctx, "a/../b?c#d") },
			method: "GET", uri: "/v1/sandboxes/a%2F..%2Fb%3Fc%23d", status: 200, answer: `{"id":"x"}`, want: &api.Sandbox{ID: "x"},
		},
		{
			name: "list",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return c.ListSandboxes(ctx, client.ListOptions{Labels: []string{"a=b", "c=d e"}})
			},
			method: "GET", uri: "/v1/sandboxes?label=a%3Db&label=c%3Dd+e", status: 200,
			answer: `{"sandboxes":[{"id":"abc123","name":"n","state":"running","created_at":"2026-01-02T03:04:05Z"}]}`, want: []api.Sandbox{sandbox},
		},
		{
			name:   "delete",
			call:   func(ctx context.Context, c *client.Client) (any, error) { return nil, c.DeleteSandbox(ctx, "abc123") },
			method: "DELETE", uri: "/v1/sandboxes/abc123", status: 204,
		},
		{
			name: "prune",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				none := 0.0
				return c.PruneSandboxes(ctx, api.PruneSandboxes{OlderThan: &none, Labels: map[string]string{"a": "b"}})
			},
			method: "POST", uri: "/v1/sandboxes/prune", send: `{"older_than":0,"labels":{"a":"b"}}`, status: 200,
			answer: `{"removed":[{"id":"abc123","name":"n"}],"recent":2}`,
			want:   &api.SandboxesRemoved{Removed: []api.SandboxRef{{ID: "abc123", Name: "n"}}, Recent: 2},
		},
		{
			name: "prune snapshots",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				day := 86400.0
				return c.PruneSnapshots(ctx, api.PruneSnapshots{OlderThan: &day})
			},
			method: "POST", uri: "/v1/snapshots/prune", send: `{"older_than":86400}`, status: 200, answer: `{"removed":["n"],"bytes":7}`,
			want: &api.SnapshotsRemoved{Removed: []string{"n"}, Bytes: 7},
		},
		{
			name: "exec, buffered",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return c.Exec(ctx, "abc", api.ExecRequest{Argv: []string{"sh"}, Stdin: []byte("hi")})
			},
			method: "POST", uri: "/v1/sandboxes/abc/exec", accept: api.TypeJSON, send: `{"argv":["sh"],"stdin":"aGk="}`, status: 200,
			answer: `{"exit":{"code":3},"usage":{"wall_ms":1,"cpu_ms":2},"stdout":"o","stderr":""}`,
			want:   &api.ExecResult{Exit: api.Exit{Code: 3}, Usage: api.Usage{WallMS: 1, CPUMS: 2}, Stdout: "o"},
		},
		{
			name: "run",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return c.Run(ctx, api.RunRequest{Sandbox: api.CreateSandbox{Image: "i"}, Exec: api.ExecRequest{Argv: []string{"x"}}})
			},
			method: "POST", uri: "/v1/run", accept: api.TypeJSON, send: `{"sandbox":{"image":"i"},"exec":{"argv":["x"]}}`, status: 200,
			answer: `{"exit":{"code":0},"usage":{"wall_ms":0,"cpu_ms":0},"stdout":"","stderr":"e"}`,
			want:   &api.ExecResult{Stderr: "e"},
		},
		{
			name: "exec, streamed",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				var got []api.ExecEvent
				_, err := c.ExecStream(ctx, "abc", api.ExecRequest{Argv: []string{"x"}}, func(e api.ExecEvent) error {
					got = append(got, e)
					return nil
				})
				return got, err
			},
			method: "POST", uri: "/v1/sandboxes/abc/exec", accept: api.TypeNDJSON, send: `{"argv":["x"]}`,
			answerType: api.TypeNDJSON, status: 200,
			answer: "{\"pid\":2}\n\n{\"stream\":\"stdout\",\"text\":\"hi\"}\n{\"stream\":\"stderr\",\"data\":\"/w==\"}\n{\"exit\":{\"code\":1},\"usage\":{\"wall_ms\":5,\"cpu_ms\":1}}\n",
			want: []api.ExecEvent{
				{PID: 2},
				{Stream: "stdout", Text: "hi"},
				{Stream: "stderr", Data: []byte{0xff}},
				{Exit: &api.Exit{Code: 1}, Usage: &api.Usage{WallMS: 5, CPUMS: 1}},
			},
		},
		{
			name: "run, streamed: the end",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return c.RunStream(ctx, api.RunRequest{}, func(api.ExecEvent) error { return nil })
			},
			method: "POST", uri: "/v1/run", accept: api.TypeNDJSON, answerType: api.TypeNDJSON, status: 200,
			answer: `{"exit":{"code":137,"signal":"SIGKILL","timeout":true}}`, // no newline at the end
			want:   &client.End{Exit: api.Exit{Code: 137, Signal: "SIGKILL", Timeout: true}},
		},
		{
			name: "read a file",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return slurp(c.ReadFile(ctx, "abc", "/a b"))
			},
			method: "GET", uri: "/v1/sandboxes/abc/files?path=%2Fa+b", answerType: api.TypeBytes, status: 200, answer: "\x00\x01", want: "\x00\x01",
		},
		{
			name: "write a file",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return nil, c.WriteFile(ctx, "abc", "/x", strings.NewReader("data"), 0o750, "1000:1000")
			},
			method: "PUT", uri: "/v1/sandboxes/abc/files?mode=0750&path=%2Fx&user=1000%3A1000", send: "data", status: 204,
		},
		{
			name: "write an empty file",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return nil, c.WriteFile(ctx, "abc", "/x", strings.NewReader(""), 0, "")
			},
			method: "PUT", uri: "/v1/sandboxes/abc/files?path=%2Fx", status: 204,
		},
		{
			name: "append to a file",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return nil, c.AppendFile(ctx, "abc", "/x", strings.NewReader("data"), 0, "")
			},
			method: "PUT", uri: "/v1/sandboxes/abc/files?append=true&path=%2Fx", send: "data", status: 204,
		},
		{
			name: "read a part of a file",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return slurp(c.ReadFileRange(ctx, "abc", "/x", 4, 2))
			},
			method: "GET", uri: "/v1/sandboxes/abc/files?path=%2Fx", answerType: api.TypeBytes, status: 206, answer: "ab", want: "ab",
		},
		{
			name: "remove a tree",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return nil, c.RemoveFile(ctx, "abc", "/x", true)
			},
			method: "DELETE", uri: "/v1/sandboxes/abc/files?path=%2Fx&recursive=true", status: 204,
		},
		{
			name: "stat",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return c.StatFile(ctx, "abc", "/\xff", true)
			},
			method: "GET", uri: "/v1/sandboxes/abc/stat?follow=true&path=%2F%FF", status: 200,
			answer: `{"path":"/\ufffd","path_bytes":"L/8=","type":"file","mode":"0644"}`,
			want:   &api.FileEntry{Path: "/\uFFFD", PathBytes: []byte("/\xff"), Type: api.TypeFile, Mode: "0644"},
		},
		{
			name: "list",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return c.ListFiles(ctx, "abc", "/d", 3)
			},
			method: "GET", uri: "/v1/sandboxes/abc/list?depth=3&path=%2Fd", status: 200,
			answer: `{"entries":[{"path":"/d/f"}],"more":true}`, want: &api.FileList{Entries: []api.FileEntry{{Path: "/d/f"}}, More: true},
		},
		{
			name: "list as it is read",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				var got []string
				more, err := c.ListEachFile(ctx, "abc", "/d", 1, func(e api.FileEntry) error { got = append(got, e.Path); return nil })
				return []any{got, more}, err
			},
			method: "GET", uri: "/v1/sandboxes/abc/list?depth=1&path=%2Fd", accept: api.TypeNDJSON, answerType: api.TypeNDJSON, status: 200,
			answer: `{"entry":{"path":"/d/f"}}` + "\n" + `{"done":true,"more":true}` + "\n", want: []any{[]string{"/d/f"}, true},
		},
		{
			name: "make a directory",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return nil, c.MakeDirectory(ctx, "abc", api.MakeDirectory{Path: "/d", Parents: true})
			},
			method: "POST", uri: "/v1/sandboxes/abc/mkdir", send: `{"path":"/d","parents":true}`, status: 204,
		},
		{
			name: "move",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return nil, c.MoveFile(ctx, "abc", api.MoveFile{From: "/a", To: "/b", Overwrite: true})
			},
			method: "POST", uri: "/v1/sandboxes/abc/move", send: `{"from":"/a","to":"/b","overwrite":true}`, status: 204,
		},
		{
			name: "watch",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				var got []api.FileChange
				err := c.WatchFiles(ctx, "abc", "/d", true, func(e api.FileChange) error { got = append(got, e); return nil })
				return got, err
			},
			method: "GET", uri: "/v1/sandboxes/abc/watch?path=%2Fd&recursive=true", accept: api.TypeNDJSON, answerType: api.TypeNDJSON, status: 200,
			answer: `{"kind":"ready","path":"/d"}` + "\n" + `{"kind":"moved","from":"/d/a","to":"/d/b"}` + "\n",
			want:   []api.FileChange{{Kind: api.WatchReady, Path: "/d"}, {Kind: api.FileMoved, From: "/d/a", To: "/d/b"}},
		},
		{
			name: "archive out",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return slurp(c.ArchiveOut(ctx, "abc", "/d"))
			},
			method: "GET", uri: "/v1/sandboxes/abc/archive?path=%2Fd", accept: api.TypeTar, answerType: api.TypeTar, status: 200, answer: "tar", want: "tar",
		},
		{
			name: "archive in",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				return nil, c.ArchiveIn(ctx, "abc", "/d", strings.NewReader("tar"))
			},
			method: "PUT", uri: "/v1/sandboxes/abc/archive?path=%2Fd", send: "tar", status: 204,
		},
		{
			name:   "images",
			call:   func(ctx context.Context, c *client.Client) (any, error) { return c.Images(ctx) },
			method: "GET", uri: "/v1/images", status: 200, answer: `{"images":[{"reference":"r"}]}`, want: []api.Image{{Reference: "r"}},
		},
		{
			name: "pull",
			call: func(ctx context.Context, c *client.Client) (any, error) {
				var got []api.PullEvent
				img, err := c.Pull(ctx, api.PullImage{Reference: "r", Insecure: true}, func(e api.PullEvent) { got = append(got, e) })
				return []any{img, got}, err
			},
			method: "POST", uri: "/v1/images/pull", send: `{"reference":"r","insecure":true}`, answerType: api.TypeNDJSON, status: 200,
			answer: `{"layer":"sha256:1","status":"downloading","bytes":1,"total":2}` + "\n" + `{"image":{"reference":"r:latest"}}` + "\n",
			want: []any{&api.Image{Reference: "r:latest"}, []api.PullEvent{
				{Layer: "sha256:1", Status: "downloading", Bytes: 1, Total: 2},
				{Image: &api.Image{Reference: "r:latest"}},
			}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var served atomic.Bool
			c := listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				served.Store(true)
				if r.Method != tt.method || r.RequestURI != tt.uri {
					t.Errorf("got %s %s, want %s %s", r.Method, r.RequestURI, tt.method, tt.uri)
				}
				if got := r.Header.Get("Accept"); tt.accept != "" && got != tt.accept {
					t.Errorf("Accept: %q, want %q", got, tt.accept)
				}
				body, err := io.ReadAll(r.Body)
				if err != nil {
					t.Errorf("read the body: %v", err)
				}
				if tt.send != "" {
					sameBody(t, tt.send, body, r.Header.Get("Content-Type"))
				}
				typ := tt.answerType
				if typ == "" {
					typ = api.TypeJSON + "; charset=utf-8"
				}
				answer(w, typ, tt.status, tt.answer)
			}))
			got, err := tt.call(t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			if !served.Load() {
				t.Error("no request arrived")
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
		})
	}
}

func slurp(r io.ReadCloser, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	return string(b), err
}

func sameBody(t *testing.T, want string, got []byte, typ string) {
	t.Helper()
	if typ != api.TypeJSON {
		if string(got) != want {
			t.Errorf("body %q, want %q", got, want)
		}
		return
	}
	var a, b any
	if err := errors.Join(json.Unmarshal([]byte(want), &a), json.Unmarshal(got, &b)); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(a, b); diff != "" {
		t.Errorf("body (-want +got):\n%s", diff)
	}
}

// Every code survives the way through the daemon's answer into an error, on every kind of route.
func TestProblems(t *testing.T) {
	codes := []api.Code{
		api.CodeInvalid, api.CodeTooLarge, api.CodeForbidden, api.CodeNotFound, api.CodeExists, api.CodeConflict, api.CodeGone,
		api.CodeProgramMissing, api.CodeProgramDenied, api.CodeUnenforceable, api.CodeRegistry, api.CodeImage, api.CodeNoLanguage, api.CodeLibraries, api.CodeRefused, api.CodeUnavailable, api.CodeInternal,
	}
	calls := map[string]func(context.Context, *client.Client) error{
		"call": func(ctx context.Context, c *client.Client) error { _, err := c.System(ctx); return err },
		"stream": func(ctx context.Context, c *client.Client) error {
			return ignore(c.ExecStream(ctx, "x", api.ExecRequest{}, nothing))
		},
		"dial": func(ctx context.Context, c *client.Client) error {
			return ignore(c.ExecInteractive(ctx, "x", api.ExecRequest{}, client.Streams{}))
		},
		"download": func(ctx context.Context, c *client.Client) error { _, err := c.ReadFile(ctx, "x", "/p"); return err },
		"upload": func(ctx context.Context, c *client.Client) error {
			return c.ArchiveIn(ctx, "x", "/p", strings.NewReader("y"))
		},
	}
	for _, code := range codes {
		want := &api.Problem{Code: code, Title: "t", Status: code.Status(), Detail: "what was done: what went wrong", Hint: "do this"}
		body, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		c := listen(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			answer(w, api.TypeProblem, code.Status(), string(body))
		}))
		for name, call := range calls {
			err := call(t.Context(), c)
			got, ok := errors.AsType[*api.Problem](err)
			if !ok {
				t.Errorf("%s, %s: error %v is no *api.Problem", code, name, err)
				continue
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s, %s: problem (-want +got):\n%s", code, name, diff)
			}
			if !errors.Is(err, &api.Problem{Code: code}) {
				t.Errorf("%s, %s: errors.Is does not find the code in %v", code, name, err)
			}
		}
	}
}

func nothing(api.ExecEvent) error { return nil }

func ignore(_ *client.End, err error) error { return err }

// Any program may listen on the socket: the client reports the answer, and reads a bounded part.
func TestStrangeAnswers(t *testing.T) {
	system := func(ctx context.Context, c *client.Client) error { _, err := c.System(ctx); return err }
	stream := func(ctx context.Context, c *client.Client) error {
		return ignore(c.ExecStream(ctx, "x", api.ExecRequest{}, nothing))
	}
	interact := func(ctx context.Context, c *client.Client) error {
		return ignore(c.ExecInteractive(ctx, "x", api.ExecRequest{}, client.Streams{}))
	}
	pull := func(ctx context.Context, c *client.Client) error {
		_, err := c.Pull(ctx, api.PullImage{Reference: "r"}, nil)
		return err
	}
	tests := []struct {
		name string
		h    http.HandlerFunc
		call func(context.Context, *client.Client) error
		want string
	}{
		{"HTML error", func(w http.ResponseWriter, _ *http.Request) {
			answer(w, "text/html", 404, "<h1>404</h1>"+strings.Repeat("x", 1<<20))
		}, system, `unexpected answer 404 Not Found of type "text/html", beginning "<h1>404</h1>`},
		{"HTML success", func(w http.ResponseWriter, _ *http.Request) { answer(w, "text/html", 200, "hi") }, system, "does another server listen"},
		{"redirect", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", http.StatusFound) }, system, "302 Found"},
		{"problem that is not one", func(w http.ResponseWriter, _ *http.Request) { answer(w, api.TypeProblem, 500, "{}") }, system, "500 Internal"},
		{"broken JSON", func(w http.ResponseWriter, _ *http.Request) { answer(w, api.TypeJSON, 200, "{") }, system, "decode the answer to GET /v1/system"},
		{"endless JSON", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", api.TypeJSON)
			chunk := bytes.Repeat([]byte(" "), 1<<20)
			for r.Context().Err() == nil {
				if _, err := w.Write(chunk); err != nil {
					return
				}
			}
		}, system, "exceeds"},
		{"endless line", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", api.TypeNDJSON)
			chunk := bytes.Repeat([]byte(" "), 1<<20)
			for r.Context().Err() == nil {
				if _, err := w.Write(chunk); err != nil {
					return
				}
			}
		}, stream, "token too long"},
		{"stream without an end", func(w http.ResponseWriter, _ *http.Request) {
			answer(w, api.TypeNDJSON, 200, `{"stream":"stdout","text":"x"}`+"\n")
		}, stream, "without the exit of the program"},
		{"stream that breaks off", func(w http.ResponseWriter, _ *http.Request) {
			answer(w, api.TypeNDJSON, 200, `{"pid":1}`+"\n")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}, stream, "unexpected EOF"},
		{"stream of something else", func(w http.ResponseWriter, _ *http.Request) {
			answer(w, api.TypeNDJSON, 200, "hello\n")
		}, stream, "decode an exec event"},
		{"stream of another type", func(w http.ResponseWriter, _ *http.Request) { answer(w, api.TypeJSON, 200, "{}") }, stream, "does another server listen"},
		{"stream with an error at the end", func(w http.ResponseWriter, _ *http.Request) {
			answer(w, api.TypeNDJSON, 200, `{"pid":1}`+"\n"+`{"error":{"code":"gone","detail":"the sandbox ended"}}`+"\n")
		}, stream, "the sandbox ended"},
		{"pull without an end", func(w http.ResponseWriter, _ *http.Request) { answer(w, api.TypeNDJSON, 200, "") }, pull, "without a result"},
		{"pull with an error at the end", func(w http.ResponseWriter, _ *http.Request) {
			answer(w, api.TypeNDJSON, 200, `{"error":{"code":"registry_error","detail":"no such host"}}`)
		}, pull, "no such host"},
		{"no upgrade", func(w http.ResponseWriter, _ *http.Request) { answer(w, "text/plain", 200, "hm") }, interact, "unexpected answer 200"},
		{"no id", nil, func(ctx context.Context, c *client.Client) error { return c.DeleteSandbox(ctx, "") }, `"" is not the id`},
		{"dots for an id", nil, func(ctx context.Context, c *client.Client) error { return c.DeleteSandbox(ctx, "..") }, `".." is not the id`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := tt.h
			if h == nil {
				h = func(_ http.ResponseWriter, r *http.Request) {
					t.Errorf("a request arrived: %s %s", r.Method, r.RequestURI)
				}
			}
			err := tt.call(t.Context(), listen(t, h))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error %v, want one that says %q", err, tt.want)
			}
			if len(err.Error()) > 1000 {
				t.Errorf("the message has %d bytes", len(err.Error()))
			}
		})
	}
}

func TestNotRunning(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale})
	if err != nil {
		t.Skipf("listen: %v", err) // TMPDIR is too long for a socket
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close()
	for _, socket := range []string{filepath.Join(dir, "missing", "api.sock"), stale, filepath.Join(dir, strings.Repeat("d", 120), "api.sock")} {
		c := client.New(socket)
		for name, err := range map[string]error{
			"health":      c.Health(t.Context()),
			"interactive": ignore(c.ExecInteractive(t.Context(), "x", api.ExecRequest{}, client.Streams{})),
		} {
			nr, ok := errors.AsType[*client.NotRunning](err)
			if !ok {
				t.Errorf("%s at %s: error %v (%T), want NotRunning", name, socket, err, err)
				continue
			}
			if nr.Socket != socket || !strings.Contains(err.Error(), socket) || !strings.Contains(err.Error(), "sandboxd serve") {
				t.Errorf("%s: error %q names neither the socket nor the way out", name, err)
			}
		}
	}
}

func TestLongSocketPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	listenAt(t, fmt.Sprintf("/proc/self/fd/%d/api.sock", d.Fd()), http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	c := client.New(filepath.Join(dir, "api.sock"))
	defer c.Close()
	if err := c.Health(t.Context()); err != nil {
		t.Error(err)
	}
}

// One connection serves any number of requests, streams included.
func TestConnectionReuse(t *testing.T) {
	var conns atomic.Int64
	socket := filepath.Join(shortDir(t), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "/exec"):
			answer(w, api.TypeNDJSON, 200, `{"exit":{"code":0}}`+"\n")
		case r.Method == http.MethodDelete:
			w.WriteHeader(http.StatusNoContent)
		default:
			answer(w, api.TypeJSON, 200, "{}")
		}
	}))
	s.Listener = l
	s.Config.ConnState = func(_ net.Conn, st http.ConnState) {
		if st == http.StateNew {
			conns.Add(1)
		}
	}
	s.Start()
	defer s.Close()
	c := client.New(socket)
	defer c.Close()
	for range 20 {
		_, e1 := c.System(t.Context())
		_, e2 := c.ExecStream(t.Context(), "x", api.ExecRequest{}, nothing)
		if err := errors.Join(e1, e2, c.DeleteSandbox(t.Context(), "x")); err != nil {
			t.Fatal(err)
		}
	}
	// A connection is not reused if its writer finishes late, as happens on a busy machine. A kind
	// of request that never reuses one needs 20.
	if n := conns.Load(); n > 10 {
		t.Errorf("60 requests used %d connections", n)
	}
}

// An error of the callback and the end of the context both close the stream: the daemon then kills
// the exec.
func TestStreamIsClosedEarly(t *testing.T) {
	enough := errors.New("enough")
	tests := []struct {
		name string
		on   func(context.CancelCauseFunc) func(api.ExecEvent) error
	}{
		{"callback", func(context.CancelCauseFunc) func(api.ExecEvent) error {
			return func(api.ExecEvent) error { return enough }
		}},
		{"context", func(cancel context.CancelCauseFunc) func(api.ExecEvent) error {
			return func(api.ExecEvent) error { cancel(enough); return nil }
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			gone := make(chan struct{})
			c := listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				answer(w, api.TypeNDJSON, 200, `{"pid":1}`+"\n")
				_ = http.NewResponseController(w).Flush()
				<-r.Context().Done()
				close(gone)
			}))
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			_, err := c.ExecStream(ctx, "x", api.ExecRequest{}, tt.on(cancel))
			if !errors.Is(err, enough) {
				t.Errorf("error %v, want %v", err, enough)
			}
			<-gone // the daemon has seen the client disconnect
		})
	}
}

// The daemon refuses an upload before it is sent: the client gets its reason, not a broken pipe.
func TestUploadRefused(t *testing.T) {
	c := listen(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		answer(w, api.TypeProblem, 404, `{"code":"not_found","detail":"no sandbox"}`)
	}))
	err := c.ArchiveIn(t.Context(), "x", "/", iotest.ErrReader(errors.New("the body was read")))
	if !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		t.Errorf("error %v, want the daemon's", err)
	}
}

// A failing source must not leave a partial archive that looks complete.
func TestUploadSourceFails(t *testing.T) {
	complete := make(chan error, 1)
	c := listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := io.Copy(io.Discard, r.Body)
		complete <- err
		w.WriteHeader(http.StatusNoContent)
	}))
	broken := errors.New("disk on fire")
	err := c.ArchiveIn(t.Context(), "x", "/", io.MultiReader(strings.NewReader("some"), iotest.ErrReader(broken)))
	if !errors.Is(err, broken) {
		t.Errorf("error %v, want %v", err, broken)
	}
	if err := <-complete; err == nil {
		t.Error("the daemon saw a complete body")
	}
}

// interactive serves one exec with talk.
func interactive(t *testing.T, talk func(ctx context.Context, conn *websocket.Conn, req api.ExecRequest) error) *client.Client {
	t.Helper()
	var talking sync.WaitGroup
	t.Cleanup(talking.Wait) // the server does not wait for hijacked connections
	return listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		talking.Add(1)
		defer talking.Done()
		if r.URL.Path != "/v1/sandboxes/abc/exec" {
			t.Errorf("path %s", r.URL.Path)
		}
		conn, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Errorf("accept: %v", err)
			return
		}
		defer func() { _ = conn.CloseNow() }()
		_, b, err := conn.Read(r.Context())
		var req api.ExecRequest
		if err = errors.Join(err, json.Unmarshal(b, &req)); err != nil {
			t.Errorf("first frame: %v", err)
			return
		}
		if err := talk(r.Context(), conn, req); err != nil {
			t.Errorf("talk: %v", err)
		}
	}))
}

func say(ctx context.Context, conn *websocket.Conn, text string) error {
	return conn.Write(ctx, websocket.MessageText, []byte(text))
}

func TestInteractive(t *testing.T) {
	size := make(chan api.TerminalSize)
	signals := make(chan string)
	c := interactive(t, func(ctx context.Context, conn *websocket.Conn, req api.ExecRequest) error {
		if diff := cmp.Diff(api.ExecRequest{Argv: []string{"cat"}, TTY: true}, req); diff != "" {
			t.Errorf("request (-want +got):\n%s", diff)
		}
		if err := say(ctx, conn, `{"pid":4}`); err != nil {
			return err
		}
		// cat: stdin is echoed until it is closed; terminal events appear on stderr.
		controls := 0
		for {
			typ, b, err := conn.Read(ctx)
			if err != nil {
				return err
			}
			if typ == websocket.MessageBinary {
				if b[0] != 0 {
					t.Errorf("channel %d", b[0])
				}
				b[0] = 1
				if err := conn.Write(ctx, websocket.MessageBinary, b); err != nil {
					return err
				}
				continue
			}
			if string(b) == `{"stdin_close":true}` {
				go func() { size <- api.TerminalSize{Rows: 2, Cols: 3} }()
				continue
			}
			if err := conn.Write(ctx, websocket.MessageBinary, append([]byte{2}, b...)); err != nil {
				return err
			}
			if controls++; controls == 2 {
				break
			}
			go func() { signals <- "SIGINT" }()
		}
		if err := say(ctx, conn, `{"exit":{"code":130,"signal":"SIGINT"},"usage":{"wall_ms":1,"cpu_ms":1}}`); err != nil {
			return err
		}
		_ = conn.Close(websocket.StatusNormalClosure, "") // the client may not have waited for it
		return nil
	})
	var out, errs strings.Builder
	in := strings.Repeat("0123456789", 20_000)
	end, err := c.ExecInteractive(t.Context(), "abc", api.ExecRequest{Argv: []string{"cat"}, TTY: true}, client.Streams{
		Stdin: iotest.HalfReader(strings.NewReader(in)), Stdout: &out, Stderr: &errs, Resize: size, Signals: signals,
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&client.End{Exit: api.Exit{Code: 130, Signal: "SIGINT"}, Usage: api.Usage{WallMS: 1, CPUMS: 1}}, end); diff != "" {
		t.Errorf("end (-want +got):\n%s", diff)
	}
	if out.String() != in {
		t.Errorf("%d bytes came back of %d", out.Len(), len(in))
	}
	if want := `{"resize":{"rows":2,"cols":3}}{"signal":"SIGINT"}`; errs.String() != want {
		t.Errorf("control frames %s, want %s", errs.String(), want)
	}
}

func TestInteractiveErrors(t *testing.T) {
	tests := []struct {
		name string
		talk func(ctx context.Context, conn *websocket.Conn, req api.ExecRequest) error
		s    client.Streams
		want string
	}{
		{"refused", func(ctx context.Context, conn *websocket.Conn, _ api.ExecRequest) error {
			return say(ctx, conn, `{"error":{"code":"program_not_found","detail":"no program \"x\""}}`)
		}, client.Streams{}, `no program "x"`},
		{"broken off", func(_ context.Context, conn *websocket.Conn, _ api.ExecRequest) error {
			return conn.CloseNow()
		}, client.Streams{}, "without the exit of the program"},
		{"nonsense", func(ctx context.Context, conn *websocket.Conn, _ api.ExecRequest) error {
			return say(ctx, conn, `[]`)
		}, client.Streams{}, "decode"},
		{"channel 9", func(ctx context.Context, conn *websocket.Conn, _ api.ExecRequest) error {
			return conn.Write(ctx, websocket.MessageBinary, []byte{9, 'x'})
		}, client.Streams{}, "unknown channel 9"},
		{"no channel", func(ctx context.Context, conn *websocket.Conn, _ api.ExecRequest) error {
			return conn.Write(ctx, websocket.MessageBinary, nil)
		}, client.Streams{}, "without a channel"},
		{"stdin fails", func(ctx context.Context, conn *websocket.Conn, _ api.ExecRequest) error {
			_, _, _ = conn.Read(ctx)
			return nil
		}, client.Streams{Stdin: iotest.ErrReader(errors.New("unplugged"))}, "read stdin: unplugged"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := interactive(t, tt.talk).ExecInteractive(t.Context(), "abc", api.ExecRequest{}, tt.s)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one that says %q", err, tt.want)
			}
		})
	}
}

func TestInteractiveCancelled(t *testing.T) {
	gone := make(chan struct{})
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	c := interactive(t, func(ctx context.Context, conn *websocket.Conn, _ api.ExecRequest) error {
		defer close(gone)
		cancel(enough)
		for {
			if _, _, err := conn.Read(ctx); err != nil {
				return nil
			}
		}
	})
	r, w := io.Pipe() // stdin without data
	defer w.Close()
	if _, err := c.ExecInteractive(ctx, "abc", api.ExecRequest{}, client.Streams{Stdin: r}); !errors.Is(err, enough) {
		t.Errorf("error %v, want %v", err, enough)
	}
	<-gone // the daemon has seen the client disconnect
}

// Client and daemon each implement the rule for the socket's path; this test compares them.
func TestDefaultSocketAgreesWithDirs(t *testing.T) {
	ours := t.TempDir()
	for _, env := range []map[string]string{
		{},
		{"XDG_RUNTIME_DIR": ours},
		{"XDG_RUNTIME_DIR": filepath.Join(ours, "missing")},
		{"XDG_RUNTIME_DIR": "/"}, // belongs to root; a different user must skip it
		{"XDG_RUNTIME_DIR": "relative", "XDG_DATA_HOME": ours},
		{"XDG_RUNTIME_DIR": "", "XDG_DATA_HOME": "relative", "HOME": ours},
	} {
		t.Run(fmt.Sprint(env), func(t *testing.T) {
			t.Setenv("SANDBOXD_SOCKET", "")
			t.Setenv("HOME", ours)
			for k, v := range env {
				t.Setenv(k, v)
			}
			d, err := dirs.Default()
			if err != nil {
				t.Fatal(err)
			}
			if got := client.DefaultSocket(); got != d.Socket() {
				t.Errorf("client dials %s, daemon listens on %s", got, d.Socket())
			}
		})
	}
	t.Setenv("SANDBOXD_SOCKET", "/x/y.sock")
	if got := client.DefaultSocket(); got != "/x/y.sock" {
		t.Errorf("SANDBOXD_SOCKET is ignored: %s", got)
	}
}
