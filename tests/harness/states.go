package harness

import (
	"context"
	"net/http"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Turn asks for another state: "stop", "start" and the like, with the verb's request or nil.
func (s *Sandbox) Turn(ctx context.Context, verb string, request any) (*api.Sandbox, error) {
	var now api.Sandbox
	if err := s.daemon.Call(ctx, http.MethodPost, s.path("/"+verb), request, &now); err != nil {
		return nil, err
	}
	return &now, nil
}

// MustTurn is Turn that must work and end in the state, before a test counts as hung.
func (s *Sandbox) MustTurn(t testing.TB, verb string, request any, want api.SandboxState) *api.Sandbox {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	now, err := s.Turn(ctx, verb, request)
	if err != nil {
		t.Fatalf("%s sandbox %s: %v", verb, s.ID, err)
	}
	if now.State != want {
		t.Fatalf("after %s sandbox %s is %s (%s)", verb, s.ID, now.State, now.Reason)
	}
	return now
}
