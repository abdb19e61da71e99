package functional

import (
	"errors"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

// wantProblem checks that err is the problem of the code, and that its text names the thing.
func wantProblem(t *testing.T, err error, code api.Code, names ...string) {
	t.Helper()
	var p *api.Problem
	if !errors.As(err, &p) {
		t.Errorf("got %v, want a problem %s", err, code)
		return
	}
	if p.Code != code {
		t.Errorf("problem is %s (%s), want %s", p.Code, p.Error(), code)
	}
	for _, name := range names {
		if !strings.Contains(strings.ToLower(p.Error()), strings.ToLower(name)) {
			t.Errorf("problem %q does not name %q", p.Error(), name)
		}
	}
}
