package httpapi

import (
	"context"
	"net/http"
	"os"
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

func TestOtherUsersAreRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		access access
		uid    uint32
		ok     bool
	}{
		"owner":             {owner, uint32(os.Geteuid()), true},
		"root":              {owner, 0, true},
		"another":           {owner, uint32(os.Geteuid()) + 1, false},
		"unknown":           {owner, unknownUID, false},
		"health to another": {anyone, 12345, true},
	} {
		err := allowed(context.WithValue(t.Context(), peerKey{}, tc.uid), tc.access)
		if (err == nil) != tc.ok {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && ProblemOf(err).Status != http.StatusForbidden {
			t.Errorf("%s: %+v", name, ProblemOf(err))
		}
	}
	if err := allowed(t.Context(), owner); err == nil {
		t.Error("a connection without a peer was let in")
	}
	for _, route := range routes {
		if route.access != owner && route.pattern != "/healthz" {
			t.Errorf("%s is open to all", route.pattern)
		}
	}
}

func FuzzBodies(f *testing.F) {
	f.Add([]byte(`{"argv":["a"],"env":["K=V"],"cwd":"/","user":"0:0","stdin":"AA==","timeout":1.5}`))
	f.Add([]byte(`{"name":"a","limits":{"memory":5,"swap":0},"labels":{"a":"b"}}`))
	f.Fuzz(func(_ *testing.T, data []byte) {
		var e api.ExecRequest
		_ = decodeJSON(data, &e)
		var c api.CreateSandbox
		_ = decodeJSON(data, &c)
	})
}
