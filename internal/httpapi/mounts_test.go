package httpapi_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/httpapi"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Tenants of a daemon that serves several get no directory of the host.
// Its operator does.
func TestTenantsGetNoMounts(t *testing.T) {
	testenv.RequireRoot(t)
	b := daemontest.New(t, nil)
	b.Options.Socket = filepath.Join(openDir(t), "api.sock")
	b.Options.Tenants = httpapi.Tenants{UIDs: []uint32{40001}}
	r := b.Start()
	tenant := as(r, 40001, 40001)
	ask := api.CreateSandbox{Image: "host", Settings: api.Settings{Mounts: []api.Mount{{Type: api.MountBind, Source: "/srv", Target: "/srv"}}}}
	refused := daemontest.Decode[api.Problem](t, tenant.Do("POST", "/v1/sandboxes", ask), 400)
	if !strings.Contains(refused.Detail, "several tenants") {
		t.Errorf("a tenant: %+v", refused)
	}
	if made := r.Create(ask); len(made.Mounts) != 1 || made.Mounts[0].UID == nil || *made.Mounts[0].UID != 0 {
		t.Errorf("the operator: %+v", made.Mounts)
	}
}
