package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

// A Sandbox is one that runs in a daemon under test; it is deleted with the daemon at the latest.
type Sandbox struct {
	api.Sandbox

	daemon *Daemon
}

// Create makes a sandbox, of the host image where the request names none.
func (d *Daemon) Create(t testing.TB, request api.CreateSandbox) *Sandbox {
	t.Helper()
	s, err := d.TryCreate(t.Context(), request)
	if err != nil {
		t.Fatalf("create a sandbox: %v", err)
	}
	d.deleteAtEnd(t, s)
	d.mark(t, true)
	return s
}

// TryCreate is Create for requests that may fail, and for those that are timed: it does nothing
// but ask.
func (d *Daemon) TryCreate(ctx context.Context, request api.CreateSandbox) (*Sandbox, error) {
	s := &Sandbox{daemon: d}
	if err := d.Call(ctx, http.MethodPost, "/v1/sandboxes", request, &s.Sandbox); err != nil {
		return nil, err
	}
	return s, nil
}

// Sandbox is one that the daemon was asked for in another way.
func (d *Daemon) Sandbox(s api.Sandbox) *Sandbox { return &Sandbox{Sandbox: s, daemon: d} }

// List asks for all sandboxes.
func (d *Daemon) List(t testing.TB) []api.Sandbox {
	t.Helper()
	var list api.SandboxList
	if err := d.Call(t.Context(), http.MethodGet, "/v1/sandboxes", nil, &list); err != nil {
		t.Fatalf("list sandboxes: %v", err)
	}
	return list.Sandboxes
}

// path is the sandbox's resource, with something below it.
func (s *Sandbox) path(below string) string { return "/v1/sandboxes/" + s.ID + below }

// TryExec runs a program in the sandbox and waits for it.
func (s *Sandbox) TryExec(ctx context.Context, request api.ExecRequest) (*api.ExecResult, error) {
	var result api.ExecResult
	if err := s.daemon.Call(ctx, http.MethodPost, s.path("/exec"), request, &result); err != nil {
		return nil, err
	}
	return &result, nil
}

// Exec runs a program that must be startable; how it ends is the caller's business.
func (s *Sandbox) Exec(t testing.TB, request api.ExecRequest) *api.ExecResult {
	t.Helper()
	result, err := s.TryExec(t.Context(), request)
	if err != nil {
		t.Fatalf("exec %q: %v", request.Argv, err)
	}
	return result
}

// Sh runs a shell command that must exit 0, and returns its output.
func (s *Sandbox) Sh(t testing.TB, script string) string {
	t.Helper()
	result := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", script}})
	if result.Exit.Code != 0 || result.Exit.Signal != "" {
		t.Fatalf("%s\nended with %+v\nstdout: %s\nstderr: %s", script, result.Exit, result.Stdout, result.Stderr)
	}
	return result.Stdout
}

// Put writes a file in the sandbox.
func (s *Sandbox) Put(ctx context.Context, path string, data []byte) error {
	return s.daemon.Call(ctx, http.MethodPut, s.path("/files?path="+url.QueryEscape(path)), data, nil)
}

// Get asks for a file of the sandbox; the caller closes the body.
func (s *Sandbox) Get(ctx context.Context, path string) (*http.Response, error) {
	response, err := s.daemon.Do(ctx, http.MethodGet, s.path("/files?path="+url.QueryEscape(path)), nil)
	if err != nil {
		return nil, err
	}
	if response.StatusCode >= 300 {
		defer response.Body.Close()
		return nil, problem(response)
	}
	return response, nil
}

// PutArchive extracts a tar below a directory of the sandbox.
func (s *Sandbox) PutArchive(ctx context.Context, path string, archive []byte) error {
	return s.daemon.Call(ctx, http.MethodPut, s.path("/archive?path="+url.QueryEscape(path)), archive, nil)
}

// Stream runs a program and calls f for every event as it arrives.
func (s *Sandbox) Stream(ctx context.Context, request api.ExecRequest, f func(api.ExecEvent)) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	post, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sandboxd"+s.path("/exec"), bytes.NewReader(body))
	if err != nil {
		return err
	}
	post.Header.Set("Content-Type", api.TypeJSON)
	post.Header.Set("Accept", api.TypeNDJSON)
	response, err := s.daemon.HTTP.Do(post)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode >= 300 {
		return problem(response)
	}
	dec := json.NewDecoder(response.Body)
	for {
		var e api.ExecEvent
		if err := dec.Decode(&e); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		f(e)
	}
}

// Flows asks for the record of the sandbox's network.
func (s *Sandbox) Flows(t testing.TB) []api.Flow {
	t.Helper()
	response, err := s.daemon.Do(t.Context(), http.MethodGet, s.path("/flows"), nil)
	if err != nil {
		t.Fatalf("ask for the flows of sandbox %s: %v", s.ID, err)
	}
	defer response.Body.Close()
	if response.StatusCode >= 300 {
		t.Fatalf("ask for the flows of sandbox %s: %v", s.ID, problem(response))
	}
	var flows []api.Flow
	for dec := json.NewDecoder(response.Body); ; {
		var f api.Flow
		switch err := dec.Decode(&f); {
		case errors.Is(err, io.EOF):
			return flows
		case err != nil:
			t.Fatalf("read the flows of sandbox %s: %v", s.ID, err)
		case f.Error != nil:
			t.Fatalf("read the flows of sandbox %s: %v", s.ID, f.Error)
		}
		flows = append(flows, f)
	}
}

// Inspect asks for the sandbox as it is now.
func (s *Sandbox) Inspect(ctx context.Context) (*api.Sandbox, error) {
	var now api.Sandbox
	if err := s.daemon.Call(ctx, http.MethodGet, s.path(""), nil, &now); err != nil {
		return nil, err
	}
	return &now, nil
}

// TryDelete deletes the sandbox.
func (s *Sandbox) TryDelete(ctx context.Context) error {
	return s.daemon.Call(ctx, http.MethodDelete, s.path(""), nil, nil)
}

// Delete deletes the sandbox.
func (s *Sandbox) Delete(t testing.TB) {
	t.Helper()
	if err := s.TryDelete(t.Context()); err != nil {
		t.Fatalf("delete sandbox %s: %v", s.ID, err)
	}
}

// WaitState waits until the sandbox is in the state, and returns it.
func (s *Sandbox) WaitState(t testing.TB, want api.SandboxState) *api.Sandbox {
	t.Helper()
	var now *api.Sandbox
	Eventually(t, func() error {
		var err error
		now, err = s.Inspect(t.Context())
		if err != nil {
			return err
		}
		if now.State != want {
			return errors.New("the state is " + string(now.State) + ", not " + string(want))
		}
		return nil
	})
	return now
}
