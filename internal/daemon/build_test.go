package daemon

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/runtime"
)

// TestSandboxesOfBuildsAreNobodyElses is about a client that would write into a step of a build, whose result is then kept
// under a key that knows nothing of it.
func TestSandboxesOfBuildsAreNobodyElses(t *testing.T) {
	r := newBench(t, nil).start()
	mine := r.create(api.CreateSandbox{Name: "mine"})
	rec, err := r.d.service.supervisor.Create(t.Context(), runtime.Request{
		Image: "build", ImageDigest: "sha256:11", Rootfs: rootfs.Source{Layers: []string{"sha256:11"}}, Cwd: "/", Ephemeral: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, req := range []struct {
		method, path string
		body         any
	}{
		{"GET", "", nil},
		{"PATCH", "", api.UpdateSandbox{}},
		{"DELETE", "", nil},
		{"GET", "/stats", nil},
		{"GET", "/diff", nil},
		{"POST", "/exec", api.ExecRequest{Argv: []string{"true"}}},
		{"GET", "/exec", nil},
		{"GET", "/files?path=/x", nil},
		{"PUT", "/files?path=/x", nil},
		{"GET", "/archive?path=/", nil},
		{"PUT", "/archive?path=/", nil},
		{"POST", "/commit", api.CommitSandbox{}},
	} {
		problem(t, r.do(req.method, "/v1/sandboxes/"+rec.ID+req.path, req.body), api.CodeNotFound)
	}
	for _, query := range []string{"", "?limit=1"} {
		list := decode[api.SandboxList](t, r.do("GET", "/v1/sandboxes"+query, nil), 200)
		if len(list.Sandboxes) != 1 || list.Sandboxes[0].ID != mine.ID {
			t.Errorf("list%s: %+v", query, list.Sandboxes)
		}
	}
	if _, err := r.d.service.supervisor.Get(rec.ID); err != nil {
		t.Errorf("it is gone: %v", err)
	}
}

// TestBuildsWaitForEachOther is about the memory that each may take.
func TestBuildsWaitForEachOther(t *testing.T) {
	r := newBench(t, nil).start()
	for range maxBuilds {
		r.d.service.builds <- struct{}{}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	body := strings.NewReader("a context")
	_, err := r.d.service.Build(ctx, body, api.Build{}, func(api.BuildEvent) { t.Error("it has begun") })
	if !errors.Is(err, context.DeadlineExceeded) || body.Len() != len("a context") {
		t.Errorf("%v, and %d bytes are left to be read", err, body.Len())
	}
}
