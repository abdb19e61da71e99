package httpapi

import (
	"context"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

func TestOtherUsersAreRefused(t *testing.T) {
	s := &Server{socket: &Socket{tenants: Tenants{UIDs: []uint32{40001}}}}
	for name, tc := range map[string]struct {
		access access
		uid    uint32
		ok     bool
	}{
		"owner":               {owner, uint32(os.Geteuid()), true},
		"root":                {owner, 0, true},
		"another":             {owner, uint32(os.Geteuid()) + 1, false},
		"unknown":             {owner, unknownUID, false},
		"health to another":   {anyone, 12345, true},
		"a tenant":            {tenant, 40001, true},
		"no tenant":           {tenant, 40002, false},
		"what is no tenant's": {owner, 40001, false},
	} {
		err := s.allowed(context.WithValue(t.Context(), peerKey{}, &peerConn{peer: peer{uid: tc.uid}}), tc.access)
		if (err == nil) != tc.ok {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && ProblemOf(err).Status != http.StatusForbidden {
			t.Errorf("%s: %+v", name, ProblemOf(err))
		}
	}
	if err := s.allowed(t.Context(), tenant); err == nil {
		t.Error("a connection without a peer was let in")
	}
	for _, route := range routes {
		if route.access == anyone && route.pattern != "/healthz" {
			t.Errorf("%s is open to all", route.pattern)
		}
		ofTenants := strings.HasPrefix(route.pattern, "/v1/sandboxes") || strings.HasPrefix(route.pattern, "/v1/snapshots") || strings.HasPrefix(route.pattern, "/v1/images") ||
			strings.HasPrefix(route.pattern, "/v1/profiles") || strings.HasPrefix(route.pattern, "/v1/secrets") || strings.HasPrefix(route.pattern, "/v1/volumes") || route.pattern == "/v1/run" || route.pattern == "/v1/builds" || route.pattern == "/v1/events" || strings.HasPrefix(route.pattern, "/v1/networks") ||
			route.pattern == "/v1/stats" || route.pattern == "/v1/languages" || route.pattern == "/v1/system/df"
		if route.access == tenant && (!ofTenants || route.pattern == "/v1/images/verify") {
			t.Errorf("%s is open to tenants", route.pattern)
		}
	}
}

func FuzzBodies(f *testing.F) {
	f.Add([]byte(`{"argv":["a"],"env":["K=V"],"cwd":"/","user":"0:0","stdin":"AA==","timeout":1.5}`))
	f.Add([]byte(`{"name":"a","limits":{"memory":5,"swap":0},"labels":{"a":"b"}}`))
	f.Add([]byte(`{"kind":"bearer","value":"some-value","host":"example.com","port":443,"methods":["GET"],"always":true}`))
	f.Fuzz(func(_ *testing.T, data []byte) {
		var e api.ExecRequest
		_ = decodeJSON(data, &e)
		var c api.CreateSandbox
		_ = decodeJSON(data, &c)
		var s api.SetSecret
		_ = decodeJSON(data, &s)
	})
}
