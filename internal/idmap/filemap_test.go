package idmap

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The owner of a directory of the host is one id of the sandbox, and no other file of the host has
// an owner there.
func TestFileMap(t *testing.T) {
	all := []Range{{Size: 1<<32 - 1}}
	p := NewPlan(Inputs{OwnUID: all, OwnGID: all})
	for _, tt := range []struct {
		number, owner, inside int
		want                  []Range
	}{
		{0, 0, 0, []Range{{0, rootBase + 1, 1}, {rootBase + 2, rootBase + 2, SandboxIDs - 1}}},
		{2, 1000, 0, []Range{{1000, rootBase + 1 + 2*SandboxIDs, 1}, {rootBase + 2, rootBase + 2 + 2*SandboxIDs, SandboxIDs - 1}}},
		{1, 0, 33, []Range{
			{rootBase + 1, rootBase + 1 + SandboxIDs, 33}, {0, rootBase + 34 + SandboxIDs, 1}, {rootBase + 35, rootBase + 35 + SandboxIDs, SandboxIDs - 34},
		}},
		{1, 0, SandboxIDs - 1, []Range{{rootBase + 1, rootBase + 1 + SandboxIDs, SandboxIDs - 1}, {0, rootBase + 2*SandboxIDs, 1}}},
	} {
		uid, gid, err := p.FileMap(tt.number, tt.owner, tt.owner, tt.inside, tt.inside)
		if err != nil || !cmp.Equal(uid, tt.want) || !cmp.Equal(gid, tt.want) {
			t.Errorf("%+v: %v, %s", tt, err, cmp.Diff(tt.want, uid))
		}
	}
	uid, gid, err := p.FileMap(1, 5, 6, 0, 1)
	if err != nil || uid[0].Inside != 5 || gid[1].Inside != 6 {
		t.Errorf("%v %v %v", uid, gid, err)
	}
	for _, bad := range [][5]int{{-1, 0, 0, 0, 0}, {p.Ranges() + 1, 0, 0, 0, 0}, {1, 0, 0, -1, 0}, {1, 0, 0, 0, SandboxIDs}, {1, rootBase + 7, 0, 0, 0}, {1, 0, rootBase + SandboxIDs, 0, 0}} {
		if uid, _, err := p.FileMap(bad[0], bad[1], bad[2], bad[3], bad[4]); err == nil {
			t.Errorf("%v: %v", bad, uid)
		}
	}
	single := singlePlan(Inputs{UID: 1000}, "")
	if _, _, err := single.FileMap(0, 1000, 1000, 0, 0); err == nil {
		t.Error("an ordinary user's daemon maps a mount")
	}
}
