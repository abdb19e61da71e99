package service_test

import (
	"errors"
	"net/http"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/runtime"
)

// A sandbox that is started by a later daemon has the profile as that one has it, or is not
// started.
func TestProfileThatHasChangedOrIsGone(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	gone, strict := false, false
	b.Options.Profile = func(name string) (runtime.Profile, api.Limits, error) {
		if gone && name == "mine" {
			return runtime.Profile{}, api.Limits{}, errors.New("no such profile")
		}
		return runtime.Profile{Name: name, Seccomp: &specs.LinuxSeccomp{}, NonRoot: strict, User: "65534:65534"}, api.Limits{Pids: 512}, nil
	}
	next := func(r *daemontest.Running) *daemontest.Running {
		r.Cancel()
		r.Wait()
		return b.Start()
	}
	r := b.Start()
	sb := r.Create(api.CreateSandbox{Name: "one", Profile: "mine"})
	if sb.Enforced.NonRoot || sb.User != "" {
		t.Errorf("%+v", sb)
	}
	daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/one/stop", nil), http.StatusOK)
	gone = true
	r = next(r)
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/one/start", nil), api.CodeConflict)
	if now := daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/one", nil), http.StatusOK); now.State != api.StateStopped {
		t.Errorf("it is %s", now.State)
	}
	gone, strict = false, true
	r = next(r)
	again := daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/one/start", nil), http.StatusOK)
	if !again.Enforced.NonRoot {
		t.Errorf("enforced: %+v", again.Enforced)
	}
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/one/exec", api.ExecRequest{Argv: []string{"true"}}), api.CodeInvalid)
}
