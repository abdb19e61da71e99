package service_test

import (
	"net/http"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

// A sandbox that is removed at its end is gone when its main process has ended or it was stopped,
// and after a restart of the daemon too. Its exit can be waited for, also afterwards.
func TestRemovedAtTheEnd(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	// gone returns when there is no such sandbox.
	gone := func(id string) {
		t.Helper()
		for {
			if p := r.Do("GET", "/v1/sandboxes/"+id, nil); p.Status == http.StatusNotFound {
				return
			}
			if t.Context().Err() != nil {
				t.Fatalf("%s stays", id)
			}
		}
	}
	auto := api.Settings{AutoRemove: true}
	ends := r.Create(api.CreateSandbox{Name: "ends", Command: []string{"sh", "-c", "exit 7"}, Settings: auto})
	for range 2 { // while it ends, and when it is gone
		if sb := daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/"+ends.ID+"/wait", nil), http.StatusOK); sb.Exit == nil || sb.Exit.Code != 7 || sb.State != api.StateStopped {
			t.Errorf("%+v", sb)
		}
		gone(ends.ID)
	}
	daemontest.Problem(t, r.Do("GET", "/v1/sandboxes/ends/wait", nil), api.CodeNotFound) // another one may have the name

	stopped := r.Create(api.CreateSandbox{Name: "stopped", Settings: auto})
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/stopped/rollback", api.RollbackSandbox{Snapshot: "s"}), api.CodeConflict)
	if sb := daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/stopped/stop", map[string]int{"grace": 0}), http.StatusOK); sb.State != api.StateStopped {
		t.Errorf("%+v", sb)
	}
	gone(stopped.ID)

	stays := r.Create(api.CreateSandbox{Name: "stays", Command: []string{"sh", "-c", "exit 0"}})
	daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/stays/wait", nil), http.StatusOK)
	later := r.Create(api.CreateSandbox{Name: "later", Command: []string{"sleep", "1000"}, Settings: auto})
	r.Cancel()
	r.Wait()
	r = b.Start()
	if sb := daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/later", nil), http.StatusOK); sb.State != api.StateRunning || !sb.AutoRemove {
		t.Errorf("%+v", sb)
	}
	if err := b.Engine.Kill(t.Context(), later.ID); err != nil {
		t.Fatal(err)
	}
	gone(later.ID)
	daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/"+stays.ID, nil), http.StatusOK)

	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes", api.CreateSandbox{Command: []string{"true"}, Settings: api.Settings{AutoRemove: true, Restart: "always"}}), api.CodeInvalid)
}
