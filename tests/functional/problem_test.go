package functional

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

// wantProblem checks that err is the problem of the code, and that its text names the things;
// "a|b" is one of them.
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
		says := func(word string) bool { return strings.Contains(strings.ToLower(p.Error()), strings.ToLower(word)) }
		if !slices.ContainsFunc(strings.Split(name, "|"), says) {
			t.Errorf("problem %q does not name %q", p.Error(), name)
		}
	}
}
