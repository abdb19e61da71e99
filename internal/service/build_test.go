package service_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/runtime"
)

// TestSandboxesOfBuildsAreNobodyElses is about a client that would write into a step of a build,
// whose result is then kept under a key that knows nothing of it.
func TestSandboxesOfBuildsAreNobodyElses(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	mine := r.Create(api.CreateSandbox{Name: "mine"})
	rec, err := r.D.Service().Supervisor().Create(t.Context(), runtime.Request{
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
		{"POST", "/commit", api.CommitSandbox{Reference: "a/b:1"}},
	} {
		daemontest.Problem(t, r.Do(req.method, "/v1/sandboxes/"+rec.ID+req.path, req.body, "Upgrade", "websocket"), api.CodeNotFound)
	}
	for _, query := range []string{"", "?limit=1"} {
		list := daemontest.Decode[api.SandboxList](t, r.Do("GET", "/v1/sandboxes"+query, nil), 200)
		if len(list.Sandboxes) != 1 || list.Sandboxes[0].ID != mine.ID {
			t.Errorf("list%s: %+v", query, list.Sandboxes)
		}
	}
	if _, err := r.D.Service().Supervisor().Get(rec.ID); err != nil {
		t.Errorf("it is gone: %v", err)
	}
}

// TestBuildsWaitForEachOther is about the memory that each may take.
func TestBuildsWaitForEachOther(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	for range service.MaxBuilds {
		r.D.Service().Builds() <- struct{}{}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	body := strings.NewReader("a context")
	_, err := r.API().Build(ctx, body, api.Build{}, func(api.BuildEvent) { t.Error("it has begun") })
	if !errors.Is(err, context.DeadlineExceeded) || body.Len() != len("a context") {
		t.Errorf("%v, and %d bytes are left to be read", err, body.Len())
	}
}
