package service_test

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

// A sandbox without an end has one in two hundred years, also when it is started again by the next
// daemon. Tenants cannot have one.
func TestLifetimeOfNever(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	r := b.Start()
	far := time.Now().AddDate(150, 0, 0)
	check := func(what string, sb api.Sandbox) {
		t.Helper()
		if sb.State != api.StateRunning || sb.Deadline.Before(far) {
			t.Errorf("%s: %+v", what, sb)
		}
	}
	check("created", r.Create(api.CreateSandbox{Name: "never", Timeout: api.Never}))
	r.Create(api.CreateSandbox{Name: "hour"})
	check("updated", daemontest.Decode[api.Sandbox](t, r.Do("PATCH", "/v1/sandboxes/hour", api.UpdateSandbox{Timeout: api.Never}), http.StatusOK))
	daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/never/stop", map[string]int{"grace": 0}), http.StatusOK)
	r.Cancel()
	r.Wait()
	r = b.Start()
	check("started", daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/never/start", nil), http.StatusOK))
	check("adopted", daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/hour", nil), http.StatusOK))
	if sb := daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/never/stop", map[string]int{"grace": 0}), http.StatusOK); sb.Deadline.Before(far) {
		t.Errorf("stopped: %+v", sb)
	}
	if sb := daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/never/start", api.StartSandbox{Timeout: 60}), http.StatusOK); sb.Deadline.After(time.Now().Add(time.Hour)) {
		t.Errorf("started for a minute: %+v", sb)
	}
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes", api.CreateSandbox{Timeout: -2}), api.CodeInvalid)
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes", api.CreateSandbox{IdleTimeout: api.Never}), api.CodeInvalid)

	tenant := r.D.Service().For(service.Caller{Tenant: "t", UID: 1})
	if _, err := tenant.CreateSandbox(t.Context(), api.CreateSandbox{Timeout: api.Never}); !errors.Is(err, class.ErrForbidden) {
		t.Errorf("a tenant: %v", err)
	}
}
