package service

import (
	"fmt"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// One tenant's ends push out none of another's, and of a sandbox that has ended twice the last end
// counts.
func TestFinals(t *testing.T) {
	var f finals
	end := func(tenant, id string, code int) {
		f.keep(&runtime.Record{Tenant: tenant, Sandbox: api.Sandbox{ID: id, Exit: &api.SandboxExit{Exit: api.Exit{Code: code}}}})
	}
	end("one", "a", 1)
	end("one", "a", 2)
	for i := range maxFinal + 1 {
		end("two", fmt.Sprint("b", i), 0)
	}
	if got, ok := f.find("one", "a"); !ok || got.Exit == nil || got.Exit.Code != 2 {
		t.Errorf("the other tenant's: %+v, %v", got, ok)
	}
	for id, want := range map[string]bool{"b0": false, "b1": true, fmt.Sprint("b", maxFinal): true, "a": false} {
		if _, ok := f.find("two", id); ok != want {
			t.Errorf("%s: %v, want %v", id, ok, want)
		}
	}
}
