package httpapi_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
)

// share is the network of a sandbox that shares that of another one.
func share(owner string) api.Network {
	return api.Network{Mode: api.NetworkSandbox, Sandbox: owner}
}

// A shared network is recorded by its owner's id, however that was named.
func TestSharedNetworkIsKeptByTheOwnersID(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	owner := r.Create(api.CreateSandbox{Name: "owner"})
	byName := r.Create(api.CreateSandbox{Network: share("owner")})
	bySharer := r.Create(api.CreateSandbox{Network: share(byName.ID)})
	for _, s := range []api.Sandbox{byName, bySharer} {
		if s.Network.Mode != api.NetworkSandbox || s.Network.Sandbox != owner.ID {
			t.Errorf("sandbox %s has the network %+v, want that of %s", s.Name, s.Network, owner.ID)
		}
		if got := r.Engine.Spec(s.ID); got.Join != owner.ID || got.Network {
			t.Errorf("the engine was told to join %q, network %t", got.Join, got.Network)
		}
	}
}

// Requests about the network of a guest are refused with a hint to its owner.
func TestSharedNetworkIsTheOwnersToChange(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	owner := r.Create(api.CreateSandbox{Name: "owner"})
	guest := r.Create(api.CreateSandbox{Name: "guest", Network: share("owner")})
	at := "/v1/sandboxes/" + guest.ID
	with := func(change func(n *api.Network)) api.CreateSandbox {
		n := share("owner")
		change(&n)
		return api.CreateSandbox{Network: n}
	}
	for name, tt := range map[string]struct {
		method, path string
		body         any
		code         api.Code
		says         string
	}{
		"a policy":      {"POST", "/v1/sandboxes", with(func(n *api.Network) { n.Policy = "version: 1" }), api.CodeInvalid, `those of sandbox "owner"`},
		"a budget":      {"POST", "/v1/sandboxes", with(func(n *api.Network) { n.Budget.Hosts = 1 }), api.CodeInvalid, `those of sandbox "owner"`},
		"a secret":      {"POST", "/v1/sandboxes", with(func(n *api.Network) { n.Secrets = []string{"x"} }), api.CodeInvalid, `those of sandbox "owner"`},
		"no owner":      {"POST", "/v1/sandboxes", with(func(n *api.Network) { n.Sandbox = "" }), api.CodeInvalid, "is missing"},
		"another mode":  {"POST", "/v1/sandboxes", with(func(n *api.Network) { n.Mode = api.NetworkNone }), api.CodeInvalid, "shares no network"},
		"an unknown":    {"POST", "/v1/sandboxes", with(func(n *api.Network) { n.Sandbox = "nobody" }), api.CodeNotFound, `"nobody"`},
		"a port":        {"POST", "/v1/sandboxes", api.CreateSandbox{Network: share("owner"), Ports: []api.PortMapping{{Port: 80}}}, api.CodeInvalid, `published by its owner, sandbox "owner"`},
		"its flows":     {"GET", at + "/flows", nil, api.CodeConflict, "shares the network of sandbox " + owner.ID},
		"a server":      {"GET", at + "/ports/80/", nil, api.CodeConflict, "shares the network of sandbox " + owner.ID},
		"a change":      {"PATCH", at, api.UpdateSandbox{Network: &api.Network{Mode: api.NetworkNone}}, api.CodeConflict, "shares the network of sandbox " + owner.ID},
		"a later share": {"PATCH", "/v1/sandboxes/" + owner.ID, api.UpdateSandbox{Network: &api.Network{Mode: api.NetworkSandbox, Sandbox: "guest"}}, api.CodeInvalid, "create another sandbox"},
		"a build":       {"POST", "/v1/builds?options=%7B%22network%22%3A%7B%22mode%22%3A%22sandbox%22%7D%7D", "", api.CodeInvalid, "is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			if p := daemontest.Problem(t, r.Do(tt.method, tt.path, tt.body), tt.code); !strings.Contains(p.Detail, tt.says) {
				t.Errorf("%q, want %q in it", p.Detail, tt.says)
			}
		})
	}
}

// Without its owner a sandbox does not start, and says which one to start.
func TestSharedNetworkNeedsItsOwner(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	owner := r.Create(api.CreateSandbox{Name: "owner"})
	guest := r.Create(api.CreateSandbox{Network: share("owner")})
	turn := func(id, verb string) daemontest.Reply { return r.Do("POST", "/v1/sandboxes/"+id+"/"+verb, nil) }
	daemontest.Decode[api.Sandbox](t, turn(owner.ID, "stop"), http.StatusOK)
	if now := daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/"+guest.ID, nil), http.StatusOK); now.State != api.StateRunning {
		t.Errorf("with its owner it has become %s", now.State)
	}
	daemontest.Decode[api.Sandbox](t, turn(guest.ID, "stop"), http.StatusOK)
	says := func(response daemontest.Reply, want string) {
		t.Helper()
		if p := daemontest.Problem(t, response, api.CodeConflict); !strings.Contains(p.Detail, want) || !strings.Contains(p.Hint, "sandboxd start") {
			t.Errorf("%+v, want %q in it", p, want)
		}
	}
	says(turn(guest.ID, "start"), "sandbox owner ("+owner.ID+"), does not run")
	says(r.Do("POST", "/v1/sandboxes", api.CreateSandbox{Network: share("owner")}), "sandbox owner ("+owner.ID+"), does not run")
	daemontest.Decode[api.Sandbox](t, turn(owner.ID, "start"), http.StatusOK)
	daemontest.Decode[api.Sandbox](t, turn(guest.ID, "start"), http.StatusOK)
	daemontest.Decode[api.Sandbox](t, turn(guest.ID, "stop"), http.StatusOK)
	if got := r.Do("DELETE", "/v1/sandboxes/"+owner.ID, nil); got.Status != http.StatusNoContent {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	says(turn(guest.ID, "start"), "was deleted")
}
