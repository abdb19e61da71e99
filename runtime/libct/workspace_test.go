package libct

import (
	"errors"
	"os"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestEnforceWorkspace(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	many := launcher.WithOwner([]idmap.Range{{Inside: 0, Outside: 1, Size: 65536}})
	single := launcher.WithOwner([]idmap.Range{{Inside: 0, Outside: 0, Size: 1}})
	for name, tc := range map[string]struct {
		w       *runtime.Workspace
		ids     []idmap.Range
		want    string
		refused bool
		owner   int
	}{
		"none":                          {},
		"no mount yet":                  {w: &runtime.Workspace{UID: 1000}, ids: many, owner: 65536},
		"mapped":                        {w: &runtime.Workspace{UID: 1000, Mapped: true, Mount: null}, ids: many, want: api.WorkspaceMapped, owner: 1000},
		"root of a sandbox":             {w: &runtime.Workspace{Mount: null}, ids: many, want: api.WorkspaceShared, owner: 65536},
		"root of a sandbox with one id": {w: &runtime.Workspace{Mount: null}, ids: single, want: api.WorkspaceShared, owner: 0},
		"another user":                  {w: &runtime.Workspace{UID: 1000, Mount: null}, ids: many, refused: true, owner: 65536},
	} {
		var e api.Enforced
		err := enforceWorkspace(&runtime.Spec{Workspace: tc.w}, &e)
		if errors.Is(err, runtime.ErrUnenforceable) != tc.refused || e.Workspace != tc.want {
			t.Errorf("%s: %q, %v", name, e.Workspace, err)
		}
		if tc.w != nil {
			if got := ownerSeen(tc.w, &Host{IDs: tc.ids}); got != tc.owner {
				t.Errorf("%s: the owner is seen as %d, not as %d", name, got, tc.owner)
			}
		}
	}
}
